"""What the compiled kernels take: checked before they get addresses, which have no bounds.

A kernel of the wrong shape would read, or write, memory that is not its own. Shapes, dtypes and
strides are checked here; ids of slots, positions and blocks in the kernels, which look at each of
them anyway. Comparing shapes costs about a microsecond a call.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16)  # those that numba's kernels compute with
_INT32 = torch.int32


def refuse(rule: str, **given: Any) -> NoReturn:
    """Raise `ValueError`: `rule`, and what was given instead."""
    raise ValueError(f"{rule}: {', '.join(f'{name} {_shown(x)}' for name, x in given.items())}")


def _shown(x: Any) -> str:
    if isinstance(x, Tensor):
        strided = "" if x.is_contiguous() else f" of strides {x.stride()}"
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{strided} on {x.device}"
    if isinstance(x, np.ndarray):
        return f"{x.dtype} {list(x.shape)} of strides {x.strides}"
    return f"is {x!r:.80}"


def check_norm(x: Tensor, weight: Tensor) -> None:
    """x [..., hidden] and weight [hidden], each float32 or bfloat16."""
    shape, size = x.shape, weight.shape
    if len(size) != 1 or not shape or shape[-1] != size[0] or not size[0]:
        refuse("x must be [..., hidden] and weight [hidden]", x=x, weight=weight)
    if x.dtype not in FLOATS or weight.dtype not in FLOATS:
        refuse("x and weight must be float32 or bfloat16", x=x, weight=weight)


def check_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """x and residual [num_tokens, hidden] of one dtype, and weight [hidden]."""
    shape, dtype, size = x.shape, x.dtype, weight.shape
    if len(shape) != 2 or residual.shape != shape or residual.dtype != dtype:
        refuse("x and residual must be alike, [num_tokens, hidden]", x=x, residual=residual)
    if len(size) != 1 or size[0] != shape[1] or not size[0]:
        refuse("x must be [..., hidden] and weight [hidden]", x=x, weight=weight)
    if dtype not in FLOATS or weight.dtype not in FLOATS:
        refuse("x and weight must be float32 or bfloat16", x=x, weight=weight)


def check_gate_up(gate_up: Tensor) -> None:
    """[num_tokens, 2 x size] in float32 or bfloat16."""
    shape = gate_up.shape
    if len(shape) != 2 or shape[1] % 2 or not shape[1] or gate_up.dtype not in FLOATS:
        refuse("gate_up must be [num_tokens, 2 x size] in float32 or bfloat16", gate_up=gate_up)


def check_heads(
    heads: Tensor, rotary: Any, norms: tuple[Any, Any], cache_shape: Sequence[int], metadata: Any
) -> None:
    """Check what `norm_rotate_store` takes, whatever the cache keeps.

    heads: [num_tokens, num_heads + 2 x num_kv_heads, head_dim]. rotary: its cos and sin are
    [num_positions, head_dim / 2] in the dtype of heads. norms: of q and of k, both or none, with
    the same eps. cache_shape: [2, num_blocks, num_kv_heads, block_size, head_dim]. metadata: its
    positions and slot_mapping are int32 [num_tokens].
    """
    shape, cos, dtype = heads.shape, rotary.cos, heads.dtype
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
    if cos.dim() != 2 or cos.shape[1] * 2 != head_dim or cos.shape != rotary.sin.shape:
        refuse("cos and sin must be [positions, head_dim / 2]", cos=cos, sin=rotary.sin)
    if cos.dtype != dtype or rotary.sin.dtype != dtype:
        refuse("cos, sin and heads must be of one dtype", cos=cos, sin=rotary.sin, heads=heads)
    positions, slots = metadata.positions, metadata.slot_mapping
    tokens = (num_tokens,)
    if positions.shape != tokens or slots.shape != tokens:
        refuse(f"there are {num_tokens} tokens", positions=positions, slot_mapping=slots)
    if positions.dtype != _INT32 or slots.dtype != _INT32:
        refuse("must be int32", positions=positions, slot_mapping=slots)
    q_norm, k_norm = norms
    if (q_norm is None) != (k_norm is None):
        refuse("both q and k are normalised, or neither", q_norm=q_norm, k_norm=k_norm)
    if q_norm is not None:
        _check_head_norms(q_norm, k_norm, head_dim)


def _check_head_norms(q_norm: Any, k_norm: Any, head_dim: int) -> None:
    q, k = q_norm.weight, k_norm.weight
    if q.shape != (head_dim,) or k.shape != (head_dim,):
        refuse(f"norms of heads must be [{head_dim}]", q_norm=q, k_norm=k)
    if q.dtype not in FLOATS or k.dtype != q.dtype or q_norm.eps != k_norm.eps:
        told = {"q_norm": q, "k_norm": k, "q_eps": q_norm.eps, "k_eps": k_norm.eps}
        refuse("norms must be alike, in float32 or bfloat16, with one eps", **told)


def check_store(num_wrong: int, rotary: Any, cache_shape: Sequence[int], metadata: Any) -> None:
    """Raise `ValueError` if the kernel has found tokens whose position or slot does not exist."""
    if not num_wrong:
        return
    most = {"positions": rotary.cos.shape[0], "slot_mapping": cache_shape[1] * cache_shape[3]}
    for name, end in most.items():
        values = getattr(metadata, name)
        wrong = values[(values < 0) | (values >= end)].tolist()
        if wrong:
            raise ValueError(f"{name} must be in [0, {end}): {len(wrong)} are not, as {wrong[:4]}")


def check_attention(layer: Any, q: Tensor, cache: Tensor, metadata: Any) -> None:
    """q: [num_tokens, num_heads, head_dim]; cache: [2, blocks, KV heads, block_size, head_dim]."""
    num_heads, num_kv_heads, head_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
    of_q = [*q.shape]
    if of_q[1:] != [num_heads, head_dim] or q.dtype not in FLOATS:
        refuse(f"q must be [tokens, {num_heads}, {head_dim}], float32 or bfloat16", q=q)
    shape = [*cache.shape]
    if len(shape) != 5 or shape != [2, shape[1], num_kv_heads, shape[3], head_dim] or 0 in shape:
        refuse(f"the cache must be [2, blocks, {num_kv_heads}, slots, {head_dim}]", cache=cache)
    if num_heads % num_kv_heads or not num_heads:
        refuse("query heads must be a multiple of KV heads", q=q, cache=cache)
    starts, lens, tables = metadata.cu_seqlens_q, metadata.context_lens, metadata.block_tables
    rows = tables.shape[0] if tables.dim() == 2 else -1
    if starts.shape != (rows + 1,) or lens.shape != (rows,):
        refuse(
            "must be [rows + 1], [rows] and [rows, blocks]",
            cu_seqlens_q=starts,
            context_lens=lens,
            block_tables=tables,
        )
    is_good = starts.dtype == lens.dtype == tables.dtype == _INT32
    if not (is_good and starts.is_cpu and lens.is_cpu and tables.is_cpu):
        told = {"cu_seqlens_q": starts, "context_lens": lens, "block_tables": tables}
        refuse("must be int32, on a CPU", **told)
    num_single = metadata.num_decode_rows
    if not 0 <= num_single <= min(rows, of_q[0]):
        raise ValueError(f"num_decode_rows={num_single} of {rows} rows with {of_q[0]} tokens")
    if layer.sliding_window is not None and layer.sliding_window < 1:
        raise ValueError(f"sliding_window={layer.sliding_window}: a query sees at least itself")


def refuse_rows(num_tokens: int, cache_shape: Sequence[int], metadata: Any) -> NoReturn:
    """Raise `ValueError` for the first row whose tokens or blocks do not exist."""
    for row in range(metadata.context_lens.shape[0]):
        check_row(row, num_tokens, cache_shape, metadata)
    ends = metadata.cu_seqlens_q[[0, -1]].tolist()
    raise ValueError(f"rows have tokens {ends[0]} to {ends[1]}, and q has {num_tokens}")


def check_row(row: int, num_tokens: int, cache_shape: Sequence[int], metadata: Any) -> None:
    """Raise `ValueError` unless a row's tokens and blocks exist."""
    num_blocks, block_size = cache_shape[1], cache_shape[3]
    start, end = metadata.cu_seqlens_q[row : row + 2].tolist()
    length, table = int(metadata.context_lens[row]), metadata.block_tables[row].numpy()
    if not (0 <= start < end <= num_tokens and end - start <= length):
        raise ValueError(
            f"row {row}: tokens {start} to {end} of {num_tokens} must be the last ones of its "
            f"context_len {length}"
        )
    if length > len(table) * block_size:
        raise ValueError(
            f"row {row}: context_len {length} does not fit into {len(table)} blocks of {block_size}"
        )
    used = table[: -(-length // block_size)]
    wrong = used[(used < 0) | (used >= num_blocks)].tolist()
    if wrong:
        raise ValueError(f"row {row}: blocks {wrong[:4]} are none of {num_blocks}")


def check_choice(logits: Tensor, of_rows: dict[str, tuple[np.ndarray, type]]) -> None:
    """logits: [num_rows, vocab_size]; of_rows: by name [num_rows] and the dtype it must have."""
    if len(logits.shape) != 2 or not logits.shape[1] or logits.dtype not in FLOATS:
        refuse("logits must be [num_rows, vocab_size], float32 or bfloat16", logits=logits)
    num_rows = logits.shape[0]
    for name, (values, dtype) in of_rows.items():
        is_one = values.shape == (num_rows,) and values.dtype == dtype
        if not (is_one and values.flags.c_contiguous):
            refuse(f"must be contiguous {dtype.__name__} [{num_rows}]", **{name: values})


def check_linear(x: Tensor, inputs: int, dtypes: Sequence[torch.dtype]) -> None:
    """x: [..., inputs], of one of these dtypes, on a CPU."""
    if not x.shape or x.shape[-1] != inputs or x.dtype not in dtypes or not x.is_cpu:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        refuse(f"x must be [..., {inputs}] in {names}, on a CPU", x=x)


def check_weight(weight: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """[outputs, inputs], neither of them 0."""
    if len(weight.shape) != 2 or 0 in weight.shape or weight.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        refuse(f"a weight must be [outputs, inputs] in {names}", weight=weight)
    if not weight.is_cpu:
        refuse("a weight must be on a CPU", weight=weight)


def check_codes(codes: Tensor, scale: Tensor, offset: Tensor | None, bits: int) -> None:
    """Check integer weights, on a CPU.

    codes: int8 [outputs, inputs]. scale and offset: float32 [outputs, groups], whose groups are
    runs of equally many inputs. bits: 4 or 8.
    """
    if codes.dtype == torch.float8_e4m3fn:
        raise ValueError("codes of 8-bit floats are no integers: quantise them to int8 before")
    check_weight(codes, (torch.int8,))
    outputs, inputs = codes.shape
    for values in (scale, offset):
        if values is not None:
            check_weight(values, (torch.float32,))
            if values.shape[0] != outputs or inputs % values.shape[1]:
                rule = "scale and offset must be [outputs, groups], in groups of equal size"
                refuse(rule, codes=codes, scale=scale, offset=offset)
    if offset is not None and offset.shape != scale.shape:
        refuse("scale and offset must be alike", scale=scale, offset=offset)
    if bits not in (4, 8):
        raise ValueError(f"codes must be of 4 or 8 bits, not {bits}")
