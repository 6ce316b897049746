"""Test of the exercise of chapter 11."""

import numpy as np
import pytest
import torch

from nanoserve.sampling.filters import apply_filters

from .exercise import draw, kept, noise

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
FIVE = np.log([0.40, 0.30, 0.15, 0.10, 0.05])
SEVEN = np.log([0.40, 0.25, 0.15, 0.10, 0.05, 0.03, 0.02])


def engine_keeps(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    row = torch.from_numpy(logits.astype(np.float32)).unsqueeze(0).clone()
    apply_filters(row, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    return torch.isfinite(row[0]).numpy()


@pytest.mark.parametrize(
    ("logits", "settings", "num_kept"),
    [
        (FIVE, {}, 5),
        (FIVE, {"top_k": 3}, 3),
        (FIVE, {"top_k": -1}, 5),
        (FIVE, {"top_k": 99}, 5),
        (FIVE, {"top_p": 0.86}, 4),
        (SEVEN, {"top_p": 0.89}, 4),
        (SEVEN, {"top_p": 0.01}, 1),
        (SEVEN, {"min_p": 0.24}, 4),
        (SEVEN, {"min_p": 1.0}, 1),
        # 0.40 and 0.25 are left; of these alone, 0.40 has 0.615 of the mass.
        (SEVEN, {"top_k": 2, "top_p": 0.60}, 1),
        (SEVEN, {"top_k": 2, "top_p": 0.63}, 2),
    ],
)
def test_how_many_are_kept(logits: np.ndarray, settings: dict, num_kept: int) -> None:
    order = np.random.default_rng(3).permutation(len(logits))  # a rank is not a token id
    given = {**OFF, **settings}
    mask, case = (
        kept(logits[order], **given),
        f"kept(np.array({logits[order].tolist()}), **{given})",
    )
    assert mask.dtype == bool and mask.shape == logits.shape, case
    assert set(order[mask]) == set(range(num_kept)), case


def test_equal_logits_are_kept_or_dropped_together() -> None:
    logits = np.array([1.0, 3.0, 1.0, 2.0, 1.0, 0.0])
    expected = [True, True, True, True, True, False]
    assert kept(logits, 3, 1.0, 0.0).tolist() == expected, f"kept(np.array({logits}), 3, 1.0, 0.0)"
    assert kept(np.zeros(8), 0, 0.5, 0.0).all(), "kept(np.zeros(8), 0, 0.5, 0.0)"


def test_what_is_kept_is_what_the_engine_keeps() -> None:
    num_equal, unequal = 0, ""
    for seed in range(300):
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal(200).astype(np.float32) * rng.choice([0.1, 1.0, 4.0])
        settings = {
            "top_k": int(rng.choice([-1, 0, 1, 3, 50, 200])),
            "top_p": float(rng.choice([1.0, 0.99, 0.9, 0.5])),
            "min_p": float(rng.choice([0.0, 0.02, 0.3])),
        }
        ours, engines = kept(logits, **settings), engine_keeps(logits, **settings)
        case = f"kept(np.array({logits.tolist()}, dtype=np.float32), **{settings})"
        # Sums of a different precision may differ by a token at the border.
        assert abs(int(ours.sum()) - int(engines.sum())) <= 1, case
        num_equal += bool((ours == engines).all())
        unequal = unequal if (ours == engines).all() else case
    assert num_equal >= 295, f"{num_equal} of 300 equal; the last that differs: {unequal}"


def test_logits_are_left_as_they_were() -> None:
    logits = FIVE.copy()
    kept(logits, 2, 0.5, 0.1)
    draw(logits, 0.5, 2, 0.5, 0.1, seed=1, completion=0, position=0)
    assert (logits == FIVE).all(), f"kept or draw modified np.array({FIVE.tolist()})"


def test_noise_is_exponential() -> None:
    numbers = np.concatenate([noise(5, 0, position, 5_000) for position in range(20)])
    case = "noise(5, 0, position, 5_000) for positions 0 to 19"
    assert numbers.min() > 0 and np.isfinite(numbers).all(), case
    assert numbers.mean() == pytest.approx(1, abs=0.02), case
    assert numbers.var() == pytest.approx(1, abs=0.05), case
    assert (numbers < np.log(2)).mean() == pytest.approx(0.5, abs=0.01), case


def test_noise_is_a_pure_function_and_its_rows_are_unrelated() -> None:
    near = [(7, 0, 35), (8, 0, 35), (7, 1, 35), (7, 0, 36), (7 + 2**32, 0, 35), (35, 0, 7)]
    rows = []
    for arguments in near:
        np.random.seed(len(rows))  # detects use of the global generator
        rows.append(noise(*arguments, 4_000))
    again = [noise(*arguments, 4_000) for arguments in reversed(near)][::-1]
    for arguments, row, other in zip(near, rows, again, strict=True):
        assert (row == other).all(), f"noise{(*arguments, 4_000)} differs the second time"
    together = np.array(rows)
    correlation = np.corrcoef(together) - np.eye(len(near))
    related = [near[i] for i in np.argwhere(np.abs(correlation) >= 0.08).flatten()]
    assert not related, f"noise(seed, completion, position, 4_000) correlates for {related[:2]}"
    shifted = [np.corrcoef(rows[0][k:], rows[3][:-k])[0, 1] for k in (1, 2, 3, 4)]
    # The next position is not the same stream, shifted.
    assert np.abs(shifted).max() < 0.08, f"noise of {near[0]} and {near[3]}, shifted: {shifted}"


def test_temperature_0_is_the_first_of_the_most_likely() -> None:
    logits = np.array([0.5, 3.0, 3.0, -1.0])
    for seed in range(20):
        found = draw(logits, 0.0, 0, 1.0, 0.0, seed=seed, completion=0, position=seed)
        assert found == 1, f"draw(np.array({logits}), 0.0, 0, 1.0, 0.0, {seed}, 0, {seed})"


@pytest.mark.parametrize(
    ("temperature", "settings", "expected"),
    [
        (1.0, {}, [0.575, 0.211, 0.128, 0.086]),
        (0.5, {}, [0.828, 0.112, 0.041, 0.019]),
        (2.0, {}, [0.406, 0.246, 0.192, 0.157]),
        (1.0, {"top_k": 2}, [0.731, 0.269, 0, 0]),  # 1 / (1 + 1/e)
        (1.0, {"top_p": 0.6}, [0.731, 0.269, 0, 0]),
        # Of the probabilities at temperature 1, 0.5 is reached by one token.
        (2.0, {"top_p": 0.5}, [0.622, 0.378, 0, 0]),
    ],
)
def test_draws_have_the_probabilities_of_the_worked_example(
    temperature: float, settings: dict, expected: list[float]
) -> None:
    logits, num_draws = np.array([2.0, 1.0, 0.5, 0.1]), 4_000
    drawn = [
        draw(logits, temperature, **{**OFF, **settings}, seed=1, completion=0, position=position)
        for position in range(num_draws)
    ]
    counts = np.bincount(drawn, minlength=4)
    probs = np.array(expected)
    case = f"draw(np.array({logits}), {temperature}, **{settings}), 4,000 positions: {counts}"
    assert counts[probs == 0].sum() == 0, case
    wanted = probs[probs > 0] * num_draws
    assert ((counts[probs > 0] - wanted) ** 2 / wanted).sum() < 16.27, case


def test_a_draw_does_not_notice_its_neighbours() -> None:
    rng = np.random.default_rng(1)
    requests = [(rng.standard_normal(50), int(seed), int(rng.integers(99))) for seed in range(12)]

    def run(order: list[int]) -> dict[int, int]:
        return {
            i: draw(requests[i][0], 1.0, 0, 0.9, 0.0, requests[i][1], 0, requests[i][2])
            for i in order
        }

    expected = run(list(range(12)))
    case = "12 draws in another order, or one of them alone, give different tokens"
    assert run(list(reversed(range(12)))) == expected, case
    assert run([5])[5] == expected[5], case


def test_a_single_remaining_token_always_wins() -> None:
    logits = np.zeros(1000)
    logits[7] = 20.0
    for seed in range(200):
        found = draw(logits, 1.0, 1, 1.0, 0.0, seed, 0, seed)
        assert found == 7, (
            f"draw(logits, 1.0, 1, 1.0, 0.0, {seed}, 0, {seed}), 20 at token 7, else 0"
        )
