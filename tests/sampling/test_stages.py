"""The list of stages, the program of a slot, and masks at either of their two places."""

from typing import Any

import numpy as np
import pytest
import torch

from nanoserve import SamplingParams, StructuredOutputsParams
from nanoserve.engine.draft_tokens import accept_draft_tokens
from nanoserve.engine.executor import SlotUpdate
from nanoserve.sampling.sampler import Sampler
from nanoserve.sampling.settings import Program, draw_of
from nanoserve.sampling.stages import make_stages

ORDER = [
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "logit_bias",
    "penalties",
    "logits_processors",
    "engine_processors",
    "token_mask",
    "temperature",
    "filters",
    "race",
]
GUIDE = StructuredOutputsParams(regex="a")
# For each stage, parameters that ask for it; the last three come with a temperature.
ASKED: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": [1]},
    "bad_words": {"bad_words": ["x"]},
    "min_tokens": {"min_tokens": 2},
    "logit_bias": {"logit_bias": {1: 1.0}},
    "penalties": {"presence_penalty": 0.5},
    "logits_processors": {"logits_processors": [lambda ids, logits: logits]},
    "token_mask": {"structured_outputs": GUIDE, "temperature": 1.0, "top_k": 3},
    "temperature": {"temperature": 1.0},
    "filters": {"temperature": 1.0, "min_p": 0.1},
    "race": {"temperature": 1.0},
}
BEHIND = {"temperature": {"race"}, "race": {"temperature"}, "filters": {"temperature", "race"}}
BEHIND["token_mask"] = {"temperature", "filters", "race"}


def update(slot: int = 0, **settings: Any) -> SlotUpdate:
    return SlotUpdate(slot, SamplingParams(**{"temperature": 0.0} | settings), seed=5)


def test_the_stages_are_in_vllms_order() -> None:
    stages = [stage for stage in make_stages() if not stage.is_registered]
    assert [stage.name for stage in stages] == ORDER
    bits = [stage.bit for stage in make_stages()]
    assert bits == sorted({*bits}) and all(bit & (bit - 1) == 0 for bit in bits)


@pytest.mark.parametrize("name", ASKED)
def test_a_slot_goes_through_what_it_asks_for(name: str) -> None:
    asked = update(**ASKED[name])
    wanted = {stage.name for stage in make_stages() if stage.wants(asked)}
    assert wanted == {name} | BEHIND.get(name, set())
    assert not any(stage.wants(update()) for stage in make_stages())


def test_stages_are_applied_in_their_order_each_once() -> None:
    sampler = Sampler(2, 40, torch.device("cpu"), [lambda logits, states: None])
    seen = []

    def watched(stage: Any) -> Any:
        def apply(logits: torch.Tensor, rows: Any) -> None:
            seen.append((stage.name, rows.outputs.tolist()))
            stage.apply(logits, rows)

        return stage._replace(apply=apply)

    sampler._changes[:] = map(watched, sampler._changes)
    sampler._draws[:] = map(watched, sampler._draws)
    everything = {key: value for asked in ASKED.values() for key, value in asked.items()}
    sampler.set_slot(update(0, temperature=1.0, logit_bias={3: 1.0}))
    sampler.set_slot(update(1, **everything, top_p=0.9))
    sampler.sample(torch.randn(2, 40), np.arange(2), np.arange(2))
    both = {"logit_bias", "engine_processors", "temperature", "race"}
    assert seen == [(name, [0, 1] if name in both else [1]) for name in ORDER]


@pytest.mark.parametrize(
    ("settings", "program", "draw"),
    [
        ({}, Program.GREEDY, Program.GREEDY),
        ({"top_k": 5, "min_p": 0.1}, Program.GREEDY, Program.GREEDY),
        ({"temperature": 0.5}, Program.RACE, Program.RACE),
        ({"temperature": 0.5, "logprobs": 3}, Program.RACE, Program.RACE),
        ({"temperature": 0.5, "top_p": 0.5}, Program.FILTERED, Program.FILTERED),
        ({"logit_bias": {1: 1.0}}, Program.GENERAL, Program.GREEDY),
        ({"temperature": 0.5, "min_tokens": 1}, Program.GENERAL, Program.RACE),
        ({"structured_outputs": GUIDE}, Program.GREEDY, Program.GREEDY),
        ({"structured_outputs": GUIDE, "temperature": 1.0}, Program.RACE, Program.RACE),
        (
            {"structured_outputs": GUIDE, "temperature": 1.0, "top_k": 2},
            Program.GENERAL,
            Program.FILTERED,
        ),
    ],
    ids=str,
)
def test_the_program_of_a_slot(settings: dict, program: Program, draw: Program) -> None:
    assert draw_of(SamplingParams(**{"temperature": 0.0} | settings)) == draw
    sampler = Sampler(1, 10, torch.device("cpu"))
    sampler.set_slot(update(0, **settings))
    sampled = sampler.sample(torch.randn(1, 10), np.zeros(1, dtype=int), np.zeros(1))
    assert len(sampled.states) == (program == Program.GENERAL)


class Only:
    """A `TokenMask` that allows some tokens, at every index."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids, self.filled = token_ids, []

    def first_illegal(self, token_ids: list[int]) -> int | None:
        illegal = [i for i, token_id in enumerate(token_ids) if token_id not in self.token_ids]
        return illegal[0] if illegal else None

    def fill(self, index: int, mask: np.ndarray) -> None:
        self.filled.append(index)
        mask[:] = 0
        for token_id in self.token_ids:
            mask[token_id // 32] |= 1 << token_id % 32


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 1}, {"logit_bias": {5: 50.0}}],
    ids=str,
)
def test_a_mask_comes_with_the_step_whatever_the_request_asks_for(settings: dict) -> None:
    """Also for a request without `structured_outputs`: an extension may give it one."""
    sampler = Sampler(2, 40, torch.device("cpu"))
    for slot in range(2):
        sampler.set_slot(update(slot, **settings))
    logits, slots = torch.zeros(3, 40), np.array([0, 1, 1])
    logits[:, 5] = 9.0
    mask = Only(3)
    sampled = sampler.sample(logits, slots, np.arange(3), token_masks={1: mask})
    assert sampled.token_ids.tolist() == [5, 3, 3] and mask.filled == [0, 1]
    without = sampler.sample(logits, slots, np.arange(3))
    assert without.token_ids.tolist() == [5, 5, 5] and mask.filled == [0, 1]
    empty = sampler.sample(logits, slots, np.arange(3), token_masks={0: Only()})
    assert empty.token_ids.tolist()[0] == -1
    assert "logit_bias" in settings or "structured_outputs" in str(empty.errors[0])


def test_only_what_is_forbidden_is_looked_up() -> None:
    """A row that takes its logits as they are is asked about its token first."""
    sampler = Sampler(1, 40, torch.device("cpu"))
    sampler.set_slot(update(0))
    logits, mask = torch.zeros(3, 40), Only(5, 6)
    logits[[0, 1, 2], [5, 7, 6]] = 9.0
    sampled = sampler.sample(logits, np.zeros(3, dtype=int), np.arange(3), token_masks={0: mask})
    assert sampled.token_ids.tolist() == [5, 5, 6] and mask.filled == [1]


def test_penalties_see_the_draft_tokens_before_a_row() -> None:
    sampler = Sampler(2, 10, torch.device("cpu"))
    for slot in range(2):
        sampler.set_slot(update(slot, presence_penalty=2.0))
    logits = torch.zeros(4, 10)
    logits[:, 4], logits[:, 7] = 1.5, 1.0
    drafts = {1: [4, 7]}
    sampled = sampler.sample(logits, np.array([0, 1, 1, 1]), np.arange(4), draft_tokens=drafts)
    assert sampled.token_ids.tolist() == [4, 4, 7, 0]
    assert all(state.output_token_ids == [] for _, state in sampled.states)


def test_outputs_by_row() -> None:
    slots = [3, 1, 1, 1, 0, 0, 2, 2]
    drafts = {1: [5, 6], 0: [8], 2: [9]}
    sampled = [[1], [5], [6], [7], [9], [4], [], [3]]
    rows = accept_draft_tokens(sampled, slots, drafts)
    assert rows.token_ids == [[1], [5, 6, 7], [9], []]
    assert rows.first_outputs == [0, 1, 4, 6] and rows.last_outputs == [0, 3, 4, 6]
    places = [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), None, None, None]
    assert rows.places(range(8)) == places
    error = ValueError("no token")
    assert rows.errors({6: error, 5: ValueError("behind a rejected one")}) == {3: error}
    plain = accept_draft_tokens([[1], [], [2]], [0, 1, 2], {})
    assert plain.token_ids == [[1], [], [2]] and plain.last_outputs == [0, 1, 2]
    assert plain.errors({1: error}) == {1: error} and plain.places([1, 2]) == [None, (2, 0)]
