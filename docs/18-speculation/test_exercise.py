"""Tests of the exercise of chapter 18: exact distributions, and the engine's noise and rule."""

from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from nanoserve.engine.draft_tokens import accept_draft_tokens
from nanoserve.sampling.gumbel_noise import Noise, row_keys

from .exercise import verify_by_rejection, verify_by_sampling

VOCAB_SIZE = 12


# ---------------------------------------------------------------- rejection, case by case


def test_a_draft_token_with_more_probability_in_the_target_is_always_accepted() -> None:
    target, draft = np.array([[0.5, 0.5], [0.25, 0.75]]), np.array([[0.8, 0.2]])
    # p / q is 2.5. Then one more token: the sum exceeds 0.3 at token 1.
    found = verify_by_rejection(target, draft, [1], [0.999], 0.3)
    assert found == [1, 1], "draft 1 of 0.8, 0.2 for 0.5, 0.5, then 0.3 in 0.25, 0.75"


def test_a_draft_token_is_accepted_with_p_over_q() -> None:
    target, draft = np.array([[0.5, 0.5], [0.25, 0.75]]), np.array([[0.8, 0.2]])
    kept = verify_by_rejection(target, draft, [0], [0.62], 0.2)
    assert kept == [0, 0], "draft 0 with 0.62, less than 0.5 / 0.8 = 0.625; then 0.2 in 0.25, 0.75"
    rejected = verify_by_rejection(target, draft, [0], [0.63], 0.2)
    assert rejected == [1], "draft 0 with 0.63: the target has more of token 1 alone"


def test_the_residual_is_the_positive_part_of_target_minus_draft() -> None:
    target, draft = np.array([[0.5, 0.3, 0.2]] * 2), np.array([[0.2, 0.2, 0.6]])
    for u, token in ((0.0, 0), (0.74, 0), (0.76, 1), (0.99, 1)):
        found = verify_by_rejection(target, draft, [2], [0.5], u)
        assert found == [token], f"draft 2 with 0.5 > 1/3, then {u} in the residual 0.75, 0.25, 0"


def test_draft_tokens_after_a_rejected_one_do_not_count() -> None:
    target, draft = np.full((4, 2), 0.5), np.array([[0.8, 0.2]] * 3)
    found = verify_by_rejection(target, draft, [1, 0, 1], [0.0, 0.9, 0.0], 0.1)
    assert found == [1, 1], "drafts 1, 0, 1: the second is rejected, and 1 sampled in its place"


def test_a_draft_with_one_token_is_accepted_with_the_targets_probability() -> None:
    """As with an n-gram: `draft` has all its probability on one token."""
    target, draft = np.array([[0.2, 0.3, 0.5]] * 2), np.array([[0.0, 1.0, 0.0]])
    kept = verify_by_rejection(target, draft, [1], [0.29], 0.1)
    assert kept == [1, 0], "draft 1 with 0.29 < 0.3, then 0.1 in 0.2, 0.3, 0.5"
    for u, token in ((0.28, 0), (0.29, 2)):
        found = verify_by_rejection(target, draft, [1], [0.31], u)
        assert found == [token], f"draft 1 with 0.31, then {u} in the residual 2/7, 0, 5/7"


def test_without_drafts_a_token_is_sampled() -> None:
    found = verify_by_rejection(np.array([[0.2, 0.8]]), np.empty((0, 2)), [], [], 0.5)
    assert found == [1], "no drafts, 0.5 in 0.2, 0.8"


def test_with_the_number_0_no_token_without_probability_is_returned() -> None:
    """Numbers are from [0, 1), so 0 is one of them: it is not less than a p / q of 0."""
    target, draft = np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([[0.5, 0.5]])
    found = verify_by_rejection(target, draft, [0], [0.0], 0.0)
    assert found == [1], "draft 0 of 0.5, 0.5 for 0, 1, with 0.0; then 0.0 in the residual 0, 1"
    found = verify_by_rejection(target, draft, [1], [0.0], 0.0)
    assert found == [1, 1], "draft 1 of 0.5, 0.5 for 0, 1, with 0.0; then 0.0 in 0, 1"
    found = verify_by_rejection(target[:1], np.empty((0, 2)), [], [], 0.0)
    assert found == [1], "no drafts, 0.0 in 0, 1: the sum at token 0 is 0, which does not exceed 0"


def test_a_token_is_sampled_even_if_sums_are_rounded() -> None:
    """The largest number below 1 may be at or above the last sum."""
    u = 1 - 2.0**-53
    for tail in ([], [0.0, 0.0]):
        row = [0.1] * 10 + tail  # in float64, ten times 0.1 is exactly this u
        found = verify_by_rejection(np.array([row]), np.empty((0, len(row))), [], [], u)
        assert found == [9], f"no drafts, 1 - 2**-53 in {row}, sums {np.cumsum(row).tolist()}"


# ---------------------------------------------------------------- rejection, all cases at once


def middles(count: int) -> list[float]:
    """Middles of equal parts of [0, 1), each for a share of 1 / count; none is a boundary."""
    return [(i + 0.5) / count for i in range(count)]


@pytest.mark.parametrize(
    ("target", "draft", "num"),
    [
        ([0.5, 0.5], [0.8, 0.2], 8),
        ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], 60),
        ([0.2, 0.3, 0.5], [0.0, 1.0, 0.0], 70),
        ([0.3, 0.3, 0.4], [0.3, 0.3, 0.4], 20),
    ],
)
def test_the_output_is_distributed_as_the_target(
    target: list[float], draft: list[float], num: int
) -> None:
    """Exact: every draft token, and every number in steps of 1 / num, which hit all boundaries."""
    first: Counter[int] = Counter()
    rows = np.array([target, [0.25] + [0.75] + [0.0] * (len(target) - 2)])
    for token_id, q in enumerate(draft):
        for u, last in product(middles(num), middles(num)) if q else ():
            first[verify_by_rejection(rows, np.array([draft]), [token_id], [u], last)[0]] += q
    found = [first[token] / num**2 for token in range(len(target))]
    assert found == pytest.approx(target), f"target {target}, draft {draft}"


def test_two_draft_tokens_and_the_token_after_them() -> None:
    """Exact: every pair of draft tokens, and every number in steps of 1 / 8."""
    target = np.array([[0.5, 0.5], [0.25, 0.75], [0.125, 0.875]])
    draft = np.array([[0.8, 0.2], [0.5, 0.5]])
    came: Counter[tuple[int, ...]] = Counter()
    for a, b in product((0, 1), (0, 1)):
        for u, v, last in product(middles(8), middles(8), middles(8)):
            tokens = verify_by_rejection(target, draft, [a, b], [u, v], last)
            came[tuple(tokens)] += draft[0, a] * draft[1, b] / 8**3
    first = sum(share for tokens, share in came.items() if tokens[0] == 0)
    assert first == pytest.approx(0.5), f"the first token is 0 with 0.5: {came}"
    more = {tokens: share for tokens, share in came.items() if len(tokens) > 1}
    assert sum(more.values()) == pytest.approx(0.7), f"a second one with 0.5 + 0.2: {came}"
    second = sum(share for tokens, share in more.items() if tokens[1] == 0)
    assert second == pytest.approx(0.7 * 0.25), f"which is 0 with 0.25: {came}"
    all_three = {tokens: share for tokens, share in came.items() if len(tokens) == 3}
    assert sum(all_three.values()) == pytest.approx(0.7 * 0.75), f"a third: {came}"
    third = sum(share for tokens, share in all_three.items() if tokens[2] == 0)
    assert third == pytest.approx(0.7 * 0.75 * 0.125), f"which is 0 with 0.125: {came}"


# ---------------------------------------------------------------- sampling


def test_draft_tokens_are_accepted_while_they_equal_the_samples() -> None:
    target = np.array([[0.5, 0.5], [0.8, 0.2], [0.5, 0.5]])
    noise = np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 1.0]])
    # The times: 2 and 4, 2.5 and 5, 6 and 2.
    for drafts, expected in (
        ([0, 0], [0, 0, 1]),
        ([0, 1], [0, 0]),
        ([1, 0], [0]),
        ([1, 1], [0]),
    ):
        found = verify_by_sampling(target, noise, drafts)
        assert found == expected, f"drafts {drafts}; the samples are 0, 0, 1"


def test_a_token_without_probability_is_never_sampled() -> None:
    target, noise = np.array([[0.0, 1.0]] * 2), np.array([[1e-9, 5.0]] * 2)
    found = verify_by_sampling(target, noise, [0])
    assert found == [1], "draft 0, which has no probability in the target"


@pytest.mark.parametrize("seed", range(40))
def test_it_accepts_what_the_engine_accepts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = int(rng.integers(0, 5))
    target, noise = distributions(rng, k + 1), rng.exponential(size=(k + 1, VOCAB_SIZE))
    sampled = (noise / target).argmin(axis=1).tolist()
    drafts = [token if rng.random() < 0.7 else int(rng.integers(12)) for token in sampled[:k]]
    # One sequence, in slot 0: an output for its last token and for each draft token.
    draft_tokens = {0: drafts} if drafts else {}
    expected = accept_draft_tokens([[token] for token in sampled], [0] * (k + 1), draft_tokens)
    found = verify_by_sampling(target, noise, drafts)
    assert [found] == expected.token_ids, f"drafts {drafts}, samples {sampled}"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("proposer", ["none", "accepted", "rejected", "at random", "another model"])
def test_the_tokens_are_those_without_drafts(proposer: str, seed: int) -> None:
    """With the engine's own noise, of (seed, position, completion, token id)."""
    rng = np.random.default_rng(seed)
    model, other = distributions(rng, VOCAB_SIZE), distributions(rng, VOCAB_SIZE)
    noise = engine_noise(seed, num_positions=40)
    expected = [0]  # the prompt, and the output of the model
    while len(expected) < 30:
        expected.append(int((noise[len(expected)] / model[expected[-1]]).argmin()))

    def coupled(known: list[int], count: int) -> list[int]:
        """Another model, which samples with the noise of the same position."""
        drafts: list[int] = []
        while len(drafts) < count:
            last = [*known, *drafts][-1]
            times = noise[len(known) + len(drafts)] / other[last]
            drafts.append(int(times.argmin()))
        return drafts

    proposers: dict[str, Callable[[list[int], int], list[int]]] = {
        "none": lambda known, count: [],
        "accepted": lambda known, count: expected[len(known) : len(known) + count],
        "rejected": lambda known, count: [(expected[len(known)] + 1) % VOCAB_SIZE] * count,
        "at random": lambda known, count: rng.integers(VOCAB_SIZE, size=count).tolist(),
        "another model": coupled,
    }
    known, num_steps = [0], 0
    while len(known) < 29:
        drafts = proposers[proposer](known, min(4, 29 - len(known)))
        inputs = [known[-1], *drafts]
        places = slice(len(known), len(known) + len(inputs))
        came = verify_by_sampling(model[inputs], noise[places], drafts)
        assert came, f"seed {seed}, drafts {drafts} after {known}: no token"
        known, num_steps = known + came, num_steps + 1
    same = expected[: len(known)]
    assert known == same, f"seed {seed}, {proposer} drafts: {known} is not {same}"
    if proposer in ("none", "rejected"):
        assert num_steps == len(known) - 1, f"seed {seed}, {proposer}: each step yields one token"
    if proposer == "accepted":
        assert num_steps <= 6, (
            f"seed {seed}: accepted drafts, four per step, took {num_steps} steps"
        )


def distributions(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    return rng.dirichlet(np.full(VOCAB_SIZE, 0.5), size=num_rows) * 0.99 + 0.01 / VOCAB_SIZE


def engine_noise(seed: int, num_positions: int) -> np.ndarray:
    """Noise of each position and token, from Exp(1)."""
    zeros = np.zeros(num_positions, dtype=np.uint64)
    keys = row_keys(zeros + np.uint64(seed), np.arange(num_positions), zeros)
    scores = torch.zeros(num_positions, VOCAB_SIZE)
    Noise(VOCAB_SIZE, torch.device("cpu")).subtract_log_exponential(scores, keys)
    return np.exp(-scores.double().numpy())
