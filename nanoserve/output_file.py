"""Where a trace is to be written: asked of the option, before there is an engine."""

import os
from pathlib import Path
from typing import Any

from nanoserve.checks import require, shown


def check_output_file(name: str, value: Any) -> None:
    """A file that can be written, or replaced; it is not touched."""
    is_path = isinstance(value, (str, Path))
    require(is_path, f"{name}={shown(value)} must be the name of a file")
    path = Path(value)
    require(path.parent.is_dir(), f"{name}={str(value)!r}: there is no folder {path.parent}")
    require(not path.is_dir(), f"{name}={str(value)!r} is a folder, not a file")
    is_writable = os.access(path if path.exists() else path.parent, os.W_OK)
    require(is_writable, f"{name}={str(value)!r} cannot be written")
