"""Check of checkpoints that store both of two tied tensors (a model's `tied_tensors`)."""

from collections.abc import Mapping
from pathlib import Path

import torch

from nanoserve.checkpoint.weight_files import open_weights


def check_tied(tied: Mapping[str, str], files: Mapping[str, Path]) -> None:
    """Raise `ValueError` if a stored tensor differs from the one to which it is tied.

    `tied` maps a tensor's name to that of its twin; `files` maps each stored tensor to its file.
    """
    for name, twin in tied.items():
        if name not in files:
            continue
        with open_weights(files[name]) as tensors, open_weights(files[twin]) as twins:
            if not torch.equal(tensors.get_tensor(name), twins.get_tensor(twin)):
                raise ValueError(
                    f"tie_word_embeddings is true, but {name} differs from {twin}; if that is "
                    f"intended, set tie_word_embeddings to false in config.json"
                )
