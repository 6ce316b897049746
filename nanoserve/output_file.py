"""What the option `trace` needs: asked before there is an engine."""

import os
from pathlib import Path
from typing import Any

from nanoserve.checks import require, shown


def check_trace(trace: Any, is_ahead: bool | None) -> None:
    """A file that can be written, or replaced; it is not touched. `is_ahead` is what was chosen for
    `async_scheduling`, if anything was."""
    require(isinstance(trace, (str, Path)), f"trace={shown(trace)} must be the name of a file")
    path, told = Path(trace), f"trace={str(trace)!r}"
    require(path.parent.is_dir(), f"{told}: there is no folder {path.parent}")
    require(not path.is_dir(), f"{told} is a folder, not a file")
    is_writable = os.access(path if path.exists() else path.parent, os.W_OK)
    require(is_writable, f"{told} cannot be written")
    require(not is_ahead, f"{told} needs async_scheduling=False: it shows one step at a time")
