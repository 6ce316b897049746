"""What may happen while a step runs: a request fails, aborts come, streams go, somebody steps."""

import gc
import logging
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from counting_executor import CountingExecutor, Handle, byte_tokenizer, make_engine, run

from nanoserve import LLM, RequestOutput, RequestOutputKind, SamplingParams
from nanoserve.engine.executor import StepResult
from nanoserve.engine.guard import GuardedEngine

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 64, "max_num_seqs": 8}
STOP = 17
Processor = Callable[[list[int], torch.Tensor], Any]


class Mishap(Exception):
    """What a request's own code raises."""


def at_token(number: int, action: Callable[[], Any]) -> Processor:
    """A logits processor that does something when so many tokens are there, and changes nothing."""

    def processor(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) == number:
            action()
        return logits

    return processor


def fail() -> None:
    raise Mishap("too bad")


def greedy(*processors: Processor, max_tokens: int = 6, **params: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logits_processors=list(processors) or None,
        **params,
    )


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "one step ahead"])
def opened(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, async_scheduling=request.param, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(opened: LLM) -> Iterator[LLM]:
    """Whatever a test does with it, nothing may be left."""
    yield opened
    engine = opened.engine
    engine.observers.clear()
    assert not engine.has_unfinished_requests() and not engine.output_processor.requests
    assert not engine.loop.outputs and not engine.loop.outputs._queues
    assert engine.scheduler.block_manager.num_free_blocks == OPTIONS["num_kv_blocks"]
    engine.scheduler.check()


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    with LLM(checkpoint, **OPTIONS) as llm:
        return tokens(llm.generate(PROMPTS, greedy(), use_tqdm=False))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def joined(pieces: list[RequestOutput]) -> list[int]:
    """What a stream's outputs make up."""
    return [*chain.from_iterable(tokens(pieces))]


def num_tokens_after(llm: LLM, number: int) -> int:
    """Tokens of a request at the end of the step in which its processor sees `number` of them.

    With a step ahead, the next one is still under way then.
    """
    return number if llm.engine.config.async_scheduling else number + 1


def reasons(outputs: list[RequestOutput]) -> list[str | None]:
    return [output.outputs[0].finish_reason for output in outputs]


# ---------------------------------------------------------------- a request fails


def test_a_request_whose_own_processor_raises_ends_alone(llm: LLM, expected, caplog) -> None:
    params = [greedy(), greedy(at_token(2, fail)), greedy()]
    with caplog.at_level(logging.ERROR):
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert tokens(outputs) == [expected[0], expected[1][:2], expected[2]]
    assert reasons(outputs) == ["length", "error", "length"]
    assert isinstance(outputs[1].error, Mishap) and outputs[1].finished
    assert outputs[0].error is None and outputs[2].error is None
    assert outputs[1].metrics.finished_time < outputs[0].metrics.finished_time
    assert outputs[1].request_id in caplog.text and "too bad" in caplog.text


@pytest.mark.parametrize(
    "nonsense",
    [lambda ids, logits: None, lambda ids, logits: logits[:-1], lambda ids, logits: "logits"],
    ids=["None", "another shape", "text"],
)
def test_a_processor_that_returns_no_logits_is_its_requests_error(
    llm: LLM, expected, nonsense: Processor
) -> None:
    outputs = llm.generate(PROMPTS[:2], [greedy(nonsense), greedy()], use_tqdm=False)
    assert tokens(outputs) == [[], expected[1]]
    assert reasons(outputs) == ["error", "length"] and outputs[0].error is not None


def test_several_requests_may_fail_in_one_step(llm: LLM, expected) -> None:
    params = [greedy(at_token(0, fail)), greedy(at_token(0, fail)), greedy()]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert tokens(outputs) == [[], [], expected[2]]
    assert reasons(outputs) == ["error", "error", "length"]


def test_neighbours_of_a_failed_request_keep_their_logprobs(llm: LLM) -> None:
    """The rows of log-probabilities are shared, and the failed request's is one of them."""
    with_logprobs = greedy(logprobs=2)
    plain = llm.generate(PROMPTS, with_logprobs, use_tqdm=False)
    failing = greedy(at_token(2, fail), logprobs=1)
    outputs = llm.generate(PROMPTS, [failing, with_logprobs, with_logprobs], use_tqdm=False)
    for output, alone in zip(outputs[1:], plain[1:], strict=True):
        (got,), (known,) = output.outputs, alone.outputs
        assert [list(entry) for entry in got.logprobs] == [list(entry) for entry in known.logprobs]
        assert got.cumulative_logprob == pytest.approx(known.cumulative_logprob, abs=1e-4)
    assert len(outputs[0].outputs[0].logprobs) == 2


def test_all_completions_of_a_prompt_end_with_the_one_that_fails(llm: LLM) -> None:
    """A processor cannot tell them apart, but for what they have said."""
    calls = []

    def at_the_fifth_call(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append(len(token_ids))
        return fail() if len(calls) == 5 else logits

    params = SamplingParams(n=3, seed=1, max_tokens=9, logits_processors=[at_the_fifth_call])
    (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
    assert [c.finish_reason for c in output.outputs] == ["error"] * 3
    assert output.finished and isinstance(output.error, Mishap)
    # The first step calls it once, the second one for all three, and in the third one it fails for
    # the first row. The other rows of that step have got their tokens.
    assert [len(c.token_ids) for c in output.outputs] == [2, 2, 2]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize(
    ("how", "text", "reason"),
    [
        ({"max_tokens": 4}, "defg", "length"),
        ({"stop_token_ids": [ord("g")]}, "def", "stop"),
        ({"stop": "fg"}, "de", "stop"),
        ({"stop": "fg", "max_tokens": 4}, "de", "stop"),
    ],
    ids=str,
)
def test_a_completion_that_ends_in_the_step_in_which_another_fails_is_handed_out(
    kind: RequestOutputKind, how: dict[str, Any], text: str, reason: str
) -> None:
    engine = make_engine(byte_tokenizer())
    engine.replace_executor(FailsFor(engine, completion=1, at_position=5))
    # Completion 0 is a step ahead of its sibling, and gets its fourth token when that one fails.
    engine.add_request("r", "abc", SamplingParams(n=2, output_kind=kind, **how))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    texts, reasons = ["", ""], [[], []]
    for completion in (c for output in outputs for c in output.outputs):
        is_delta = kind is RequestOutputKind.DELTA
        texts[completion.index] = texts[completion.index] * is_delta + completion.text
        reasons[completion.index].append(completion.finish_reason)
    assert texts == [text, "de"]
    assert [ends[-1] for ends in reasons] == [reason, "error"]
    assert [len(ends) - ends.count(None) for ends in reasons] == [1, 1]
    assert isinstance(outputs[-1].error, Mishap)
    assert not engine.output_processor.requests
    assert not engine.output_processor._detokenizer._streams


class FailsFor(CountingExecutor):
    """One completion's own code raises where its token would get this position."""

    def __init__(self, engine: GuardedEngine, completion: int, at_position: int) -> None:
        super().__init__(engine.config)
        self.completion, self.at_position = completion, at_position

    def collect(self, handle: Handle) -> StepResult:
        new_ids, errors = super().collect(handle).token_ids, {}
        completion_of = {change.slot: change.completion for change in self.sampling}
        batch = handle.batch
        for row in range(len(new_ids)):
            position = batch.positions[batch.output_rows[row]] + 1
            completion = completion_of[int(batch.output_slots[row])]
            if (completion, position) == (self.completion, self.at_position):
                new_ids[row], errors[row] = [], Mishap()
        return StepResult(new_ids, errors=errors)


def test_a_stream_raises_what_its_processor_raised_behind_its_last_output(
    llm: LLM, expected
) -> None:
    failing = llm.stream(PROMPTS[0], greedy(at_token(3, fail)))
    other = llm.stream(PROMPTS[1], greedy())
    pieces = []
    with pytest.raises(Mishap, match="too bad"):
        for output in failing:
            pieces.append(output)
    assert joined(pieces) == expected[0][:3]
    assert reasons(pieces) == [None] * 3 + ["error"]
    assert isinstance(pieces[-1].error, Mishap)
    assert joined(list(other)) == expected[1]


def test_a_processor_of_the_engine_that_raises_fails_the_step(checkpoint: Path, expected) -> None:
    """It is nobody's own: all wait to be computed again."""
    calls = []

    def shared(logits: torch.Tensor, states: list) -> None:
        calls.append(len(states))
        if len(calls) == 3:
            fail()

    with LLM(checkpoint, logits_processors=[shared], **OPTIONS) as llm:
        engine = llm.engine
        for name, prompt in zip("abc", PROMPTS, strict=True):
            engine.add_request(name, prompt, greedy())
        engine.step()
        engine.step()
        with pytest.raises(Mishap) as caught:
            engine.step()
        engine.scheduler.check()
        outputs = run(engine)
    assert caught.value.request_ids == ["a", "b", "c"]
    assert tokens([outputs[name] for name in "abc"]) == expected
    assert all(output.error is None for output in outputs.values())


# ---------------------------------------------------------------- whose step it was


@pytest.mark.parametrize("ahead", [False, True])
def test_a_failing_step_says_whose_it_was(ahead: bool) -> None:
    engine = make_engine(max_num_seqs=2, async_scheduling=ahead)
    for name in "abc":
        engine.add_request(name, [1, 2], SamplingParams(n=1 + (name == "b"), max_tokens=4))
    engine.step()
    engine.executor.fail_next = True
    with pytest.raises(RuntimeError, match="on fire") as caught:
        engine.step()
    assert caught.value.request_ids == ["a", "b"]  # once each, and c has not begun
    if hasattr(caught.value, "__notes__"):  # Python 3.11
        assert caught.value.__notes__ == ["in a step of the requests ['a', 'b']"]
    engine.scheduler.check()
    outputs = run(engine)
    assert {name: len(output.outputs) for name, output in outputs.items()} == {
        "a": 1,
        "b": 2,
        "c": 1,
    }
    assert all(c.token_ids == [3, 4, 5, 6] for o in outputs.values() for c in o.outputs)


# ---------------------------------------------------------------- aborts


def test_a_request_may_abort_itself_and_others(llm: LLM, expected) -> None:
    engine, answers = llm.engine, []

    def abort_two() -> None:
        first, second, _ = engine.output_processor.requests
        for request_id in (second, first, second, "unknown"):
            answers.append(engine.abort_request(request_id))

    params = [greedy(), greedy(at_token(2, abort_two)), greedy()]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert answers == [None] * 4  # the step that runs will return them
    assert reasons(outputs) == ["abort", "abort", "length"]
    n = num_tokens_after(llm, 2)
    assert tokens(outputs) == [expected[0][:n], expected[1][:n], expected[2]]


def test_an_observer_may_abort_requests(llm: LLM, expected) -> None:
    engine = llm.engine

    def abort_one(plan, batch, result, times) -> None:
        requests = list(engine.output_processor.requests.values())
        if len(requests) == 3 and requests[1].sequences[0].num_output_tokens == 2:
            assert engine.abort_request(requests[1].request_id) is None

    engine.observers.append(abort_one)
    outputs = llm.generate(PROMPTS, greedy(), use_tqdm=False)
    assert reasons(outputs) == ["length", "abort", "length"]
    assert tokens(outputs) == [expected[0], expected[1][:2], expected[2]]


def test_an_abort_in_the_step_that_ends_a_request_comes_too_late(llm: LLM, expected) -> None:
    engine = llm.engine

    def abort_all() -> None:
        for request_id in list(engine.output_processor.requests):
            assert engine.abort_request(request_id) is None

    last = num_tokens_after(llm, 2)  # of the shorter one: it comes in the step of the abort
    params = [greedy(at_token(2, abort_all)), greedy(max_tokens=last)]
    outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert reasons(outputs) == ["abort", "length"]
    assert tokens(outputs) == [expected[0][:last], expected[1][:last]]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_the_output_of_an_abort_comes_behind_the_steps_own(llm: LLM, expected, kind) -> None:
    engine = llm.engine
    abort = at_token(2, lambda: engine.abort_request("r"))
    engine.add_request("r", PROMPTS[0], greedy(abort, output_kind=kind))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert reasons(outputs)[-1] == "abort"
    is_delta = kind is RequestOutputKind.DELTA
    whole = joined(outputs) if is_delta else tokens(outputs)[-1]
    assert whole == expected[0][: num_tokens_after(llm, 2)]


def test_an_abort_in_a_step_that_fails_is_done_all_the_same(monkeypatch) -> None:
    engine = make_engine()
    for name in "ab":
        engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=5))
    engine.step()

    def fails(handle: Handle) -> StepResult:
        assert engine.abort_request("a") is None
        raise Mishap

    with monkeypatch.context() as patched:
        patched.setattr(engine.executor, "collect", fails)
        with pytest.raises(Mishap):
            engine.step()
    assert set(engine.output_processor.requests) == {"b"}
    engine.scheduler.check()
    outputs = run(engine)
    assert reasons([outputs["a"], outputs["b"]]) == ["abort", "length"]
    assert tokens([outputs["a"], outputs["b"]]) == [[4], [4, 5, 6, 7, 8]]


def test_an_abort_between_steps_returns_its_output_at_once() -> None:
    """Unlike one from inside a step: here nothing waits to be handed out before it."""
    engine = make_engine()
    engine.observers.append(lambda *args: None)
    engine.add_request("a", [1], SamplingParams(max_tokens=5))
    engine.step()
    output = engine.abort_request("a")
    assert output.finished and engine.step() == []


# ---------------------------------------------------------------- streams that go


@pytest.mark.parametrize("how", ["close", "forget"])
def test_a_stream_may_be_dropped_inside_a_step(llm: LLM, expected, how: str) -> None:
    """As the garbage collector may do at any moment."""
    streams = [llm.stream(PROMPTS[0], greedy())]
    next(streams[0])

    def drop() -> None:
        if how == "close":
            streams[0].close()
        streams.clear()
        gc.collect()

    other = llm.stream(PROMPTS[1], greedy(at_token(2, drop)))
    assert joined(list(other)) == expected[1]
    assert not streams


def test_a_stream_dropped_inside_the_step_that_ends_it_leaves_no_output(llm: LLM, expected) -> None:
    short = llm.stream(PROMPTS[0], greedy(max_tokens=3))
    other = llm.stream(PROMPTS[1], greedy(at_token(2, short.close)))
    assert joined(list(other)) == expected[1]
    assert llm.engine.step() == []


def test_a_stream_that_is_aborted_inside_a_step_ends_with_that(llm: LLM, expected) -> None:
    engine = llm.engine

    def abort_first() -> None:
        engine.abort_request(next(iter(engine.output_processor.requests)))

    first = llm.stream(PROMPTS[0], greedy())
    second = llm.stream(PROMPTS[1], greedy(at_token(2, abort_first)))
    pieces = list(first)
    assert reasons(pieces)[-1] == "abort"
    assert joined(pieces) == expected[0][: num_tokens_after(llm, 2)]
    assert joined(list(second)) == expected[1]


def test_a_stream_gets_its_last_output_though_the_step_that_brought_it_raises(
    llm: LLM, expected
) -> None:
    """And raises to the reader of another stream, as when the disk of a trace is full."""
    engine = llm.engine
    short, other = llm.stream(PROMPTS[0], greedy(max_tokens=3)), llm.stream(PROMPTS[1], greedy())
    request_id = next(iter(engine.output_processor.requests))

    def fail_when_short_is_over(*args: object) -> None:
        if request_id not in engine.output_processor.requests:
            engine.observers.clear()
            fail()

    engine.observers.append(fail_when_short_is_over)
    with pytest.raises(Mishap):
        list(other)
    pieces = list(short)
    assert joined(pieces) == expected[0][:3] and reasons(pieces)[-1] == "length"
    assert not engine.has_unfinished_requests()


# ---------------------------------------------------------------- a step inside a step


def test_a_processor_that_steps_the_engine_fails_alone(llm: LLM, expected) -> None:
    params = [greedy(at_token(1, llm.engine.step)), greedy()]
    outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert tokens(outputs) == [expected[0][:1], expected[1]]
    assert reasons(outputs) == ["error", "length"]
    assert "inside a step" in str(outputs[0].error)


def test_a_processor_that_reads_a_stream_fails_alone(llm: LLM, expected) -> None:
    other = llm.stream(PROMPTS[1], greedy())
    failing = llm.stream(PROMPTS[0], greedy(at_token(0, lambda: next(other))))
    third = llm.stream(PROMPTS[2], greedy())
    with pytest.raises(RuntimeError, match="inside a step"):
        list(failing)
    assert list(other) == []  # as any generator that has raised
    assert joined(list(third)) == expected[2]


def test_an_observer_that_steps_the_engine_is_refused(llm: LLM, expected) -> None:
    engine = llm.engine
    engine.add_request("r", PROMPTS[0], greedy())
    engine.step()
    engine.observers.append(lambda *args: engine.step())
    with pytest.raises(RuntimeError, match="inside a step"):
        engine.step()
    engine.observers.clear()
    assert tokens([run(engine)["r"]]) == [expected[0]]


def test_a_request_may_be_added_inside_a_step(llm: LLM, expected) -> None:
    engine = llm.engine
    add = at_token(2, lambda: engine.add_request("late", PROMPTS[1], greedy()))
    engine.add_request("early", PROMPTS[0], greedy(add))
    outputs = run(engine)
    assert tokens([outputs["early"], outputs["late"]]) == expected[:2]


# ---------------------------------------------------------------- what is left under way


def test_streams_that_have_ended_leave_nothing_under_way(llm: LLM, expected) -> None:
    """With a step ahead, a step may hold nobody any more but who has ended in the one before."""
    stop = expected[0][2]
    ended = list(llm.stream(PROMPTS[0], greedy(stop_token_ids=[stop])))
    assert joined(ended) == expected[0][: expected[0].index(stop)]
    assert not llm.engine.has_unfinished_requests() and llm.engine.step() == []
    dropped = llm.stream(PROMPTS[1], greedy())
    next(dropped)
    dropped.close()
    assert not llm.engine.has_unfinished_requests() and llm.engine.step() == []
    assert tokens(llm.generate(PROMPTS, greedy(), use_tqdm=False)) == expected


def test_what_an_aborted_request_left_under_way_is_not_its_successors(checkpoint: Path) -> None:
    """The old one's prompt is still being computed when the new one takes its name."""
    wants_prompt = greedy(prompt_logprobs=1)
    with LLM(checkpoint, async_scheduling=True, max_num_batched_tokens=8, **OPTIONS) as llm:
        engine = llm.engine
        (alone,) = llm.generate([PROMPTS[1]], wants_prompt, use_tqdm=False)
        for successor in (greedy(), wants_prompt):
            engine.add_request("other", PROMPTS[0], greedy(max_tokens=20))
            engine.add_request("r", list(range(30)), wants_prompt)
            engine.step()
            engine.step()
            engine.abort_request("r")
            engine.add_request("r", PROMPTS[1], successor)
            output = run(engine)["r"]
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids
            if successor is wants_prompt:
                got, known = output.prompt_logprobs[1:], alone.prompt_logprobs[1:]
                assert [list(entry) for entry in got] == [list(entry) for entry in known]
            else:
                assert output.prompt_logprobs is None


def test_what_an_aborted_requests_code_raises_is_not_its_successors(
    checkpoint: Path, expected
) -> None:
    with LLM(checkpoint, async_scheduling=True, **OPTIONS) as llm:
        engine = llm.engine
        engine.add_request("other", PROMPTS[0], greedy(max_tokens=20))
        engine.add_request("r", PROMPTS[1], greedy(at_token(1, fail)))
        engine.step()
        engine.step()  # the processor has raised by now, and nobody knows it yet
        engine.abort_request("r")
        engine.add_request("r", PROMPTS[2], greedy())
        outputs = run(engine)
    assert reasons([outputs["r"]]) == ["length"]
    assert tokens([outputs["r"]]) == [expected[2]]


def test_what_is_raised_for_a_completion_that_has_ended_is_nobodys_error(checkpoint: Path) -> None:
    """With a step ahead, its row is still computed once; its sibling goes on."""
    stopped: list[list[int]] = []
    late_calls = []

    def processor(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if token_ids[-1:] == [STOP]:
            late_calls.append(token_ids)
            fail()
        stops_now = len(token_ids) == 2 and not stopped
        if stops_now:
            stopped.append(token_ids)
        logits[STOP] = 1e9 if stops_now else -torch.inf
        return logits

    params = SamplingParams(
        n=2, seed=3, max_tokens=6, stop_token_ids=[STOP], logits_processors=[processor]
    )
    with LLM(checkpoint, async_scheduling=True, **OPTIONS) as llm:
        (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
    assert len(late_calls) == 1 and output.error is None
    assert [c.finish_reason for c in output.outputs] == ["stop", "length"]
    assert [len(c.token_ids) for c in output.outputs] == [2, 6]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_may_be_closed_inside_a_step(checkpoint: Path, ahead: bool) -> None:
    """It is when the step is over; what was left is aborted."""
    llm = LLM(checkpoint, async_scheduling=ahead, **OPTIONS)
    llm.engine.add_request("a", PROMPTS[0], greedy(at_token(2, llm.close)))
    llm.engine.add_request("b", PROMPTS[1], greedy())
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert not llm.engine.output_processor.requests and llm.engine.executor.model is None
    with pytest.raises(ValueError, match="closed"):
        llm.generate(PROMPTS, greedy(), use_tqdm=False)
