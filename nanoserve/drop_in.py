"""The former name of `nanoserve.compat`; importing it warns and returns the same module."""

import sys
import warnings
from typing import TYPE_CHECKING

import nanoserve.compat

if TYPE_CHECKING:
    from nanoserve.compat import *  # noqa: F403

warnings.warn(
    "nanoserve.drop_in is now nanoserve.compat: update the import; 0.2 removes the old name",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules[__name__] = nanoserve.compat
