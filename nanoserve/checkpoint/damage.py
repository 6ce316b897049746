"""What to say of files that are not what their names promise."""

from contextlib import suppress
from pathlib import Path


def tell_pointer(file: Path) -> str:
    return (
        f"{file} is a git-lfs pointer, not the file itself: git has cloned the repository without "
        f"its large files; run `git lfs pull` in {file.parent}"
    )


def tell_damage(file: Path, error: Exception) -> str:
    """Of what should be a safetensors file, and the reason why it could not be opened."""
    with suppress(OSError), file.open("rb") as content:  # or that is the reason itself
        if content.read(23) == b"version https://git-lfs":
            return tell_pointer(file)
    return f"{file} is damaged or no safetensors file: {error}"
