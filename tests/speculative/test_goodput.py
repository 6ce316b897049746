"""How many guesses pay: the choice, on machines and texts that are known."""

import random

import pytest

from nanoserve.speculative.goodput import Goodput, Record

STEPS = 3000
MOST = 8  # guesses of a row

# What a step of one sequence spends on reading, the first guess, and computing a token; reading is
# for all sequences. A large model on a GPU, a small one on two cores, and one that only computes.
MACHINES = {"reads": (1.0, 0.02, 0.01), "small": (0.5, 0.15, 0.1), "computes": (0.05, 0.0, 0.95)}


def seconds(machine: str, num_rows: int, num_guesses: int) -> float:
    reading, jump, computing = MACHINES[machine]
    return reading + jump * (num_guesses > 0) + computing * (num_rows + num_guesses)


def rights(rng: random.Random, probability: float, count: int) -> int:
    right = 0
    while right < count and rng.random() < probability:
        right += 1
    return right


def simulate(machine: str, num_rows: int, probability: float, seed: int = 0) -> float:
    """Tokens per second over those without guesses."""
    rng, goodput = random.Random(seed), Goodput(MOST)
    records = [Record() for _ in range(num_rows)]
    num_tokens, ask_at, total = 0, 0, 0.0
    for step in range(STEPS):
        counts = [0] * num_rows
        if step >= ask_at and not goodput.is_plain_due and not goodput.may_pay(num_rows):
            ask_at = step + 16
        if step >= ask_at and not goodput.is_plain_due:
            asked = [i for i, record in enumerate(records) if record.ask_at <= step]
            chosen = goodput.choose(num_rows, [(records[i], MOST) for i in asked])
            for i, counts[i] in zip(asked, chosen, strict=True):
                if not counts[i]:  # what comes tells how far they would have been right
                    right = rights(rng, probability, MOST)
                    goodput.note_guesses(records[i], MOST, right)
                    records[i].ask_at = max(records[i].ask_at, step + MOST)
        guesses = sum(counts)
        took = seconds(machine, num_rows, guesses) * rng.lognormvariate(0, 0.05)
        seen = took * (2 if rng.random() < 0.05 else 1)  # as if another one had the processor
        right = 0
        for record, count in zip(records, counts, strict=True):
            if count:
                own = rights(rng, probability, count)
                goodput.note_guesses(record, count, own)
                right += own
        goodput.note_step(num_rows, guesses, right, seen)
        num_tokens, total = num_tokens + num_rows + right, total + took
    return num_tokens / total / (num_rows / seconds(machine, num_rows, 0))


def best(machine: str, num_rows: int, probability: float) -> float:
    """The same, with the best number of guesses for all."""
    gains = []
    for count in range(MOST + 1):
        expected = 1 + sum(probability**i for i in range(1, count + 1))
        slower = seconds(machine, num_rows, count * num_rows) / seconds(machine, num_rows, 0)
        gains.append(expected / slower)
    return max(gains)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
def test_the_choice_loses_nothing_and_finds_most_of_what_there_is(
    machine: str, num_rows: int
) -> None:
    for probability in (0.02, 0.3, 0.6, 0.8, 0.95, 1.0):
        found, possible = (
            simulate(machine, num_rows, probability),
            best(machine, num_rows, probability),
        )
        print(f"{machine} {num_rows} rows, {probability}: {found:.3f} of {possible:.3f}")
        assert found > 0.98
        assert found > 0.85 * possible
