"""The small real model that ships with the package, and everything it was made from.

``tiny-qwen3`` is a Qwen3 checkpoint of about 5.5 MB that runs at once, without a download. It
answers what the terms of the course mean, word for word as in ``glossary.json``, and adds two
numbers below 100. A model with known answers is an oracle: if the engine breaks, the text breaks.
"""

import os
from pathlib import Path


def bundled_checkpoint(name: str) -> Path | None:
    """The folder of a checkpoint that ships with the package, or None if no such one does.

    Args:
        name: a bare name such as ``"tiny-qwen3"``; a path is never taken for a bundled name.
    """
    folder = Path(__file__).parent / name
    is_bare = name == folder.name
    # Unlike Path.is_file, it takes names that are too long for a file.
    return folder if is_bare and os.path.isfile(folder / "config.json") else None
