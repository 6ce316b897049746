"""A row is looked at once, pays for nothing that only a neighbour wants, and fails alone."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from in_stages import change_logits

from nanoserve.engine.executor import SlotUpdate
from nanoserve.sampling import filters, logprobs, processors, sampler
from nanoserve.sampling.gumbel_noise import Noise
from nanoserve.sampling.sampler import Sampled, Sampler
from nanoserve.sampling_params import SamplingParams

CPU = torch.device("cpu")
VOCAB_SIZE = 3000


def halve(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits * 0.5


# What a row may ask for; `at random` is a temperature, and a filter means nothing without it.
WISHES: dict[str, dict[str, Any]] = {
    "at random": {"temperature": 0.8},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5},
    "bias": {"logit_bias": {7: 3.0}},
    "own processor": {"logits_processors": [halve]},
    "logprobs": {"logprobs": 2},
}
FILTERS = {"top_k", "top_p", "min_p"}
CHANGES = {"penalties", "bias", "own processor"}


def make_sampler(rows: list[dict[str, Any]], of_engine: list[Callable] | None = None) -> Sampler:
    """Row i of a batch is in slot i."""
    made = Sampler(len(rows), VOCAB_SIZE, CPU, of_engine or [])
    for slot, settings in enumerate(rows):
        params = SamplingParams(**{"temperature": 0.0, **settings})
        changed = SlotUpdate(slot, params, slot * 77, prompt_token_ids=[1, 2], output_token_ids=[3])
        made.set_slot(changed)
    return made


def settings_of(wishes: set[str]) -> dict[str, Any]:
    return {name: value for wish in wishes for name, value in WISHES[wish].items()}


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def sample(made: Sampler, logits: torch.Tensor, rows: list[int] | None = None) -> Sampled:
    slots = np.arange(len(logits)) if rows is None else np.array(rows)
    return made.sample(logits[slots], slots, slots + 40)


def assert_bit_identical(a: torch.Tensor, b: torch.Tensor) -> None:
    assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """For each stage, how many rows each of its calls has got."""
    seen: dict[str, list[int]] = {}

    def watch(
        owner: Any, name: str, size_of: Callable[..., int] = lambda first, *_: len(first)
    ) -> None:
        stage = getattr(owner, name)

        def watched(*args: Any) -> Any:
            seen.setdefault(name, []).append(size_of(*args))
            return stage(*args)

        monkeypatch.setattr(owner, name, watched)

    watch(sampler, "best_tokens")
    watch(filters, "apply_filters")
    for name in ("penalise", "add_bias", "run_own_processors"):
        watch(processors, name, lambda logits, rows: len(rows.states))
    watch(logprobs, "gather_logprobs")
    watch(Noise, "subtract_log_exponential", lambda noise, logits, keys: len(logits))
    return seen


# ---------------------------------------------------------------- one look, and no neighbour's bill


def test_a_mixed_batch_does_each_stage_once_for_those_that_want_it(work) -> None:
    rows = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"repetition_penalty": 1.3},
        {"temperature": 1.3, "top_p": 0.9, "frequency_penalty": 0.4},
        {"logprobs": 3},
        {"temperature": 1.0, "logprobs": 1},
        {"top_k": 3, "top_p": 0.1},  # greedy, whatever the filters
    ]
    sample(make_sampler(rows), random_logits(len(rows)))
    assert work == {
        "best_tokens": [3, 5],  # rows 0, 5 and 7 as the model gave them, then all others
        "penalise": [2],
        "apply_filters": [2],
        "subtract_log_exponential": [4],
        "gather_logprobs": [2],
    }


def test_in_any_mix_a_row_is_looked_at_once_and_pays_for_itself(work) -> None:
    rng = np.random.default_rng(0)
    for seed in range(150):
        share = rng.choice([0.05, 0.3, 0.8])
        wishes = [{w for w in WISHES if rng.random() < share} for _ in range(rng.integers(1, 12))]
        work.clear()
        sampled = sample(make_sampler([*map(settings_of, wishes)]), random_logits(len(wishes)))
        at_random = [row for row in wishes if "at random" in row]
        expected = {
            "penalise": sum("penalties" in row for row in wishes),
            "add_bias": sum("bias" in row for row in wishes),
            "run_own_processors": sum("own processor" in row for row in wishes),
            "apply_filters": sum(bool(row & FILTERS) for row in at_random),
            "subtract_log_exponential": len(at_random),
            "gather_logprobs": sum("logprobs" in row for row in wishes),
        }
        looks = work.pop("best_tokens")
        assert sum(looks) == len(wishes) and len(looks) <= 2, seed
        assert work == {stage: [rows] for stage, rows in expected.items() if rows}, seed
        changed = [row for row, asked in enumerate(wishes) if asked & CHANGES]
        assert [row for row, _ in sampled.states] == changed


def test_a_greedy_batch_is_read_where_the_model_has_left_it(monkeypatch) -> None:
    """No row is copied, and nothing is made for a chance that nobody takes."""
    read, best_tokens = [], sampler.best_tokens

    def watched(logits: torch.Tensor) -> torch.Tensor:
        read.append(logits.data_ptr())
        return best_tokens(logits)

    monkeypatch.setattr(sampler, "best_tokens", watched)
    monkeypatch.setattr(Noise, "__init__", lambda *args: pytest.fail("nobody samples"))
    logits, slots = random_logits(4), np.arange(4)
    sampled = make_sampler([{}, {"top_k": 2}, {}, {"logprobs": 0}]).sample(logits, slots, slots)
    assert read == [logits.data_ptr()]
    assert torch.equal(sampled.token_ids, logits.argmax(dim=-1))
    assert sampled.states == [] and sampled.errors == {}


def test_with_a_processor_of_the_engine_every_row_is_changed(work) -> None:
    seen = []

    def look(logits: torch.Tensor, states: list[Any]) -> None:
        seen.append([state.params.temperature for state in states])

    rows = [{}, {"temperature": 1.0}, {"presence_penalty": 1.0}]
    sampled = sample(make_sampler(rows, [look]), random_logits(3))
    assert seen == [[0.0, 1.0, 0.0]]
    assert work["best_tokens"] == [3] and work["penalise"] == [1]
    assert [row for row, _ in sampled.states] == [0, 1, 2]


def test_a_row_is_what_it_is_alone_whatever_shares_its_batch() -> None:
    rng = np.random.default_rng(1)
    drawn: Counter[bool] = Counter()
    for seed in range(40):
        wishes = [{w for w in WISHES if rng.random() < 0.4} for _ in range(8)]
        made, logits = make_sampler([*map(settings_of, wishes)]), random_logits(8, seed)
        together = sample(made, logits)
        asked = [row for row in range(8) if "logprobs" in wishes[row]]
        for row in range(8):
            alone = sample(made, logits, [row])
            assert alone.token_ids[0] == together.token_ids[row], (seed, row)
            if row in asked:
                theirs = together.logprobs.logprobs[asked.index(row)]
                assert_bit_identical(alone.logprobs.logprobs[0], theirs)
        drawn.update((together.token_ids != logits.argmax(dim=-1)).tolist())
    assert min(drawn.values()) > 50  # there is something to compare


# ---------------------------------------------------------------- what a request's own code raises


class Failure(Exception):
    pass


def fail(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise Failure(f"after {output_token_ids}")


def spoil_and_fail(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits.fill_(torch.nan)
    raise Failure("spoilt")


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        ([fail], Failure),
        ([spoil_and_fail], Failure),
        ([halve, fail, spoil_and_fail], Failure),
        ([lambda output_token_ids, logits: None], TypeError),
        ([lambda output_token_ids, logits: 0.0], TypeError),
        ([lambda output_token_ids, logits: logits.numpy()], TypeError),
        ([lambda output_token_ids, logits: logits[:-1]], ValueError),
        ([lambda output_token_ids, logits: logits.max()], ValueError),
        ([lambda output_token_ids, logits: logits[:1]], ValueError),
        ([lambda output_token_ids, logits: logits[None]], ValueError),
        ([lambda output_token_ids, logits: logits.argsort()], ValueError),
        ([lambda output_token_ids, logits: logits > 0], ValueError),
        ([lambda output_token_ids, logits: logits.to(torch.complex64)], ValueError),
        ([lambda: 0], TypeError),
    ],
    ids=[
        "raises",
        "changes, then raises",
        "the second of three",
        "None",
        "a number",
        "an array",
        "too short",
        "a scalar",
        "one logit",
        "a batch",
        "integers",
        "a mask",
        "complex",
        "no args",
    ],
)
@pytest.mark.parametrize("at_random", [False, True])
def test_what_a_requests_processor_raises_is_returned_by_row(
    bad: list[Callable], kind: type[Exception], at_random: bool
) -> None:
    """And all other rows are what they are when it raises nothing, bit for bit."""
    own = {"temperature": 0.9, "top_p": 0.9} if at_random else {}
    others = [
        {"logprobs": 4},
        {"temperature": 1.0, "logprobs": 4},
        {"temperature": 1.1, "top_k": 9, "presence_penalty": 1.0, "logprobs": 4},
        {"logits_processors": [halve], "logprobs": 4},
    ]

    def batch(processors_of_two: list[Callable]) -> Sampled:
        theirs = {**own, "logits_processors": processors_of_two}
        rows = [others[0], theirs, others[1], others[2], theirs, others[3]]
        return sample(make_sampler(rows), logits)

    logits = random_logits(6)
    before = logits.clone()
    good, failed = batch([halve]), batch(bad)
    assert good.errors == {} and list(failed.errors) == [1, 4]
    assert all(isinstance(error, kind) for error in failed.errors.values())
    assert torch.equal(logits, before)
    rest = [0, 2, 3, 5]
    assert failed.token_ids[rest].tolist() == good.token_ids[rest].tolist()
    assert (failed.token_ids >= -1).all() and (failed.token_ids < VOCAB_SIZE).all()
    assert_bit_identical(failed.logprobs.logprobs, good.logprobs.logprobs)
    assert torch.equal(failed.logprobs.token_ids, good.logprobs.token_ids)
    assert [row for row, _ in failed.states] == [1, 3, 4, 5]


def test_the_error_says_what_a_processor_returned_and_what_it_must() -> None:
    def error_of(processor: Callable) -> str:
        made = make_sampler([{"logits_processors": [processor]}])
        return str(sample(made, random_logits(1)).errors[0])

    wanted = f"floating-point logits of shape [{VOCAB_SIZE}]"
    for changed, returned in (
        (lambda ids, logits: logits.mean(), "torch.float32 of shape []"),
        (lambda ids, logits: logits[:1], "torch.float32 of shape [1]"),
        (lambda ids, logits: logits.argsort(), f"torch.int64 of shape [{VOCAB_SIZE}]"),
    ):
        message = error_of(changed)
        assert returned in message and wanted in message
    assert "returned NoneType" in error_of(lambda ids, logits: None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_processor_may_compute_in_any_float(dtype: torch.dtype) -> None:
    made = make_sampler([{"logits_processors": [lambda ids, logits: (-logits).to(dtype)]}])
    logits = torch.arange(VOCAB_SIZE).repeat(1, 1).float()
    assert sample(made, logits).token_ids.tolist() == [0]


def test_changed_logits_of_other_rows_are_untouched_by_a_failure() -> None:
    def updates(first: Callable) -> list[SlotUpdate]:
        rows = [{"logits_processors": [first]}, {"presence_penalty": 1.0}, {}]
        return [SlotUpdate(0, SamplingParams(**r), 0, output_token_ids=[3, 5]) for r in rows]

    def subtract_one(logits: torch.Tensor, states: list[Any]) -> None:
        logits -= 1

    good, failed = random_logits(3), random_logits(3)
    assert change_logits(good, updates(halve), processors=[subtract_one]) == {}
    errors = change_logits(failed, updates(spoil_and_fail), processors=[subtract_one])
    assert list(errors) == [0] and str(errors[0]) == "spoilt"
    assert_bit_identical(failed[1:], good[1:])  # and the engine's own has seen them


def test_a_ctrl_c_in_a_requests_processor_is_no_error_of_the_request() -> None:
    def interrupt(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(make_sampler([{"logits_processors": [interrupt]}, {}]), random_logits(2))


def test_what_a_processor_of_the_engine_raises_is_everybodys() -> None:
    def refuse(logits: torch.Tensor, states: list[Any]) -> None:
        raise Failure("of the engine")

    with pytest.raises(Failure, match="of the engine"):
        sample(make_sampler([{}, {"logits_processors": [fail]}], [refuse]), random_logits(2))
