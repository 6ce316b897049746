"""Several threads, one engine: they take turns, and nobody gets what is another's."""

import contextlib
import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from counting_executor import Handle, make_engine, run
from injector import Injector, Moment, Recorder, looks_for_signals

import nanoserve
from nanoserve import LLM, RequestOutput, RequestOutputKind, SamplingParams
from nanoserve.engine import interrupts
from nanoserve.engine.executor import StepResult
from nanoserve.features.streams import Streams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[[5, 6, 7 + i], [9, i]] for i in range(4)]
PACKAGE = Path(nanoserve.__file__).parent


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "one step ahead"])
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    options = {"num_kv_blocks": 16, "max_num_seqs": 4, "async_scheduling": request.param}
    with LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, **options) as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def in_threads(*jobs: Callable[[], None]) -> list[BaseException]:
    """Run them side by side, switching as often as can be; what they raised."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return errors


@pytest.fixture(autouse=True)
def _switch_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_each_thread_gets_its_own_answers(llm: LLM, by_size: Callable[..., int]) -> None:
    expected = [tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) for prompts in PROMPTS]
    num_rounds = by_size(5, 10)
    wrong: list[int] = []

    def job(index: int) -> None:
        for _ in range(num_rounds):
            got = tokens(llm.generate(PROMPTS[index], GREEDY, use_tqdm=False))
            if got != expected[index]:
                wrong.append(index)

    assert in_threads(*(lambda i=i: job(i) for i in range(len(PROMPTS)))) == [] == wrong
    llm.engine.scheduler.check()


def test_each_thread_reads_its_own_streams(llm: LLM) -> None:
    expected = tokens(llm.generate([[5, 6, i] for i in range(4)], GREEDY, use_tqdm=False))
    wrong: list[int] = []

    def job(index: int) -> None:
        for _ in range(5):
            if read(llm.stream([5, 6, index], GREEDY)) != expected[index]:
                wrong.append(index)

    assert in_threads(*(lambda i=i: job(i) for i in range(4))) == [] == wrong
    assert not llm.engine.loop.outputs.num_subscribers and not llm.engine.has_unfinished_requests()


def test_requests_may_come_and_go_from_other_threads(by_size: Callable[..., int]) -> None:
    """While one thread steps: each has one last output, the aborted ones included."""
    for _ in range(by_size(10, 100, 1000)):
        come_and_go()


def come_and_go() -> None:
    engine = make_engine(max_num_seqs=4, num_kv_blocks=24)
    outputs: dict[str, RequestOutput] = {}
    is_over = threading.Event()

    def step() -> None:
        while not is_over.is_set() or engine.has_unfinished_requests():
            take(output for output in engine.step() if output.finished)

    def take(new: Iterable[RequestOutput]) -> None:
        for output in new:
            assert output.request_id not in outputs
            outputs[output.request_id] = output

    def come(name: str) -> None:
        for number in range(40):
            request_id = f"{name}{number}"
            engine.add_request(request_id, [number, 7], SamplingParams(max_tokens=5))
            if number % 3 == 0 and (output := engine.abort_request(request_id)) is not None:
                take([output])

    def come_all() -> None:
        try:
            assert in_threads(lambda: come("a"), lambda: come("b")) == []
        finally:
            is_over.set()

    assert in_threads(step, come_all) == []
    assert len(outputs) == 80
    for name, output in outputs.items():
        (completion,) = output.outputs
        assert completion.token_ids == [8, 9, 10, 11, 12][: len(completion.token_ids)]
        may_be_aborted = int(name[1:]) % 3 == 0
        assert completion.finish_reason == "length" or may_be_aborted
    engine.scheduler.check()
    assert engine.scheduler.block_manager.num_free_blocks == 24


def test_threads_may_read_streams_of_one_engine() -> None:
    """Whichever steps: each reads its own tokens, all of them and in order, and a thread that steps
    the engine itself gets its requests' outputs and no others."""
    engine = make_engine(max_num_seqs=4, num_kv_blocks=24)
    streams = Streams(engine)
    wrong: list[tuple[str, list[int]]] = []
    direct: list[RequestOutput] = []
    deltas = SamplingParams(max_tokens=6, output_kind=RequestOutputKind.DELTA)

    def reader(first: int) -> None:
        for number in range(20):
            request_id = f"{first}-{number}"
            request = engine.input_processor.process(request_id, [3, first], deltas)
            got = read(streams.open(request))
            if got != list(range(first + 1, first + 7)):
                wrong.append((request_id, got))

    def stepper() -> None:
        for number in range(20):
            engine.add_request(f"direct-{number}", [3, 100], deltas)
            while f"direct-{number}" in engine.output_processor.requests:
                direct.extend(engine.step())
            direct.extend(engine.step())

    assert in_threads(stepper, *(lambda i=i: reader(10 * i) for i in (1, 2, 3))) == [] == wrong
    assert [o.request_id for o in direct] == [f"direct-{i}" for i in range(20) for _ in range(6)]
    assert [o.outputs[0].token_ids[0] for o in direct] == list(range(101, 107)) * 20
    assert not engine.loop.outputs.num_subscribers
    assert not engine.has_unfinished_requests()


class SlowlySearched(dict):
    """Whoever asks whether an id is in it has the answer long before he uses it."""

    def __contains__(self, request_id: object) -> bool:
        found = super().__contains__(request_id)
        time.sleep(0.05)
        return found


def test_one_of_two_threads_gets_an_id_that_both_want() -> None:
    engine = make_engine()
    engine.output_processor.requests = SlowlySearched()
    first, second = (engine.input_processor.process("a", [1, 2], GREEDY) for _ in "ab")
    (error,) = in_threads(lambda: engine.add(first), lambda: engine.add(second))
    assert isinstance(error, ValueError) and "already in use" in str(error)
    assert list(run(engine)) == ["a"]
    engine.scheduler.check()


def test_a_stream_that_another_threads_collector_ends_disturbs_no_step(
    llm: LLM, by_size: Callable[..., int]
) -> None:
    """The collector runs wherever it likes; the thread that steps has the engine to itself."""
    (expected,) = tokens(llm.generate([[5, 6]], GREEDY, use_tqdm=False))
    for _ in range(by_size(3, 10)):
        reader = llm.stream([5, 6], GREEDY)
        dropped = [llm.stream([7, 8], GREEDY)]
        next(dropped[0])

        def drop(held: list[Iterator[RequestOutput]] = dropped) -> None:
            held.clear()
            gc.collect()

        got: list[int] = []
        assert in_threads(drop, lambda g=got, r=reader: g.extend(*[read(r)])) == []
        assert got == expected
    assert not llm.engine.has_unfinished_requests()


def read(stream: Iterator[RequestOutput]) -> list[int]:
    return [token for output in stream for token in output.outputs[0].token_ids]


def test_an_abort_from_another_thread_in_a_step_does_not_wait_for_it() -> None:
    engine = make_engine()
    inside, go_on = threading.Event(), threading.Event()
    collect = engine.executor.collect

    def slow(handle: Handle) -> StepResult:
        inside.set()
        assert go_on.wait(60)
        return collect(handle)

    engine.executor.collect = slow
    for name in "ab":
        engine.add_request(name, [1, 2], SamplingParams(max_tokens=3))
    answers: list[RequestOutput | None] = []

    def abort() -> None:
        assert inside.wait(60)
        answers.append(engine.abort_request("a"))
        go_on.set()

    finished: dict[str, RequestOutput] = {}
    assert in_threads(lambda: finished.update(run(engine)), abort) == []
    assert answers == [None]  # the step hands it out
    assert finished["a"].outputs[0].finish_reason == "abort"
    assert finished["b"].outputs[0].token_ids == [3, 4, 5]


def test_ctrl_c_ends_the_wait_for_another_threads_step() -> None:
    engine = make_engine()
    inside, go_on = threading.Event(), threading.Event()

    def hang(*step: object) -> None:
        inside.set()
        assert go_on.wait(60)

    engine.observers.append(hang)
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=1))
    other = threading.Thread(target=engine.step)
    other.start()
    assert inside.wait(60)
    for wait in (
        engine.has_unfinished_requests,
        lambda: engine.add_request("b", [1]),
        engine.step,
    ):
        arrives = [threading.get_ident(), signal.SIGINT]
        timer = threading.Timer(0.1, signal.pthread_kill, arrives)
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            wait()
    go_on.set()
    other.join(60)
    assert not engine.has_unfinished_requests() and not engine.is_stepping


def test_a_second_ctrl_c_at_the_end_of_a_hold_leaves_none_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_handler = signal.signal

    def interrupted(number: int, handler: object) -> None:
        set_handler(number, handler)
        raise KeyboardInterrupt  # it strikes as soon as it can

    caught = False
    try:
        with interrupts.DeferredInterrupt(gives_way=False):
            signal.raise_signal(signal.SIGINT)
            assert len(interrupts.DeferredInterrupt.holding) == 1
            monkeypatch.setattr(signal, "signal", interrupted)
    except KeyboardInterrupt:
        caught = True
    assert caught and not interrupts.DeferredInterrupt.holding


# ---------------------------------------------------------------- Ctrl-C in the front door


def ctrl_c(frame: FrameType) -> None:
    """In what holds one back, only where it can come."""
    if frame.f_code.co_filename != interrupts.__file__ or looks_for_signals(frame):
        signal.raise_signal(signal.SIGINT)


FRONT_DOOR = [
    PACKAGE / "llm.py",
    PACKAGE / "features" / "streams.py",
    *(PACKAGE / "engine").glob("*.py"),
]
FILES = {str(file) for file in FRONT_DOOR}


def record(call: Callable[[], object]) -> list[Moment]:
    with Recorder(FILES) as recorder:
        call()
    return recorder.moments


@pytest.fixture
def _collector_waits() -> Iterator[None]:
    """So that a call runs the same bytecodes every time: an end of garbage is a call, too."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_collector_waits")
@pytest.mark.parametrize("how", ["generate", "stream"])
def test_the_next_generate_finds_nothing_of_an_interrupted_call(
    llm: LLM, how: str, by_size: Callable[..., int]
) -> None:
    """Not even if the first Ctrl-C ends it, and the second one its clearing up."""
    calls = {
        "generate": lambda: llm.generate([[5, 6], [7]], GREEDY, use_tqdm=False),
        "stream": lambda: read(llm.stream([5, 6], GREEDY)),
    }
    expected = tokens(llm.generate([[5, 6], [7]], GREEDY, use_tqdm=False))
    rng = random.Random(4)
    calls[how]()  # what is made when it is first asked for is there
    moments = record(calls[how])
    for _ in range(by_size(12, 150, 2000)):
        again = rng.randint(1, 400) if rng.random() < 0.7 else None
        injector = Injector(FILES, ctrl_c, rng.choice(moments), again)
        with injector, contextlib.suppress(KeyboardInterrupt):
            calls[how]()
        assert injector.acted
        assert tokens(llm.generate([[5, 6], [7]], GREEDY, use_tqdm=False)) == expected
        llm.engine.scheduler.check()
        assert llm.engine.scheduler.block_manager.num_free_blocks == 16
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
