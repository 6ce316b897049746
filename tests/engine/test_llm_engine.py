"""The loop: requests come, go, stream, are aborted, and survive a step that raises."""

import codecs
from itertools import chain
from typing import Any

import pytest
from counting_executor import Handle, byte_tokenizer, make_engine, run

from nanoserve.engine.executor import StepResult
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.plan import Plan
from nanoserve.engine.stopwatch import StepTimes
from nanoserve.sampling_params import RequestOutputKind, SamplingParams


def test_a_request_from_prompt_to_output() -> None:
    engine = make_engine()
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=4))
    output = run(engine)["a"]
    assert output.prompt_token_ids == [5, 6, 7] and output.finished
    (completion,) = output.outputs
    assert completion.token_ids == [8, 9, 10, 11]
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
    assert metrics.first_token_time <= metrics.finished_time
    assert metrics.total_time >= metrics.queue_time + metrics.inter_token_time * 3
    assert metrics.num_output_tokens == 4


@pytest.mark.parametrize(
    ("params", "token_ids", "finish_reason", "stop_reason"),
    [
        ({}, [11, 12, 13], "stop", None),  # 14 is EOS, and no part of the output
        ({"stop_token_ids": [12]}, [11], "stop", 12),
        ({"stop_token_ids": [14]}, [11, 12, 13], "stop", 14),
        ({"ignore_eos": True}, [11, 12, 13, 14, 15], "length", None),
        ({"ignore_eos": True, "stop_token_ids": [15]}, [11, 12, 13, 14], "stop", 15),
        ({"max_tokens": 3}, [11, 12, 13], "length", None),
        ({"max_tokens": 4}, [11, 12, 13], "stop", None),  # a stop on the last allowed token
        ({"max_tokens": 1}, [11], "length", None),
    ],
)
def test_how_a_sequence_ends(params, token_ids, finish_reason, stop_reason) -> None:
    engine = make_engine(eos=frozenset({14}))
    engine.add_request("a", [10], SamplingParams(**{"max_tokens": 5, **params}))
    (completion,) = run(engine)["a"].outputs
    assert completion.token_ids == token_ids
    assert (completion.finish_reason, completion.stop_reason) == (finish_reason, stop_reason)


def test_max_tokens_none_goes_up_to_max_model_len() -> None:
    engine = make_engine(max_model_len=20)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=None))
    assert len(run(engine)["a"].outputs[0].token_ids) == 17


def test_the_tokenizers_eos_counts_too() -> None:
    engine = make_engine(byte_tokenizer(eos_token_id=ord("e")), eos=frozenset({ord("x")}))
    engine.add_request("a", "abc", SamplingParams())
    engine.add_request("b", "uv", SamplingParams())
    outputs = run(engine)
    assert outputs["a"].outputs[0].text == "d" and outputs["a"].prompt == "abc"
    assert outputs["b"].outputs[0].text == "w"


def test_requests_can_join_while_others_run() -> None:
    engine = make_engine()
    engine.add_request("a", [1], SamplingParams(max_tokens=10))
    for _ in range(3):
        engine.step()
    engine.add_request("b", [100], SamplingParams(max_tokens=2))
    outputs = run(engine)
    assert list(outputs) == ["b", "a"]
    assert outputs["b"].outputs[0].token_ids == [101, 102]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_streaming_pieces_make_up_the_final_text(kind: RequestOutputKind) -> None:
    """Bytes count up from the prompt, so characters of two bytes and broken ones occur."""
    engine = make_engine(byte_tokenizer())
    prompt = {"prompt_token_ids": [0x20]}
    engine.add_request("a", prompt, SamplingParams(max_tokens=220, output_kind=kind))
    pieces, ids = [], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            pieces.append(output.outputs[0].text)
            ids.append(output.outputs[0].token_ids)
    expected_ids = list(range(0x21, 0x21 + 220))
    expected = byte_tokenizer().decode(expected_ids)
    if kind is RequestOutputKind.DELTA:
        assert len(pieces) == 220
        assert "".join(pieces) == expected and [*chain.from_iterable(ids)] == expected_ids
    else:
        assert len(pieces) == (220 if kind is RequestOutputKind.CUMULATIVE else 1)
        assert pieces[-1] == expected and ids[-1] == expected_ids


def test_a_character_is_never_streamed_in_halves() -> None:
    """The byte C3 opens a character of two bytes, and C4 is no second one."""
    engine = make_engine(byte_tokenizer())
    params = SamplingParams(max_tokens=2, output_kind=RequestOutputKind.DELTA)
    engine.add_request("a", [0xC2], params)
    (first,) = engine.step()
    assert first.outputs[0].text == "" and not first.finished
    (last,) = engine.step()  # it ends here, so what is broken is shown
    assert last.outputs[0].text == "\ufffd\ufffd" and last.finished


def test_a_failing_step_is_undone_and_the_request_goes_on() -> None:
    engine = make_engine()
    engine.add_request("a", [1] * 40, SamplingParams(max_tokens=30))
    for _ in range(5):
        engine.step()
    engine.executor.fail_next = True
    with pytest.raises(RuntimeError, match="on fire"):
        engine.step()
    engine.scheduler.check()
    output = run(engine)["a"]
    assert output.outputs[0].token_ids == list(range(2, 32))
    assert output.metrics.num_preemptions == 1


def test_abort_returns_what_there_is_and_frees_the_blocks() -> None:
    engine = make_engine(byte_tokenizer())
    engine.add_request("a", "abc", SamplingParams(max_tokens=50))
    engine.add_request("b", "xyz", SamplingParams(max_tokens=2))
    engine.step()
    aborted = engine.abort_request("a")
    assert aborted.finished and aborted.outputs[0].finish_reason == "abort"
    assert aborted.outputs[0].text == "d"
    assert engine.abort_request("a") is None and engine.abort_request("unknown") is None
    assert list(run(engine)) == ["b"]
    assert engine.scheduler.block_manager.num_free_blocks == engine.executor.num_kv_blocks


def test_only_changes_travel_to_the_sampler() -> None:
    engine = make_engine()
    engine.add_request("a", [1], SamplingParams(max_tokens=5, seed=11))
    engine.add_request("b", [1], SamplingParams(max_tokens=5))
    run(engine)
    sent = engine.executor.sampling
    assert [change.slot for change in sent] == [0, 1]
    assert sent[0].seed == 11 and sent[1].seed != 11


def test_unseeded_requests_repeat_with_the_engines_seed() -> None:
    def seeds(seed: int) -> list[int]:
        engine = make_engine(seed=seed)
        for name in "abc":
            engine.add_request(name, [1], SamplingParams(max_tokens=1))
        run(engine)
        return [change.seed for change in engine.executor.sampling]

    assert seeds(1) == seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 3


def test_a_cached_prompt_is_not_computed_twice() -> None:
    engine = make_engine()
    for name in "ab":
        engine.add_request(name, list(range(100)), SamplingParams(max_tokens=1))
        output = run(engine)[name]
        assert output.metrics.num_cached_prompt_tokens == (0 if name == "a" else 96)
    stats = engine.stats
    assert stats.num_computed_tokens == 104
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (200, 96)
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (200, 2)


def test_observers_see_every_step() -> None:
    engine = make_engine()
    seen = []
    engine.observers.append(
        lambda plan, batch, result, times: seen.append((batch.header.step, times))
    )
    engine.add_request("a", [1], SamplingParams(max_tokens=3))
    run(engine)
    assert [step for step, _ in seen] == [0, 1, 2]
    assert all(min(times.schedule, times.pack, times.execute) > 0 for _, times in seen)


def test_close_aborts_and_releases() -> None:
    engine = make_engine()
    engine.add_request("a", [1])
    engine.close()
    engine.close()
    assert engine.executor.closed and not engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="closed"):
        engine.add_request("b", [1])


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ("scheduler", "_admit_waiting"),  # the last thing that planning does
        ("executor", "next_batch"),
        ("executor", "forward"),
        ("executor", "sample"),
        ("scheduler", "commit"),
        ("executor", "collect"),
        ("scheduler", "update"),
    ],
)
def test_an_exception_anywhere_in_a_step_undoes_it(part: str, where: str, monkeypatch) -> None:
    """Above all, no block may stay published that was planned and never computed."""
    engine = make_engine()
    original = getattr(getattr(engine, part), where)

    def interrupted(*args):
        original(*args)
        raise KeyboardInterrupt

    engine.add_request("a", list(range(40)), SamplingParams(max_tokens=3))
    with monkeypatch.context() as patched:
        patched.setattr(getattr(engine, part), where, interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            engine.step()
    # Nobody is in a plan that has never come to be.
    assert caught.value.request_ids == ([] if where == "_admit_waiting" else ["a"])
    engine.scheduler.check()
    assert not engine.scheduler.block_manager.prefix_cache.hashes()
    token_ids = run(engine)["a"].outputs[0].token_ids
    assert token_ids == [40, 41, 42]
    assert engine.scheduler.block_manager.num_free_blocks == engine.executor.num_kv_blocks


def test_an_observer_that_raises_loses_no_output() -> None:
    engine = make_engine()
    engine.observers.append(lambda *args: 1 / 0)
    engine.add_request("a", [1], SamplingParams(max_tokens=1))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert engine.has_unfinished_requests()  # there is something to hand out
    assert [output.request_id for output in engine.step()] == ["a"]
    assert not engine.has_unfinished_requests()


def test_the_time_between_tokens_does_not_count_the_end_of_sequence() -> None:
    engine = make_engine(eos=frozenset({4}))
    engine.add_request("a", [1], SamplingParams(max_tokens=9))
    metrics = run(engine)["a"].metrics
    assert metrics.num_output_tokens == 2 and metrics.last_token_time < metrics.finished_time
    span = metrics.last_token_time - metrics.first_token_time
    assert metrics.inter_token_time == pytest.approx(span)


def test_stats_are_a_snapshot() -> None:
    engine = make_engine()
    before = engine.stats
    engine.add_request("a", [1], SamplingParams(max_tokens=3))
    run(engine)
    assert (before.num_steps, engine.stats.num_steps) == (0, 3)


def test_a_run_of_broken_bytes_is_not_held_back_for_ever(monkeypatch) -> None:
    """No piece waits for longer than the bytes of a character."""
    engine = make_engine(byte_tokenizer())
    tokens = iter([0xC3, 0x80, 0xE4, 0xBD] * 100 + [0xFF] * 100 + list("é".encode()) + [0xC3])
    monkeypatch.setattr(engine.executor, "collect", lambda handle: StepResult([[next(tokens)]]))
    params = SamplingParams(max_tokens=503, output_kind=RequestOutputKind.DELTA)
    engine.add_request("a", [1], params)
    utf8, pieces, token_ids = codecs.getincrementaldecoder("utf-8")("replace"), [], []
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        pieces.append(output.outputs[0].text)
        token_ids += output.outputs[0].token_ids
        if not output.finished:
            assert pieces[-1] == utf8.decode(bytes(output.outputs[0].token_ids))
    assert "".join(pieces) == byte_tokenizer().decode(token_ids)
    assert pieces.count("") < 450 and pieces[-2].endswith("é") and pieces[-1] == "\ufffd"


# ---------------------------------------------------------------- time


class Clock:
    """Stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_timed_engine(clock: Clock, seconds_per_step: float, **options: Any) -> GuardedEngine:
    engine = make_engine(clock=clock, **options)
    original = engine.executor.collect

    def collect(handle: Handle) -> StepResult:
        clock.now += seconds_per_step
        return original(handle)

    engine.executor.collect = collect
    return engine


def test_all_times_are_readings_of_the_clock_that_was_handed_in() -> None:
    clock = Clock()
    engine = make_timed_engine(clock, seconds_per_step=2, max_num_seqs=1, eos=frozenset({54}))
    engine.add_request("first", [1], SamplingParams(max_tokens=3))
    clock.now += 5
    engine.add_request("second", [50], SamplingParams(max_tokens=9))
    outputs = run(engine)
    first, second = outputs["first"].metrics, outputs["second"].metrics
    assert (first.arrival_time, first.first_scheduled_time) == (100, 105)
    assert (first.first_token_time, first.last_token_time, first.finished_time) == (107, 111, 111)
    assert (first.queue_time, first.time_to_first_token, first.total_time) == (5, 7, 11)
    assert first.inter_token_time == 2
    assert (second.arrival_time, second.first_scheduled_time) == (105, 111)
    # Its fourth sample is EOS, which is no token of its output but counts as work.
    assert (second.first_token_time, second.last_token_time) == (113, 117)
    assert second.finished_time == 119
    assert (second.num_output_tokens, second.inter_token_time) == (3, 2)


def test_an_abort_is_an_end() -> None:
    clock = Clock()
    engine = make_timed_engine(clock, seconds_per_step=1)
    engine.add_request("a", [1])
    engine.step()
    clock.now += 6
    assert engine.abort_request("a").metrics.finished_time == 107


@pytest.mark.parametrize("caching", [True, False])
def test_the_time_between_tokens_is_that_within_a_completion(caching: bool) -> None:
    """Three completions side by side do not make their request three times as fast."""
    clock = Clock()
    engine = make_timed_engine(clock, seconds_per_step=2, enable_prefix_caching=caching)
    engine.add_request("r", list(range(40)), SamplingParams(n=3, max_tokens=5))
    metrics = run(engine)["r"].metrics
    assert metrics.num_output_tokens == 15
    assert (metrics.num_intervals, metrics.interval_seconds) == (3 * 4, 3 * 4 * 2)
    assert metrics.inter_token_time == 2
    assert metrics.last_token_time - metrics.first_token_time == 2 * 5  # siblings begin a step late


def test_a_preempted_request_has_waited_between_its_tokens() -> None:
    clock = Clock()
    engine = make_timed_engine(clock, seconds_per_step=1)
    engine.add_request("a", [1], SamplingParams(max_tokens=3))
    engine.step()
    engine.executor.fail_next = True
    with pytest.raises(RuntimeError, match="on fire"):
        engine.step()
    clock.now += 8
    metrics = run(engine)["a"].metrics
    assert (metrics.num_preemptions, metrics.first_scheduled_time) == (1, 100)
    assert (metrics.first_token_time, metrics.last_token_time) == (101, 111)
    assert metrics.inter_token_time == (9 + 1) / 2


def test_the_parts_of_a_step_make_up_its_time() -> None:
    clock, seen = Clock(), []
    engine = make_timed_engine(clock, seconds_per_step=2)
    original = engine.scheduler.schedule

    def schedule() -> Plan:
        clock.now += 3
        return original()

    engine.scheduler.schedule = schedule
    engine.observers.append(lambda plan, batch, result, times: seen.append(times))
    engine.add_request("a", [1], SamplingParams(max_tokens=2))
    run(engine)
    assert seen == [StepTimes(schedule=3, pack=0, execute=2, update=0)] * 2


# ---------------------------------------------------------------- completions that are held


@pytest.mark.parametrize(
    ("num_steps", "texts"),
    [(0, ["", "", ""]), (1, ["", "", ""]), (2, ["b", "", ""]), (3, ["bc", "b", "b"])],
)
def test_a_request_is_aborted_with_all_of_its_completions(num_steps: int, texts: list[str]) -> None:
    """Before its first step, in the middle of its prompt, at the end of it, and when they run."""
    engine = make_engine(byte_tokenizer(), max_num_batched_tokens=20)
    engine.add_request("r", "a" * 40, SamplingParams(n=3, max_tokens=9))
    for _ in range(num_steps):
        engine.step()
    assert len(engine.scheduler.held) == (2 if num_steps < 2 else 0)
    output = engine.abort_request("r")
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 3
    assert [c.text for c in output.outputs] == texts
    assert not engine.has_unfinished_requests() and not engine.scheduler.held
    engine.scheduler.check()
    assert engine.scheduler.block_manager.num_free_blocks == engine.executor.num_kv_blocks


def test_what_is_held_for_another_reason_is_unfinished_and_can_be_aborted() -> None:
    engine = make_engine()
    request = engine.input_processor.process("r", [1, 2], SamplingParams(max_tokens=2))
    engine.output_processor.requests["r"] = request
    engine.scheduler.hold(request.sequences[0], "its image is being read")
    assert engine.has_unfinished_requests() and engine.step() == []
    engine.add_request("other", [5], SamplingParams(max_tokens=1))
    assert [output.request_id for output in engine.step()] == ["other"]
    assert engine.abort_request("r").outputs[0].finish_reason == "abort"
    assert not engine.has_unfinished_requests()
