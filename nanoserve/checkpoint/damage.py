"""Error messages for files whose contents do not match their names."""

from contextlib import suppress
from pathlib import Path


def tell_pointer(file: Path) -> str:
    return (
        f"{file} is a git-lfs pointer, not the file itself: git cloned the repository without its "
        f"large files; run `git lfs pull` in {file.parent}"
    )


def tell_damage(file: Path, error: Exception) -> str:
    """Describe a file that could not be opened as safetensors, and the reason."""
    with suppress(OSError), file.open("rb") as content:  # an OSError may be the reason itself
        if content.read(23) == b"version https://git-lfs":
            return tell_pointer(file)
    return f"{file} is damaged or not a safetensors file: {error}"
