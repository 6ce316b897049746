"""What changes logits before the choice, against a plain reference that works on one row."""

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from fresh_modules import fresh_modules
from in_stages import change_logits

from nanoserve.engine.executor import SlotUpdate
from nanoserve.sampling.sampler import Sampler
from nanoserve.sampling.slot_state import SlotState, TokenCounts
from nanoserve.sampling_params import SamplingParams

CPU = torch.device("cpu")
VOCAB_SIZE = 40
TRANSFORMS = (
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "logit_bias",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logits_processors",
)


def halve(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits * 0.5


def add_length(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits += len(output_token_ids)  # in place, as user code may well do
    return logits


def forbid_last(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[output_token_ids[-1:]] = -torch.inf
    return logits


@dataclass
class Case:
    """One row: what its request asks for, and how far it has come."""

    settings: dict = field(default_factory=dict)
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)

    def state(self) -> SlotState:
        return SlotState(self.admitted())

    def admitted(self, slot: int = 0, seed: int = 0) -> SlotUpdate:
        return SlotUpdate(
            slot,
            SamplingParams(**self.settings),
            seed,
            prompt_token_ids=self.prompt,
            output_token_ids=self.output,
            stop_token_ids=frozenset(self.stops),
            bad_words_token_ids=self.bad_words,
        )


def reference(logits: np.ndarray, case: Case) -> np.ndarray:
    """The definitions, one token at a time: vLLM's order, OpenAI's and CTRL's penalties."""
    row = [np.float32(x) for x in logits]
    params = SamplingParams(**case.settings)
    if params.allowed_token_ids:
        row = [x if i in params.allowed_token_ids else -np.inf for i, x in enumerate(row)]
    for *before, last in case.bad_words:
        if case.output[len(case.output) - len(before) :] == before:
            row[last] = -np.inf
    if len(case.output) < params.min_tokens:
        for token in case.stops:
            row[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        row[token] = row[token] + np.float32(bias)
    counts = Counter(case.output)
    for token in {*case.prompt, *case.output}:
        rate = np.float32(params.repetition_penalty)
        row[token] = row[token] / rate if row[token] > 0 else row[token] * rate
    for token, count in counts.items():
        row[token] = row[token] - np.float32(params.frequency_penalty) * np.float32(count)
        row[token] = row[token] - np.float32(params.presence_penalty)
    result = np.array(row, dtype=np.float32)
    for processor in params.logits_processors or ():
        result = processor(case.output, torch.from_numpy(result)).numpy()
    return result


def random_case(rng: np.random.Generator, names: tuple[str, ...]) -> Case:
    """Each of `names` is asked for with probability 0.7, so some rows ask for nothing."""
    tokens = rng.integers(VOCAB_SIZE, size=int(rng.integers(1, 30))).tolist()
    cut = int(rng.integers(1, len(tokens) + 1))
    case = Case(prompt=tokens[:cut], output=tokens[cut:])
    asked = [name for name in names if rng.random() < 0.7]
    some = rng.permutation(VOCAB_SIZE)[: rng.integers(1, 20)].tolist()
    values: dict[str, Callable[[], object]] = {
        "allowed_token_ids": lambda: some,
        "min_tokens": lambda: int(rng.integers(1, 16)),
        "logit_bias": lambda: {token: float(rng.uniform(-100, 100)) for token in some},
        "repetition_penalty": lambda: float(rng.uniform(0.3, 3)),
        "frequency_penalty": lambda: float(rng.uniform(-2, 2)),
        "presence_penalty": lambda: float(rng.uniform(-2, 2)),
        "logits_processors": lambda: rng.permutation([halve, add_length, forbid_last]).tolist(),
    }
    case.settings = {name: values[name]() for name in asked if name in values}
    if "min_tokens" in asked:
        case.stops = rng.permutation(VOCAB_SIZE)[: rng.integers(0, 4)].tolist()
    if "bad_words" in asked:
        for _ in range(rng.integers(1, 5)):
            before = case.output[len(case.output) - int(rng.integers(0, 4)) :]
            if rng.random() < 0.3:
                before = rng.integers(VOCAB_SIZE, size=rng.integers(1, 4)).tolist()
            case.bad_words.append([*before, int(rng.integers(VOCAB_SIZE))])
    return case


def random_logits(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    logits = (rng.standard_normal((num_rows, VOCAB_SIZE)) * 3).astype(np.float32)
    logits[rng.random(logits.shape) < 0.05] = 0
    logits[rng.random(logits.shape) < 0.05] = -0.0
    return logits


def processed(logits: np.ndarray, cases: list[Case]) -> np.ndarray:
    result = torch.from_numpy(logits.copy())
    change_logits(result, [case.admitted() for case in cases])
    return result.numpy()


def one_row(logits: list[float], **case) -> list[float]:
    return processed(np.array([logits], dtype=np.float32), [Case(**case)])[0].tolist()


@pytest.mark.parametrize("names", [*((name,) for name in TRANSFORMS), TRANSFORMS], ids="+".join)
def test_a_thousand_rows_of_mixed_batches_equal_the_reference(
    names: tuple[str, ...], by_size: Callable[..., int]
) -> None:
    """A few hundred at the small size."""
    wanted = by_size(250, 1000, 10_000)
    rng = np.random.default_rng(len(names[0]))
    num_cases = num_changed = num_plain = 0
    while num_cases < wanted:
        cases = [random_case(rng, names) for _ in range(rng.integers(1, 17))]
        logits = random_logits(rng, len(cases))
        expected = np.stack([reference(row, case) for row, case in zip(logits, cases, strict=True)])
        np.testing.assert_array_equal(processed(logits, cases), expected)
        num_cases += len(cases)
        num_changed += int((expected != logits).any(axis=1).sum())
        num_plain += sum(not case.settings and not case.bad_words for case in cases)
    assert num_changed > wanted / 4  # the rows do ask for something, and the answer shows
    assert num_plain > wanted / 10 or names == TRANSFORMS


def test_w18_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    settings = {"repetition_penalty": 1.2}
    logits = one_row([2.5, -0.5, 2.5, -0.5, 1.0], settings=settings, prompt=[0, 1], output=[2, 3])
    # Prompt and output alike, and the token that was never seen keeps its logit.
    assert logits == pytest.approx([2.0833, -0.6, 2.0833, -0.6, 1.0], abs=1e-4)


def test_w18_frequency_counts_and_presence_does_not() -> None:
    history = {"prompt": [1, 1], "output": [0, 0, 0, 2]}
    frequency = one_row([2.5, 2.5, 2.5, 2.5], settings={"frequency_penalty": 0.5}, **history)
    presence = one_row([2.5, 2.5, 2.5, 2.5], settings={"presence_penalty": 0.5}, **history)
    assert frequency == [1.0, 2.5, 2.0, 2.5]  # token 1 is in the prompt only
    assert presence == [2.0, 2.5, 2.0, 2.5]


# ---------------------------------------------------------------- order of operations
# Those that forbid tokens commute with each other and with a finite bias; so do min_p and top_k,
# and frequency and presence. Every other neighbouring pair has a case that tells.


def test_what_is_forbidden_stays_so_whatever_else_is_asked() -> None:
    seen = []

    def look(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.tolist())
        return logits

    case = {
        "settings": {
            "allowed_token_ids": [1, 2, 3],
            "min_tokens": 5,
            "logit_bias": dict.fromkeys(range(5), 100),
            "repetition_penalty": 0.5,
            "frequency_penalty": -2,
            "presence_penalty": -2,
            "logits_processors": [look],
        },
        "bad_words": [[1]],
        "stops": [2, 4],
    }
    expected = [-np.inf, -np.inf, -np.inf, 206.0, -np.inf]
    assert one_row([1.0] * 5, prompt=[0, 1], output=[3, 2, 4], **case) == expected
    assert seen == [expected]  # the request's own processors come last of these


def test_logit_bias_comes_before_the_penalties() -> None:
    settings = {"logit_bias": {0: 2.0}, "repetition_penalty": 2.0}
    assert one_row([-1.0, 0.0], settings=settings, prompt=[0]) == [0.5, 0.0]  # and not 0.0


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_repetition_comes_before_frequency_and_presence(name: str) -> None:
    settings = {"repetition_penalty": 2.0, name: 0.5}
    assert one_row([2.5, 0.0], settings=settings, output=[0]) == [0.75, 0.0]  # and not 1.0


def test_penalties_come_before_the_requests_processors_and_these_in_their_order() -> None:
    settings = {"repetition_penalty": 2.0, "logits_processors": [add_length, halve]}
    logits = one_row([2.0, 0.0], settings=settings, output=[0, 0])
    assert logits == [1.5, 1.0]  # (2 / 2 + 2) / 2


def test_the_engines_processors_come_after_the_requests_own_and_see_all_rows() -> None:
    seen = []

    def add_one(logits: torch.Tensor, states: list[SlotState]) -> None:
        seen.append([state.output_token_ids for state in states])
        logits += 1

    cases = [Case({"logits_processors": [halve]}, output=[1, 0]), Case()]
    logits = torch.ones(2, 3)
    change_logits(logits, [case.admitted() for case in cases], processors=[add_one])
    assert logits.tolist() == [[1.5] * 3, [2.0] * 3]  # and not (1 + 1) / 2
    assert seen == [[[1, 0], []]]


def support(logits: list[float], num_draws: int = 300, **settings) -> set[int]:
    """The tokens that `num_draws` draws of one request reach."""
    sampler = Sampler(1, len(logits), CPU)
    sampler.set_slot(Case(settings).admitted(0, seed=3))
    rows = torch.tensor(logits).repeat(num_draws, 1)
    slots = np.zeros(num_draws, dtype=np.int32)
    return set(sampler.sample(rows, slots, np.arange(num_draws)).token_ids.tolist())


def test_processors_come_before_temperature() -> None:
    def at_most_two(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.clamp(max=2)

    options = {"logits_processors": [at_most_two], "temperature": 0.5}
    # [4, 1] -> [2, 1] -> [4, 2]: token 1 is 0.14 times as likely. The other way round they tie.
    assert support([4.0, 1.0], **options) == {0, 1}
    assert support([4.0, 1.0], min_p=0.2, **options) == {0}


def test_temperature_comes_before_min_p() -> None:
    # exp(-1) = 0.37 is above 0.2, but exp(-1 / 0.5) is not; exp(-1 / 2) = 0.61 is above 0.5.
    assert support([2.0, 1.0], temperature=0.5, min_p=0.2) == {0}
    assert support([2.0, 1.0], temperature=2.0, min_p=0.5) == {0, 1}


@pytest.mark.parametrize("first", [{"min_p": 0.6}, {"top_k": 2}], ids=str)
def test_min_p_and_top_k_come_before_top_p(first: dict[str, float]) -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32).tolist()
    assert support(logits, **first) == support(logits, top_p=0.5) == {0, 1}
    assert support(logits, top_p=0.5, **first) == {0}  # 0.4 of the 0.7 that are left


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("num_distinct", [1, 255, 256, 257, 512, 513, 3000])
def test_token_counts_grow_with_the_sequence(num_distinct: int) -> None:
    rng = np.random.default_rng(num_distinct)
    tokens = [*rng.permutation(num_distinct), *rng.integers(num_distinct, size=500)]
    tokens = [int(token) * 7 for token in tokens]
    counts = TokenCounts(tokens[: num_distinct // 2], tokens[num_distinct // 2 : num_distinct])
    for token in tokens[num_distinct:]:
        counts.append(token)
    assert len(counts.ids) == num_distinct  # each once
    expected = Counter(tokens[num_distinct // 2 :])
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        token: expected[token] for token in tokens
    }


def test_a_state_made_after_a_preemption_equals_one_that_was_never_lost() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        case = random_case(rng, TRANSFORMS)
        kept = Case(case.settings, case.prompt, [], case.stops, case.bad_words).state()
        for token in case.output:
            kept.extend([token])
        logits = torch.from_numpy(random_logits(rng, 1)).repeat(2, 1)
        for row, state in enumerate((kept, case.state())):
            change_logits(logits[row : row + 1], [case.admitted()], [state])
        assert torch.equal(logits[0].view(torch.int32), logits[1].view(torch.int32))


def test_draws_after_a_preemption_at_every_step_are_those_without() -> None:
    """Slot 1 is admitted anew at each step; slot 0 has followed from the start."""
    settings = {
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.3,
        "min_tokens": 20,
        "logits_processors": [forbid_last],
        "temperature": 0.8,
        "top_p": 0.9,
    }
    case = Case(settings | {"max_tokens": None}, [1, 2], [], [3, 4], [[5], [6, 7]])
    sampler = Sampler(2, VOCAB_SIZE, CPU)
    sampler.set_slot(case.admitted(0, seed=11))
    rng = np.random.default_rng(0)
    for position in range(2, 42):
        sampler.set_slot(case.admitted(1, seed=11))
        logits = torch.from_numpy(random_logits(rng, 1)).repeat(2, 1)
        sampled = sampler.sample(logits, np.array([0, 1]), np.array([position, position]))
        kept, anew = sampled.token_ids.tolist()
        assert kept == anew
        assert [row for row, _ in sampled.states] == [0, 1]
        for _, state in sampled.states:
            state.extend([kept])
        case.output.append(kept)
    first, later = case.output[:20], case.output[20:]
    assert not {3, 4} & set(first) and len(set(later)) > 5 and 5 not in case.output


# ---------------------------------------------------------------- what stays as it is


def test_rows_that_ask_for_nothing_are_bit_identical() -> None:
    rng = np.random.default_rng(1)
    logits = random_logits(rng, 9)
    logits[::3, :4] = [-0.0, np.inf, -np.inf, np.nan]
    cases = [Case() if row % 3 == 0 else random_case(rng, TRANSFORMS) for row in range(9)]
    result = processed(logits, cases)
    changed = (result.view(np.int32) != logits.view(np.int32)).any(axis=1)
    assert changed.tolist() == [False, True, True] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_left_alone_and_neighbours_draw_what_they_draw_alone(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(random_logits(rng, 6)).to(dtype)
    before = logits.clone()
    sampler = Sampler(6, VOCAB_SIZE, CPU)
    plain = [SamplingParams(temperature=0), SamplingParams(top_p=0.9), SamplingParams(top_k=3)]
    for slot, params in enumerate(plain):
        sampler.set_slot(SlotUpdate(slot, params, seed=slot))
    best = logits.argmax(dim=-1).tolist()
    for slot in (3, 4, 5):  # in place and not, greedy and not
        settings = {"logits_processors": [add_length, forbid_last], "temperature": (slot - 3) / 2}
        settings["logit_bias"] = {best[slot]: -100}
        sampler.set_slot(Case(settings, output=[1]).admitted(slot, seed=slot))
    slots, positions = np.arange(6), np.arange(6) + 10
    together = sampler.sample(logits, slots, positions).token_ids
    assert torch.equal(logits, before)
    assert all(together[slot] != best[slot] for slot in (3, 4, 5))
    alone = sampler.sample(logits[:3], slots[:3], positions[:3]).token_ids
    assert together[:3].tolist() == alone.tolist() and together[0] == best[0]


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(random_logits(rng, 2))
    settings = {"allowed_token_ids": [7], "temperature": 0.3, "logit_bias": {7: 5}, "logprobs": 3}
    sampler = Sampler(2, VOCAB_SIZE, CPU)
    for slot in (0, 1):
        sampler.set_slot(Case(settings).admitted(slot, seed=slot))
    slots = np.arange(2)
    sampled = sampler.sample(logits, slots, slots)
    assert sampled.token_ids.tolist() == [7, 7]
    rows = sampled.logprobs.numpy()
    raw = logits.double().numpy()
    expected = raw - np.log(np.exp(raw).sum(axis=1, keepdims=True))
    best = np.argsort(-expected, axis=1)[:, :3]
    assert rows.token_ids.tolist() == [[7, *row] for row in best.tolist()]
    np.testing.assert_allclose(
        rows.logprobs, np.take_along_axis(expected, rows.token_ids, axis=1), atol=1e-5
    )
    assert rows.ranks.tolist() == [1 + int((row > row[7]).sum()) for row in expected]


ROOM = "nanoserve.sampling."
OPTIONAL = {"gumbel_noise", "filters", "processors", "logprobs", "prompt_logprobs", "fused_sampler"}
OPTIONAL |= {"token_masks"}


# Lists, because the order of a set is not the same in every process.
WHAT_IS_LOADED = [
    ({"temperature": 0}, []),
    ({"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, []),
    ({"temperature": 1}, ["gumbel_noise"]),
    ({"temperature": 1, "top_k": 3}, ["gumbel_noise", "filters"]),
    ({"temperature": 1, "min_p": 0.1}, ["gumbel_noise", "filters"]),
    ({"temperature": 0, "logprobs": 0}, ["logprobs"]),
    ({"temperature": 0, "min_tokens": 1}, ["processors"]),
    ({"temperature": 0, "presence_penalty": 1}, ["processors"]),
    ({"temperature": 0, "of_engine": True}, []),
    (
        {"temperature": 1, "top_p": 0.5, "bad_words": ["x"], "logprobs": 2},
        ["gumbel_noise", "filters", "processors", "logprobs"],
    ),
]


@pytest.mark.parametrize(("settings", "loaded"), WHAT_IS_LOADED, ids=str)
def test_nobody_loads_what_only_others_want(settings: dict[str, Any], loaded: list[str]) -> None:
    """Beside a greedy row, which needs none of it."""
    settings = dict(settings)
    of_engine = [lambda logits, states: None] if settings.pop("of_engine", False) else []
    slots, logits = np.arange(2), torch.eye(5)[:2]
    with fresh_modules("nanoserve"):
        importlib.import_module("nanoserve.worker.model_runner")
        executor = importlib.import_module("nanoserve.engine.executor")
        anew = importlib.import_module("nanoserve.sampling.sampler")
        params = importlib.import_module("nanoserve.sampling_params").SamplingParams
        sampler = anew.Sampler(2, 5, CPU, of_engine)
        for slot, asked in enumerate([{"temperature": 0}, settings]):
            sampler.set_slot(executor.SlotUpdate(slot, params(**asked), seed=slot))
        sampler.sample(logits, slots, slots)
        found = {name.removeprefix(ROOM) for name in sys.modules if name.startswith(ROOM)}
    assert found & OPTIONAL == set(loaded)
