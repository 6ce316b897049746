"""The parts around the loop: output queues, the engine's lock, and `reset` after an exception."""

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from counting_executor import CountingExecutor, Handle, byte_tokenizer, make_engine, run
from fake_grammars import FakeCompiler, HalfRight, guided_by

from nanoserve import RequestOutput, RequestOutputKind, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import ForwardInputs, SampleInputs, StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.interrupts import EngineLock
from nanoserve.engine.llm_engine import LLMEngine
from nanoserve.engine.output_processor import OutputProcessor
from nanoserve.engine.output_queues import OutputQueues
from nanoserve.engine.plan import Plan
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.features.parallel.pipeline_schedule import PipelineSchedule
from nanoserve.features.speculative.extension import Speculation
from nanoserve.features.structured import backends, extension
from nanoserve.outputs import CompletionOutput, RequestMetrics

SOON = 10.0  # seconds, for what only a hang would miss
DELTA = RequestOutputKind.DELTA


class Mishap(Exception):
    """What is raised somewhere in the loop."""


# ---------------------------------------------------------------- output queues


def output_of(request_id: str, token_id: int = 0) -> RequestOutput:
    completion = CompletionOutput(0, "", [token_id])
    return RequestOutput(request_id, None, [1], [completion], False, RequestMetrics(0.0))


def test_outputs_go_to_the_subscriber_of_their_request_and_else_to_whoever_takes() -> None:
    queues = OutputQueues()
    own = queues.subscribe("a")
    assert queues.is_subscribed("a") and not queues.is_subscribed("b")
    outputs = [output_of("b", 1), output_of("a", 2), output_of("b", 3), output_of("a", 4)]
    queues.put(outputs)
    assert len(queues) == 2  # a subscriber's outputs are not taken
    assert list(own) == [outputs[1], outputs[3]]
    assert queues.take() == [outputs[0], outputs[2]]
    assert queues.take() == [] and len(queues) == 0 and len(own) == 2


def test_what_did_not_reach_the_caller_is_taken_again_in_order() -> None:
    queues = OutputQueues()
    first, second, third = (output_of("a", token) for token in range(3))
    queues.put([first, second])
    taken = queues.take()
    queues.put([third])
    queues.unclaimed[:0] = taken
    assert queues.take() == [first, second, third]


def test_each_output_has_its_place_once_after_an_exception_between_two_of_them() -> None:
    queues = OutputQueues()
    own = queues.subscribe("a")
    # Equal outputs are different ones: a request may get the same tokens twice.
    outputs = [output_of("b"), output_of("a"), output_of("b"), output_of("a")]
    queues.put(outputs[:2])
    queues.put_missing(outputs)
    queues.put_missing(outputs)
    assert [id(output) for output in own] == [id(outputs[1]), id(outputs[3])]
    assert [id(output) for output in queues.take()] == [id(outputs[0]), id(outputs[2])]


def test_unread_outputs_of_a_request_are_known_and_can_be_dropped() -> None:
    queues = OutputQueues()
    own = queues.subscribe("a")
    assert not queues.has("a") and not queues.has("b")
    queues.put([output_of("a"), output_of("b"), output_of("c")])
    assert queues.has("a") and queues.has("b")
    own.popleft()
    assert not queues.has("a")
    queues.drop(["a", "b", "unknown"])
    assert not queues.is_subscribed("a") and not queues.has("b")
    assert [output.request_id for output in queues.take()] == ["c"]


# ---------------------------------------------------------------- the engine's lock


def in_thread(action: Callable[[], Any]) -> Any:
    """Call it in another thread, which must not wait; returns what it returns."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive(), "it waits"
    return results[0]


def test_only_the_thread_that_is_inside_is_the_owner() -> None:
    lock = EngineLock()
    assert not lock.is_inside
    with lock.turn():
        assert lock.is_inside
        assert in_thread(lambda: lock.is_inside) is False
        with lock.turn():  # the thread that is inside may come in again
            assert lock.is_inside
        assert lock.is_inside
    assert not lock.is_inside


def test_another_thread_waits_for_its_turn() -> None:
    lock, events = EngineLock(), []
    has_begun = threading.Event()

    def enter() -> None:
        has_begun.set()
        with lock.turn():
            events.append("other")

    with lock.turn():
        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        assert has_begun.wait(SOON)
        time.sleep(0.05)
        events.append("first")
    thread.join(SOON)
    assert events == ["first", "other"]


def test_an_exception_ends_the_turn() -> None:
    lock = EngineLock()
    with pytest.raises(Mishap), lock.turn():
        raise Mishap
    assert not lock.is_inside
    assert in_thread(lambda: lock.call_soon(lambda: "free")) == "free"


def test_an_action_is_called_at_once_if_no_thread_is_inside() -> None:
    lock = EngineLock()
    assert lock.call_soon(lambda: lock.is_inside) is True
    assert not lock.is_inside

    def fail() -> None:
        raise Mishap

    with pytest.raises(Mishap):
        lock.call_soon(fail)
    assert not lock.is_inside and lock.call_soon(lambda: 7) == 7


def test_deferred_actions_are_called_in_order_at_the_end_of_the_turn() -> None:
    lock, called = EngineLock(), []

    def act(name: str) -> str:
        assert lock.is_inside
        called.append(name)
        return name

    with lock.turn():
        # From within, from another thread, and in another form than at once.
        assert lock.call_soon(lambda: act("a")) is None
        assert in_thread(lambda: lock.call_soon(lambda: act("b"))) is None
        lock.call_soon(lambda: act("not this"), deferred=lambda: act("c"))
        # What a deferred action defers comes behind those that are there.
        lock.call_soon(lambda: lock.call_soon(lambda: act("e")))
        lock.call_soon(lambda: act("d"))
        assert called == []
    assert called == ["a", "b", "c", "d", "e"]
    assert not lock._deferred and not lock.is_inside


def test_the_thread_that_is_inside_may_run_what_was_deferred() -> None:
    lock, called = EngineLock(), []
    with lock.turn():
        lock.call_soon(lambda: called.append(1))
        lock.run_deferred()
        assert called == [1]
    assert called == [1]


def test_what_is_deferred_behind_an_action_that_raises_is_called() -> None:
    lock, called = EngineLock(), []

    def fail() -> None:
        raise Mishap

    with pytest.raises(Mishap), lock.turn():
        lock.call_soon(fail)
        lock.call_soon(lambda: called.append(1))
        lock.run_deferred()
    assert called == [1] and not lock._deferred and not lock.is_inside


class Cycle:
    """Garbage that only the collector finds; then `action` is called."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.itself = self
        weakref.finalize(self, action)


@pytest.mark.parametrize("where", ["outside", "inside", "another thread"])
def test_a_finalizer_may_call_an_action_at_any_moment(where: str) -> None:
    lock, called = EngineLock(), []
    Cycle(lambda: lock.call_soon(lambda: called.append(lock.is_inside)))
    if where == "outside":
        gc.collect()
    else:
        with lock.turn():
            if where == "inside":
                gc.collect()
            else:
                in_thread(gc.collect)
            assert called == []
    assert called == [True]


def test_a_finalizer_in_the_middle_of_a_deferred_action_waits_for_its_end() -> None:
    lock, called = EngineLock(), []
    Cycle(lambda: lock.call_soon(lambda: called.append("finalizer")))

    def act() -> None:
        gc.collect()
        called.append("action")

    lock.call_soon(act)
    assert called == ["action", "finalizer"]


def test_many_threads_take_turns() -> None:
    lock, num_inside, num_calls = EngineLock(), 0, 0

    def act() -> None:
        nonlocal num_inside, num_calls
        num_inside += 1
        assert num_inside == 1
        num_calls += 1
        num_inside -= 1

    def work() -> None:
        for _ in range(200):
            lock.call_soon(act)
            with lock.turn():
                act()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert num_calls == 6 * 200 * 2 and not lock._deferred


# ---------------------------------------------------------------- reset


@dataclass
class Trap:
    """Raises when a place is reached for the `nth` time."""

    place: str = ""
    nth: int = 0
    has_sprung: bool = False

    def reach(self, place: str) -> None:
        if place == self.place and not self.has_sprung:
            self.nth -= 1
            if self.nth == 0:
                self.has_sprung = True
                raise Mishap(place)


class TrappedExecutor(CountingExecutor):
    """Knows which steps were launched and not collected. `cancel` must name all of them."""

    def __init__(self, config: EngineConfig, trap: Trap) -> None:
        super().__init__(config)
        self.trap = trap
        self.launched: list[Handle] = []
        self.num_cancelled: list[int] = []  # of each call

    def next_batch(self) -> Batch:
        self.trap.reach("next_batch")
        return super().next_batch()

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Handle:
        self.trap.reach("forward")
        handle = super().forward(batch, inputs)
        self.trap.reach("forward, launched")
        self.launched.append(handle)
        return handle

    def sample(self, handle: Handle, inputs: SampleInputs) -> None:
        self.trap.reach("sample")
        super().sample(handle, inputs)
        self.trap.reach("sample, launched")

    def collect(self, handle: Handle) -> StepResult:
        self.trap.reach("collect")
        assert handle is self.launched[0]
        result = super().collect(handle)
        del self.launched[0]
        return result

    def cancel(self, handles: list[Handle]) -> None:
        # A step may have been collected, and not have ended.
        collected = len(handles) - len(self.launched)
        assert collected in (0, 1)
        assert [id(h) for h in handles[collected:]] == [id(h) for h in self.launched]
        self.launched.clear()
        self.num_cancelled.append(len(handles))


HOOKS = [
    "on_step_start",
    "token_budget",
    "may_admit",
    "limit_tokens",
    "extend_plan",
    "forward_inputs",
    "sample_inputs",
    "on_result",
    "on_release",
]


class Gate(Extension):
    """Holds a request until it is opened, and has a trap in each of its methods."""

    def __init__(self, engine: GuardedEngine, trap: Trap) -> None:
        self._scheduler, self._trap = engine.scheduler, trap
        self._held: list[Sequence] = []
        self.is_open = False
        self.num_resets = 0

    def on_add(self, seq: Sequence) -> str | None:
        if seq.request_id != "held":
            return None
        self._held.append(seq)
        return "the gate is closed"

    def on_step_start(self) -> None:
        self._trap.reach("on_step_start")
        if self.is_open:
            self._scheduler.release(self._held, "the gate is closed")

    def token_budget(self, num_tokens: int) -> int:
        self._trap.reach("token_budget")
        return num_tokens

    def may_admit(self, seq: Sequence, plan: Plan) -> bool:
        self._trap.reach("may_admit")
        return True

    def limit_tokens(self, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        self._trap.reach("limit_tokens")
        return num_tokens

    def extend_plan(self, plan: Plan) -> None:
        self._trap.reach("extend_plan")

    def forward_inputs(self, plan: Plan, inputs: ForwardInputs) -> None:
        self._trap.reach("forward_inputs")

    def sample_inputs(self, plan: Plan, inputs: SampleInputs) -> None:
        self._trap.reach("sample_inputs")

    def on_result(self, plan: Plan, result: StepResult) -> None:
        self._trap.reach("on_result")

    def on_release(self, seq: Sequence) -> None:
        self._trap.reach("on_release")

    def on_reset(self) -> None:
        self.num_resets += 1


# Methods of the loop's parts. A trap is in front of them, and another one behind, when they have
# changed all that they change.
METHODS: dict[str, tuple[type, str]] = {
    "schedule": (Scheduler, "schedule"),
    "pack": (Batch, "pack"),
    "commit": (Scheduler, "commit"),
    "update": (Scheduler, "update"),
    "process": (OutputProcessor, "process"),
    "put": (OutputQueues, "put"),
    "forget": (OutputProcessor, "forget"),
    "finish_step": (LLMEngine, "_finish_step"),
}
CALLS = ["next_batch", "forward", "forward, launched", "sample", "sample, launched", "collect"]
PLACES = [*METHODS, *(f"{name}, over" for name in METHODS), *CALLS, *HOOKS]
# While a step is planned, and when it has ended, it is no step under way: its requests need not be
# named.
OUTSIDE_OF_STEPS = {
    "schedule",
    "schedule, over",
    "on_step_start",
    "token_budget",
    "may_admit",
    "limit_tokens",
    "extend_plan",
    "finish_step, over",
}

KINDS: dict[str, dict[str, Any]] = {
    "in turn": {},
    "one step ahead": {"async_scheduling": True},
    "draft tokens": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    },
    "three stages": {"pipeline_parallel_size": 3},
}
REQUESTS: dict[str, tuple[list[int], SamplingParams]] = {
    "runs": ([1, 2, 3], SamplingParams(max_tokens=12, output_kind=DELTA)),
    "held": ([40, 41], SamplingParams(max_tokens=4, output_kind=DELTA)),
    "twins": (list(range(60, 75)), SamplingParams(max_tokens=5, n=2, output_kind=DELTA)),
    "waits": ([90], SamplingParams(max_tokens=3)),
    "waits long": ([100, 101], SamplingParams(max_tokens=6, stop="ij", output_kind=DELTA)),
}


@dataclass
class GuardedRun:
    """The requests above, with one trap; `seen` says what there was when it was sprung."""

    kind: str
    trap: Trap = field(default_factory=Trap)

    def __post_init__(self) -> None:
        engine = make_engine(
            byte_tokenizer(),
            block_size=4,
            max_num_seqs=3,
            max_num_batched_tokens=8,
            **KINDS[self.kind],
        )
        self.engine = engine
        self.executor = TrappedExecutor(engine.config, self.trap)
        engine.replace_executor(self.executor)
        self.gate = Gate(engine, self.trap)
        engine.add_extension(self.gate)
        if self.kind == "three stages":
            engine.add_extension(PipelineSchedule(engine))
        if self.kind == "draft tokens":
            engine.add_extension(Speculation(engine, lambda *of_engine: HalfRight()))
        self.token_ids: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], tuple[str, str | None]] = {}
        self.seen: set[str] = set()
        self.num_in_flight = 0

    def run(self) -> None:
        for name, (prompt, params) in REQUESTS.items():
            self.engine.add_request(name, prompt, params)
        num_steps = 0
        while self.engine.has_unfinished_requests():
            num_steps += 1
            assert num_steps < 200, "livelock"
            self.gate.is_open = num_steps > 6
            self._step()
        self.engine.scheduler.check()
        assert not self.engine.output_processor.requests
        assert not self.executor.launched or self.kind != "in turn"

    def _step(self) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        waits = {seq.request_id for seq in scheduler.waiting}
        ran = {seq.request_id for seq in scheduler.running}
        held = {seq.request_id for seq in scheduler.held}
        num_in_flight = len(engine.plans_under_way)
        num_resets, num_cancels = self.gate.num_resets, len(self.executor.num_cancelled)
        try:
            outputs = engine.step()
        except Mishap as error:
            self.seen |= {"waiting"} if waits else set()
            self.seen |= {"running"} if ran else set()
            self.seen |= {"held", *(held & {"twins"})} if "held" in held else set()
            self.num_in_flight = max(self.num_in_flight, num_in_flight)
            assert self.gate.num_resets == num_resets + 1
            is_cancelled = len(self.executor.num_cancelled) > num_cancels
            assert is_cancelled or not num_in_flight or self.trap.place == "finish_step, over"
            self._check_reset(error)
        else:
            for output in outputs:
                self._take(output)

    def _check_reset(self, error: Mishap) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        scheduler.check()
        assert not engine.plans_under_way and not self.executor.launched
        assert not scheduler.running and not engine.is_stepping
        manager = scheduler.block_manager
        assert manager.num_free_blocks == manager.num_blocks
        requests = engine.output_processor.requests
        unfinished = {seq for r in requests.values() for seq in r.sequences if not seq.finished}
        assert {*scheduler.waiting, *scheduler.held} == unfinished
        for seq in unfinished:
            assert seq.num_pending == seq.num_computed_tokens == 0 and seq.slot == -1
        if "held" in requests and not self.gate.is_open:
            assert "held" in {seq.request_id for seq in scheduler.held}
        names = error.request_ids
        assert names == sorted({*names}) and {*names} <= {*REQUESTS}
        assert names or self.trap.place in OUTSIDE_OF_STEPS
        assert getattr(error, "__notes__", [""])[-1] in ("", f"in a step of the requests {names}")

    def _take(self, output: RequestOutput) -> None:
        assert output.error is None
        for completion in output.outputs:
            key = output.request_id, completion.index
            assert key not in self.ends or output.request_id == "waits"
            is_delta = REQUESTS[output.request_id][1].output_kind is DELTA
            if is_delta:
                self.token_ids[key] = self.token_ids.get(key, []) + completion.token_ids
            else:
                self.token_ids[key] = completion.token_ids
            if completion.finished:
                self.ends[key] = completion.finish_reason, completion.stop_reason


def plant(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the trap around a method of the loop's parts, if its place is one."""
    place = trap.place.removesuffix(", over")
    if place in METHODS:
        owner, name = METHODS[place]
        original = getattr(owner, name)

        def trapped(self: Any, *args: Any) -> Any:
            trap.reach(place)
            result = original(self, *args)
            trap.reach(f"{place}, over")
            return result

        monkeypatch.setattr(owner, name, trapped)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_raises_anywhere_has_not_happened(
    kind: str, place: str, by_size: Callable[..., int]
) -> None:
    plain = GuardedRun(kind)
    plain.run()
    assert len(plain.ends) == 6 and plain.ends["waits long", 0] == ("stop", "ij")
    seen: Counter[str] = Counter()
    num_in_flight = num_runs = 0
    stride = by_size(3, 1)
    for nth in range(1, 1000, stride):
        trapped = GuardedRun(kind, Trap(place, nth))
        with pytest.MonkeyPatch.context() as patched:
            plant(trapped.trap, patched)
            trapped.run()
        assert (trapped.token_ids, trapped.ends) == (plain.token_ids, plain.ends), nth
        if not trapped.trap.has_sprung:
            break
        num_runs += 1
        seen.update(trapped.seen)
        num_in_flight = max(num_in_flight, trapped.num_in_flight)
    assert num_runs >= 6 // stride
    # The runs must be hard enough to mean something.
    assert num_in_flight >= plain.engine.config.num_steps_ahead
    wanted = {"running"} if place == "on_release" else {"running", "waiting", "held", "twins"}
    assert wanted <= {*seen}, seen


def test_an_abort_that_raises_half_way_leaves_the_request_as_it_was() -> None:
    """Also one that was held: it is held again."""
    guarded = GuardedRun("in turn")
    engine, trap = guarded.engine, guarded.trap
    for name, (prompt, params) in REQUESTS.items():
        engine.add_request(name, prompt, params)
    guarded._step()
    for name in ("twins", "held", "runs"):
        trap.place, trap.nth, trap.has_sprung = "on_release", 1, False
        with pytest.raises(Mishap):
            engine.abort_request(name)
        engine.scheduler.check()
        assert all(not seq.finished for seq in engine.output_processor.requests[name].sequences)
    guarded.gate.is_open = True
    while engine.has_unfinished_requests():
        guarded._step()
    plain = GuardedRun("in turn")
    plain.run()
    assert (guarded.token_ids, guarded.ends) == (plain.token_ids, plain.ends)


# ---------------------------------------------------------------- requests and extensions


class Refuses(Extension):
    """Raises where a request is added, or when it is released; knows what was released."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.fails_to_release = False
        self.released: list[Sequence] = []

    def on_add(self, seq: Sequence) -> str | None:
        if self.error is not None:
            raise self.error
        return None

    def on_release(self, seq: Sequence) -> None:
        if self.fails_to_release:
            self.fails_to_release = False
            raise Mishap
        self.released.append(seq)


@pytest.fixture
def fake_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    monkeypatch.setattr(extension, "make_compiler", FakeCompiler)
    monkeypatch.setattr(backends, "check", lambda *source: None)


@pytest.mark.parametrize("error", [ValueError("no"), Mishap("by mistake")], ids=repr)
def test_a_request_that_one_extension_refuses_leaves_nothing_in_the_others(
    fake_grammars: None, error: Exception
) -> None:
    engine = make_engine(byte_tokenizer())
    refuses = Refuses()
    engine.add_extension(refuses)
    engine.add_request("other", [1], SamplingParams(max_tokens=4))
    for pattern, delay in (("ab", 0), ("ab", 1), ("", 1)):  # there, compiled later, and never
        refuses.error = error
        params = SamplingParams(max_tokens=9, n=2, structured_outputs=guided_by(pattern, delay))
        with pytest.raises(type(error)):
            engine.add_request("r", [70], params)
        assert [*engine.output_processor.requests] == ["other"]
        structured = engine.extensions[0]
        structured._compiler.tick()
        engine.step()
        assert not structured._guided and not structured._compilations
    assert len(engine.extensions) == 2  # the extension for grammars was made once
    refuses.error = None
    engine.add_request("r", [70], params)
    finished = run(engine)
    assert finished["other"].outputs[0].token_ids == [2, 3, 4, 5]
    assert finished["r"].error is not None


def test_a_held_request_whose_abort_raises_gets_its_grammar_all_the_same(
    fake_grammars: None,
) -> None:
    engine = make_engine(byte_tokenizer())
    refuses = Refuses()
    engine.add_extension(refuses)
    params = SamplingParams(max_tokens=9, structured_outputs=guided_by("x(01)y", 1))
    engine.add_request("r", [70], params)
    refuses.fails_to_release = True
    with pytest.raises(Mishap):
        engine.abort_request("r")
    for _ in range(2):
        assert engine.step() == [] and engine.scheduler.held
    engine.extensions[0]._compiler.tick()
    assert run(engine)["r"].outputs[0].text == "x0y"


def test_outputs_of_a_step_whose_deferred_action_raises_come_with_the_next() -> None:
    engine = make_engine(byte_tokenizer())
    engine.add_request("a", [1], SamplingParams(max_tokens=1))
    engine.add_request("b", [5], SamplingParams(max_tokens=2))

    def fail() -> None:
        raise Mishap

    def observe(*of_step: Any) -> None:
        engine.observers.clear()
        engine._lock.call_soon(fail)
        engine.abort_request("b")  # what was deferred behind it is done all the same

    engine.observers.append(observe)
    with pytest.raises(Mishap):
        engine.step()
    outputs = [(output.request_id, output.finished) for output in engine.step()]
    assert outputs == [("a", True), ("b", False), ("b", True)]
    assert not engine.has_unfinished_requests()
