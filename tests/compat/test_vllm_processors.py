"""Logits processors that were written for vLLM, on nanoserve's engine."""

import random
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.compat.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    RequestLogitsProcessor,
    VllmProcessor,
    load,
    process_dict_updates,
)
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import SlotUpdate
from nanoserve.sampling.slot_state import SlotState

ONE_WAY, SWAP = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP
VOCAB_SIZE = 12
PROMPTS = [[3 + i] * (1 + 5 * i) for i in range(9)]


# ---------------------------------------------------------------- in the shape of vLLM's examples


def extra(params: SamplingParams, name: str) -> Any:
    return (params.extra_args or {}).get(name)


class OnlyTarget(LogitsProcessor):
    """As custom.py: requests with a target token get nothing else."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        target = extra(params, "target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token {target!r} is no integer")

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.targets, batch_update, lambda params, _, __: extra(params, "target_token")
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.targets:
            return logits
        rows = torch.tensor(list(self.targets), device=logits.device)
        columns = torch.tensor(list(self.targets.values()), device=logits.device)
        kept = logits[rows, columns].clone()
        logits[rows] = -torch.inf
        logits[rows, columns] = kept
        return logits


class KeepOne:
    def __init__(self, target: int) -> None:
        self.target = target

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        kept = logits[self.target].item()
        logits[:] = -torch.inf
        logits[self.target] = kept
        return logits


class OnlyTargetPerRequest(AdapterLogitsProcessor):
    """As custom_req.py."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        target = extra(params, "target_token")
        return None if target is None else KeepOne(target)


class OnlyTargetOnCpu(OnlyTargetPerRequest):
    """As custom_req_init.py: its constructor looks where it runs."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self.is_on = device.type == "cpu" and not is_pin_memory and vllm_config.max_num_seqs == 4

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        return super().new_req_logits_processor(params) if self.is_on else None


class TopNSigma(LogitsProcessor):
    """As top_n_sigma.py: -inf for what lies n standard deviations below the best."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.sigmas: dict[int, float] = {}

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.sigmas, batch_update, lambda params, *_: extra(params, "sigma"))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.sigmas:
            return logits
        rows = torch.tensor(list(self.sigmas), device=logits.device)
        sigmas = torch.tensor(list(self.sigmas.values()), device=logits.device).unsqueeze(1)
        logits[rows] = keep_sigmas(logits[rows], sigmas)
        return logits


def keep_sigmas(logits: torch.Tensor, sigmas: Any) -> torch.Tensor:
    best, deviation = logits.amax(-1, keepdim=True), logits.std(-1, keepdim=True)
    return logits.masked_fill(logits < best - sigmas * deviation, -torch.inf)


# ---------------------------------------------------------------- with state in each row


def last_and_length(output_ids: list[int]) -> int:
    """One token too few, or those of another request, would show."""
    return len(output_ids) + (output_ids[-1] if output_ids else 0)


class Shift(LogitsProcessor):
    """Every third token up; which, depends on the request's own and on what it has so far.

    In arrays of the engine's size, and in what a row has read of its output up to now.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.shifts = torch.zeros(vllm_config.max_num_seqs, dtype=torch.long)
        self.outputs: dict[int, list[int]] = {}
        self.read: dict[int, list[int]] = {}
        self.num_rows = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            assert not batch_update.moved
            self.num_rows = batch_update.batch_size
            for row in batch_update.removed:
                del self.outputs[row], self.read[row]
            for row, params, _, output_ids in batch_update.added:
                self.shifts[row] = extra(params, "shift")
                self.outputs[row], self.read[row] = output_ids, list(output_ids)
        for row, read in self.read.items():
            read += self.outputs[row][len(read) :]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert len(logits) == self.num_rows
        for row, read in self.read.items():
            logits[row, (self.shifts[row] + last_and_length(read)) % 3 :: 3] += 10
        return logits


class ShiftPerRequest(AdapterLogitsProcessor):
    """The same; every second request's callable gets the prompt, too."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        shift = extra(params, "shift")

        def with_prompt(
            prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
        ) -> torch.Tensor:
            assert prompt_ids == PROMPTS[shift % len(PROMPTS)]
            return shifted(shift)(output_ids, logits)

        return with_prompt if shift % 2 else shifted(shift)


def shifted(shift: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    def processor(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        changed = logits.clone()
        changed[(shift + last_and_length(output_ids)) % 3 :: 3] += 10
        return changed

    return processor


# ---------------------------------------------------------------- through the engine


def engine(processor_class: type | None = None, **options: Any) -> LLM:
    options = {"max_num_seqs": 4, "max_model_len": 128, **options}
    processors = []
    if processor_class is not None:
        config = EngineConfig("tiny-qwen3", max_num_seqs=options["max_num_seqs"])
        processors = [VllmProcessor(processor_class, config)]
    return LLM(
        "tiny-qwen3",
        dtype="float32",
        attention_backend="torch",
        logits_processors=processors,
        **options,
    )


def tokens_of(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def with_targets(**settings: Any) -> list[SamplingParams]:
    given = [{"target_token": 128}, None, {"target_token": 67}, {"other": 1}, {"target_token": 5}]
    settings = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, **settings}
    return [SamplingParams(**settings, extra_args=args) for args in given]


@pytest.mark.parametrize("example", [OnlyTarget, OnlyTargetPerRequest, OnlyTargetOnCpu])
def test_who_asked_gets_a_token_and_others_get_theirs(example: type) -> None:
    with engine() as llm, engine(example) as forced:
        params = with_targets()
        expected = tokens_of(llm, params)
        for request, target in ((0, 128), (2, 67), (4, 5)):
            assert expected[request] != [target] * 6
            expected[request] = [target] * 6
        assert tokens_of(forced, params) == expected


def test_a_class_and_its_name_are_options_of_an_engine() -> None:
    params = with_targets()
    for entry in (OnlyTarget, f"{__name__}:OnlyTarget"):
        with LLM(
            "tiny-qwen3", dtype="float32", attention_backend="torch", logits_processors=[entry]
        ) as llm:
            assert tokens_of(llm, params)[2] == [67] * 6


def test_parameters_are_checked_before_a_request_is_queued() -> None:
    with engine(OnlyTarget) as llm, engine(OnlyTargetPerRequest) as unchecked:
        bad = SamplingParams(extra_args={"target_token": "five"})
        with pytest.raises(ValueError, match="target_token 'five' is no integer"):
            llm.generate([PROMPTS[0]] * 2, [SamplingParams(), bad], use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()
        params = with_targets()
        assert tokens_of(llm, params) == tokens_of(unchecked, params)


def test_a_filter_of_those_who_sample() -> None:
    settings = {"temperature": 1.5, "max_tokens": 10, "ignore_eos": True}
    sigmas = [2.0, None, 4.0, None, 0.5]
    filters: list[Any] = [
        sigma and [lambda _, logits, n=sigma: keep_sigmas(logits, n)] for sigma in sigmas
    ]
    with engine() as llm, engine(TopNSigma) as filtering:
        expected = tokens_of(
            llm,
            [
                SamplingParams(**settings, seed=i, logits_processors=f)
                for i, f in enumerate(filters)
            ],
        )
        args = [sigma and {"sigma": sigma} for sigma in sigmas]
        params = [SamplingParams(**settings, seed=i, extra_args=a) for i, a in enumerate(args)]
        assert tokens_of(filtering, params) == expected
        plain = [SamplingParams(**settings, seed=i) for i in range(5)]
        assert tokens_of(filtering, plain) != expected


# ---------------------------------------------------------------- rows under every schedule


SETTINGS: dict[str, dict[str, Any]] = {
    "as many as there are": {"max_num_seqs": 16},
    "few at a time": {},
    "chunked prefill": {"max_num_batched_tokens": 5},
    "preemption": {"num_kv_blocks": 13, "block_size": 8, "max_model_len": 104},
    "one step ahead": {"async_scheduling": True, "max_num_batched_tokens": 7},
    "not ahead": {"async_scheduling": False},
}


DIFFERENT_WISHES: list[dict[str, Any]] = [
    {"temperature": 2.0 * (i % 3 == 2), "seed": i, "max_tokens": 4 + 5 * (i % 4)}
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def by_own_processors() -> Callable[[str], list[list[int]]]:
    """Return what processors of the requests themselves lead to, computed once for each setting."""

    @cache
    def answers(name: str) -> list[list[int]]:
        params = [
            SamplingParams(**wish, ignore_eos=True, logits_processors=[shifted(i)])
            for i, wish in enumerate(DIFFERENT_WISHES)
        ]
        with engine(**SETTINGS[name]) as llm:
            found = tokens_of(llm, params)
            assert llm.stats.num_preemptions > 0 or "num_kv_blocks" not in SETTINGS[name]
        return found

    return answers


IN_SMALL = [(Shift, "one step ahead")]


@pytest.mark.parametrize(
    ("processor_class", "name"),
    [
        pytest.param(*case, marks=[] if case in IN_SMALL else [pytest.mark.size("full")])
        for case in product([Shift, ShiftPerRequest], SETTINGS)
    ],
)
def test_state_in_rows_is_as_state_of_requests(
    processor_class: type, name: str, by_own_processors: Callable[[str], list[list[int]]]
) -> None:
    params = [
        SamplingParams(**wish, ignore_eos=True, extra_args={"shift": i})
        for i, wish in enumerate(DIFFERENT_WISHES)
    ]
    with engine(processor_class, **SETTINGS[name]) as llm:
        assert tokens_of(llm, params) == by_own_processors(name)
        assert tokens_of(llm, params) == by_own_processors(name)  # in rows that others have left


def test_requests_that_are_aborted_leave_their_rows() -> None:
    wish = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    with engine(Shift) as llm:
        params = [SamplingParams(**wish, extra_args={"shift": i}) for i in range(6)]
        expected = tokens_of(llm, params)
        for i in (0, 1, 2):
            llm.engine.add_request(str(i), PROMPTS[i], params[i])
        for _ in range(4):
            llm.engine.step()
        for i in (0, 1):
            llm.engine.abort_request(str(i))
        for i in (4, 5):
            llm.engine.add_request(str(i), PROMPTS[i], params[i])
        done = {}
        while llm.engine.has_unfinished_requests():
            done |= {o.request_id: o for o in llm.engine.step() if o.finished}
        for i in (2, 4, 5):
            assert list(done[str(i)].outputs[0].token_ids) == expected[i]


# ---------------------------------------------------------------- the book of rows


def make_state(*output_ids: int, **settings: Any) -> SlotState:
    params = SamplingParams(**{"temperature": 0, **settings})
    return SlotState(
        SlotUpdate(0, params, 0, prompt_token_ids=[1, 2], output_token_ids=list(output_ids))
    )


class Recorder(LogitsProcessor):
    """Adds to each row what its request's first output token says, in a new tensor."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.updates, self.outputs = [], {}
        vllm_config.append(self)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)
        process_dict_updates(self.outputs, batch_update, lambda _, __, output_ids: output_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        added = torch.zeros(len(logits), 1)
        for row, output_ids in self.outputs.items():
            added[row] = output_ids[0]
            assert (logits[row] == 100 * output_ids[0]).all(), "a row is another's"
        for row in set(range(len(logits))) - set(self.outputs):
            assert (logits[row] == 0).all(), "a row of nobody holds something"
        return logits + added


def step(processor: VllmProcessor, states: list[SlotState]) -> None:
    firsts = torch.tensor([float(state.output_token_ids[0]) for state in states])
    logits = (100 * firsts).unsqueeze(1).repeat(1, VOCAB_SIZE)
    processor(logits, states)
    assert logits.tolist() == (101 * firsts).unsqueeze(1).repeat(1, VOCAB_SIZE).tolist()


def test_what_the_class_is_told() -> None:
    made: list[Recorder] = []
    processor = VllmProcessor(Recorder, made)
    a, b, c, d = (make_state(i) for i in (1, 2, 3, 4))
    assert not made
    for states in ([a, b, c], [a, b, c], [c, b], [d, b], [b], [a, b]):
        step(processor, states)
    (recorder,) = made
    first, unchanged, a_ended, c_left, d_ended, a_again = recorder.updates
    assert unchanged is None
    assert (first.batch_size, first.removed, first.moved) == (3, [], [])
    for row, state in enumerate((a, b, c)):
        told = first.added[row]
        assert told == (row, state.params, [1, 2], state.output_token_ids)
        assert told[3] is state.output_token_ids
    assert (a_ended.batch_size, a_ended.removed, a_ended.added) == (3, [0], [])
    assert (c_left.batch_size, c_left.removed) == (2, [2])
    assert [row for row, *_ in c_left.added] == [0]
    assert (d_ended.batch_size, d_ended.removed, d_ended.added) == (2, [0], [])
    assert [row for row, *_ in a_again.added] == [0] and not a_again.removed


def test_a_row_that_is_taken_over_at_once_is_only_added() -> None:
    """Else a class that adds before it removes, as vLLM's own do, would lose the new request."""
    made: list[Recorder] = []
    processor = VllmProcessor(Recorder, made)
    a, b, c, d = (make_state(i) for i in (1, 2, 3, 4))
    step(processor, [a, b, c])
    step(processor, [b, d])
    update = made[0].updates[-1]
    assert (update.removed, [row for row, *_ in update.added]) == ([2], [0])
    assert made[0].outputs == {0: [4], 1: [2]}


@pytest.mark.parametrize("seed", range(5))
def test_whoever_comes_and_goes_in_whatever_order(seed: int) -> None:
    rng, made = random.Random(seed), []
    processor = VllmProcessor(Recorder, made)
    present: list[SlotState] = []
    most, fresh = 1, 0
    for _ in range(60):
        before = {id(state) for state in present}
        present = [state for state in present if rng.random() < 0.8]
        for _ in range(rng.randrange(3) + (not present)):
            fresh += 1
            present.append(make_state(fresh))
        rng.shuffle(present)
        most = max(most, len(present))
        step(processor, present)
        (recorder,) = made
        assert max(recorder.outputs) < most  # arrays of max_num_seqs suffice
        assert len(recorder.outputs) == len(present)
        assert (recorder.updates[-1] is None) == (before == {id(state) for state in present})


# ---------------------------------------------------------------- what greedy rows do not feel


class Heat(LogitsProcessor):
    """Says that it never changes the best token, which is a lie; keeps what it was given."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.seen = vllm_config

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.seen.append(batch_update)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.seen.append(logits.clone())
        logits[:, 0] = 8
        logits[:, 1] = -torch.inf
        return logits


def test_argmax_invariant_classes_see_what_is_drawn_from() -> None:
    seen: list[Any] = []
    processor = VllmProcessor(Heat, seen)
    greedy, hot = make_state(1), make_state(2, temperature=0.3)
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    given = logits.clone()
    processor(logits[:1], [greedy])
    assert torch.equal(logits, given) and len(seen) == 1  # told, and not asked
    processor(logits, [greedy, hot])
    assert torch.equal(seen[-1], given / torch.tensor([[1.0], [0.3]]))
    assert torch.equal(logits[0], given[0])
    assert torch.equal(logits[1, 2:], given[1, 2:])  # to the bit
    assert logits[1, :2].tolist() == [pytest.approx(2.4), -torch.inf]


# ---------------------------------------------------------------- process_dict_updates


MOVES = {
    "one way": ({0: "a", 1: "b"}, [(0, 1, ONE_WAY)], {1: "a"}, True),
    "one way, to an empty row": ({0: "a"}, [(0, 5, ONE_WAY)], {5: "a"}, True),
    "one way, of one without entry": ({1: "b"}, [(0, 1, ONE_WAY)], {}, True),
    "swap": ({0: "a", 1: "b"}, [(0, 1, SWAP)], {0: "b", 1: "a"}, True),
    "swap with one without entry": ({0: "a"}, [(0, 1, SWAP)], {1: "a"}, True),
    "swap of one without entry": ({1: "b"}, [(0, 1, SWAP)], {0: "b"}, True),
    "of nobody": ({3: "c"}, [(0, 1, SWAP), (1, 0, ONE_WAY)], {3: "c"}, False),
    "one after the other": ({0: "a", 1: "b"}, [(0, 2, ONE_WAY), (1, 0, SWAP)], {2: "a", 0: "b"}, 1),
}


@pytest.mark.parametrize(("entries", "moved", "expected", "changes"), MOVES.values(), ids=MOVES)
def test_moves(entries: dict, moved: list, expected: dict, changes: bool) -> None:
    entries = dict(entries)
    has_changed = process_dict_updates(entries, BatchUpdate(6, [], [], moved), lambda *_: None)
    assert (entries, has_changed) == (expected, bool(changes))


def test_entries_come_and_go() -> None:
    def state_of(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> Any:
        return params.extra_args and (params.extra_args["x"], prompt, output)

    entries: dict[int, Any] = {}
    plain, asks = SamplingParams(), SamplingParams(extra_args={"x": 0})
    added = [(0, asks, [1], [2]), (1, plain, [3], []), (2, asks, None, [])]
    assert not process_dict_updates(entries, None, state_of)
    assert process_dict_updates(entries, BatchUpdate(3, [], added, []), state_of)
    assert entries == {0: (0, [1], [2]), 2: (0, None, [])}
    assert not process_dict_updates(entries, BatchUpdate(3, [1], [], []), state_of)
    replaced = BatchUpdate(3, [2], [(0, plain, [5], [])], [])
    assert process_dict_updates(entries, replaced, state_of) and entries == {}
    assert not process_dict_updates(entries, replaced, state_of)
    again = BatchUpdate(1, [0], [(0, asks, [7], [])], [])  # removed comes first
    assert process_dict_updates(entries, again, state_of) and entries == {0: (0, [7], [])}
    falsy = BatchUpdate(1, [0], [], [])
    entries = {0: 0}
    assert process_dict_updates(entries, falsy, state_of) and entries == {}


# ---------------------------------------------------------------- what cannot be


class Incomplete(LogitsProcessor):
    def update_state(self, batch_update: BatchUpdate | None) -> None: ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


class OfNobody:
    """Such a class, though it inherits from none of ours."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None: ...

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None: ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return vars(self).get("result", logits)


MODULE = """
from nanoserve.compat import LogitsProcessor
class Outer:
    class Good(LogitsProcessor):
        def __init__(self, vllm_config, device, is_pin_memory): ...
        def is_argmax_invariant(self): return False
        def update_state(self, batch_update): ...
        def apply(self, logits): return logits
number = 7
def function(logits, states): ...
"""


def test_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_processors.py").write_text(MODULE)
    (tmp_path / "breaking_processors.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    assert load("some_processors:Outer.Good").__name__ == "Good"
    assert load(OnlyTarget) is OnlyTarget and load(OfNobody) is OfNobody
    processor = VllmProcessor(OnlyTarget, None)
    assert load(processor) is processor and load(len) is len
    refused = {
        "some_processors:Outer": "is not a LogitsProcessor: it has no apply, is_argmax_invariant",
        "some_processors:number": "is not a class, but 7",
        "some_processors:function": "is not a class, but <function",
        "some_processors:Good": "cannot be imported: AttributeError",
        "no_such_processors:Good": "cannot be imported: ModuleNotFoundError",
        "breaking_processors:Good": "cannot be imported: ZeroDivisionError",
        "some_processors.Outer": "must have the form 'package.module:Class'",
        ":Good": "must have the form",
        "some_processors:": "must have the form",
        "": "must have the form",
        ".some_processors:Good": "cannot be imported: TypeError",
    }
    for name, message in refused.items():
        with pytest.raises(ValueError, match=f"{name!r} .*{message}"):
            load(name)
    for entry, message in (
        (int, "<class 'int'> is not a LogitsProcessor: it has no apply"),
        (Incomplete, "it has no __init__, is_argmax_invariant"),
        (7, "7 is neither a class, the name of one nor a callable"),
        (None, "None is neither"),
    ):
        with pytest.raises(ValueError, match=message):
            load(entry)


def test_what_a_class_raises_comes_out() -> None:
    class FailsToStart(OfNobody):
        def __init__(self, *_: Any) -> None:
            raise RuntimeError("not on this machine")

    class FailsLater(OfNobody):
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            raise KeyError("row 3")

    params = SamplingParams(temperature=0, max_tokens=3)
    for failing, error, message in (
        (FailsToStart, RuntimeError, "not on this machine"),
        (FailsLater, KeyError, "row 3"),
    ):
        with engine(failing) as llm:
            with pytest.raises(error, match=message):
                llm.generate([PROMPTS[0]], params, use_tqdm=False)
            with pytest.raises(error):  # nor does a half-made one stay
                llm.generate([PROMPTS[0]], params, use_tqdm=False)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (None, TypeError, "OfNobody returned NoneType, and must return a tensor"),
        (torch.zeros(VOCAB_SIZE), ValueError, r"torch.float32 of shape \[12\]"),
        (torch.zeros(1, VOCAB_SIZE), ValueError, r"of shape \[2, 12\]"),
        (torch.zeros(2, VOCAB_SIZE, dtype=torch.int64), ValueError, "torch.int64"),
    ],
)
def test_results_that_are_no_logits(result: Any, error: type, message: str) -> None:
    processor = VllmProcessor(OfNobody, None)
    states, logits = [make_state(1), make_state(2)], torch.ones(2, VOCAB_SIZE)
    processor(logits, states)
    processor._processor.result = result
    with pytest.raises(error, match=message):
        processor(logits, states)


def test_results_of_requests_that_are_no_logits() -> None:
    class Scalar(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            def half(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
                return logits.mean()

            return half

    with pytest.raises(ValueError, match=r"half returned torch.float32 of shape \[\], and must"):
        VllmProcessor(Scalar, None)(torch.ones(1, VOCAB_SIZE), [make_state(1)])
