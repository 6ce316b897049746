"""Checkpoints that store a tensor twice, of which a model's `tied_tensors` says that it is one."""

from collections.abc import Mapping
from pathlib import Path

import torch

from nanoserve.checkpoint.weight_files import open_weights


def check_tied(tied: Mapping[str, str], files: Mapping[str, Path]) -> None:
    """Raise `ValueError` if a tensor that is stored is not the one that it should be.

    `tied` names that one; `files` says where each stored tensor is.
    """
    for name, twin in tied.items():
        if name not in files:
            continue
        with open_weights(files[name]) as tensors, open_weights(files[twin]) as twins:
            if not torch.equal(tensors.get_tensor(name), twins.get_tensor(twin)):
                raise ValueError(
                    f"tie_word_embeddings is true, but {name} is not {twin}; if it is meant to be "
                    f"another, set tie_word_embeddings to false in config.json"
                )
