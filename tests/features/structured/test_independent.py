"""Grammars and draft tokens know nothing of each other: alone or together, the same tokens.

What is compared is an engine without draft tokens, jump-forward tokens included, and in which each
request is alone.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from proposers import speculation_of
from tiny_checkpoints import TINY_QWEN3, make_qwen3

from nanoserve import LLM, SamplingParams, StructuredOutputsParams
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.draft_room import add_draft_tokens, reserve_draft_tokens
from nanoserve.engine.executor import ForwardInputs, SampleInputs, StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.plan import Plan
from nanoserve.engine.sequence import Sequence
from nanoserve.features.speculative.goodput import Goodput
from nanoserve.features.speculative.hidden_head import HiddenHead
from nanoserve.models.layers.context import ParallelContext
from nanoserve.outputs import RequestOutput
from nanoserve.worker.build_executor import make_runner

pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
from grammars import PERSON

from nanoserve.features.structured import extension as structured_extension
from nanoserve.features.structured.extension import COMPILING, StructuredOutputs
from nanoserve.features.structured.grammar import Source

VOCAB_SIZE, EOS = 2048, 2
MAX_MODEL_LEN = 64
SIZES: dict[str, Any] = {"tokenizer": "tiny-qwen3", "max_model_len": MAX_MODEL_LEN}
TINY = {
    "block_size": 4,
    "num_kv_blocks": MAX_MODEL_LEN // 4 + 2,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
}

Answer = list[tuple[list[int], str, str | None, Any]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_qwen3(path, vocab_size=VOCAB_SIZE)
    HiddenHead.untrained(TINY_QWEN3["hidden_size"], 32).save(path / "head.bin")
    return path


# ---------------------------------------------------------------- what is requested

GUIDES: list[dict[str, Any]] = [
    {"json": PERSON},
    {"choice": ["block table", "block", "KV cache", "preemption"]},
    {"regex": r"(yes|no|maybe), [0-9]{2,4}!"},
    {"regex": r"([a-c]{2} is a letter, ){2}and [0-9]"},
    {"grammar": 'root ::= "x" [0-9]+ ("," root)?'},
    {"regex": r"[a-z ]*"},
]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_k": 20, "logprobs": 1},
    {"temperature": 0, "repetition_penalty": 1.3, "stop": ["e"]},
    {"temperature": 1.0, "seed": 7, "n": 2, "top_p": 0.9},
    {"temperature": 0, "min_tokens": 6, "logit_bias": {EOS: 5.0}},
]


@dataclass
class Request:
    prompt: list[int]
    params: SamplingParams
    answer: Answer = field(default_factory=list)


def make_requests(kind: str) -> dict[str, Request]:
    """Return requests by id: "guided" ones, "plain" ones, or "both" of them in turns."""
    requests = {}
    for number, settings in enumerate(SETTINGS):
        for which in ("guided", "plain"):
            if kind not in (which, "both"):
                continue
            guide = StructuredOutputsParams(**GUIDES[number]) if which == "guided" else None
            params = SamplingParams(max_tokens=24, structured_outputs=guide, **settings)
            # Prompts that repeat themselves, so that a lookup finds something, and share a prefix.
            prompt = [7, 8, 9, 10, 11, 12] * 2 + [20 + number, 30, 31] * (1 + number % 3)
            requests[f"{which} {number}"] = Request(prompt, params)
    return requests


def answer_of(output: RequestOutput) -> Answer:
    assert output.error is None, output.error
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[str, Answer]:
    options = {"structured_outputs_config": {"jump_forward": False}, "num_kv_blocks": 64}
    with LLM(path, enable_prefix_caching=False, **options, **SIZES) as llm:
        answers = {
            request_id: answer_of(llm.generate([request.prompt], request.params, use_tqdm=False)[0])
            for request_id, request in make_requests("both").items()
        }
        assert llm.stats.num_draft_tokens == 0
    assert sum(len(ids) for answer in answers.values() for ids, *_ in answer) > 150
    return answers


def live(
    llm: LLM, requests: dict[str, Request], aborts: dict[int, str]
) -> tuple[dict[str, Answer], dict[str, Answer]]:
    """Let requests arrive one by one, abort some after so many steps; returns what they got, and
    what the aborted ones did."""
    engine, waiting = llm.engine, deque(requests.items())
    finished: dict[str, RequestOutput] = {}
    aborted: dict[str, RequestOutput] = {}
    num_steps = 0
    while waiting or engine.has_unfinished_requests():
        if waiting and num_steps % 2 == 0:
            request_id, request = waiting.popleft()
            engine.add_request(request_id, request.prompt, request.params)
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check()
        num_steps += 1
        output = engine.abort_request(aborts.get(num_steps, "none"))
        if output is not None:
            aborted[output.request_id] = output
        assert num_steps < 5000, "the run does not end"
    return tuple({i: answer_of(o) for i, o in outputs.items()} for outputs in (finished, aborted))


# ---------------------------------------------------------------- how it is computed


class FixedDrafts(Extension):
    """A reader's extension: draft tokens from a fixed list for each request.

    The list is what a request is known to get, in which now and then a token is another one: what
    its grammar forbids, what ends it, what comes later. keeps_filters: whether draft tokens are cut
    where the grammar forbids them before they are computed.
    """

    def __init__(
        self, engine: GuardedEngine, lists: dict[str, Answer], keeps_filters: bool
    ) -> None:
        self._scheduler, self._lists, self._keeps_filters = engine.scheduler, lists, keeps_filters
        self._rng = random.Random(0)
        self.num_illegal = 0

    def limit_tokens(self, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        return 0 if seq.num_pending else num_tokens  # draft tokens go behind known ones only

    def extend_plan(self, plan: Plan) -> None:
        for index, row in enumerate(plan.rows):
            if row.start >= row.seq.num_prompt_tokens:
                drafts = self._drafts(row.seq)
                is_legal = plan.draft_filters.get(row.seq, lambda token_ids: token_ids)
                self.num_illegal += is_legal(drafts) != drafts
                if self._keeps_filters:
                    add_draft_tokens(self._scheduler, plan, index, drafts)
                elif row.seq not in plan.draft_tokens:
                    count = reserve_draft_tokens(self._scheduler, plan, row, len(drafts))
                    plan.set_draft_tokens(index, drafts[:count])

    def _drafts(self, seq: Sequence) -> list[int]:
        token_ids = self._lists[seq.request_id][seq.index][0]
        drafts = token_ids[seq.num_output_tokens :][: self._rng.randint(1, 5)]
        drafts += self._rng.choice([[], [], [EOS], [self._rng.randrange(VOCAB_SIZE)]])
        if drafts and self._rng.random() < 0.4:
            drafts[self._rng.randrange(len(drafts))] = self._rng.randrange(VOCAB_SIZE)
        return drafts


@dataclass
class Launched:
    batch: Batch
    inputs: ForwardInputs
    sample_inputs: SampleInputs = field(default_factory=SampleInputs)


class TwoStages:
    """Plays a pipeline in one process: a step runs when it is collected, two later than others."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, path: Path, second_models: Any = ()
    ) -> None:
        own = replace(config, pipeline_parallel_size=1, async_scheduling=False)
        self.runner = make_runner(own, model_config, path, ParallelContext())
        memory = np.zeros(3 * self.runner.layout.num_bytes, np.uint8)
        self.runner.use_memory(memory)
        self.num_kv_blocks, self.max_model_len = self.runner.num_kv_blocks, MAX_MODEL_LEN
        self.launched: deque[Launched] = deque()
        self.most_under_way = 0

    def next_batch(self) -> Batch:
        return self.runner.next_batch()

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Launched:
        self.launched.append(Launched(batch, inputs))
        self.most_under_way = max(self.most_under_way, len(self.launched))
        return self.launched[-1]

    def sample(self, step: Launched, inputs: SampleInputs) -> None:
        step.sample_inputs = inputs

    def collect(self, step: Launched) -> StepResult:
        assert self.launched.popleft() is step
        handle = self.runner.forward(step.batch, step.inputs)
        self.runner.sample(handle, step.sample_inputs)
        return self.runner.collect(handle)

    def cancel(self, handles: list[Launched]) -> None:
        self.launched.clear()

    def close(self) -> None:
        self.runner.close()


METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model", "dtype": "float32"},
    "hidden_head": {"method": "hidden_head"},
}
READERS = ["fixed list", "fixed list, not filtered", "ngram and fixed list"]
KINDS = ["no draft tokens", "jump-forward", *METHODS, *READERS]
PLACES: dict[str, dict[str, Any]] = {
    "alone": {"num_kv_blocks": 256},
    "tiny pool, async": {**TINY, "async_scheduling": True},
    "tiny pool, two stages": {**TINY, "pipeline_parallel_size": 2},
}


def open_llm(kind: str, place: str, path: Path, **more: Any) -> LLM:
    options = SIZES | PLACES[place] | more
    options["structured_outputs_config"] = {"jump_forward": kind != "no draft tokens"}
    method = METHODS.get(kind.split()[0])
    if method is not None:
        models = {"draft_model": path, "hidden_head": path / "head.bin"}
        if method["method"] in models:
            method = method | {"model": str(models[method["method"]])}
        drafts = method | {"num_speculative_tokens": 4, "adaptive": False}
        options["speculative_config"] = drafts
    return LLM(path, **options)


def left_behind(llm: LLM) -> list[Any]:
    """Return what extensions still keep of sequences."""
    left: list[Any] = []
    for extension in llm.engine.extensions:
        for name in ("_guided", "_forced", "_compilations", "_records", "_drafted", "_foreign"):
            left += getattr(extension, name, ())
    return left


def structured_outputs_of(engine: GuardedEngine) -> StructuredOutputs:
    (extension,) = (e for e in engine.extensions if isinstance(e, StructuredOutputs))
    return extension


def possible(kind: str, place: str) -> bool:
    return not (kind == "hidden_head" and "stages" in place)  # it is refused


# Without --full: every kind once, in the place that shows most of it, and one in each other place.
SMALL = [("no draft tokens", "alone"), ("ngram and fixed list", "tiny pool, two stages")]
SMALL += [(kind, "tiny pool, async") for kind in KINDS if kind != "no draft tokens"]
CASES = [
    pytest.param(kind, place, marks=[] if (kind, place) in SMALL else pytest.mark.size("full"))
    for place in PLACES
    for kind in KINDS
    if possible(kind, place)
]


@pytest.mark.parametrize(("kind", "place"), CASES)
def test_a_request_gets_what_it_gets_without_draft_tokens(
    kind: str,
    place: str,
    path: Path,
    expected: dict[str, Answer],
    full_size: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts without a grammar, grammars without drafts, and both in one engine."""
    if "stages" in place:
        monkeypatch.setattr("nanoserve.build.make_executor", TwoStages)
    with open_llm(kind, place, path) as llm:
        if kind in READERS:
            is_kept = "not filtered" not in kind
            reader = FixedDrafts(llm.engine, expected, is_kept)
            llm.engine.add_extension(reader)
        for load in ("plain", "guided", "both") if full_size else ("plain", "both"):
            before, requests = llm.stats, make_requests(load)
            num_grammars = sum(isinstance(e, StructuredOutputs) for e in llm.engine.extensions)
            assert num_grammars == (0 if load == "plain" else num_grammars)
            ids = list(requests)
            aborts = {} if place == "alone" else {7: ids[2], 16: ids[3], 30: ids[-1]}
            finished, aborted = live(llm, requests, aborts)
            assert finished.keys() | aborted.keys() == requests.keys()
            for request_id, answer in finished.items():
                assert answer == expected[request_id], (load, request_id)
            for request_id, answer in aborted.items():
                for (token_ids, *_), (whole, *_) in zip(answer, expected[request_id], strict=True):
                    assert whole[: len(token_ids)] == token_ids, (load, request_id)
            assert not left_behind(llm), load
            # At first there are no finished texts to look anything up in.
            has_none = kind == "no draft tokens" or (
                load == "plain" and kind in ("jump-forward", "suffix")
            )
            assert has_none or llm.stats.num_draft_tokens > before.num_draft_tokens
            assert place == "alone" or llm.stats.num_preemptions > 0
        assert sum(isinstance(e, StructuredOutputs) for e in llm.engine.extensions) == 1
        stats = llm.stats
        if kind == "no draft tokens":
            assert stats.num_draft_tokens == 0
        elif kind != "hidden_head":  # it is untrained
            assert stats.num_accepted_tokens > 10
        if kind in READERS:
            assert reader.num_illegal > 5
        if "stages" in place:
            assert llm.engine.executor.most_under_way == 2
        scheduler = llm.engine.scheduler
        assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks


@pytest.mark.size("full")
@pytest.mark.parametrize("kind", ["jump-forward", "draft_model", "fixed list, not filtered"])
def test_two_stages_in_two_processes(kind: str, path: Path, expected: dict[str, Answer]) -> None:
    with open_llm(kind, "tiny pool, two stages", path) as llm:
        if kind in READERS:
            llm.engine.add_extension(FixedDrafts(llm.engine, expected, keeps_filters=False))
        finished, _ = live(llm, make_requests("both"), {})
        assert finished == expected
        assert llm.stats.num_accepted_tokens > 10 and not left_behind(llm)


def test_the_proposers_are_those_that_were_chosen(path: Path) -> None:
    """So the kinds above are no four names for one."""
    names = set()
    for kind in METHODS:
        with open_llm(kind, "alone", path) as llm:
            names.add(type(speculation_of(llm).proposer).__name__)
    assert names == {"NgramProposer", "SuffixProposer", "DraftModelProposer", "HeadProposer"}


# ---------------------------------------------------------------- ends that are undone


class Broken(RuntimeError):
    """What breaks a step, once."""


@pytest.fixture(params=[False, True], ids=["", "async"])
def llm(path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(path, num_kv_blocks=64, async_scheduling=request.param, **SIZES) as llm:
        yield llm
        assert not left_behind(llm)


def break_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool]
) -> list[Broken]:
    """Let a method raise in the place of its first call for which `when` is true."""
    method, broken = getattr(owner, name), []

    def raise_once(*args: Any) -> Any:
        if not broken and when(*args):
            broken.append(Broken())
            raise broken[0]
        return method(*args)

    monkeypatch.setattr(owner, name, raise_once)
    return broken


def finish_all(engine: GuardedEngine) -> tuple[dict[str, Answer], int]:
    """Step to the end, over steps that break; returns the answers and how many have."""
    finished, num_broken = {}, 0
    while engine.has_unfinished_requests():
        try:
            outputs = engine.step()
        except Broken:
            num_broken += 1
            continue
        finished |= {o.request_id: answer_of(o) for o in outputs if o.finished}
    return finished, num_broken


def ends(request_id: str) -> Callable[..., bool]:
    """Return whether a sequence of this request has ended with the step that is processed."""
    return lambda plan, *_: any(
        row.seq.finished for row in plan.sampled if row.seq.request_id == request_id
    )


GUIDED = list(make_requests("guided"))


@pytest.mark.small(request_id=["guided 0", "guided 3", "guided 4"])
@pytest.mark.parametrize("request_id", GUIDED)
def test_a_sequence_whose_end_is_undone_keeps_its_grammar(
    request_id: str,
    llm: LLM,
    expected: dict[str, Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The output processor fails when a step has ended it, with neighbours beside it."""
    engine, requests = llm.engine, make_requests("both")
    chosen = [request_id, "guided 1", "plain 1"]
    for name in dict.fromkeys(chosen):
        engine.add_request(name, requests[name].prompt, requests[name].params)
    broken = break_once(monkeypatch, engine.output_processor, "process", ends(request_id))
    finished, num_broken = finish_all(engine)
    assert finished == {name: expected[name] for name in chosen}
    assert num_broken == 1 and request_id in broken[0].request_ids


def test_it_waits_for_its_grammar_if_that_has_to_be_compiled_again(
    llm: LLM, expected: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = llm.engine, make_requests("guided")["guided 4"]  # two completions
    engine.add_request("guided 4", request.prompt, request.params)
    extension = structured_outputs_of(engine)
    while not extension._guided:
        engine.step()
    orders: list[tuple[Source, Future[Any]]] = []

    def compile_later(source: Source) -> "Future[Any]":
        orders.append((source, Future()))
        return orders[-1][1]

    compile_now = extension._compiler.compile
    monkeypatch.setattr(extension._compiler, "compile", compile_later)
    break_once(monkeypatch, engine.output_processor, "process", ends("guided 4"))
    with pytest.raises(Broken):
        while engine.has_unfinished_requests():
            engine.step()
    engine.scheduler.check()
    held = set(engine.scheduler.held)
    for _ in range(60):  # its sibling goes on to its end
        assert not any(output.finished for output in engine.step())
    assert held and held == engine.scheduler.held
    assert all(seq.held_for == {COMPILING} and seq.num_output_tokens > 0 for seq in held)
    ((source, future),) = orders
    future.set_result(compile_now(source).result(30))
    assert finish_all(engine) == ({"guided 4": expected["guided 4"]}, 0)


def test_an_abort_that_is_undone_leaves_the_grammar(
    llm: LLM, expected: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails when the sequences have ended and the output is made."""
    engine, request = llm.engine, make_requests("guided")["guided 4"]
    engine.add_request("guided 4", request.prompt, request.params)
    for _ in range(4):
        engine.step()
    break_once(monkeypatch, engine.output_processor, "_output", lambda request, _: request.finished)
    with pytest.raises(Broken):
        engine.abort_request("guided 4")
    engine.scheduler.check()
    assert finish_all(engine) == ({"guided 4": expected["guided 4"]}, 0)


def test_what_jump_forward_takes_says_nothing_of_a_proposers_costs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a step in which such tokens end their request."""
    recorded: list[int] = []
    record_step = Goodput.record_step

    def record(self: Goodput, num_rows: int, num_drafts: int, *rest: Any) -> None:
        recorded.append(num_drafts)
        record_step(self, num_rows, num_drafts, *rest)

    monkeypatch.setattr(Goodput, "record_step", record)
    drafts = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
    with LLM(path, num_kv_blocks=64, speculative_config=drafts, **SIZES) as llm:
        monkeypatch.setattr(speculation_of(llm).proposer, "draft", lambda seq, most: [])
        guide = StructuredOutputsParams(regex="[0-9] blocks of 16 tokens")
        params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=guide)
        for _ in range(10):
            llm.generate([[5, 6, 7]] * 2, params, use_tqdm=False)
        llm.generate([5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
        assert llm.stats.num_accepted_tokens > 50
        assert not left_behind(llm)
    assert recorded and not any(recorded)


def test_a_planted_bug_is_seen(
    llm: LLM, expected: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that is lost with an end that is undone makes a difference."""

    def forget_all(self: StructuredOutputs) -> None:
        self._forced.clear()

    monkeypatch.setattr(structured_extension.StructuredOutputs, "on_reset", forget_all)
    engine, request = llm.engine, make_requests("guided")["guided 2"]
    engine.add_request("guided 2", request.prompt, request.params)
    break_once(monkeypatch, engine.output_processor, "process", ends("guided 2"))
    finished, num_broken = finish_all(engine)
    assert num_broken == 1 and finished["guided 2"] != expected["guided 2"]
