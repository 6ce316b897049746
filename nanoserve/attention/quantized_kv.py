"""K and V in 8 bits: codes, and a scale for every token and head.

    value = code x scale        scale = largest magnitude of the head's values / largest code

The largest value of each head and token is a code to itself, so nothing has to be calibrated, and
nothing is ever cut off. int8 has 255 even steps: no value is wrong by more than half a scale. e4m3,
fp8 of 4 bits of exponent and 3 of mantissa (Micikevicius et al. 2022, arXiv 2209.05433), is wrong
by a sixteenth of the value at most, or by 2^-10 of a scale: better for values much smaller than the
largest, worse for all others.

With a head_dim of 128, a scale of 4 bytes makes 132 bytes of a head that takes 256 in 16 bits:
1.94 times the tokens in the same pool.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# How codes are kept: torch computes little with its own type for e4m3, numba and the older GPUs
# nothing. So they are bytes, and are taken apart where they are used.
CODE_DTYPES = {"int8": torch.int8, "fp8": torch.uint8, "fp8_e4m3": torch.uint8}
LARGEST_CODE = {torch.int8: 127.0, torch.uint8: 448.0}
# A head of zeros has it, too: a division by it is none by 0. Smaller ones some GPUs take for 0.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class QuantizedKV(NamedTuple):
    """The cache of one layer, K before V."""

    codes: (
        Tensor  # int8, or uint8 for the bits of e4m3: [2, blocks, KV heads, block_size, head_dim]
    )
    scales: Tensor  # float32 [2, num_blocks, num_kv_heads, block_size]

    def blocks(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Some blocks in floats: [2, len(ids), num_kv_heads, block_size, head_dim]."""
        return dequantize(self.codes[:, ids], self.scales[:, ids]).to(dtype)


class QuantizedKVCache:
    """The caches of all layers, in turn; both tensors have the layer before what a layer has."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales
        self._layers = [QuantizedKV(*layer) for layer in zip(codes, scales, strict=True)]

    @classmethod
    def allocate(
        cls, shape: tuple[int, ...], context: Any, zeros: Callable[..., Tensor]
    ) -> "QuantizedKVCache":
        """What is [num_layers, *attention.kv_cache_shape()] in floats, for a `LayerContext`.

        `zeros(shape, dtype, device)` takes the memory.
        """
        dtype, device = CODE_DTYPES[context.attention.kv_cache_dtype], context.device
        return cls(zeros(shape, dtype, device), zeros(shape[:-1], torch.float32, device))

    def __iter__(self) -> Iterator[QuantizedKV]:
        return iter(self._layers)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def zero_(self) -> None:
        self.codes.zero_()
        self.scales.zero_()

    def fill_(self, value: float) -> None:
        """Make every K and V `value`."""
        codes, scales = quantize(torch.full((1,), value), self.codes.dtype)
        self.codes.fill_(codes.item())
        self.scales.fill_(scales.item())


def codes_and_scales(
    kv_cache: Tensor | QuantizedKV, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """For a kernel that takes a layer's cache of either kind; of floats there are no scales.

    Raises `ValueError` unless floats are of `dtype`, and codes contiguous, each with its scale.
    """
    if isinstance(kv_cache, Tensor):
        if kv_cache.dtype != dtype:
            raise ValueError(f"kv_cache {kv_cache.dtype} of values in {dtype} is not supported")
        return kv_cache, None
    codes, scales = kv_cache
    is_good = codes.dtype in LARGEST_CODE and scales.dtype == torch.float32
    if not is_good or scales.shape != codes.shape[:-1]:
        raise ValueError(
            f"codes {codes.dtype} {list(codes.shape)} must be int8 or uint8, and scales "
            f"{scales.dtype} {list(scales.shape)} float32, one for each head of each slot"
        )
    if not (codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError(
            f"codes and scales must be contiguous: {codes.stride()}, {scales.stride()}"
        )
    return kv_cache


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] -> codes of the same shape, in a dtype of `CODE_DTYPES`, and scales [...].

    In float32, whatever x is. Codes cannot be infinite or NaN: where a value is, all of its head
    becomes NaN, by its scale, so that the request ends with an error and not with nonsense.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    is_finite = largest.isfinite()
    scales = (largest / LARGEST_CODE[dtype]).clamp(min=SMALLEST_SCALE)
    values = torch.where(is_finite, x / scales, 0)
    if dtype == torch.int8:
        codes = values.round().to(torch.int8)  # halves to the even one, as everywhere here
    else:
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scales.masked_fill(~is_finite, torch.nan).squeeze(-1)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., head_dim] of codes [..., head_dim] and scales [...]."""
    values = codes if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)
    return values.float() * scales.unsqueeze(-1)
