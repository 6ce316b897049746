"""Greedy and plain temperature sampling on the GPU, for all rows of a step at once.

The method is the exponential race of `nanoserve/sampling/gumbel_noise.py`, argmax(logit /
temperature - log E), with the noise computed where it is used: from the same hash of (seed,
position, completion, token id), bit for bit; only the last bit of a logarithm may differ. The
logits are read once, and nothing of their size is written. A program processes a part of one row's
vocabulary, since the few rows of a step alone would leave most of a GPU idle; a second kernel
selects the best part. For rows with a top-k, top-p or min-p filter, the filter's border is an
input, see `filter_logits.py`. For rows with a grammar, a mask of the allowed tokens is an input, a
bit for each token.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from nanoserve.kernels.triton.dependent_launch import launch_options, wait_for_previous_kernel

SETTINGS_WORDS = tl.constexpr(8)  # per slot: 32 bytes
_PART = 4096  # tokens of a program: 16 for each of its 256 threads, with their hashes in registers

# The constants of the hash, as in `nanoserve/sampling/gumbel_noise.py`.
_WEYL = tl.constexpr(0x9E3779B9)
_MULTIPLIER_1 = tl.constexpr(0x7FEB352D)
_MULTIPLIER_2 = tl.constexpr(0x846CA68B)


def pack_settings(
    temperature: float,
    seed: int,
    completion: int,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Return a slot's row of `settings`, int32 [8].

    Its words: bits of the temperature, seed in two halves, completion, top_k, bits of top_p and
    min_p, and one unused word.

    temperature 0 is greedy; the lower 64 bits of a seed are used. top_k <= 0, top_p = 1 and
    min_p = 0 are off.
    """
    words = np.zeros(SETTINGS_WORDS.value, dtype=np.uint32)
    words[1:5] = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, completion, max(top_k, 0)
    words[[0, 5, 6]] = np.array([temperature, top_p, min_p], dtype=np.float32).view(np.uint32)
    return words.view(np.int32)


def choose_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    settings: torch.Tensor,
    borders: torch.Tensor | None = None,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
    *,
    is_dependent: bool = False,
) -> torch.Tensor:
    """Sample a token for each row; return token ids, int64 [num_rows].

    logits: [num_rows, vocab_size], any float dtype, any row stride; not modified.
    slots: int32 [num_rows], the row of `settings` for each row of logits.
    positions: int32 [num_rows], the position that the new token will have.
    settings: int32 [num_slots, 8], rows from `pack_settings`.
    borders: float32 [num_rows], from `filter_borders`, if any row of the step has a filter: random
        rows exclude tokens whose logit / temperature is below.
    masks, mask_rows: int32 [num_masks, ceil(vocab_size / 32)], bit t % 32 of word t // 32 set for
        each allowed token t; and int32 [num_rows], the mask of each row, -1 for none. A logit that
        is not finite is an error even if its token is forbidden.
    is_dependent: use programmatic dependent launch.
    Of equal scores the lowest id wins. A row whose best score is not finite gets -1: it has NaN or
    infinity somewhere, or all its logits are -inf.
    """
    check_logits(logits)
    num_rows, vocab_size = logits.shape
    check_tensor("slots", slots, torch.int32, num_rows)
    check_tensor("positions", positions, torch.int32, num_rows)
    check_tensor("settings", settings, torch.int32, len(settings), SETTINGS_WORDS.value)
    if borders is not None:
        check_tensor("borders", borders, torch.float32, num_rows)
    if masks is not None and mask_rows is not None:
        check_tensor("masks", masks, torch.int32, len(masks), -(-vocab_size // 32))
        check_tensor("mask_rows", mask_rows, torch.int32, num_rows)
    # In plain Python: Triton's `next_power_of_2` and `cdiv` take microseconds.
    part = min(_PART, 1 << (vocab_size - 1).bit_length())
    num_parts = -(-vocab_size // part)
    best_scores = logits.new_empty(num_rows, num_parts, dtype=torch.float32)
    best_ids = logits.new_empty(num_rows, num_parts, dtype=torch.int32)
    token_ids = logits.new_empty(num_rows, dtype=torch.int64)
    launch = launch_options(is_dependent)
    _best_of_parts[(num_rows, num_parts)](
        logits,
        slots,
        positions,
        settings,
        borders,
        masks,
        mask_rows,
        best_scores,
        best_ids,
        logits.stride(0),
        vocab_size,
        part,
        triton.knobs.runtime.interpret,
        num_warps=8,
        **launch,
    )
    block = 1 << (num_parts - 1).bit_length()
    _best_part[(num_rows,)](
        best_scores, best_ids, token_ids, num_parts, block, num_warps=1, **launch
    )
    return token_ids


def check_logits(logits: torch.Tensor) -> None:
    """Raise `ValueError` unless logits are [num_rows, vocab_size] with contiguous rows."""
    if logits.ndim != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(
            f"logits of shape {list(logits.shape)} and strides {list(logits.stride())} must be "
            f"[num_rows, vocab_size] with contiguous rows"
        )


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Raise `ValueError` unless a tensor is contiguous and has this dtype and shape."""
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} {list(shape)}; it is {tensor.dtype} "
            f"{list(tensor.shape)} with strides {list(tensor.stride())}"
        )


# Slots and positions start anywhere in a step's buffer of integers: specialising on their alignment
# would compile the kernel again while serving.
@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _best_of_parts(
    logits,
    slots,
    positions,
    settings,
    borders,
    masks,
    mask_rows,
    best_scores,
    best_ids,
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    PART: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Find the best score of one part of one row's vocabulary, and its token id."""
    wait_for_previous_kernel(IS_DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    token_ids = part * PART + tl.arange(0, PART)
    address = logits + row.to(tl.int64) * row_stride + token_ids
    scores = tl.load(address, mask=token_ids < VOCAB_SIZE, other=-float("inf")).to(tl.float32)
    # A maximum may ignore NaN. It becomes infinity, which wins and is detected at the end.
    scores = tl.where(scores == scores, scores, float("inf"))
    if masks is not None:
        mask_row = tl.load(mask_rows + row).to(tl.int64)
        NUM_WORDS: tl.constexpr = (VOCAB_SIZE + 31) // 32
        words = masks + tl.maximum(mask_row, 0) * NUM_WORDS + token_ids // 32
        bits = tl.load(words, mask=token_ids < VOCAB_SIZE, other=0) >> (token_ids % 32)
        is_allowed = (bits & 1 != 0) | (mask_row < 0) | (scores == float("inf"))
        scores = tl.where(is_allowed, scores, -float("inf"))
    slot_settings = settings + tl.load(slots + row) * SETTINGS_WORDS
    temperature = tl.load(slot_settings).to(tl.float32, bitcast=True)
    if temperature > 0:
        key = _row_key(slot_settings, tl.load(positions + row))
        scores = scores / temperature
        if borders is not None:
            scores = tl.where(scores >= tl.load(borders + row), scores, -float("inf"))
        scores = scores - _log_exponential(key, token_ids, IS_INTERPRETED)
    score, index = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    result = row * tl.num_programs(1) + part
    tl.store(best_scores + result, score)
    tl.store(best_ids + result, part * PART + index)


@triton.jit
def _best_part(
    best_scores,
    best_ids,
    token_ids,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Select the best part of a row.

    Parts are in the order of their ids, so the first of equal parts has the lowest id.
    """
    wait_for_previous_kernel(IS_DEPENDENT)
    row = tl.program_id(0)
    parts = tl.arange(0, BLOCK)
    address = best_scores + row * NUM_PARTS + parts
    scores = tl.load(address, mask=parts < NUM_PARTS, other=-float("inf"))
    score, best = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    token_id = tl.load(best_ids + row * NUM_PARTS + best).to(tl.int64)
    tl.store(token_ids + row, tl.where(tl.abs(score) < float("inf"), token_id, -1))


@triton.jit
def _row_key(slot_settings, position):
    """Compute `row_keys` of gumbel_noise.py for one row. Unsigned, so that shifts insert zeros."""
    key = _mix(tl.load(slot_settings + 1).to(tl.uint32, bitcast=True) + _WEYL)
    key = _mix((key ^ tl.load(slot_settings + 2).to(tl.uint32, bitcast=True)) + _WEYL)
    key = _mix((key ^ position.to(tl.uint32, bitcast=True)) + _WEYL)
    return _mix((key ^ tl.load(slot_settings + 3).to(tl.uint32, bitcast=True)) + _WEYL)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * _MULTIPLIER_1
    x = (x ^ (x >> 15)) * _MULTIPLIER_2
    return x ^ (x >> 16)


@triton.jit
def _log_exponential(key, token_ids, IS_INTERPRETED: tl.constexpr):
    """Return log of Exp(1) noise as in `Noise`: E = -log(1 - u) with u = (bits + 0.5) / 2^32."""
    bits = _mix((token_ids.to(tl.uint32, bitcast=True) * _WEYL) ^ key)
    # Clamped below 1, as there: the largest bits round up to 1, and an infinite E never wins.
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # There is no log1p: 1 - u rounds by up to 2^-25, which -log(1 - u) propagates, and the
    # hardware's log2 has an error of 2^-22, together a relative error of 2e-7 / u. Nine terms of
    # the series have a relative error of u^9 / 10. At the border of 1/4 these errors are 8e-7 and
    # 4e-7, and each decreases away from the border on its own side. The smallest E wins, so the
    # series decides.
    series = 1 / 9 * u
    for i in tl.static_range(8, 1, -1):
        series = (series + 1 / i) * u
    series = series * u + u
    exponential = tl.where(u < 1 / 4, series, -_log(1 - u, IS_INTERPRETED))
    return _log(exponential, IS_INTERPRETED)


@triton.jit
def _log(x, IS_INTERPRETED: tl.constexpr):
    """Return the logarithm by the hardware's log2: one instruction instead of thirty."""
    LN_2: tl.constexpr = 0.6931471805599453
    return (tl.log2(x) if IS_INTERPRETED else libdevice.fast_log2f(x)) * LN_2
