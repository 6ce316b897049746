"""Validate the arguments of compiled kernels, which get addresses without bounds.

With a wrong shape, a kernel would read or write outside of an array. Shapes, dtypes and strides are
checked here; KV slots, positions and block ids are checked in the kernels, which read each of them
anyway. A check of shapes costs about a microsecond per call.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16)  # types that the numba kernels compute with
CODES = (torch.int8, torch.uint8)  # types of an 8-bit KV cache
_INT32 = torch.int32


def refuse(rule: str, **given: Any) -> NoReturn:
    """Raise `ValueError` with `rule` and a description of the arguments that were given."""
    raise ValueError(f"{rule}: {', '.join(f'{name} {_shown(x)}' for name, x in given.items())}")


def _shown(x: Any) -> str:
    if isinstance(x, Tensor):
        strided = "" if x.is_contiguous() else f" of strides {x.stride()}"
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{strided} on {x.device}"
    if isinstance(x, np.ndarray):
        return f"{x.dtype} {list(x.shape)} of strides {x.strides}"
    return f"is {x!r:.80}"


def check_norm(x: Tensor, weight: Tensor) -> None:
    """Check x [..., hidden] and weight [hidden], each float32 or bfloat16."""
    shape, size = x.shape, weight.shape
    if len(size) != 1 or not shape or shape[-1] != size[0] or not size[0]:
        refuse("x must be [..., hidden] and weight [hidden]", x=x, weight=weight)
    if x.dtype not in FLOATS or weight.dtype not in FLOATS:
        refuse("x and weight must be float32 or bfloat16", x=x, weight=weight)


def check_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Check x and residual [num_tokens, hidden], of one dtype, and weight [hidden]."""
    shape, dtype, size = x.shape, x.dtype, weight.shape
    if len(shape) != 2 or residual.shape != shape or residual.dtype != dtype:
        rule = "x and residual must have one dtype and the shape [num_tokens, hidden]"
        refuse(rule, x=x, residual=residual)
    if len(size) != 1 or size[0] != shape[1] or not size[0]:
        refuse("x must be [..., hidden] and weight [hidden]", x=x, weight=weight)
    if dtype not in FLOATS or weight.dtype not in FLOATS:
        refuse("x and weight must be float32 or bfloat16", x=x, weight=weight)


def check_gate_up(gate_up: Tensor) -> None:
    """Check gate_up [num_tokens, 2 x size], float32 or bfloat16."""
    shape = gate_up.shape
    if len(shape) != 2 or shape[1] % 2 or not shape[1] or gate_up.dtype not in FLOATS:
        refuse("gate_up must be [num_tokens, 2 x size] in float32 or bfloat16", gate_up=gate_up)


def check_cache(kv_cache: Tensor, kv_scales: Tensor | None, dtype: torch.dtype) -> None:
    """Check a KV cache of `dtype`, or one of codes with a scale for each head of each KV slot.

    kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim]; kv_scales: without head_dim.
    """
    if kv_scales is None:
        if kv_cache.dtype != dtype:
            refuse(f"a cache without scales must have the model's dtype {dtype}", cache=kv_cache)
    elif kv_cache.dtype not in CODES or kv_scales.dtype != torch.float32:
        refuse("codes must be int8 or uint8, and scales float32", cache=kv_cache, scales=kv_scales)
    elif kv_scales.shape != kv_cache.shape[:-1]:
        refuse("each head of each KV slot must have a scale", cache=kv_cache, scales=kv_scales)


def check_heads(
    heads: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cache_shape: Sequence[int],
    slot_mapping: Tensor,
) -> None:
    """Check the arguments of `nanoserve.kernels.cpu.store_kv.store_kv`, except the cache's type."""
    shape, dtype = heads.shape, heads.dtype
    if len(shape) != 3 or dtype not in FLOATS:
        refuse("heads must be [num_tokens, heads, head_dim], float32 or bfloat16", heads=heads)
    num_tokens, num_heads, head_dim = shape
    if len(cache_shape) != 5 or cache_shape[0] != 2 or 0 in cache_shape:
        refuse("the cache must be [2, blocks, KV heads, slots, head_dim]", cache=list(cache_shape))
    if cache_shape[4] != head_dim or num_heads <= 2 * cache_shape[2] or head_dim % 2:
        refuse(
            "heads must be [num_tokens, heads of q + 2 x KV heads, head_dim], with the cache's KV "
            "heads and its even head_dim",
            heads=heads,
            cache=list(cache_shape),
        )
    if cos.dim() != 2 or cos.shape[1] * 2 != head_dim or cos.shape != sin.shape:
        refuse("cos and sin must be [positions, head_dim / 2]", cos=cos, sin=sin)
    if cos.dtype != dtype or sin.dtype != dtype:
        refuse("cos, sin and heads must have the same dtype", cos=cos, sin=sin, heads=heads)
    tokens = (num_tokens,)
    if positions.shape != tokens or slot_mapping.shape != tokens:
        rule = f"positions and slot_mapping must be [{num_tokens}], one for each token"
        refuse(rule, positions=positions, slot_mapping=slot_mapping)
    if positions.dtype != _INT32 or slot_mapping.dtype != _INT32:
        rule = "positions and slot_mapping must be int32"
        refuse(rule, positions=positions, slot_mapping=slot_mapping)
    if (q_weight is None) != (k_weight is None):
        rule = "q_weight and k_weight must both be tensors, or both None"
        refuse(rule, q_weight=q_weight, k_weight=k_weight)
    if q_weight is not None and k_weight is not None:
        _check_head_norms(q_weight, k_weight, head_dim)


def _check_head_norms(q: Tensor, k: Tensor, head_dim: int) -> None:
    if q.shape != (head_dim,) or k.shape != (head_dim,):
        refuse(f"q_weight and k_weight must be [{head_dim}]", q_weight=q, k_weight=k)
    if q.dtype not in FLOATS or k.dtype != q.dtype:
        rule = "q_weight and k_weight must both be float32, or both bfloat16"
        refuse(rule, q_weight=q, k_weight=k)


def refuse_places(
    positions: Tensor, num_positions: int, slot_mapping: Tensor, num_slots: int
) -> NoReturn:
    """Raise `ValueError` that lists the positions and KV slots that do not exist."""
    places = {"positions": (positions, num_positions), "slot_mapping": (slot_mapping, num_slots)}
    messages = []
    for name, (values, end) in places.items():
        wrong = values[(values < 0) | (values >= end)].tolist()
        if wrong:
            messages.append(f"{name} must be in [0, {end}): {len(wrong)} are not, as {wrong[:4]}")
    raise ValueError("; ".join(messages))


def check_choice(logits: Tensor, of_rows: dict[str, tuple[np.ndarray, type]]) -> None:
    """Check the arguments of `choose_tokens`.

    logits: [num_rows, vocab_size]. of_rows: name -> (array [num_rows], its required dtype).
    """
    if len(logits.shape) != 2 or not logits.shape[1] or logits.dtype not in FLOATS:
        refuse("logits must be [num_rows, vocab_size], float32 or bfloat16", logits=logits)
    num_rows = logits.shape[0]
    for name, (values, dtype) in of_rows.items():
        is_one = values.shape == (num_rows,) and values.dtype == dtype
        if not (is_one and values.flags.c_contiguous):
            refuse(f"must be contiguous {dtype.__name__} [{num_rows}]", **{name: values})


def check_linear(x: Tensor, inputs: int, dtypes: Sequence[torch.dtype]) -> None:
    """Check that x is [..., inputs], of one of these dtypes, on a CPU."""
    if not x.shape or x.shape[-1] != inputs or x.dtype not in dtypes or not x.is_cpu:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        refuse(f"x must be [..., {inputs}] in {names}, on a CPU", x=x)


def check_weight(weight: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Check that a weight is [outputs, inputs], neither 0, of one of these dtypes, on a CPU."""
    if len(weight.shape) != 2 or 0 in weight.shape or weight.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        refuse(f"a weight must be [outputs, inputs] in {names}", weight=weight)
    if not weight.is_cpu:
        refuse("a weight must be on a CPU", weight=weight)


def check_codes(codes: Tensor, scale: Tensor, offset: Tensor | None, bits: int) -> None:
    """Check integer weights on a CPU.

    codes: int8 [outputs, inputs]. scale and offset: float32 [outputs, groups]; a group is a run of
    inputs, and all groups are of one size. bits: 4 or 8.
    """
    if codes.dtype == torch.float8_e4m3fn:
        raise ValueError("codes must be integers, not 8-bit floats: quantize the weight to int8")
    check_weight(codes, (torch.int8,))
    outputs, inputs = codes.shape
    for values in (scale, offset):
        if values is not None:
            check_weight(values, (torch.float32,))
            if values.shape[0] != outputs or inputs % values.shape[1]:
                rule = "scale and offset must be [outputs, groups], in groups of equal size"
                refuse(rule, codes=codes, scale=scale, offset=offset)
    if offset is not None and offset.shape != scale.shape:
        refuse("scale and offset must have the same shape", scale=scale, offset=offset)
    if bits not in (4, 8):
        raise ValueError(f"bits={bits} must be 4 or 8")
