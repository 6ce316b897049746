"""How many draft tokens pay: the choice, on machines and texts that are known."""

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from nanoserve.features.speculative.goodput import Goodput
from nanoserve.features.speculative.step_costs import StepCosts

STEPS = 3000
MOST = 8  # draft tokens of a row
LENGTH = 10  # steps after which another of a model's sequences is a new one

# What a step of one sequence spends on reading, the first draft token, and computing a token;
# reading is for all sequences. A large model on a GPU, a small one on two cores, and one that only
# computes.
MACHINES = {"reads": (1.0, 0.02, 0.01), "small": (0.5, 0.15, 0.1), "computes": (0.05, 0.0, 0.95)}


def seconds(machine: str, num_rows: int, num_drafts: int) -> float:
    reading, jump, computing = MACHINES[machine]
    return reading + jump * (num_drafts > 0) + computing * (num_rows + num_drafts)


def accepted(rng: random.Random, probability: float, count: int) -> int:
    number = 0
    while number < count and rng.random() < probability:
        number += 1
    return number


def simulate(
    machine: str, num_rows: int, probability: float, a_pass: float = 0.0, seed: int = 0
) -> float:
    """Return tokens per second over those without draft tokens.

    a_pass: what one of a model takes, that makes the next draft token of all; 0 if they are looked
    up. A model does not draft what is not computed, and its sequences are short.
    """
    rng, goodput = random.Random(seed), Goodput(MOST, is_model=a_pass > 0)
    records = [goodput.new_record() for _ in range(num_rows)]
    num_tokens, propose_at, total = 0, 0, 0.0
    for step in range(STEPS):
        counts = [0] * num_rows
        if a_pass and step % LENGTH == 0:
            records[step // LENGTH % num_rows] = goodput.new_record()
            propose_at = 0
        if step >= propose_at and not goodput.is_plain_due and not goodput.may_pay(num_rows):
            propose_at = step + 16
        if step >= propose_at and not goodput.is_plain_due:
            wanted = [i for i, record in enumerate(records) if record.propose_at <= step]
            chosen = goodput.choose(num_rows, [(records[i], MOST) for i in wanted])
            if a_pass and not any(chosen):
                goodput.fade(records)
                propose_at = step + 16
            for i, counts[i] in zip(wanted, chosen, strict=True):
                if not counts[i] and not a_pass:  # what comes shows how many would be accepted
                    num_accepted = accepted(rng, probability, MOST)
                    goodput.record_accepted(records[i], MOST, num_accepted)
                    records[i].propose_at = max(records[i].propose_at, step + MOST)
        num_drafts = sum(counts)
        took = seconds(machine, num_rows, num_drafts) + a_pass * max(counts)
        took *= rng.lognormvariate(0, 0.05)
        seen = took * (2 if rng.random() < 0.05 else 1)  # as if another one had the processor
        num_accepted = 0
        for record, count in zip(records, counts, strict=True):
            if count:
                own = accepted(rng, probability, count)
                goodput.record_accepted(record, count, own)
                num_accepted += own
        if num_drafts or step % 4 == 0:  # as an engine does
            goodput.record_step(num_rows, num_drafts, num_accepted, seen)
        num_tokens, total = num_tokens + num_rows + num_accepted, total + took
    return num_tokens / total / (num_rows / seconds(machine, num_rows, 0))


def best(machine: str, num_rows: int, probability: float, a_pass: float = 0.0) -> float:
    """Return the same, with the best number of draft tokens for all."""
    gains = []
    for count in range(MOST + 1):
        expected = 1 + sum(probability**i for i in range(1, count + 1))
        took = seconds(machine, num_rows, count * num_rows) + a_pass * count
        gains.append(expected * seconds(machine, num_rows, 0) / took)
    return max(gains)


ALL_OF_THEM = list(product((0.02, 0.3, 0.6, 0.8, 0.95, 1.0), (0.0, 0.05, 0.2, 0.5)))
# Each probability and each pass, looked up or made by a model, few accepted ones and many.
FEW_OF_THEM = [(0.02, 0.0), (0.3, 0.05), (0.6, 0.2), (0.8, 0.0), (0.95, 0.5), (1.0, 0.05)]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.small(num_rows=[1, 16])
@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
def test_the_choice_loses_nothing_and_finds_most_of_what_there_is(
    machine: str, num_rows: int, by_size: Callable[..., Any]
) -> None:
    for probability, a_pass in by_size(FEW_OF_THEM, ALL_OF_THEM):
        found = simulate(machine, num_rows, probability, a_pass)
        possible = best(machine, num_rows, probability, a_pass)
        shown = f"{machine} {num_rows} rows, {probability}, {a_pass}: {found:.3f} {possible:.3f}"
        print(shown)
        assert found > 0.98, shown
        assert found > 0.85 * possible, shown


def test_what_has_lost_lately_pauses_for_longer_each_time() -> None:
    costs = StepCosts(num_rows=4, max_draft_tokens=32, is_model=False)
    for num_drafts, seconds_per_row in [(0, 1.0)] * 5 + [(8, 1.5)] * 6:
        costs.add(num_drafts, seconds_per_row)
    for _ in range(50):
        costs.judge(8, 4, 1.5)  # two tokens a row in the time of one and a half
        costs.judge(16, 0, 9.0)  # tried: it was not known what so many take
    assert costs.can_pay
    pauses = []
    for _ in range(5):
        while costs.can_pay:
            costs.judge(8, 1, 1.5)
        pauses.append(0)
        while not costs.can_pay:
            costs.add(0, 1.0)
            pauses[-1] += 1
    assert pauses == [8, 16, 32, 64, 64]
