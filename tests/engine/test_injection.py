"""Between any two bytecodes: Ctrl-C, once and twice, an exception, an abort, a collection.

Requests run through a small pool, with preemption, an abort, streams. Whatever happens at whatever
bytecode, the engine is consistent at once, no other request gets another token, and nothing is
left. Engines also run with draft tokens and grammars, and as a pipeline.
"""

import gc
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from counting_executor import byte_tokenizer, make_engine
from fake_grammars import FakeCompiler, HalfRight, guided_by
from injector import Injector, Moment, Recorder, last_of_its_like, looks_for_signals

import nanoserve
from nanoserve import RequestOutput, RequestOutputKind, SamplingParams
from nanoserve.engine import interrupts
from nanoserve.engine.extension import Extension
from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.parallel.pipeline_schedule import PipelineSchedule
from nanoserve.features.speculative.extension import Speculation
from nanoserve.features.streams import Streams
from nanoserve.features.structured import backends, extension
from nanoserve.features.structured.extension import StructuredOutputs

PACKAGE = Path(nanoserve.__file__).parent
FILES = {str(file) for file in (PACKAGE / "engine").glob("*.py")} | {
    str(PACKAGE / name)
    for name in (
        "features/streams.py",
        "features/speculative/extension.py",
        "features/structured/extension.py",
        "features/structured/constrained_sequence.py",
    )
}
NUM_BLOCKS = 7
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


class Mishap(Exception):
    """An exception that no code expects."""


class Cycle:
    """Only the collector finds it."""

    def __init__(self, held: Any) -> None:
        self.held, self.itself = held, self


def params(max_tokens: int, kind: RequestOutputKind, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, output_kind=kind, **settings)


REQUESTS: dict[str, tuple[list[int], SamplingParams]] = {
    "a": ([65, 66, 67], params(9, DELTA, stop="PQ")),
    "b": ([70, 71], params(6, FINAL_ONLY, n=2)),
    "c": (list(range(65, 75)), params(5, CUMULATIVE, stop=["OP"], min_tokens=2)),
    "victim": ([80], params(30, DELTA)),
}
# The grammar of "f" is there at once, that of "h" later; that of "k" cannot be compiled, and that
# of "gone" takes longer than this lasts.
GUIDED: dict[str, tuple[list[int], SamplingParams]] = {
    "f": ([71], params(12, DELTA, structured_outputs=guided_by("(abc)def(gh)ijk"))),
    "h": ([72], params(6, CUMULATIVE, n=2, structured_outputs=guided_by("x(01)yz(01)z", 20))),
    "k": ([73], params(6, FINAL_ONLY, structured_outputs=guided_by("", 21))),
    "gone": ([74], params(6, FINAL_ONLY, structured_outputs=guided_by("abc", 10**6))),
}
STREAMED = {"d": [90, 91], "e": [100, 101, 102], "g": [32, 33]}


@dataclass(frozen=True)
class Kind:
    """What an engine is made of. With `extended`, it has draft tokens and grammars."""

    ahead: bool = False
    extended: bool = False
    num_stages: int = 1


KINDS = {
    "in turn": Kind(),
    "one step ahead": Kind(ahead=True),
    "extended": Kind(extended=True),
    "extended, one step ahead": Kind(ahead=True, extended=True),
    "three stages": Kind(num_stages=3),
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}


class Scenario:
    """The same calls every time. What an injected exception has ended is called again."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.engine = make_engine(
            byte_tokenizer(),
            num_kv_blocks=NUM_BLOCKS,
            block_size=4,
            max_model_len=NUM_BLOCKS * 4,
            max_num_seqs=4,
            max_num_batched_tokens=8,
            async_scheduling=kind.ahead,
            pipeline_parallel_size=kind.num_stages,
            speculative_config=DRAFTS if kind.extended else None,
        )
        if kind.extended:
            self.engine.add_extension(Speculation(self.engine, lambda *of_engine: HalfRight()))
        if kind.num_stages > 1:
            self.engine.add_extension(PipelineSchedule(self.engine))
        self.streams = Streams(self.engine)
        self.texts: dict[tuple[str, int], str] = {}
        self.token_ids: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str | None] = {}
        self.torn: set[str] = set()  # streams that an exception has ended
        self.garbage: Cycle | None = None

    def run(self) -> None:
        for name in ("a", "victim", "b"):
            self._add(name)
        self._step()
        self._step()
        self._add("c")
        while self._again(self.engine.has_unfinished_requests):
            self._step()
            if len(self.token_ids.get(("victim", 0), [])) == 20:
                self._abort("victim")
        if self.kind.extended:
            self._guide()
        self._stream()
        self._again(self.engine.close)

    def check_that_nothing_is_left(self) -> None:
        assert self.engine.executor.closed
        self._check()
        assert not self.engine.output_processor.requests
        assert not self.engine.loop.outputs and not self.engine.loop.outputs._queues
        assert not self.engine.output_processor._detokenizer._streams
        for each in self.engine.extensions:
            self._check_extension(each)
        assert self.engine.scheduler.block_manager.num_free_blocks == NUM_BLOCKS
        assert not self.engine._lock.is_inside and not self.engine._lock._deferred
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def _check_extension(self, each: Extension) -> None:
        """Check that it keeps nothing of any sequence."""
        names = {
            Speculation: ["_records", "_drafted", "_foreign"],
            StructuredOutputs: ["_guided", "_forced", "_compilations"],
            PipelineSchedule: ["_under_way", "_held_back"],
        }
        left = {name: getattr(each, name) for name in names[type(each)]}
        assert not any(left.values()), left
        if isinstance(each, StructuredOutputs):
            assert each._compiler.is_closed

    def _guide(self) -> None:
        """Four requests with grammars, of which one is aborted before it begins."""
        for name in GUIDED:
            self._add(name)
        for _ in range(3):
            self._step()
        self._abort("gone")
        while self._again(self.engine.has_unfinished_requests):
            self._step()

    def _stream(self) -> None:
        """Three streams: one is read to its end, one is closed, one is forgotten."""
        streams = {name: self._open(name) for name in STREAMED}
        for name in STREAMED:
            self._next(name, streams)
        self.garbage = Cycle(streams.pop("g"))
        self._next("e", streams)
        self._again(streams["d"].close)
        gc.collect()
        self.garbage = None
        while self._next("e", streams):
            pass
        gc.collect()
        streams.clear()
        self._again(self.streams.check_others)
        assert not self._again(self.engine.has_unfinished_requests)

    def _open(self, name: str) -> Iterator[RequestOutput]:
        def open_it() -> Iterator[RequestOutput]:
            prompt, how = STREAMED[name], params(7, DELTA)
            self.streams.check_others()  # as `LLM.stream` does
            return self.streams.open(self.engine.input_processor.process(name, prompt, how))

        return self._again(open_it)

    def _next(self, name: str, streams: dict[str, Iterator[RequestOutput]]) -> bool:
        """Whether there is more. An exception ends a stream, but no other one."""
        try:
            output = next(streams[name], None)
        except (Mishap, KeyboardInterrupt):
            self.torn.add(name)
            self._check()
            return True
        if output is not None:
            self._take(output)
        return output is not None

    def _add(self, name: str) -> None:
        def add() -> None:
            if name not in self.engine.output_processor.requests:
                self.engine.add_request(name, *(REQUESTS | GUIDED)[name])

        self._again(add)

    def _abort(self, name: str) -> None:
        self.torn.add(name)
        output = self._again(lambda: self.engine.abort_request(name))
        if output is not None:
            self._take(output)

    def _step(self) -> None:
        for each in self.engine.extensions:
            if isinstance(each, StructuredOutputs):
                each._compiler.tick()
        for output in self._again(self.engine.step):
            self._take(output)

    def _again(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return call()
            except (Mishap, KeyboardInterrupt):
                self._check()

    def _check(self) -> None:
        """Uninterrupted: nothing that this calls is the engine's own doing."""
        trace = sys.gettrace()
        sys.settrace(None)
        self.engine.scheduler.check()
        scheduler, requests = self.engine.scheduler, self.engine.output_processor.requests
        queued = {*scheduler.running, *scheduler.waiting, *scheduler.held}
        unfinished = {s for r in requests.values() for s in r.sequences if not s.finished}
        assert queued == unfinished
        sys.settrace(trace)

    def _take(self, output: RequestOutput) -> None:
        if isinstance(output.error, Mishap):  # in the making of its text, which ends it alone
            self.torn.add(output.request_id)
        for completion in output.outputs:
            key = output.request_id, completion.index
            is_delta = key[0] in STREAMED or (REQUESTS | GUIDED)[key[0]][1].output_kind is DELTA
            old = (self.texts.get(key, ""), self.token_ids.get(key, [])) if is_delta else ("", [])
            self.texts[key] = old[0] + completion.text
            self.token_ids[key] = old[1] + completion.token_ids
            self.reasons[key] = completion.finish_reason


def answers(scenario: Scenario) -> dict[tuple[str, int], tuple[str, list[int], str | None]]:
    return {
        key: (scenario.texts[key], token_ids, scenario.reasons[key])
        for key, token_ids in scenario.token_ids.items()
    }


def compare(scenario: Scenario, expected: dict[tuple[str, int], Any]) -> None:
    """Who was aborted, or whose reader was ended, has a part of it."""
    got = answers(scenario)
    for key, (text, token_ids, reason) in expected.items():
        if key[0] in {*scenario.torn, "victim", "d", "g"}:
            own_text, own_ids, _ = got.get(key, ("", [], None))
            assert token_ids[: len(own_ids)] == own_ids or key[0] == "victim"
            assert text.startswith(own_text) or key[0] == "victim"
        else:
            assert got[key] == (text, token_ids, reason), key


def is_delivering(frame: FrameType) -> bool:
    """A step's outputs are on their way to the caller, who alone has them: without a call."""
    return frame.f_code is GuardedEngine.step.__code__ and not looks_for_signals(frame)


def fail(scenario: Scenario, frame: FrameType) -> None:
    """Not in what holds a Ctrl-C back, which is for that alone."""
    if not (is_delivering(frame) or frame.f_code.co_filename == interrupts.__file__):
        raise Mishap


def interrupt(scenario: Scenario, frame: FrameType) -> None:
    """In what holds one back, and where a step delivers, only where it can come."""
    is_hold = frame.f_code.co_filename == interrupts.__file__
    if looks_for_signals(frame) or not (is_hold or is_delivering(frame)):
        signal.raise_signal(signal.SIGINT)


def abort(scenario: Scenario, frame: FrameType) -> None:
    output = scenario.engine.abort_request("victim")
    if output is not None:
        scenario._take(output)


def collect(scenario: Scenario, frame: FrameType) -> None:
    """A stream ends here, in a finalizer."""
    scenario.garbage = None
    gc.collect()


ACTIONS = [fail, interrupt, abort, collect]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    if KINDS[request.param].extended:  # parameters are checked for it, though a fake compiles
        pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(extension, "make_compiler", FakeCompiler)
        patched.setattr(backends, "check", lambda *source: None)
        yield KINDS[request.param]


@pytest.fixture(scope="module")
def recorded(kind: Kind) -> Iterator[tuple[list[Moment], dict[tuple[str, int], Any]]]:
    """Every bytecode that the scenario runs, in order, and its answers.

    The collector comes when it is called and at no other moment, so that every run is the same one.
    """
    gc.disable()
    with Recorder(FILES):
        Scenario(kind).run()  # modules are imported, and Python 3.12 begins to tell of bytecodes
    scenario = Scenario(kind)
    with Recorder(FILES) as recorder:
        scenario.run()
    assert scenario.engine.scheduler.num_preemptions > 0
    if kind.extended:
        check_that_much_was_drafted(scenario)
    gc.collect()
    gc.freeze()  # so that a collection is quick
    yield recorder.moments, answers(scenario)
    gc.enable()


def check_that_much_was_drafted(scenario: Scenario) -> None:
    """Without draft tokens, accepted and rejected ones, there is nothing to see."""
    stats, got = scenario.engine.stats, answers(scenario)
    assert 10 < stats.num_accepted_tokens < stats.num_draft_tokens - 5
    assert got["f", 0][:1] + got["f", 0][2:] == ("adefgijk", "stop")
    assert {got["h", index][0] for index in (0, 1)} == {"x0yz0z"}
    assert got["k", 0][2] == "error"
    assert got["gone", 0][2] == "abort"


def points(moments: list[Moment], seed: int, stride: int, offset: int = 0) -> list[int]:
    """Where to act: at each bytecode when it is first run, and at 200 of the later visits.

    Of moments that are all the same to whoever is hit, the last one stands for the others. A
    `stride` leaves some of them out.
    """
    rng = random.Random(seed)
    first: dict[tuple[CodeType, int], int] = {}
    for number, moment in enumerate(moments):
        first.setdefault(moment[:2], number)
    numbers = [*first.values(), *rng.sample(range(len(moments)), 200)]
    return [*dict.fromkeys(last_of_its_like(moments, number) for number in numbers)][offset::stride]


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_what_happens_between_two_bytecodes_is_nobody_elses_loss(
    action: Callable[[Scenario, FrameType], None],
    kind: Kind,
    recorded,
    by_size: Callable[..., int],
) -> None:
    moments, expected = recorded
    stride = by_size(400, 16, 1)
    if action not in (fail, interrupt):
        # They change nothing at once, but leave a note: half as many points, which take as long.
        stride *= 2
    # What one action leaves out at smaller sizes is where another one acts.
    offset = ACTIONS.index(action) * stride // len(ACTIONS)
    for number in points(moments, 1, stride, offset):
        inject(action, kind, moments[number], None, expected)


def test_a_second_ctrl_c_may_come_at_any_moment_after_the_first(
    kind: Kind, recorded, by_size: Callable[..., int]
) -> None:
    moments, expected = recorded
    rng = random.Random(2)
    for number in points(moments, 3, by_size(400, 40, 5)):
        inject(interrupt, kind, moments[number], rng.randint(1, 300), expected)


def inject(
    action: Callable[[Scenario, FrameType], None],
    kind: Kind,
    moment: Moment,
    again: int | None,
    expected: dict[tuple[str, int], Any],
) -> None:
    scenario = Scenario(kind)
    try:
        with Injector(FILES, lambda frame: action(scenario, frame), moment, again) as injector:
            scenario.run()
        assert injector.acted
        scenario.check_that_nothing_is_left()
        compare(scenario, expected)
    except BaseException as error:
        code = moment.code
        where = f"{Path(code.co_filename).name}: {code.co_name}, bytecode {moment.offset}"
        raise AssertionError(f"{action.__name__}, {again} ({where}): {error!r}") from error
