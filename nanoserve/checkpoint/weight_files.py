"""The safetensors files of a checkpoint: what the first is called, and how each is opened."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from nanoserve.checkpoint.damage import tell_damage

SINGLE_FILE = "model.safetensors"  # the whole checkpoint, where it is in one file


class open_weights:
    """`safe_open` whose errors name the file."""

    def __init__(self, file: Path) -> None:
        try:
            self._file = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(tell_damage(file, error)) from error

    def __enter__(self) -> safe_open:
        return self._file.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._file.__exit__(*exc)
