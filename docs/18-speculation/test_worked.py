"""Numbers of chapter 18, against a count by hand, simulations and the engine."""

import math

import numpy as np
import pytest
import torch

from nanoserve.sampling.gumbel_noise import Noise, row_keys

from . import worked

TWO = worked.EXAMPLES["0.5, 0.5 and 0.8, 0.2"]
THREE = worked.EXAMPLES["0.5, 0.3, 0.2 and 0.2, 0.2, 0.6"]
NUM_DRAWS = 40_000
SPREAD = 4 * (0.25 / NUM_DRAWS) ** 0.5  # four standard deviations of the least certain share


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_verification_reads_16_gb_or_computes_16_gflop_per_token() -> None:
    assert worked.step_ms(1) == pytest.approx(16.06 / 3.35)  # GB over GB per millisecond
    assert worked.step_ms(1280) == pytest.approx(1280 * 16.06 / 989)
    assert worked.free_tokens() == 295
    assert cells(worked.check_table([1, 64, 256], drafts=4)) == [
        ["1", "5", "4.8 ms", "4.8 ms", "1.00"],
        ["64", "320", "4.8 ms", "5.2 ms", "1.08"],
        ["256", "1280", "4.8 ms", "20.8 ms", "4.34"],
    ]


def test_rejection_by_hand() -> None:
    assert cells(worked.rejection_table(*TWO)) == [
        ["a", "0.5", "0.8", "0.625", "0.5", "0", "0", "0.5"],
        ["b", "0.5", "0.2", "1", "0.2", "1", "0.3", "0.5"],
    ]
    assert cells(worked.rejection_table(*THREE)) == [
        ["a", "0.5", "0.2", "1", "0.2", "0.75", "0.3", "0.5"],
        ["b", "0.3", "0.2", "1", "0.2", "0.25", "0.1", "0.3"],
        ["c", "0.2", "0.6", "0.333", "0.2", "0", "0", "0.2"],
    ]


def test_sampling_from_the_target_after_a_rejection_biases_the_output() -> None:
    assert worked.one_token(*TWO, from_residual=False) == pytest.approx([0.65, 0.35])
    assert worked.one_token(*THREE, from_residual=False) == pytest.approx([0.4, 0.32, 0.28])


@pytest.mark.parametrize("from_residual", [True, False])
@pytest.mark.parametrize("name", worked.EXAMPLES)
def test_the_exact_distribution_is_that_of_many_samples(name: str, from_residual: bool) -> None:
    target, draft = map(np.array, worked.EXAMPLES[name])
    exact = worked.one_token(target, draft, from_residual)
    if from_residual:
        assert exact == pytest.approx(target.tolist())
    rng = np.random.default_rng(1)
    drafted = rng.choice(len(draft), size=NUM_DRAWS, p=draft)
    kept = rng.random(NUM_DRAWS) < np.minimum(1, target / draft)[drafted]
    rest = np.maximum(0, target - draft) if from_residual else target
    drawn = rng.choice(len(draft), size=NUM_DRAWS, p=rest / rest.sum())
    came = np.bincount(np.where(kept, drafted, drawn), minlength=len(draft)) / NUM_DRAWS
    assert came == pytest.approx(exact, abs=SPREAD), f"{name}: {came.tolist()} is not {exact}"
    assert kept.mean() == pytest.approx(worked.acceptance(target, draft), abs=SPREAD)


def test_noise_that_is_used_twice_shifts_the_distribution() -> None:
    """By hand: c is drafted with 0.6 and rejected with 2/3. It won at a time M from Exp(1), so the
    noise of a and b is 0.2 M plus an independent X. Then a wins the race of 3/4 against 1/4 unless
    X_a > 0.4 M + 3 X_b: 1 - E[exp(-0.4 M)] E[exp(-3 X)] = 1 - 1 / 1.4 / 4.
    """
    to_a = 1 - 1 / 1.4 / 4
    exact = [0.2 + 0.4 * to_a, 0.2 + 0.4 * (1 - to_a), 0.2]
    assert exact == pytest.approx([0.5286, 0.2714, 0.2], abs=1e-4)
    assert worked.reused_noise(*THREE, 400_000) == pytest.approx(exact, abs=0.003)


@pytest.mark.parametrize("name", worked.EXAMPLES)
def test_two_samples_with_the_engines_noise_agree_as_often_as_computed(name: str) -> None:
    def winners(probabilities: list[float]) -> torch.Tensor:
        zeros = np.zeros(NUM_DRAWS, dtype=np.uint64)
        keys = row_keys(zeros + np.uint64(7), np.arange(NUM_DRAWS), zeros)
        scores = torch.tensor(probabilities).log().repeat(NUM_DRAWS, 1)
        Noise(len(probabilities), torch.device("cpu")).subtract_log_exponential(scores, keys)
        return scores.argmax(dim=1)

    target, draft = worked.EXAMPLES[name]
    agreed = (winners(target) == winners(draft)).float().mean().item()
    assert agreed == pytest.approx(worked.same_noise(target, draft), abs=SPREAD), name


def test_same_noise_by_hand_and_its_bounds() -> None:
    # With two tokens nothing is lost; with three, 1/5 and 1/(5/3 + 1 + 3) and 1/5.
    assert worked.same_noise(*TWO) == pytest.approx(worked.acceptance(*TWO)) == pytest.approx(0.7)
    assert worked.same_noise(*THREE) == pytest.approx(0.4 + 3 / 17)
    assert worked.other_noise(*THREE) == pytest.approx(0.1 + 0.06 + 0.12)
    assert worked.distance(*THREE) == pytest.approx((0.3 + 0.1 + 0.4) / 2)
    assert worked.promised(*THREE) == pytest.approx(0.6 / 1.4)
    for name, (target, draft) in worked.EXAMPLES.items():
        best, found = worked.acceptance(target, draft), worked.same_noise(target, draft)
        assert worked.promised(target, draft) - 1e-9 < found < best + 1e-9, name
    assert cells(worked.acceptance_table())[1][1:] == ["0.400", "0.600", "0.576", "0.429", "0.280"]


def test_w19_five_drafts_at_a_tenth_of_the_cost() -> None:
    assert worked.accepted(0.8, 5) == pytest.approx(0.8 + 0.64 + 0.512 + 0.4096 + 0.32768)
    assert worked.tokens_per_step(0.8, 5) == pytest.approx(3.68928)
    assert worked.speedup(0.8, 5, 0.1) == pytest.approx(3.68928 / 1.5)
    assert worked.tokens_per_step(1, 5) == 6
    assert worked.tokens_per_step(0, 5) == 1
    assert cells(worked.drafts_table(0.8, 0.1, [1, 5])) == [
        ["1", "0.80", "1.80", "1.64"],
        ["5", "2.69", "3.69", "2.46"],
    ]


def test_there_is_a_best_number_of_drafts_and_it_may_be_none() -> None:
    # 6 drafts: 3.9514 / 1.6 = 2.4696; 5: 2.4595; 7: 4.1611 / 1.7 = 2.4477.
    assert worked.best_number(0.8, 0.1) == 6
    assert worked.best_number(0.3, 0.5) == 0  # 1.3 / 1.5
    assert worked.best_number(0.8, 0.0, most=9) == 9


def test_in_a_large_batch_verification_costs_more_than_it_gains() -> None:
    # 128 x 5 x 16.06 / 989 ms over 4.794; five drafts' tokens are 1 + 0.8 + ... + 0.8^4 = 3.3616.
    assert cells(worked.batch_table(0.8, 4, [1, 128, 256])) == [
        ["1", "1.00", "3.36"],
        ["128", "2.17", "1.55"],
        ["256", "4.34", "0.78"],
    ]


def test_the_engine_chooses_as_many_as_pay() -> None:
    # A step of 295 tokens takes no longer than one of 64: so 3 drafts are free, a fourth is not.
    assert cells(worked.chosen_drafts([4, 1], [1, 64, 256], most=8)) == [
        ["1", "8", "8"],
        ["64", "4", "3"],
        ["256", "1", "0"],
    ]


def test_rewinding_reduces_a_count() -> None:
    rows = cells(worked.rewind_table(drafts=[5, 6, 7, 8], came=[5, 6, 9], known=21))
    assert [row[1:] for row in rows] == [
        ["21", "0", "20"],
        ["21", "0", "20"],
        ["21", "5", "25"],
        ["24", "0", "23"],
    ]
    assert rows[1][0] == "planned: 5 tokens from 20 on"


def test_ngram_and_suffix_proposals() -> None:
    assert worked.looked_up("to be or not to be or", most=4) == "not to be or"
    assert worked.looked_up("to be or not to be", most=4) == ""  # two words are too few
    finished = ["so the cache is full now", "oh the cache is full again", "if the cache is empty"]
    # Two of three have "full"; after it the votes are divided, and 1/3 is less than 0.4.
    assert worked.voted(finished, "and the cache is", most=4) == "full"


def test_a_share_in_per_cent() -> None:
    assert worked.share(916, 1250) == pytest.approx(73.28)


def test_residuals_sum_to_one() -> None:
    for target, draft in worked.EXAMPLES.values():
        assert math.fsum(worked.residual(target, draft)) == pytest.approx(1)
