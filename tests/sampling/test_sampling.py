"""Filters, noise and the sampler. W16 and W17 are the course's worked examples."""

import math

import numpy as np
import pytest
import torch

from nanoserve.engine.executor import SlotUpdate
from nanoserve.sampling.filters import apply_filters
from nanoserve.sampling.gumbel_noise import Noise, row_keys
from nanoserve.sampling.sampler import Sampler, best_tokens
from nanoserve.sampling_params import SamplingParams

CPU = torch.device("cpu")


def filtered(logits, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """Probabilities that one row of logits has left."""
    row = torch.as_tensor(logits, dtype=torch.float32).clone().unsqueeze(0)
    apply_filters(row, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    return row.softmax(dim=-1)[0]


def sample(params: SamplingParams, logits: torch.Tensor, seed: int = 0, position: int = 0) -> int:
    sampler = Sampler(1, logits.shape[-1], CPU)
    sampler.set_slot(SlotUpdate(0, params, seed))
    one = np.array([0], dtype=np.int32)
    return int(sampler.sample(logits.view(1, -1), one, one + position).token_ids[0])


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (0.5, [0.828, 0.112, 0.041, 0.019]),
        (1.0, [0.575, 0.211, 0.128, 0.086]),
        (2.0, [0.406, 0.246, 0.192, 0.157]),
    ],
)
def test_w16_temperature(temperature: float, expected: list[float]) -> None:
    """The sampler's own draws have the probabilities of the worked example."""
    num_draws = 20_000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.1]).repeat(num_draws, 1)
    sampler = Sampler(1, 4, CPU)
    sampler.set_slot(SlotUpdate(0, SamplingParams(temperature=temperature), seed=1))
    slots = np.zeros(num_draws, dtype=np.int32)
    drawn = sampler.sample(logits, slots, np.arange(num_draws, dtype=np.int32)).token_ids
    shares = torch.bincount(drawn, minlength=4) / num_draws
    chi_square = sum(
        (share - p) ** 2 / p * num_draws for share, p in zip(shares.tolist(), expected, strict=True)
    )
    assert chi_square < 16.27  # the 0.999 quantile with 3 degrees of freedom


def test_w17a_top_k() -> None:
    probs = filtered(torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05]).log(), top_k=3)
    assert probs.tolist() == pytest.approx([0.4706, 0.3529, 0.1765, 0, 0], abs=1e-4)


def test_w17b_top_p_keeps_the_token_that_crosses_the_border() -> None:
    probs = filtered(torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05]).log(), top_p=0.9)
    assert probs.tolist() == pytest.approx([0.4211, 0.3158, 0.1579, 0.1053, 0], abs=1e-4)


def test_w17c_top_k_leaves_three_of_seven() -> None:
    probs = filtered([3.5, 2.1, 1.8, 0.5, 0.1, -0.2, -1.0], top_k=3)
    assert (probs > 0).tolist() == [True] * 3 + [False] * 4


def test_w17d_top_p_of_seven() -> None:
    probs = filtered(torch.tensor([0.40, 0.25, 0.15, 0.10, 0.05, 0.03, 0.02]).log(), top_p=0.89)
    assert int((probs > 0).sum()) == 4


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    probs = filtered(torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), min_p=0.29)
    assert (probs > 0).tolist() == [True, True, True, False]


def plain_filter(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens are kept, one row at a time and in float64: the reference."""
    kept = np.ones(len(logits), dtype=bool)
    if min_p > 0:
        kept &= logits >= logits.max() + math.log(min_p)
    if 0 < top_k < len(logits):
        kept &= logits >= np.sort(np.where(kept, logits, -np.inf))[-top_k]
    if top_p < 1:
        left = np.where(kept, logits, -np.inf)
        probs = np.exp(left - left.max())
        probs /= probs.sum()
        order = np.argsort(-probs, kind="stable")
        crossing = int(np.searchsorted(np.cumsum(probs[order]), top_p))
        kept &= logits >= logits[order[min(crossing, len(order) - 1)]]
    return kept


@pytest.mark.parametrize("vocab_size", [5, 200, 3000])
def test_filters_equal_the_reference_in_mixed_batches(vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    compared = 0
    for _ in range(20):
        rows = 16
        # A flat distribution makes the nucleus larger than the 1,024 tokens looked at first.
        spread = rng.choice([0.05, 1.0, 5.0], size=(rows, 1))
        logits = (rng.standard_normal((rows, vocab_size)) * spread).astype(np.float32)
        top_k = rng.choice([-1, 0, 1, 3, 50, vocab_size, vocab_size + 7], size=rows)
        top_p = rng.choice([1.0, 0.999, 0.9, 0.5, 0.01], size=rows).astype(np.float32)
        min_p = rng.choice([0.0, 0.02, 0.3, 1.0], size=rows).astype(np.float32)
        result = torch.from_numpy(logits.copy())
        apply_filters(result, *(torch.from_numpy(setting) for setting in (top_k, top_p, min_p)))
        for row in range(rows):
            expected = plain_filter(
                logits[row].astype(np.float64), top_k[row], float(top_p[row]), float(min_p[row])
            )
            kept = torch.isfinite(result[row]).numpy()
            # Sums in float32 and float64 may cross the border one token apart.
            assert abs(int(kept.sum()) - int(expected.sum())) <= 1, (row, kept.sum())
            compared += int((kept == expected).all())
    assert compared >= 0.97 * 20 * rows


def test_greedy_takes_the_most_likely_token_whatever_the_filters() -> None:
    logits = torch.tensor([0.1, 3.0, 2.9])
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=0, top_p=0.1)):
        assert all(sample(params, logits, seed) == 1 for seed in range(20))


@pytest.mark.parametrize("vocab_size", [1, 300, 1023, 1024, 1025, 2047, 2048, 5000, 10_240])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_token_is_the_first_among_equals(vocab_size: int, dtype: torch.dtype) -> None:
    """Few different values, so that most rows have their maximum several times."""
    rng = np.random.default_rng(vocab_size)
    logits = rng.integers(-9, rng.integers(-8, 9, (300, 1)), (300, vocab_size)).astype(np.float32)
    for row, column in enumerate(rng.integers(vocab_size, size=100), start=100):
        logits[row, column] = 20  # one of its own, anywhere
    logits[200, -1] = 20
    expected = torch.from_numpy(logits.argmax(axis=1))
    assert torch.equal(best_tokens(torch.from_numpy(logits).to(dtype)), expected)


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert sample(SamplingParams(temperature=1e-30), torch.tensor([1.0, 3.0, 2.0])) == 1


def test_rows_of_a_mixed_batch_do_not_see_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5000, generator=generator)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(top_p=0.3),
        SamplingParams(min_p=0.5),
        SamplingParams(temperature=2.0, top_k=50, top_p=0.9, min_p=0.01),
    ]
    sampler = Sampler(8, 5000, CPU)
    slots = np.array([7, 0, 3, 2, 5, 1], dtype=np.int32)
    positions = np.array([4, 9, 1, 4, 7, 30], dtype=np.int32)
    for slot, p in zip(slots, params, strict=True):
        sampler.set_slot(SlotUpdate(slot, p, seed=int(slot) * 1000 - 5))
    together = sampler.sample(logits, slots, positions).token_ids
    for row in range(6):
        only = slice(row, row + 1)
        alone = sampler.sample(logits[only], slots[only], positions[only]).token_ids
        assert alone[0] == together[row]
        assert together[row] == sample(
            params[row], logits[row], int(slots[row]) * 1000 - 5, int(positions[row])
        )


def test_noise_depends_on_seed_position_completion_and_token() -> None:
    seeds = np.array([1, 2, 1, 1 + 2**32], dtype=np.uint64)
    positions, completions = np.array([5, 5, 6, 5]), np.array([0, 0, 0, 1])
    keys = [
        *row_keys(seeds, positions, 0 * completions),
        *row_keys(seeds, positions, 1 + completions),
    ]
    assert len(set(keys)) == 8
    race = Noise(1000, CPU)
    noise = race._log_exponential(torch.tensor([[7]], dtype=torch.int32), 0, 1000)
    assert len(noise.unique()) > 990


def test_noise_is_the_same_however_the_vocabulary_is_cut() -> None:
    logits = torch.zeros(700, 400)  # 280,000 elements: several passes
    keys = row_keys(
        np.arange(700, dtype=np.uint64),
        np.zeros(700, dtype=np.int64),
        np.zeros(700, dtype=np.int64),
    )
    race = Noise(400, CPU)
    together = logits.clone()
    race.subtract_log_exponential(together, keys)
    for row in range(0, 700, 50):
        alone = logits[:1].clone()
        race.subtract_log_exponential(alone, keys[row : row + 1])
        assert torch.equal(together[row].view(torch.int32), alone[0].view(torch.int32))
        assert not torch.equal(alone[0], logits[0])


def test_noise_has_the_mean_and_spread_of_an_exponential() -> None:
    race = Noise(50_000, CPU)
    keys = torch.arange(-10, 10, dtype=torch.int32).unsqueeze(1) * 12345
    noise = torch.stack([race._log_exponential(key.view(1, 1), 0, 50_000)[0].exp() for key in keys])
    assert noise.mean().item() == pytest.approx(1, abs=0.005)
    assert noise.var().item() == pytest.approx(1, abs=0.02)
    correlation = torch.corrcoef(noise).fill_diagonal_(0).abs().max().item()
    assert correlation < 0.02  # of 190 pairs of rows; 1 / sqrt(50,000) is 0.0045


def test_draws_over_a_large_flat_vocabulary_hardly_tie() -> None:
    """The smallest noise of a row must be told apart from the next: 24-bit uniforms would not."""
    race = Noise(151_936, CPU)
    keys = row_keys(
        np.arange(50, dtype=np.uint64), np.zeros(50, dtype=np.int64), np.zeros(50, dtype=np.int64)
    )
    for key in keys:
        noise = race._log_exponential(torch.tensor([[int(key)]], dtype=torch.int32), 0, 151_936)
        smallest = noise[0].topk(2, largest=False).values if noise.numel() > 2 else noise[0]
        assert smallest[0] < smallest[1]


def test_noise_is_never_infinite() -> None:
    """This seed draws the largest hash for the only token that is left: u would round up to 1."""
    logits = torch.full((2048,), -5.0)
    logits[7] = 20.0
    for params in (SamplingParams(top_k=1), SamplingParams(temperature=0.7, top_p=0.9)):
        assert sample(params, logits, seed=9425008, position=100) == 7
