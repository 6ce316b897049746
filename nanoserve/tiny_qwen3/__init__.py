"""The small real model that ships with the package, and everything it was made from.

``tiny-qwen3`` is a Qwen3 checkpoint of about 5.5 MB that runs at once, without a download. It
answers what the terms of the course mean, word for word as in ``glossary.json``, and adds two
numbers below 100. A model with known answers is an oracle: if the engine breaks, the text breaks.
"""

from pathlib import Path


def bundled_checkpoint(name: str) -> Path | None:
    """The folder of a checkpoint that ships with the package, or None if no such one does.

    Args:
        name: ``"tiny-qwen3"`` is the only one; a path is never taken for a bundled name.
    """
    folder = Path(__file__).parent / "checkpoint"
    return folder if name == "tiny-qwen3" and (folder / "config.json").is_file() else None
