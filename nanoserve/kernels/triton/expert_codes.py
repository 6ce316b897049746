"""Expert weights in 8 bits."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ExpertCodes(nn.Module):
    """Expert weights as codes, int8 [experts, outputs, inputs], with scales.

    scale: float32 [experts, outputs]. `nanoserve.kernels.triton.experts.fused_experts` reads the
    codes. The reference, `nanoserve.models.layers.experts.sum_of_experts`, iterates over the
    experts, and the codes of each are converted to floats when it is used. Both tensors are
    buffers: they move with the module.
    """

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        super().__init__()
        kinds, shapes = (codes.dtype, scale.dtype), (codes.shape[:-1], scale.shape)
        if kinds != (torch.int8, torch.float32) or codes.dim() != 3 or shapes[0] != shapes[1]:
            raise ValueError(
                f"codes must be int8 [experts, outputs, inputs], scale float32 for each output, "
                f"not {codes.dtype} {list(codes.shape)}, {scale.dtype} {list(scale.shape)}"
            )
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[Callable[[Tensor], Tensor]]:
        for codes, scale in zip(self.codes, self.scale, strict=True):
            yield partial(_product, codes, scale)


def _product(codes: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, (codes * scale[:, None]).to(x.dtype))
