"""Between any two bytecodes: Ctrl-C, once and twice, an exception, an abort, a collection.

Requests run through a small pool, with preemption, an abort, streams. Whatever happens at whatever
bytecode, the engine is consistent at once, nobody else gets another token, and nothing is left.
"""

import gc
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from counting_executor import byte_tokenizer, make_engine
from injector import Injector, Moment, Recorder, last_of_its_like, looks_for_signals

import nanoserve
from nanoserve import RequestOutput, RequestOutputKind, SamplingParams
from nanoserve.engine import interrupts
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.output_queues import OutputQueues
from nanoserve.streams import Streams

PACKAGE = Path(nanoserve.__file__).parent
FILES = {str(file) for file in (PACKAGE / "engine").glob("*.py")} | {str(PACKAGE / "streams.py")}
NUM_BLOCKS = 7
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


class Mishap(Exception):
    """What nobody could expect."""


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
STREAMED = {"d": [90, 91], "e": [100, 101, 102], "g": [32, 33]}


class Scenario:
    """The same calls every time. What an injected exception has ended is called again."""

    def __init__(self, ahead: bool) -> None:
        self.engine = make_engine(
            byte_tokenizer(),
            num_kv_blocks=NUM_BLOCKS,
            block_size=4,
            max_model_len=NUM_BLOCKS * 4,
            max_num_seqs=4,
            max_num_batched_tokens=8,
            async_scheduling=ahead,
        )
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
        self._stream()
        self._again(self.engine.close)

    def check_that_nothing_is_left(self) -> None:
        assert self.engine.executor.closed
        self._check()
        assert not self.engine.output_processor.requests
        assert not self.engine.loop.outputs and not self.engine.loop.outputs._queues
        assert not self.engine.output_processor._detokenizer._streams
        assert self.engine.scheduler.block_manager.num_free_blocks == NUM_BLOCKS
        assert not self.engine._lock.is_inside and not self.engine._lock._deferred
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

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
                self.engine.add_request(name, *REQUESTS[name])

        self._again(add)

    def _abort(self, name: str) -> None:
        self.torn.add(name)
        output = self._again(lambda: self.engine.abort_request(name))
        if output is not None:
            self._take(output)

    def _step(self) -> None:
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
            is_delta = key[0] in STREAMED or REQUESTS[key[0]][1].output_kind is DELTA
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
    deliveries = (GuardedEngine.step.__code__, OutputQueues.take.__code__)
    return frame.f_code in deliveries and not looks_for_signals(frame)


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


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "one step ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def recorded(ahead: bool) -> Iterator[tuple[list[Moment], dict[tuple[str, int], Any]]]:
    """Every bytecode that the scenario runs, in order, and its answers.

    The collector comes when it is called and at no other moment, so that every run is the same one.
    """
    gc.disable()
    with Recorder(FILES):
        Scenario(ahead).run()  # modules are imported, and Python 3.12 begins to tell of bytecodes
    scenario = Scenario(ahead)
    with Recorder(FILES) as recorder:
        scenario.run()
    assert scenario.engine.scheduler.num_preemptions > 0
    gc.collect()
    gc.freeze()  # so that a collection is quick
    yield recorder.moments, answers(scenario)
    gc.enable()


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
    ahead: bool,
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
        inject(action, ahead, moments[number], None, expected)


def test_a_second_ctrl_c_may_come_at_any_moment_after_the_first(
    ahead: bool, recorded, by_size: Callable[..., int]
) -> None:
    moments, expected = recorded
    rng = random.Random(2)
    for number in points(moments, 3, by_size(400, 40, 5)):
        inject(interrupt, ahead, moments[number], rng.randint(1, 300), expected)


def inject(
    action: Callable[[Scenario, FrameType], None],
    ahead: bool,
    moment: Moment,
    again: int | None,
    expected: dict[tuple[str, int], Any],
) -> None:
    scenario = Scenario(ahead)
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
