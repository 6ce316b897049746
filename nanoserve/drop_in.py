"""Former name of `nanoserve.compat`: importing it warns and gives the same module."""

import sys
import warnings
from typing import TYPE_CHECKING

import nanoserve.compat

if TYPE_CHECKING:
    from nanoserve.compat import *  # noqa: F403

warnings.warn(
    "nanoserve.drop_in is now nanoserve.compat: change the import; the old name goes with 0.2",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules[__name__] = nanoserve.compat
