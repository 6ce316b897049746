"""`LLM.pause_generation`: stepping stops between two steps, and goes on where it stopped."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanoserve import LLM, BeamSearchParams, SamplingParams
from nanoserve.outputs import RequestOutput

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 400}
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
PROMPTS = ["The KV cache", "A block table"]


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("tiny-qwen3", **OPTIONS) as llm:
        yield llm
        llm.resume_generation()


class Call(threading.Thread):
    """A call in another thread, with its result or its error."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call, self.result, self.error = call, None, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error

    def end(self) -> Any:
        self.join(60)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def generating(llm: LLM) -> Call:
    """A `generate` in another thread that has computed a few tokens."""
    before = llm.stats.num_steps
    call = Call(lambda: llm.generate(PROMPTS, LONG, use_tqdm=False))
    wait_for(lambda: llm.stats.num_steps > before + 3)
    return call


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_what_is_under_way_waits_and_continues(llm: LLM) -> None:
    expected = tokens(llm.generate(PROMPTS, LONG, use_tqdm=False))
    call = generating(llm)
    llm.pause_generation(mode="keep")
    steps = llm.stats.num_steps  # no step runs when `pause_generation` returns
    assert llm.is_paused()
    time.sleep(0.2)
    assert llm.stats.num_steps == steps and call.is_alive()
    llm.resume_generation()
    assert not llm.is_paused()
    assert tokens(call.end()) == expected
    assert tokens(llm.generate(PROMPTS, LONG, use_tqdm=False)) == expected


def test_abort_ends_what_is_under_way_and_empties_the_cache(llm: LLM) -> None:
    call = generating(llm)
    llm.pause_generation()
    outputs = call.end()  # during the pause
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 2
    assert all(0 < len(output.outputs[0].token_ids) < 150 for output in outputs)
    llm.resume_generation()
    (again,) = llm.generate(PROMPTS[:1], LONG, use_tqdm=False)
    assert again.metrics.num_cached_prompt_tokens == 0
    assert again.outputs[0].token_ids[: len(outputs[0].outputs[0].token_ids)] == (
        outputs[0].outputs[0].token_ids
    )


def test_a_call_that_would_wait_for_itself_is_rejected(llm: LLM) -> None:
    stream = llm.stream("The KV cache", LONG)
    next(stream)
    llm.pause_generation(mode="keep")
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPTS, LONG),
        lambda: llm.chat([{"role": "user", "content": "a"}], LONG),
        lambda: llm.stream("a", LONG),
        lambda: llm.beam_search(["a"], BeamSearchParams(2, 4)),
        lambda: [*stream],
    ]
    for call in calls:
        with pytest.raises(ValueError, match="call resume_generation\\(\\) first"):
            call()
    llm.resume_generation()
    assert len(llm.generate(PROMPTS, LONG, use_tqdm=False)) == 2


def test_a_stream_in_another_thread_waits(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0], LONG, use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.stream(PROMPTS[0], LONG)
    seen = list(next(stream).outputs[0].token_ids)
    llm.pause_generation(mode="keep")
    call = Call(lambda: [t for output in stream for t in output.outputs[0].token_ids])
    time.sleep(0.15)
    assert call.is_alive()
    llm.resume_generation()
    assert seen + call.end() == expected


def test_a_loop_of_ones_own_is_not_blocked(llm: LLM) -> None:
    """A paused step returns nothing, and the last outputs of aborted requests."""
    llm.engine.add_request("mine", [5, 6, 7], LONG)
    llm.engine.step()
    llm.pause_generation(mode="keep")
    steps = llm.stats.num_steps
    assert llm.engine.step() == [] and llm.stats.num_steps == steps
    llm.pause_generation(mode="abort")
    (output,) = llm.engine.step()
    assert output.outputs[0].finish_reason == "abort"
    assert not llm.engine.has_unfinished_requests()


def test_a_pause_from_inside_a_step_takes_effect_after_it(llm: LLM) -> None:
    llm.engine.observers.append(lambda *_: llm.pause_generation(mode="keep"))
    call = Call(lambda: llm.generate(PROMPTS, LONG, use_tqdm=False))
    wait_for(llm.is_paused)
    time.sleep(0.1)
    assert llm.stats.num_steps == 1 and call.is_alive()
    llm.engine.observers.pop()
    llm.resume_generation()
    assert all(len(ids) == 150 for ids in tokens(call.end()))


def test_a_beam_search_under_way_waits_or_reports_its_end(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=40, ignore_eos=True)
    expected = llm.beam_search(["The KV cache"], params)
    before = llm.stats.num_steps
    call = Call(lambda: llm.beam_search(["The KV cache"], params))
    wait_for(lambda: llm.stats.num_steps > before + 2)
    llm.pause_generation(mode="keep")
    time.sleep(0.1)
    assert call.is_alive()
    llm.resume_generation()
    assert call.end()[0].sequences[0].tokens == expected[0].sequences[0].tokens


def test_arguments_are_checked(llm: LLM) -> None:
    for options in ({"mode": "wait"}, {"wait_for_inflight_requests": True}):
        with pytest.raises(ValueError, match=r"mode='wait'|requests=True is not supported"):
            llm.pause_generation(**options)
    assert not llm.is_paused()
    llm.resume_generation()  # without a pause, this does nothing


def test_ctrl_c_ends_a_call_that_waits(llm: LLM) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals arrive in the main thread")
    main = threading.get_ident()

    def pause_and_interrupt() -> None:
        wait_for(lambda: llm.stats.num_steps > 3)
        llm.pause_generation(mode="keep")
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGINT)

    call = Call(pause_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    call.end()
    llm.resume_generation()
    assert not llm.engine.has_unfinished_requests()


def test_an_update_does_not_wait_for_requests_that_are_paused(llm: LLM) -> None:
    llm.engine.add_request("0", PROMPTS[0], LONG)
    llm.engine.step()
    llm.pause_generation(mode="keep")
    with pytest.raises(ValueError, match=r"mode='wait' would wait for ever .*resume_generation"):
        llm.update_weights({}, mode="wait")
    llm.resume_generation()
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
