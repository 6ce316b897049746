"""Checks the tensors of a prompt's embeddings, and converts them to rows of bytes."""

from typing import TYPE_CHECKING, Any

import numpy as np

from nanoserve.utils.checks import require

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = ("float32", "bfloat16", "float16")


def matrix_of(name: str, tensor: Any, hidden_size: int) -> "Tensor":
    """Return [num_tokens, hidden_size] of a tensor that may have a first dimension of 1.

    Nothing is copied. Raises `ValueError` for another shape or dtype, and for what is no dense
    tensor. name: of the tensor, for errors.
    """
    import torch

    require(
        isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided,
        f"{name}: it must be a dense torch.Tensor, not {type(tensor).__name__}",
    )
    require(not tensor.is_meta, f"{name}: a tensor on the device 'meta' has no numbers")
    kind = str(tensor.dtype).removeprefix("torch.")
    require(kind in _DTYPES, f"{name}: its dtype {kind} must be one of {list(_DTYPES)}")
    shape = tuple(tensor.shape)
    if len(shape) == 3 and shape[0] == 1:
        tensor = tensor[0]
    require(
        tensor.ndim == 2 and tensor.shape[1] == hidden_size and tensor.shape[0] > 0,
        f"{name}: its shape {list(shape)} must be [number of tokens, {hidden_size}], because the "
        f"model has hidden_size={hidden_size}",
    )
    return tensor


def bytes_of(name: str, tensor: "Tensor", dtype: str) -> np.ndarray:
    """Return the rows of a matrix as bytes, in the model's dtype. They may share its memory.

    Raises `ValueError` for numbers that are not finite in that dtype.
    """
    import torch

    own = tensor.detach().to("cpu", getattr(torch, dtype)).contiguous()
    wrong = torch.nonzero(~torch.isfinite(own))
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ValueError(
            f"{name}: row {row} has {tensor[row, column].item()} at {column}, which is not "
            f"finite in {dtype}, the model's dtype; {len(wrong)} of {own.numel()} are not"
        )
    return own.view(torch.uint8).numpy()
