"""Stage 8: sampling one token."""

import math

import pytest
import torch

from nanoserve.sampling.filters import apply_filters

from .stages import stage
from .your_engine import Sequence, draw, kept, log_noise

SEVEN = torch.tensor([0.40, 0.25, 0.15, 0.10, 0.05, 0.03, 0.02]).log()


@pytest.mark.parametrize(
    ("top_k", "top_p", "num_kept"),
    [(0, 1.0, 7), (3, 1.0, 3), (99, 1.0, 7), (0, 0.89, 4), (0, 0.01, 1), (2, 0.6, 1), (2, 0.63, 2)],
)
@stage(8)
def test_how_many_are_kept(top_k: int, top_p: float, num_kept: int) -> None:
    order = torch.randperm(7, generator=torch.Generator().manual_seed(3))  # ranks are not ids
    mask = kept(SEVEN[order], top_k, top_p)
    found = sorted(order[mask].tolist())
    assert found == list(range(num_kept)), f"kept({SEVEN[order].tolist()}, {top_k}, {top_p})"


@stage(8)
def test_equal_logits_are_treated_alike() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0, 0.0])
    found = kept(logits, 3, 1.0).tolist()
    assert found == [True, True, True, True, True, False], f"kept({logits}, 3, 1.0)"


@stage(8)
def test_what_is_kept_is_what_the_engine_keeps() -> None:
    unequal = []
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(200, generator=generator) * (0.1, 1.0, 4.0)[seed % 3]
        top_k, top_p = (0, 1, 3, 50, 200)[seed % 5], (1.0, 0.99, 0.9, 0.5)[seed % 4]
        row = logits.clone()[None]
        apply_filters(row, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([0.0]))
        if not torch.equal(kept(logits, top_k, top_p), row[0].isfinite()):
            unequal.append(f"kept(torch.tensor({logits.tolist()}), {top_k}, {top_p})")
    assert len(unequal) <= 2, unequal[0]  # sums in another precision may differ by a token


@stage(8)
def test_noise_is_exponential_and_a_pure_function() -> None:
    many = torch.cat([log_noise(5, position, 5_000) for position in range(10)]).exp()
    case = "exp of log_noise(5, position, 5_000), positions 0 to 9"
    assert many.isfinite().all() and many.min() > 0, case
    assert float(many.mean()) == pytest.approx(1, abs=0.03), case
    assert float((many < math.log(2)).float().mean()) == pytest.approx(0.5, abs=0.015), case
    arguments = [(7, 35), (8, 35), (7, 36), (35, 7), (7 + 2**32, 35), (2**63, 35)]
    rows = torch.stack([log_noise(*each, 4_000) for each in arguments])
    for each, row in zip(arguments, rows, strict=True):
        again = log_noise(*each, 4_000)
        assert torch.equal(again, row), f"log_noise{(*each, 4_000)} differs the second time"
    related = torch.corrcoef(rows) - torch.eye(len(rows))
    assert related.abs().max() < 0.08, f"log_noise of (seed, position) {arguments}: {related}"


@stage(8)
def test_temperature_0_is_the_most_likely() -> None:
    logits = torch.tensor([0.5, 3.0, 2.9, -1.0])
    for seed in range(20):
        found = draw(logits, Sequence([1] * (seed + 1), seed=seed))
        assert found == 1, f"draw({logits}, Sequence({[1] * (seed + 1)}, seed={seed}))"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 1.0}, [0.575, 0.211, 0.128, 0.086]),
        ({"temperature": 0.5}, [0.828, 0.112, 0.041, 0.019]),
        ({"temperature": 1.0, "top_k": 2}, [0.731, 0.269, 0, 0]),
        ({"temperature": 2.0, "top_p": 0.5}, [0.622, 0.378, 0, 0]),
    ],
)
@stage(8)
def test_draws_have_the_probabilities_of_the_chapter(
    settings: dict[str, float], expected: list[float]
) -> None:
    logits, num_draws, counts = torch.tensor([2.0, 1.0, 0.5, 0.1]), 1_000, [0] * 4
    for seed in range(num_draws):
        counts[draw(logits, Sequence([1, 2], seed=seed, **settings))] += 1
    case = f"draw({logits}, Sequence([1, 2], seed=seed, **{settings})), seeds 0 to 999: {counts}"
    square = 0.0
    for count, share in zip(counts, expected, strict=True):
        assert share or not count, case
        square += (count - share * num_draws) ** 2 / (share * num_draws) if share else 0
    assert square < 16.27, case
    assert logits.tolist() == pytest.approx([2.0, 1.0, 0.5, 0.1]), f"{case} changed the logits"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@stage(8)
def test_the_noise_is_that_of_the_position_of_the_new_token(temperature: float) -> None:
    """After n tokens that is position n, so that a preempted sequence draws the same again."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0))
    for seed in range(8):
        seq = Sequence([7] * (seed + 3), temperature=temperature, seed=seed)
        case = f"Sequence({seq.token_ids}, temperature={temperature}, seed={seed})"
        right = int((logits / temperature - log_noise(seed, seed + 3, 300)).argmax())
        found = draw(logits, seq)
        assert found == right, f"draw(torch.randn(300, generator of seed 0), {case})"


@stage(8)
def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.zeros(500)
    found = [
        draw(logits, Sequence([7] * length, temperature=1.0, seed=seed))
        for seed, length in [(1, 5), (1, 5), (2, 5), (1, 6)]
    ]
    case = f"equal logits, (seed, tokens) of (1, 5), (1, 5), (2, 5), (1, 6): {found}"
    assert found[0] == found[1] and len(set(found)) == 3, case
