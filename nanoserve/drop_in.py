"""The former name of `nanoserve.compat`, which says so once and is the same module."""

import sys
import warnings

import nanoserve.compat

warnings.warn(
    "nanoserve.drop_in is now nanoserve.compat: change the import; the old name goes with 0.2",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules[__name__] = nanoserve.compat
