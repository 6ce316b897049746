"""A mixture of experts as two grouped matrix products (Gale et al. 2022, "MegaBlocks").

T tokens with K experts each make T x K *pairs*, numbered token x K + choice. Sorted by expert, the
pairs of an expert are rows of one product with its weights, which are then read from memory once,
not once for each token. Four kernels:

    sort      the pairs of each expert: `order` lists the pairs by expert, `bounds` has the start
              and end of each expert's range in it
    product   gated[i] = silu(gate x) * (up x) of the pair order[i]
    product   products[order[i]] = down gated[i]
    sum       of the K products of each token, weighted

The number of pairs of an expert is known only on the GPU, and the host does not wait for it: the
grid has the maximum number of row tiles, and every program finds its expert in `bounds`. So a
captured CUDA graph is valid for any choice of the router. There are no atomic additions: results do
not depend on the order of programs.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from nanoserve.kernels.triton.dependent_launch import launch_options, wait_for_previous_kernel

_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_PLAIN = (1.0, None, 0.0)  # alpha, limit and offset of SwiGLU
_SORT_BLOCK = 1024  # pairs at once
_SUM_BLOCK = 1024  # columns of a program


class ExpertCodes(nn.Module):
    """The weights of experts as codes, int8 [experts, outputs, inputs], with scales.

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
            yield partial(_linear_of_codes, codes, scale)


def _linear_of_codes(codes: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, (codes * scale[:, None]).to(x.dtype))


class TileConfig(NamedTuple):
    """Tile sizes and launch parameters of a product."""

    block_m: int  # pairs
    block_n: int  # rows of the weight: half gate, half up, if it has both
    block_k: int  # columns of the weight at once
    num_warps: int
    num_stages: int


def tile_config(num_pairs: int, num_experts: int, dtype: torch.dtype) -> TileConfig:
    """Return small tiles for few pairs per expert, and large ones for many.

    There are only two configurations: each is compiled on first use, which must not happen while
    serving, and the smallest and the largest step, which are run first, use both.
    """
    is_small = num_pairs <= 16 * num_experts
    if dtype == torch.float32:  # not supported by tensor cores: operands go through registers
        return TileConfig(16, 32, 32, 4, 3) if is_small else TileConfig(32, 64, 32, 4, 3)
    if is_small:  # limited by memory bandwidth: the bytes in flight matter
        return TileConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4)
    return TileConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3)


def fused_experts(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor | ExpertCodes,
    down: torch.Tensor | ExpertCodes,
    first_expert: int = 0,
    num_experts: int | None = None,
    *,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    swiglu: tuple[float, float | None, float] = _PLAIN,
    is_dependent: bool = False,
    one_tile_shape: bool = False,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, over the experts of this rank.

    hidden          [num_tokens, hidden], float32, float16 or bfloat16
    expert_ids      int32 or int64 [num_tokens, top_k], of all experts; distinct for each token
    expert_weights  [num_tokens, top_k], of any floating type
    gate_up         [experts here, 2 x size, hidden]: of `first_expert` and those that follow it
    down            [experts here, hidden, size]

    All are contiguous; the weights and the result [num_tokens, hidden] have hidden's dtype, or the
    weights are codes, which are converted to it on use. Sums are float32, and both products are
    rounded to the dtype. `num_experts`, of all ranks, determines the average number of pairs of an
    expert.
    biases: of gate_up [experts here, 2 x size] and of down [experts here, hidden], of hidden's
    dtype. swiglu: (alpha, limit, offset); a pair's gate and up become gate * sigmoid(alpha * gate)
    * (up + offset), after gate was clamped to limit from above and up from both sides.
    is_dependent: use programmatic dependent launch.
    one_tile_shape: use the tiles of few pairs for any number, so that a token's result does not
    depend on other tokens.
    """
    _check(hidden, expert_ids, expert_weights, gate_up, down)
    of_gate_up, of_down = _checked_biases(biases, hidden, gate_up, down)
    (gate_up, gate_up_scale), (down, down_scale) = _parts(gate_up), _parts(down)
    (num_tokens, hidden_size), (num_here, _, size) = hidden.shape, down.shape
    if num_here == 0:  # there are more ranks than experts
        return torch.zeros_like(hidden)
    top_k, num_pairs = expert_ids.shape[1], expert_ids.numel()
    pairs_for_tiles = 1 if one_tile_shape else num_pairs
    config = tile_config(pairs_for_tiles, num_experts or num_here, hidden.dtype)
    launch = launch_options(is_dependent)
    pairs = _sort(expert_ids, first_expert, num_here, launch)
    gated = hidden.new_empty(num_pairs, size)
    operands = gated, hidden, gate_up, pairs, config, launch, top_k
    _product(*operands, scale=gate_up_scale, bias=of_gate_up, swiglu=swiglu)
    products = hidden.new_empty(num_pairs, hidden_size)
    _product(products, gated, down, pairs, config, launch, scale=down_scale, bias=of_down)
    out = torch.empty_like(hidden)
    _sum_kernel[(num_tokens, -(-hidden_size // _SUM_BLOCK))](
        out,
        products,
        expert_ids,
        expert_weights,
        first_expert,
        NUM_HERE=num_here,
        HIDDEN=hidden_size,
        TOP_K=top_k,
        BLOCK=_SUM_BLOCK,
        **launch,
    )
    return out


def _parts(weight: torch.Tensor | ExpertCodes) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (weight.codes, weight.scale) if isinstance(weight, ExpertCodes) else (weight, None)


def _check(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor | ExpertCodes,
    down: torch.Tensor | ExpertCodes,
) -> None:
    kinds = {x.dtype for x in (gate_up, down) if isinstance(x, torch.Tensor)}
    gate_up, down = _parts(gate_up)[0], _parts(down)[0]
    tensors = {"hidden": hidden, "expert_ids": expert_ids, "expert_weights": expert_weights}
    tensors |= {"gate_up": gate_up, "down": down}
    given = ", ".join(f"{name} {x.dtype} {list(x.shape)}" for name, x in tensors.items())
    if [x.dim() for x in tensors.values()] != [2, 2, 2, 3, 3]:
        raise ValueError(f"inputs must have 2, 2, 2, 3 and 3 dimensions: {given}")
    if expert_weights.shape != expert_ids.shape or len(expert_ids) != len(hidden):
        raise ValueError(f"expert_ids and expert_weights must have one row for each token: {given}")
    num_here, hidden_size, size = down.shape
    if hidden_size != hidden.shape[1] or gate_up.shape != (num_here, 2 * size, hidden_size):
        raise ValueError(
            f"gate_up must be [experts, 2 x size, hidden], down [experts, hidden, size]: {given}"
        )
    if hidden.dtype not in _TRITON_DTYPES or not kinds <= {hidden.dtype}:
        raise ValueError(
            f"hidden, gate_up and down must share one of float32, float16, bfloat16: {given}"
        )
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expert_ids must be int32 or int64: {given}")
    if not expert_weights.is_floating_point():
        raise ValueError(f"expert_weights must be floating-point: {given}")
    strided = [name for name, x in tensors.items() if not x.is_contiguous()]
    if strided:
        raise ValueError(f"{', '.join(strided)} must be contiguous")


def _checked_biases(
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    hidden: torch.Tensor,
    gate_up: torch.Tensor | ExpertCodes,
    down: torch.Tensor | ExpertCodes,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the biases of both products; (None, None) if there are none."""
    if biases is None:
        return None, None
    for bias, weight in zip(biases, (gate_up, down), strict=True):
        shape = _parts(weight)[0].shape[:2]
        if bias.shape != shape or bias.dtype != hidden.dtype or not bias.is_contiguous():
            raise ValueError(
                f"a bias must be contiguous {hidden.dtype} {list(shape)}, not {bias.dtype} "
                f"{list(bias.shape)}"
            )
    return biases


class _Pairs(NamedTuple):
    order: torch.Tensor  # int32 [num_pairs]: this rank's pairs by expert; the rest is unset
    bounds: torch.Tensor  # int32 [2, experts here]: start and end of each expert in `order`


def _sort(
    expert_ids: torch.Tensor, first_expert: int, num_here: int, launch: dict[str, Any]
) -> _Pairs:
    order = expert_ids.new_empty(expert_ids.numel(), dtype=torch.int32)
    bounds = expert_ids.new_empty(2, num_here, dtype=torch.int32)
    _sort_kernel[(num_here,)](
        order, bounds, expert_ids, first_expert, expert_ids.numel(), BLOCK=_SORT_BLOCK, **launch
    )
    return _Pairs(order, bounds)


def _product(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    pairs: _Pairs,
    config: TileConfig,
    launch: dict[str, Any],
    top_k: int | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    swiglu: tuple[float, float | None, float] = _PLAIN,
) -> None:
    """Launch a product. With `top_k`: tokens -> gated, sorted pairs; else: sorted -> pairs."""
    (num_pairs, out_features), num_experts = out.shape, len(weight)
    block_n = config.block_n if top_k is None else config.block_n // 2
    # All tiles of an expert that has pairs are full, except for one.
    num_experts_used = min(num_experts, num_pairs)
    num_tiles = num_experts_used + (num_pairs - num_experts_used) // config.block_m
    interpreted = triton.knobs.runtime.interpret  # which computes bfloat16 products incorrectly
    # Consecutive programs use the same columns of an expert for other pairs. The grid is computed
    # in plain Python: Triton's `cdiv` and `next_power_of_2` take microseconds, in every layer.
    _product_kernel[(num_tiles, -(-out_features // block_n))](
        out,
        x,
        weight,
        scale,
        bias,
        *pairs,
        IN_FEATURES=x.shape[1],
        OUT_FEATURES=out_features,
        NUM_EXPERTS=num_experts,
        EXPERTS_PADDED=max(16, 1 << (num_experts - 1).bit_length()),
        TOP_K=top_k,
        ALPHA=swiglu[0],
        LIMIT=swiglu[1],
        OFFSET=swiglu[2],
        BLOCK_M=config.block_m,
        BLOCK_N=block_n,
        BLOCK_K=config.block_k,
        DOT_DTYPE=tl.float32 if interpreted else _TRITON_DTYPES[x.dtype],
        DOT_PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch,
    )


# Values that change from step to step, or between ranks, are not specialised: values of 1 or
# divisible by 16 would each recompile the kernel.
@triton.jit(do_not_specialize=["first_expert", "num_pairs"])
def _sort_kernel(
    order_ptr,
    bounds_ptr,
    expert_ids_ptr,
    first_expert,
    num_pairs,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Counting sort: a program lists one expert's pairs, after the pairs of earlier experts."""
    wait_for_previous_kernel(IS_DEPENDENT)
    here, num_here = tl.program_id(0), tl.num_programs(0)
    expert = first_expert + here
    i = tl.arange(0, BLOCK)
    num_before = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, num_pairs, BLOCK):
        ids = tl.load(expert_ids_ptr + start + i, mask=start + i < num_pairs, other=-1)
        num_before += ((ids >= first_expert) & (ids < expert)).to(tl.int32)
    position = tl.sum(num_before, 0)
    tl.store(bounds_ptr + here, position)
    for start in range(0, num_pairs, BLOCK):
        ids = tl.load(expert_ids_ptr + start + i, mask=start + i < num_pairs, other=-1)
        is_mine = ids == expert
        rank = tl.cumsum(is_mine.to(tl.int32), 0)
        tl.store(order_ptr + position + rank - 1, start + i, mask=is_mine)
        position += tl.sum(is_mine.to(tl.int32), 0)
    tl.store(bounds_ptr + num_here + here, position)


@triton.jit
def _product_kernel(
    out_ptr,  # [num_pairs, OUT_FEATURES]
    x_ptr,  # [num_tokens or num_pairs, IN_FEATURES]
    weight_ptr,  # [NUM_EXPERTS, OUT_FEATURES or twice that, IN_FEATURES]
    scale_ptr,  # scales of codes, for each row of the weight; else None
    bias_ptr,  # [NUM_EXPERTS, rows of the weight]; None: compiled away
    order_ptr,
    bounds_ptr,
    IN_FEATURES: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TOP_K: tl.constexpr,  # None: x is sorted, and out is not; else x has tokens, and out is sorted
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous_kernel(IS_DEPENDENT)
    expert, first, end = _find_tile(bounds_ptr, NUM_EXPERTS, EXPERTS_PADDED, BLOCK_M)
    if expert >= NUM_EXPERTS:
        return  # more programs than tiles
    position = first + tl.arange(0, BLOCK_M)
    exists = position < end
    pair = tl.load(order_ptr + position, mask=exists, other=0)
    x_row = position if TOP_K is None else pair // TOP_K
    out_row = pair if TOP_K is None else position
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # int64: all experts together may have more than 2^31 weights, and many pairs that many values.
    weight_ptr += expert.to(tl.int64) * (OUT_FEATURES * (1 if TOP_K is None else 2) * IN_FEATURES)
    x_ptrs = x_ptr + x_row.to(tl.int64)[:, None] * IN_FEATURES + k[None, :]
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * IN_FEATURES + k[None, :]
    x_mask = exists[:, None] & tl.full([BLOCK_M, BLOCK_K], True, tl.int1)
    # A constant true mask costs nothing: the compiler removes it.
    weight_mask = tl.full([BLOCK_N, BLOCK_K], True, tl.int1)
    if OUT_FEATURES % BLOCK_N != 0:
        weight_mask &= (n < OUT_FEATURES)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        in_row = tl.full([BLOCK_K], True, tl.int1)
        if IN_FEATURES % BLOCK_K != 0:
            in_row = k < IN_FEATURES - start
        mask = weight_mask & in_row[None, :]
        x = tl.load(x_ptrs + start, mask=x_mask & in_row[None, :], other=0.0).to(DOT_DTYPE)
        weight = tl.load(weight_ptrs + start, mask=mask, other=0.0).to(DOT_DTYPE)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision=DOT_PRECISION)
        if TOP_K is not None:
            up_ptrs = weight_ptrs + OUT_FEATURES * IN_FEATURES + start
            up = tl.load(up_ptrs, mask=mask, other=0.0).to(DOT_DTYPE)
            acc_up = tl.dot(x, tl.trans(up), acc_up, input_precision=DOT_PRECISION)
    if scale_ptr is not None:
        scale_ptr += expert * (OUT_FEATURES * (1 if TOP_K is None else 2)) + n
        acc *= tl.load(scale_ptr, mask=n < OUT_FEATURES, other=0.0)[None, :]
        if TOP_K is not None:
            up_scale = tl.load(scale_ptr + OUT_FEATURES, mask=n < OUT_FEATURES, other=0.0)
            acc_up *= up_scale[None, :]
    if bias_ptr is not None:
        bias_ptr += expert * (OUT_FEATURES * (1 if TOP_K is None else 2)) + n
        bias = tl.load(bias_ptr, mask=n < OUT_FEATURES, other=0.0)
        acc += bias.to(tl.float32)[None, :]
        if TOP_K is not None:
            up_bias = tl.load(bias_ptr + OUT_FEATURES, mask=n < OUT_FEATURES, other=0.0)
            acc_up += up_bias.to(tl.float32)[None, :]
    if TOP_K is not None:
        if LIMIT is not None:  # minima and maxima would lose NaN
            acc = tl.where(acc > LIMIT, LIMIT, acc)
            acc_up = tl.where(acc_up > LIMIT, LIMIT, tl.where(acc_up < -LIMIT, -LIMIT, acc_up))
        if OFFSET != 0.0:
            acc_up += OFFSET
        if ALPHA == 1.0:
            acc = acc / (1.0 + tl.exp(-acc)) * acc_up
        else:
            acc = acc / (1.0 + tl.exp(-ALPHA * acc)) * acc_up
    out_ptrs = out_ptr + out_row.to(tl.int64)[:, None] * OUT_FEATURES + n[None, :]
    mask = exists[:, None] & (n < OUT_FEATURES)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _find_tile(
    bounds_ptr, NUM_EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return the expert of this program's tile of pairs, and where tile and expert begin and end.

    Returns (expert, start of the tile in `order`, end of the expert in `order`). The expert is
    NUM_EXPERTS or more if the tile does not exist.
    """
    tile = tl.program_id(0)
    e = tl.arange(0, EXPERTS_PADDED)
    begins = tl.load(bounds_ptr + e, mask=e < NUM_EXPERTS, other=0)
    ends = tl.load(bounds_ptr + NUM_EXPERTS + e, mask=e < NUM_EXPERTS, other=0)
    num_tiles = tl.cdiv(ends - begins, BLOCK_M)
    expert = tl.sum((tl.cumsum(num_tiles, 0) <= tile).to(tl.int32), 0)
    tile -= tl.sum(tl.where(e < expert, num_tiles, 0), 0)  # relative to the expert's first tile
    first = tl.sum(tl.where(e == expert, begins, 0), 0) + tile * BLOCK_M
    return expert, first, tl.sum(tl.where(e == expert, ends, 0), 0)


@triton.jit(do_not_specialize=["first_expert"])
def _sum_kernel(
    out_ptr,
    products_ptr,
    expert_ids_ptr,
    expert_weights_ptr,
    first_expert,
    NUM_HERE: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Sum a token's experts in the order of the router's choice, without other ranks' experts."""
    wait_for_previous_kernel(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        here = tl.load(expert_ids_ptr + pair) - first_expert
        # The products of other ranks' experts are unset.
        num_columns = tl.where((here >= 0) & (here < NUM_HERE), HIDDEN, 0)
        address = products_ptr + pair * HIDDEN + column
        product = tl.load(address, mask=column < num_columns, other=0.0)
        total += tl.load(expert_weights_ptr + pair).to(tl.float32) * product.to(tl.float32)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * HIDDEN + column, out, mask=column < HIDDEN)
