"""Opening of safetensors files, and the name of an unsharded checkpoint's file."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from nanoserve.checkpoint.damage import tell_damage

SINGLE_FILE = "model.safetensors"  # the complete checkpoint, if it is not sharded


class open_weights:
    """Context manager: `safe_open`, with errors that name the file."""

    def __init__(self, file: Path) -> None:
        try:
            self._file = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(tell_damage(file, error)) from error

    def __enter__(self) -> safe_open:
        return self._file.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._file.__exit__(*exc)
