"""Tests of the exercise of chapter 17, on a device that does everything as late as possible."""

import random
from collections import Counter, deque

import pytest

from .exercise import EOS, PENDING, Request, Row, generate


def next_token(token_ids: list[int], num_tokens: int) -> int:
    """A model: a function of all previous tokens, which returns EOS now and then."""
    h = 7
    for position, token in enumerate(token_ids):
        h = (h * 31 + token * 17 + position) % 1_000_003
    return h % num_tokens


def expected_output(request: Request, num_tokens: int) -> list[int]:
    """The output, one token after the other, without a device."""
    token_ids, output = list(request.prompt), []
    while len(output) < request.max_tokens:
        token = next_token(token_ids, num_tokens)
        if token == EOS:
            break
        token_ids.append(token)
        output.append(token)
    return output


class LateDevice:
    """Device that computes a step only when it is collected."""

    def __init__(self, num_slots: int, num_tokens: int) -> None:
        self.num_slots, self.num_tokens = num_slots, num_tokens
        self.memory: list[list[int]] = [[] for _ in range(num_slots)]
        self.last_token: list[int | None] = [None] * num_slots
        self.queue: deque[list[Row]] = deque()
        self.num_rows = self.num_steps = self.num_alone = 0

    def launch(self, rows: list[Row]) -> None:
        assert rows, "a step without rows was launched"
        assert len(self.queue) < 2, "a third step was launched while two are in flight"
        slots = Counter(row.slot for row in rows)
        assert max(slots.values()) == 1, f"two rows for one slot: {rows}"
        self.queue.append([Row(*row) for row in rows])
        self.num_steps += 1
        self.num_rows += len(rows)

    def collect(self) -> list[int]:
        assert self.queue, "a step was collected while none is in flight"
        self.num_alone += len(self.queue) == 1
        return [self._compute(row) for row in self.queue.popleft()]

    def _compute(self, row: Row) -> int:
        memory = self.memory[row.slot]
        assert row.start <= len(memory), f"{row}: its slot has {len(memory)} tokens: {memory}"
        del memory[row.start :]
        for token in row.token_ids:
            known = self.last_token[row.slot] if token == PENDING else token
            assert known is not None, f"{row}: its slot has not sampled a token yet"
            memory.append(known)
        self.last_token[row.slot] = next_token(memory, self.num_tokens)
        return self.last_token[row.slot]


def run(requests: list[Request], num_slots: int, num_tokens: int = 5) -> LateDevice:
    device = LateDevice(num_slots, num_tokens)
    found = generate(requests, device)
    expected = {request.name: expected_output(request, num_tokens) for request in requests}
    assert found == expected, f"{requests} in {num_slots} slots: {found} is not {expected}"
    return device


def prompt_with(num_output: int) -> list[int]:
    """A prompt that is followed by so many tokens, and then EOS."""
    for first in range(1, 1000):
        if len(expected_output(Request("", [first], 50), 5)) == num_output:
            return [first]
    raise AssertionError(f"no prompt is followed by {num_output} tokens")


def test_one_request_that_ends_by_its_length() -> None:
    request = Request("a", prompt_with(9), max_tokens=4)
    device = run([request], num_slots=1)
    assert device.num_steps == 4, f"{request}: 4 tokens take 4 steps, since the end is known"


def test_one_request_that_ends_by_eos() -> None:
    request = Request("a", prompt_with(3), max_tokens=20)
    device = run([request], num_slots=1)
    # Three tokens, EOS, and the step that was launched before EOS was seen.
    assert device.num_steps == 5, f"{request}: {device.num_steps} steps"


def test_a_step_is_collected_while_the_next_one_is_in_flight() -> None:
    request = Request("a", prompt_with(9), max_tokens=8)
    device = run([request], num_slots=1)
    assert device.num_alone == 1, f"{request}: all steps but the last have a successor in flight"


def test_after_eos_on_the_last_token_nothing_is_discarded() -> None:
    request = Request("a", prompt_with(3), max_tokens=4)
    assert run([request], num_slots=1).num_rows == 4, f"{request}: 3 tokens and EOS"


def test_a_slot_is_reused_while_a_discarded_row_is_in_flight() -> None:
    requests = [Request("a", prompt_with(2), 20), Request("b", prompt_with(9), 5)]
    run(requests, num_slots=1)


def test_discarded_rows_of_several_requests_do_not_mix() -> None:
    requests = [Request(name, prompt_with(n), 20) for name, n in (("a", 2), ("b", 4), ("c", 3))]
    run(requests, num_slots=2)


@pytest.mark.parametrize("seed", range(60))
def test_tokens_are_those_of_a_synchronous_loop(seed: int) -> None:
    rng = random.Random(seed)
    num_tokens = rng.choice([2, 5, 20])
    requests = [
        Request(
            f"r{i}",
            [rng.randrange(1, 9) for _ in range(rng.randint(1, 5))],
            max_tokens=rng.choice([1, 2, 5, 20]),
        )
        for i in range(rng.randint(1, 12))
    ]
    device = run(requests, rng.randint(1, 4), num_tokens)
    rows = 0
    for request in requests:
        num_output = len(expected_output(request, num_tokens))
        sampled = min(num_output + 1, request.max_tokens)
        # One more if EOS came before the last allowed token: that row is discarded or cancelled.
        rows += sampled + (sampled < request.max_tokens)
    assert device.num_rows == rows, f"{requests}: {device.num_rows} rows were launched, not {rows}"
