"""The fused kernel between qkv projection and attention: norms, rotary embedding, cache write.

Query and key heads are normalised (if the model does that) and rotated by their positions, see
`nanoserve/models/layers/rotary.py`; keys and values are written to their KV slots of the paged
cache. Each value is read once and written once. As separate operations this would take about ten
kernels per layer, and at small batches a kernel's launch costs more than its work.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from nanoserve.kernels.triton.dependent_launch import has_dependent_launch, launch_options
from nanoserve.kernels.triton.quantized_kv import check_cache, quantized

# Up to this many tokens, one program per token and head: otherwise there are too few programs to
# fill a GPU.
_FEW_TOKENS = 64
_BLOCK_TOKENS = 16


def store_kv(
    heads: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    *,
    is_dependent: bool = False,
) -> torch.Tensor:
    """Store K and V in `kv_cache`; return q [num_tokens, num_heads, head_dim], contiguous.

    heads: [num_tokens, num_heads + 2 x num_kv_heads, head_dim]: the heads of q, then k, then v.
    positions, slot_mapping: int32 [num_tokens]; KV slot = block * block_size + offset. If several
    tokens have one KV slot (padding), any of them is stored.
    cos, sin: [max_positions, head_dim / 2].
    q_weight, k_weight: [head_dim], the RMSNorm of every query and key head, or None.
    kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim], in the dtype of `heads`; or
    codes, int8 or uint8 for e4m3, quantized from float32.
    kv_scales: of codes, float32 [2, num_blocks, num_kv_heads, block_size]; then both are
    contiguous.
    is_dependent: use programmatic dependent launch.
    The last dimension of every tensor is contiguous; heads and kv_cache may have any other strides.
    """
    check_cache(kv_cache, kv_scales, heads.dtype)
    _check(heads, positions, cos, sin, q_weight, k_weight, kv_cache, slot_mapping)
    num_tokens, num_all_heads, head_dim = heads.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    num_heads = num_all_heads - 2 * num_kv_heads
    q = heads.new_empty(num_tokens, num_heads, head_dim)
    block_tokens = 1 if num_tokens <= _FEW_TOKENS else _BLOCK_TOKENS
    # In plain Python: Triton's `next_power_of_2` and `cdiv` take microseconds, in every layer.
    block_pairs = 1 << (head_dim // 2 - 1).bit_length()
    _store_kv[(-(-num_tokens // block_tokens), num_all_heads)](
        heads,
        positions,
        cos,
        sin,
        q_weight,
        k_weight,
        kv_cache,
        kv_scales,
        slot_mapping,
        q,
        num_tokens,
        eps,
        *heads.stride()[:2],
        *kv_cache.stride()[:4],
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        block_tokens,
        block_pairs,
        has_dependent_launch(),
        num_warps=min(max(block_tokens * block_pairs // 128, 1), 8),
        **launch_options(is_dependent),
    )
    return q


def _check(
    heads: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    shape, cache_shape = heads.shape, kv_cache.shape  # read once: this takes longer than the checks
    if len(shape) != 3 or len(cache_shape) != 5 or cache_shape[0] != 2:
        raise ValueError(
            f"heads {list(shape)} must have 3 dimensions, and kv_cache {list(cache_shape)} must be "
            f"[2, ...] with 5 dimensions"
        )
    num_tokens, num_all_heads, head_dim = shape
    if head_dim % 2 or head_dim != cache_shape[4] or num_all_heads <= 2 * cache_shape[2]:
        raise ValueError(
            f"heads {list(shape)} and kv_cache {list(cache_shape)} must have the same, even "
            f"head_dim, and heads must have query heads and then 2 x {cache_shape[2]} KV heads"
        )
    if heads.stride()[2] != 1 or kv_cache.stride()[4] != 1:
        raise ValueError(
            f"heads and kv_cache must be contiguous in their last dimension; strides: "
            f"heads={list(heads.stride())}, kv_cache={list(kv_cache.stride())}"
        )
    per_token, table, norm = (num_tokens,), (cos.shape[0], head_dim // 2), (head_dim,)
    for name, tensor, wanted in (
        ("positions", positions, per_token),
        ("slot_mapping", slot_mapping, per_token),
        ("cos", cos, table),
        ("sin", sin, table),
        ("q_weight", q_weight, norm),
        ("k_weight", k_weight, norm),
    ):
        if tensor is not None and (tensor.shape != wanted or not tensor.is_contiguous()):
            raise ValueError(
                f"{name} must be a contiguous {list(wanted)}; its shape is {list(tensor.shape)} "
                f"and its strides are {list(tensor.stride())}"
            )


# Positions and KV slots start anywhere in a step's buffer of integers, and the number of tokens
# changes with every step: specialising on them would compile the kernel again while serving.
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["positions", "slot_mapping"],
)
def _store_kv(
    heads,
    positions,
    cos,
    sin,
    q_weight,
    k_weight,
    kv_cache,
    scales,
    slot_mapping,
    q,
    num_tokens,
    eps,
    heads_token_stride,
    heads_head_stride,
    cache_kv_stride,
    cache_block_stride,
    cache_head_stride,
    cache_offset_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    HAS_DEPENDENT: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    if HAS_DEPENDENT:
        cuda.gdc_launch_dependents()  # attention may start, and wait for this kernel's stores
    if IS_DEPENDENT:
        cuda.gdc_wait()
    HALF: tl.constexpr = HEAD_DIM // 2
    # int64 throughout: a large cache exceeds 2^31 elements, and its strides may be in any order.
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    in_batch = token < num_tokens
    mask = in_batch[:, None] & (pair < HALF)
    # The two halves of a head are two tiles, so that both elements of a pair are in one thread.
    row = token.to(tl.int64)[:, None] * heads_token_stride + head * heads_head_stride
    first = tl.load(heads + row + pair, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads + row + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        if head < NUM_HEADS:
            first, second = _norm(first, second, q_weight, pair, eps, HEAD_DIM)
        else:
            first, second = _norm(first, second, k_weight, pair, eps, HEAD_DIM)
        position = tl.load(positions + token, mask=in_batch, other=0).to(tl.int64)[:, None]
        c = tl.load(cos + position * HALF + pair, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + position * HALF + pair, mask=mask, other=0.0).to(tl.float32)
        first, second = first * c - second * s, second * c + first * s
    # Each branch has its own store: if a branch only selected the addresses, the compiler would not
    # see that they are consecutive, and would write value by value.
    if head < NUM_HEADS:
        target = q + (token.to(tl.int64)[:, None] * NUM_HEADS + head) * HEAD_DIM + pair
        tl.store(target, first.to(q.dtype.element_ty), mask=mask)
        tl.store(target + HALF, second.to(q.dtype.element_ty), mask=mask)
    else:
        is_v = (head - NUM_HEADS) // NUM_KV_HEADS
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        slot = tl.load(slot_mapping + token, mask=in_batch, other=0).to(tl.int64)[:, None]
        row = is_v * cache_kv_stride + kv_head * cache_head_stride
        row += slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * cache_offset_stride
        # In Triton a name has one type, so q and the cache need different names.
        place = kv_cache + row + pair
        if scales is None:
            tl.store(place, first.to(kv_cache.dtype.element_ty), mask=mask)
            tl.store(place + HALF, second.to(kv_cache.dtype.element_ty), mask=mask)
        else:
            codes = quantized(first, second, kv_cache.dtype.element_ty)
            tl.store(place, codes[0], mask=mask)
            tl.store(place + HALF, codes[1], mask=mask)
            tl.store(scales + row // HEAD_DIM, codes[2][:, None], mask=in_batch[:, None])


@triton.jit
def _norm(first, second, weight, pair, eps, HEAD_DIM: tl.constexpr):
    """Return the RMSNorm of heads with halves `first` and `second`; unchanged without a weight."""
    if weight is not None:
        HALF: tl.constexpr = HEAD_DIM // 2
        mean_square = tl.sum(first * first + second * second, axis=1) / HEAD_DIM
        scale = tl.rsqrt(mean_square + eps)[:, None]
        mask = pair < HALF
        first *= scale * tl.load(weight + pair, mask=mask, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    return first, second
