"""The filters min-p, top-k and top-p on the GPU, as a threshold for each row, without a sort.

As in `nanoserve/sampling/filters.py`, a row's filter is reduced to one number, the border, which is
found by a search: a pass over the row sums what is at or above a trial border, by count for top-k
and by probability for top-p, and the search continues above or below it. A float dtype has finitely
many values, so the bisection ends, at a value that occurs in the row. bfloat16 has 16 bits, and a
pass tries three borders and gains two bits. Usually four or five of those eight passes are needed
(all, if k is large), since the first pass over a row gives a starting range. Passes read the row
from the L2 cache, and only borders are written.
"""

import torch
import triton
import triton.language as tl

from nanoserve.kernels.triton.choose_tokens import SETTINGS_WORDS, check_logits, check_tensor
from nanoserve.kernels.triton.dependent_launch import launch_options, wait_for_previous_kernel

_WARPS = 16
_BLOCK_BYTES = 16 * 32 * _WARPS  # bytes of logits at a time: each thread loads 16
_GROUPS = tl.constexpr(64)

# float32 bits that are always 0 in a dtype's values: keys omit them, so that 16 bits are searched.
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def filter_borders(
    logits: torch.Tensor,
    slots: torch.Tensor,
    settings: torch.Tensor,
    *,
    is_dependent: bool = False,
) -> torch.Tensor:
    """Return each row's border, float32 [num_rows]: the least logit / temperature that is kept.

    logits: [num_rows, vocab_size < 2^24], float32, float16 or bfloat16, any row stride.
    slots: int32 [num_rows], the row of `settings` for each row of logits.
    settings: int32 [num_slots, 8], rows from `pack_settings`.
    is_dependent: use programmatic dependent launch.
    The filters apply in the order min_p, top_k, top_p, each to the tokens that the previous
    filter has kept. The border is -inf for rows that are greedy or have no filter. NaN counts
    as -inf here; for a row that has NaN, `choose_tokens` returns no token.
    """
    check_logits(logits)
    num_rows, vocab_size = logits.shape
    if logits.dtype not in _UNUSED_BITS or vocab_size >= 2**24:
        raise ValueError(
            f"logits must have a vocab_size below {2**24} and dtype float32, float16 or bfloat16, "
            f"not {vocab_size} and {logits.dtype}"
        )
    check_tensor("slots", slots, torch.int32, num_rows)
    check_tensor("settings", settings, torch.int32, len(settings), SETTINGS_WORDS.value)
    borders = logits.new_empty(num_rows, dtype=torch.float32)
    _filter_borders[(num_rows,)](
        logits,
        slots,
        settings,
        borders,
        logits.stride(0),
        vocab_size,
        _BLOCK_BYTES // logits.element_size(),
        _UNUSED_BITS[logits.dtype],
        num_warps=_WARPS,
        **launch_options(is_dependent),
    )
    return borders


# As in choose_tokens, slots start anywhere in a step's buffer.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _filter_borders(
    logits,
    slots,
    settings,
    borders,
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Compute the border of one row; nearly all the time is spent in the passes of the searches."""
    wait_for_previous_kernel(IS_DEPENDENT)
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * row_stride
    slot_settings = settings + tl.load(slots + row) * SETTINGS_WORDS
    temperature = tl.load(slot_settings).to(tl.float32, bitcast=True)
    top_k = tl.load(slot_settings + 4)
    top_p = tl.load(slot_settings + 5).to(tl.float32, bitcast=True)
    min_p = tl.load(slot_settings + 6).to(tl.float32, bitcast=True)
    is_limited = (top_k > 0) & (top_k < VOCAB_SIZE)
    border = tl.full((), -float("inf"), tl.float32)
    if (temperature > 0) & (is_limited | (top_p < 1) | (min_p > 0)):
        largest, low = _largest(row_logits, VOCAB_SIZE, BLOCK)
        scaled_largest = largest / temperature
        lowest_key = _key(border, UNUSED_BITS)
        largest_key = _key(largest, UNUSED_BITS)
        if min_p > 0:
            border = scaled_largest + tl.log(min_p)  # p >= min_p * p_max
        if is_limited:
            if top_k <= _GROUPS:
                lowest_key = _key(low, UNUSED_BITS)
            lowest_key = _search(
                row_logits,
                temperature,
                scaled_largest,
                lowest_key,
                largest_key,
                top_k.to(tl.float32),
                VOCAB_SIZE,
                BLOCK,
                UNUSED_BITS,
                BY_MASS=False,
            )
            border = tl.maximum(border, _value(lowest_key, UNUSED_BITS) / temperature)
        if top_p < 1:
            total, _, _ = _weigh(
                row_logits,
                temperature,
                scaled_largest,
                border,
                border,
                border,
                VOCAB_SIZE,
                BLOCK,
                BY_MASS=True,
            )
            # Tokens below `low` have a negligible sum, even if they are the whole vocabulary. The
            # largest has weight 1; a factor of e and one key less allow for rounding.
            low = largest - temperature * (1 - tl.log((1 - top_p) / VOCAB_SIZE))
            nucleus_key = _search(
                row_logits,
                temperature,
                scaled_largest,
                tl.maximum(lowest_key, _key(low, UNUSED_BITS) - 1),
                largest_key,
                top_p * total,
                VOCAB_SIZE,
                BLOCK,
                UNUSED_BITS,
                BY_MASS=True,
            )
            # Not lower than before: the sum at the earlier border is `total`, which reaches this
            # target.
            border = _value(nucleus_key, UNUSED_BITS) / temperature
    tl.store(borders + row, border)


@triton.jit
def _largest(row_logits, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest logit, and a value that at least `_GROUPS` logits reach."""
    lanes = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        x = _load(row_logits, start + lanes, VOCAB_SIZE)
        largest = tl.where(x > largest, x, largest)  # never true for NaN
    of_groups = tl.max(tl.reshape(largest, (_GROUPS, BLOCK // _GROUPS)), axis=1)
    return tl.max(of_groups, axis=0), tl.min(of_groups, axis=0)


@triton.jit
def _search(
    row_logits,
    temperature,
    scaled_largest,
    low,
    high,
    target,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """Return the largest key from `low` to `high` at which the sum of tokens reaches `target`.

    `low` is assumed to satisfy this: it is returned if no larger key does.
    """
    while low < high:
        width = high.to(tl.int64) - low  # with float32 keys it may exceed 32 bits
        first = (low + (width + 3) // 4).to(tl.int32)
        second = (low + (width + 1) // 2).to(tl.int32)
        third = (low + (3 * width + 3) // 4).to(tl.int32)
        from_first, from_second, from_third = _weigh(
            row_logits,
            temperature,
            scaled_largest,
            _value(first, UNUSED_BITS) / temperature,
            _value(second, UNUSED_BITS) / temperature,
            _value(third, UNUSED_BITS) / temperature,
            VOCAB_SIZE,
            BLOCK,
            BY_MASS,
        )
        if from_third >= target:
            low = third
        elif from_second >= target:
            low = second
            high = third - 1
        elif from_first >= target:
            low = first
            high = second - 1
        else:
            high = first - 1
    return low


@triton.jit
def _weigh(
    row_logits,
    temperature,
    scaled_largest,
    first,
    second,
    third,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """Sum the tokens that reach each of three borders: counts, or weights relative to the largest.

    All sums are taken in the same order, so they never grow with the border, despite rounding.
    """
    lanes = tl.arange(0, BLOCK)
    from_first = tl.zeros((BLOCK,), tl.float32)
    from_second = tl.zeros((BLOCK,), tl.float32)
    from_third = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        # Divided as in choose_tokens, which compares the same quotients with the border.
        x = _load(row_logits, start + lanes, VOCAB_SIZE) / temperature
        weight = tl.exp(x - scaled_largest) if BY_MASS else 1.0
        from_first += tl.where(x >= first, weight, 0.0)
        from_second += tl.where(x >= second, weight, 0.0)
        from_third += tl.where(x >= third, weight, 0.0)
    return tl.sum(from_first, axis=0), tl.sum(from_second, axis=0), tl.sum(from_third, axis=0)


@triton.jit
def _load(row_logits, token_ids, VOCAB_SIZE: tl.constexpr):
    x = tl.load(row_logits + token_ids, mask=token_ids < VOCAB_SIZE, other=-float("inf"))
    return x.to(tl.float32)


@triton.jit
def _key(value, UNUSED_BITS: tl.constexpr):
    """Return an int32 key in the order of the values: a float's bits, inverted if negative."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED_BITS


@triton.jit
def _value(key, UNUSED_BITS: tl.constexpr):
    """Return the float32 value of a key."""
    bits = key << UNUSED_BITS
    turned = (0x7FFFFFFF >> UNUSED_BITS) << UNUSED_BITS
    return (bits ^ ((bits >> 31) & turned)).to(tl.float32, bitcast=True)
