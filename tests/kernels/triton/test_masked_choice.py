"""What a grammar forbids is not chosen on a GPU: the kernel with masks, and the sampler around it.

Without a GPU the kernel runs in Triton's interpreter.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nanoserve import SamplingParams, StructuredOutputsParams
from nanoserve.engine.executor import SlotUpdate
from nanoserve.kernels.triton.choose_tokens import choose_tokens, pack_settings
from nanoserve.sampling.fused_sampler import FusedSampler
from nanoserve.sampling.sampler import Sampler
from nanoserve.sampling.token_masks import bits_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_device(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.int32)).to(DEVICE)


def random_masks(rng: np.random.Generator, num_masks: int, vocab_size: int) -> np.ndarray:
    """Among them: nothing allowed, everything, one token; with garbage behind the vocabulary."""
    bits = rng.random((num_masks, vocab_size)) < rng.choice([0.5, 0.01], (num_masks, 1))
    bits[0], bits[1], bits[2] = False, True, False
    bits[2, rng.integers(vocab_size)] = True
    padded = rng.random((num_masks, -(-vocab_size // 32) * 32)) < 0.5
    padded[:, :vocab_size] = bits
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def by_torch(
    logits: torch.Tensor, masks: np.ndarray, mask_rows: np.ndarray, temperature: float
) -> list[int]:
    """Each row, masked by torch, by the kernel without masks."""
    changed = logits.float().clone()
    is_bad = ~changed.isfinite().all(dim=1)
    for row, mask_row in enumerate(mask_rows):
        if mask_row >= 0:
            allowed = bits_of(masks[[mask_row]], changed[[row]])[0]
            changed[row] = changed[row].masked_fill(~allowed, -torch.inf)
    settings = torch.from_numpy(pack_settings(temperature, 5, 0)).view(1, 8).to(DEVICE)
    rows = np.arange(len(logits))
    chosen = choose_tokens(changed, on_device(0 * rows), on_device(rows), settings)
    return chosen.masked_fill(is_bad, -1).tolist()


@pytest.mark.small(vocab_size=[5001])
@pytest.mark.parametrize("vocab_size", [32, 100, 4096, 5001, 9000])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_mask_forbids_what_it_has_no_bit_for(vocab_size: int, temperature: float) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.standard_normal((14, vocab_size)) * 3).to(torch.bfloat16)
    logits[11, rng.integers(vocab_size)] = torch.nan  # forbidden or not, the model has failed
    logits[12, rng.integers(vocab_size)] = torch.inf
    logits, masks = logits.to(DEVICE), random_masks(rng, 5, vocab_size)
    mask_rows = np.array([0, 1, 2, 3, 4, -1, 3, 3, -1, 2, 1, 2, 2, 4])
    settings = torch.from_numpy(pack_settings(temperature, 5, 0)).view(1, 8).to(DEVICE)
    rows = np.arange(14)
    chosen = choose_tokens(
        logits,
        on_device(0 * rows),
        on_device(rows),
        settings,
        masks=torch.from_numpy(masks).to(DEVICE),
        mask_rows=on_device(mask_rows),
    ).tolist()
    assert chosen == by_torch(logits, masks, mask_rows, temperature)
    assert chosen[0] == chosen[11] == chosen[12] == -1
    plain = choose_tokens(logits, on_device(0 * rows), on_device(rows), settings).tolist()
    assert [chosen[i] for i in (1, 5, 8, 10)] == [plain[i] for i in (1, 5, 8, 10)]


def test_masks_of_another_shape_are_refused() -> None:
    logits, rows = torch.zeros(2, 100, device=DEVICE), on_device([0, 0])
    settings = torch.from_numpy(pack_settings(0.0, 0, 0)).view(1, 8).to(DEVICE)
    for masks, mask_rows in (
        (torch.zeros(2, 3, dtype=torch.int32), rows),
        (torch.zeros(2, 4, dtype=torch.int64), rows),
        (torch.zeros(2, 4, dtype=torch.int32), rows[:1]),
    ):
        with pytest.raises(ValueError, match="mask"):
            choose_tokens(logits, rows, rows, settings, None, masks.to(DEVICE), mask_rows)


class Allowed:
    """A `TokenMask` that allows some tokens, others for each row; or raises."""

    def __init__(self, allowed: list[set[int]], error: ValueError | None = None) -> None:
        self.allowed, self.error = allowed, error

    def first_illegal(self, token_ids: list[int]) -> int | None:
        if self.error is not None:
            raise self.error
        pairs = enumerate(zip(token_ids, self.allowed, strict=True))
        return next((i for i, (token_id, allowed) in pairs if token_id not in allowed), None)

    def fill(self, index: int, mask: np.ndarray) -> None:
        if self.error is not None:
            raise self.error
        bits = np.zeros(32 * len(mask), dtype=bool)
        bits[list(self.allowed[index])] = True
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)


VOCAB_SIZE, NUM_SLOTS = 200, 8
GUIDE = StructuredOutputsParams(regex="a")


def test_both_samplers_keep_within_the_same_masks(by_size: Callable[..., Any]) -> None:
    """One that chooses first and asks then, and one that knows before."""
    rng = np.random.default_rng(7)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9},
        {"temperature": 0.9, "top_k": 20},
        {"temperature": 0, "logit_bias": {7: 5.0}},
    ]
    counts: Counter[str] = Counter()
    for number in range(by_size(5, 15, 40)):
        params = [
            SamplingParams(
                **kinds[rng.integers(4)],
                logprobs=rng.choice([None, 1]),
                structured_outputs=GUIDE if rng.random() < 0.6 else None,
            )
            for _ in range(NUM_SLOTS)
        ]
        num_rows = rng.integers(1, 4, NUM_SLOTS)
        order = rng.permutation(NUM_SLOTS)
        slots = np.repeat(order, num_rows[order]).astype(np.int32)
        logits = torch.from_numpy(rng.standard_normal((len(slots), VOCAB_SIZE)) * 3).float()
        positions = np.arange(len(slots)) + number
        results = []
        for kind in (Sampler, FusedSampler):
            sampler = kind(NUM_SLOTS, VOCAB_SIZE, DEVICE)
            limits, own = {}, np.random.default_rng(number)
            for slot, p in enumerate(params):
                sampler.set_slot(SlotUpdate(slot, p, seed=slot))
                if p.structured_outputs is not None:
                    size = own.choice([0, 1, 20, 190], p=[0.05, 0.15, 0.4, 0.4])
                    allowed = [
                        {*own.choice(VOCAB_SIZE, size, replace=False).tolist()}
                        for _ in range(num_rows[slot])
                    ]
                    error = ValueError("too much") if own.random() < 0.05 else None
                    limits[slot] = Allowed(allowed, error)
            if limits and isinstance(sampler, FusedSampler):
                assert not sampler.can_capture(order)
            sampled = sampler.sample(logits.to(DEVICE), slots, positions, token_masks=limits)
            for slot, limit in limits.items():
                rows = np.flatnonzero(slots == slot)
                has_failed = any(int(row) in sampled.errors for row in rows)
                for row, allowed in zip(rows.tolist(), limit.allowed, strict=True):
                    token_id = int(sampled.token_ids[row])
                    if not has_failed and token_id >= 0:
                        assert token_id in allowed
                        counts["kept"] += 1
                    counts["failed"] += has_failed
            results.append((sampled, limits))
        (ours, limits), (theirs, _) = results
        for row, (a, b) in enumerate(
            zip(ours.token_ids.tolist(), theirs.token_ids.tolist(), strict=True)
        ):
            failed = {int(slots[i]) for i in [*ours.errors, *theirs.errors]}
            assert a == b or slots[row] in failed, row
        for one in (ours, theirs):
            if one.logprobs is not None:
                counts["with logprobs"] += 1
        # A row with nothing allowed has no token, or an error that says why.
        for slot, limit in limits.items():
            rows = np.flatnonzero(slots == slot).tolist()
            if limit.error is not None or not limit.allowed[0]:
                for one in (ours, theirs):
                    assert any(row in one.errors or one.token_ids[row] < 0 for row in rows)
                    counts["empty"] += 1
    least = min(counts[name] for name in ("kept", "failed", "with logprobs", "empty"))
    assert least > by_size(2, 5, 10), counts
