"""The products of low-rank adapters, y += B A x, for all tokens of a step in two kernels.

    shrink    narrow = A x, float32, of each token that has an adapter
    expand    B narrow, added to the token's row of y

Tokens with the same adapter share *tiles* of 16, so its matrices are read once for so many: the
host sorts them (`nanoserve.models.layers.adapter_tiles`). A launch knows only the number of tiles.
Their tokens and their adapters are data, which both kernels read on the device, and a tile may be
empty. So a captured graph with enough tiles computes any step.

The inputs of shrink are split over programs, because a step of decode rows has few tiles. Expand
adds the parts, in the order of the inputs. The number of parts depends on the matrix alone, so a
token's result depends on no other token.

Where ranks and outputs end is data, too. A mask of it would split the loads of A, B and y into
single numbers, because the compiler cannot know that it is the same for eight neighbours. So whole
vectors are loaded, and what is beyond an end is left out afterwards.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoserve.kernels.triton.dependent_launch import launch_options, wait_for_previous_kernel

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_INPUTS_OF_PART = 512  # at least
_MOST_PARTS = 8
_MOST_RANKS = 64  # of a program of shrink, and of a step of expand


class _Tiles(NamedTuple):
    """Tile sizes and launch parameters. They have not been tuned by measurements."""

    block_k: int  # inputs at once
    block_n: int  # outputs of a program
    num_warps: int
    num_stages: int


def _tiles(dtype: torch.dtype) -> _Tiles:
    return _Tiles(64, 64, 4, 3) if dtype == torch.float32 else _Tiles(128, 128, 4, 3)


def add_low_rank(
    x: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    firsts: Tensor,
    tokens: Tensor,
    places: Tensor,
    *,
    is_dependent: bool = False,
) -> None:
    """Add B A x to some rows of y, in place; all other rows keep their bits.

    x       [num_tokens, inputs], float32, float16 or bfloat16
    y       [num_tokens, outputs], rows may be apart
    a       [num_places, inputs, ranks of all targets]
    b       [num_places, largest rank, outputs]
    ends    int32 [num_places, num_targets + 1]: where the ranks of each target end, after a 0
    firsts  int32 [num_targets + 1]: the columns of y where the outputs of each target begin
    tokens  int32 [num_tiles, 16]: the rows of each tile, -1 for none, all with the same adapter
    places  int32 [num_tiles]: their adapter; -1 for an empty tile

    Sums are float32; B A x is rounded when it has been added to y. A x is rounded to tf32 before it
    is multiplied by B, unless x is float32.
    is_dependent: use programmatic dependent launch.
    """
    _check(x, y, a, b, tokens, places)
    if len(places) == 0:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles, of_step = _tiles(x.dtype), (ends, tokens, places)
    options = {
        "NUM_TARGETS": len(firsts) - 1,
        "RANKS": a.shape[2],
        "BLOCK_M": tokens.shape[1],
        "DOT_PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **launch_options(is_dependent),
    }
    narrow = _launch_shrink(x, a, of_step, tiles.block_k, options)
    _launch_expand(y, narrow, b, of_step, firsts, tiles.block_n, options)


def _launch_shrink(
    x: Tensor, a: Tensor, of_step: tuple[Tensor, ...], block_k: int, options: dict[str, Any]
) -> Tensor:
    """Return the parts of A x, float32 [parts, num_tiles x 16, ranks]."""
    (num_tiles, size), (inputs, ranks) = of_step[1].shape, a.shape[1:]
    parts = max(1, min(_MOST_PARTS, inputs // _INPUTS_OF_PART))
    block_r = _block_of(ranks)
    narrow = x.new_empty(parts, num_tiles * size, ranks, dtype=torch.float32)
    interpreted = triton.knobs.runtime.interpret  # which computes bfloat16 products incorrectly
    _shrink[num_tiles, parts, -(-ranks // block_r)](
        narrow,
        x,
        a,
        *of_step,
        x.stride(0),
        INPUTS=inputs,
        STEPS=-(-inputs // (parts * block_k)),
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        DOT_DTYPE=tl.float32 if interpreted else _DTYPES[x.dtype],
        **options,
    )
    return narrow


def _launch_expand(
    y: Tensor,
    narrow: Tensor,
    b: Tensor,
    of_step: tuple[Tensor, ...],
    firsts: Tensor,
    block_n: int,
    options: dict[str, Any],
) -> None:
    most_rank, outputs = b.shape[1:]
    _expand[len(of_step[1]), -(-outputs // block_n)](
        y,
        narrow,
        b,
        *of_step,
        firsts,
        y.stride(0),
        PARTS=len(narrow),
        MOST_RANK=most_rank,
        OUTPUTS=outputs,
        BLOCK_N=block_n,
        BLOCK_R=_block_of(most_rank),
        **options,
    )


def _block_of(ranks: int) -> int:
    """Return the number of ranks that a program computes at once: 16, 32 or 64."""
    return max(16, min(_MOST_RANKS, triton.next_power_of_2(ranks)))


def _check(x: Tensor, y: Tensor, a: Tensor, b: Tensor, tokens: Tensor, places: Tensor) -> None:
    wrong = None
    if x.shape[1] != a.shape[1] or y.shape != (len(x), b.shape[2]) or len(a) != len(b):
        wrong = "x [tokens, inputs], y [tokens, outputs], a [places, inputs, ranks] and b "
        wrong += "[places, largest rank, outputs] do not fit"
    elif x.dtype not in _DTYPES or not x.dtype == y.dtype == a.dtype == b.dtype:
        wrong = "all must be float32, float16 or bfloat16"
    elif y.stride(1) != 1 or not (a.is_contiguous() and b.is_contiguous()):
        wrong = "a, b and each row of y must be contiguous"
    elif tokens.dim() != 2 or len(tokens) != len(places) or not tokens.is_contiguous():
        wrong = f"tokens {list(tokens.shape)} must have a row for each of {len(places)} places"
    if wrong is not None:
        given = ", ".join(f"{list(one.shape)} {one.stride()} {one.dtype}" for one in (x, y, a, b))
        raise ValueError(f"{wrong}: shapes, strides and types are {given}")


@triton.jit
def _shrink(
    narrow_ptr,  # float32 [parts, tiles x BLOCK_M, RANKS]
    x_ptr,
    a_ptr,  # [places, INPUTS, RANKS]
    ends_ptr,  # int32 [places, NUM_TARGETS + 1]
    tokens_ptr,  # int32 [tiles, BLOCK_M]
    places_ptr,  # int32 [tiles]
    x_stride,
    NUM_TARGETS: tl.constexpr,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    STEPS: tl.constexpr,  # of BLOCK_K inputs, in a part
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous_kernel(IS_DEPENDENT)
    tile, part = tl.program_id(0), tl.program_id(1)
    place = tl.load(places_ptr + tile)
    if place < 0:
        return
    r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    total = tl.load(ends_ptr + place * (NUM_TARGETS + 1) + NUM_TARGETS)
    if tl.program_id(2) * BLOCK_R >= total:
        return
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    token = tl.load(tokens_ptr + tile * BLOCK_M + m)
    # int64: the matrices of all places may have more than 2^31 values.
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    a_ptrs = a_ptr + place.to(tl.int64) * INPUTS * RANKS + k[:, None] * RANKS + r[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    for step in range(STEPS):
        start = (part * STEPS + step) * BLOCK_K
        has_k = k < INPUTS - start
        x = tl.load(x_ptrs + start, mask=(token >= 0)[:, None] & has_k[None, :], other=0.0)
        a_mask = has_k[:, None] & (r < RANKS)[None, :]  # columns from `total` on are not used
        a = tl.load(a_ptrs + start * RANKS, mask=a_mask, other=0.0)
        acc = tl.dot(x.to(DOT_DTYPE), a.to(DOT_DTYPE), acc, input_precision=DOT_PRECISION)
    row = (part * tl.num_programs(0) + tile).to(tl.int64) * BLOCK_M + m
    mask = (token >= 0)[:, None] & (r < RANKS)[None, :]
    tl.store(narrow_ptr + row[:, None] * RANKS + r[None, :], acc, mask=mask)


@triton.jit
def _expand(
    y_ptr,
    narrow_ptr,  # float32 [PARTS, tiles x BLOCK_M, RANKS]
    b_ptr,  # [places, MOST_RANK, OUTPUTS]
    ends_ptr,  # int32 [places, NUM_TARGETS + 1]
    tokens_ptr,  # int32 [tiles, BLOCK_M]
    places_ptr,  # int32 [tiles]
    firsts_ptr,  # int32 [NUM_TARGETS + 1]
    y_stride,
    NUM_TARGETS: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    MOST_RANK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous_kernel(IS_DEPENDENT)
    tile, first_column = tl.program_id(0), tl.program_id(1) * BLOCK_N
    place = tl.load(places_ptr + tile)
    if place < 0:
        return
    m, n = tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    token = tl.load(tokens_ptr + tile * BLOCK_M + m)
    own_ends = ends_ptr + place * (NUM_TARGETS + 1)
    narrow_ptrs = narrow_ptr + (tile.to(tl.int64) * BLOCK_M + m)[:, None] * RANKS
    b_ptrs = b_ptr + place.to(tl.int64) * MOST_RANK * OUTPUTS + n[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    is_changed, num_changes = n < 0, 0
    # A program's columns may be those of several targets, and an adapter may have no ranks of one.
    for target in range(NUM_TARGETS):
        first, last = tl.load(firsts_ptr + target), tl.load(firsts_ptr + target + 1)
        start, end = tl.load(own_ends + target), tl.load(own_ends + target + 1)
        if (first < first_column + BLOCK_N) & (last > first_column) & (end > start):
            in_target = (n >= first) & (n < last)
            is_changed, num_changes = is_changed | in_target, num_changes + 1
            for first_rank in range(0, end - start, BLOCK_R):
                r = first_rank + tl.arange(0, BLOCK_R)
                has_r = r < end - start
                mask, at = (token >= 0)[:, None] & has_r[None, :], (start + r)[None, :]
                narrow = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
                for part in range(PARTS):
                    skip = part * tl.num_programs(0).to(tl.int64) * BLOCK_M * RANKS
                    narrow += tl.load(narrow_ptrs + skip + at, mask=mask, other=0.0)
                b_mask = has_r[:, None] & (n < OUTPUTS)[None, :]
                b = tl.load(b_ptrs + r[:, None] * OUTPUTS, mask=b_mask, other=0.0)
                b = tl.where(in_target[None, :], b, 0.0).to(tl.float32)
                if DOT_PRECISION == "tf32":
                    narrow = _rounded_to_tf32(narrow)
                acc = tl.dot(narrow, b, acc, input_precision=DOT_PRECISION)
    if num_changes == 0:
        return
    y_ptrs = y_ptr + token.to(tl.int64)[:, None] * y_stride + n[None, :]
    mask = (token >= 0)[:, None] & (n < OUTPUTS)[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
    y = tl.where(is_changed[None, :], y + acc, y)
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rounded_to_tf32(x):
    """Round float32 to the 10 bits of tf32; tensor cores would leave out the last 13 bits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
