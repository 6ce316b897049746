"""`AsyncLLM`: what `LLM` says, for any number of tasks, with nothing left of those that go away."""

import asyncio
import gc
import random
import subprocess
import sys
import threading
import weakref
from itertools import pairwise, product
from operator import attrgetter

import pytest
from serving import is_idle, wait_until

from nanoserve import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from nanoserve.engine.executor import ExecutorDeadError
from nanoserve.features.parallel import heartbeat
from nanoserve.serve.engine_thread import EngineDeadError

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
OPTIONS = {"dtype": "float32", "max_num_seqs": 16, "num_kv_blocks": 200, "max_model_len": 512}
QUESTION = [{"role": "user", "content": "What is a KV cache?"}]


@pytest.fixture(scope="module")
def llm():
    llm = AsyncLLM("tiny-qwen3", **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def unhurried():
    llm = AsyncLLM("tiny-qwen3", stream_interval=8, **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def offline():
    with LLM("tiny-qwen3", **OPTIONS) as llm:
        yield llm


def random_requests(number: int, vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(number)
    return [
        (
            [rng.randrange(vocab_size) for _ in range(rng.randint(1, 40))],
            SamplingParams(
                temperature=rng.choice([0.0, 0.8]),
                seed=rng.randrange(1000),
                max_tokens=rng.randint(1, 40),
                logprobs=rng.choice([None, 2]),
                stop=rng.choice([None, ["a", "的"]]),
                ignore_eos=True,
            ),
        )
        for _ in range(number)
    ]


def with_kind(params: SamplingParams, kind: RequestOutputKind, **others) -> SamplingParams:
    return SamplingParams(**{**vars(params), "output_kind": kind, **others})


async def joined(outputs) -> tuple[str, list[int], list, str | None]:
    """All of a stream of deltas with one completion."""
    text, token_ids, logprobs, reason = "", [], [], None
    async for output in outputs:
        for completion in output.outputs:
            text += completion.text
            token_ids += completion.token_ids
            logprobs += completion.logprobs or ()
            reason = completion.finish_reason
    return text, token_ids, logprobs, reason


def test_streams_of_many_tasks_add_up_to_what_generate_says(llm, offline, by_size) -> None:
    requests = random_requests(by_size(20, 60), offline.engine.model_config.vocab_size)
    prompts, params = zip(*requests, strict=True)
    expected = offline.generate(list(prompts), list(params), use_tqdm=False)

    async def ask_all():
        return await asyncio.gather(
            *(joined(llm.generate(p, with_kind(s, DELTA))) for p, s in requests)
        )

    for (text, token_ids, logprobs, reason), output in zip(
        asyncio.run(ask_all()), expected, strict=True
    ):
        (whole,) = output.outputs
        assert (text, token_ids, reason) == (whole.text, whole.token_ids, whole.finish_reason)
        assert [sorted(entry) for entry in logprobs] == [sorted(e) for e in whole.logprobs or ()]
    wait_until(lambda: is_idle(llm))


def test_cumulative_outputs_grow_and_final_ones_come_once(llm) -> None:
    async def ask(kind):
        params = SamplingParams(max_tokens=12, temperature=0, output_kind=kind)
        return [output async for output in llm.chat(QUESTION, params)]

    texts = [output.outputs[0].text for output in asyncio.run(ask(RequestOutputKind.CUMULATIVE))]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    (final,) = asyncio.run(ask(FINAL))
    assert final.finished and final.outputs[0].text == texts[-1]


@pytest.fixture(scope="module")
def answer_offline(offline):
    """Say what `LLM` answers to [1, 2, 3]; each parameters are asked for once."""
    answers: dict[str, RequestOutput] = {}

    def answer(params: SamplingParams) -> RequestOutput:
        key = str(params)
        if key not in answers:
            (answers[key],) = offline.generate([[1, 2, 3]], params, use_tqdm=False)
        return answers[key]

    return answer


ASKED_FOR: list[dict] = [{}, {"logprobs": 1}, {"stop": ["never"]}, {"n": 3}]
IN_SMALL = [*product([{}], RequestOutputKind), ({"n": 3}, DELTA)]
FULL = pytest.mark.size("full")


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        pytest.param(*case, marks=[] if case in IN_SMALL else [FULL])
        for case in product(ASKED_FOR, RequestOutputKind)
    ],
    ids=str,
)
def test_outputs_come_at_intervals_of_as_many_tokens_as_asked(
    answer_offline, unhurried, kind, options
) -> None:
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=3, ignore_eos=True, **options)
    expected = answer_offline(params)

    async def ask():
        stream = unhurried.generate([1, 2, 3], with_kind(params, kind))
        return [[*output.outputs] async for output in stream]

    outputs = asyncio.run(ask())
    texts, totals = dict.fromkeys(range(params.n), ""), [0]
    for output in outputs:
        for one in output:
            texts[one.index] = one.text if kind is not DELTA else texts[one.index] + one.text
        num_tokens = sum(len(one.token_ids) for one in output)
        totals.append(num_tokens + totals[-1] if kind is DELTA else num_tokens)
    assert [*texts.values()] == [one.text for one in expected.outputs]
    if kind is FINAL:
        assert len(outputs) == 1
        return
    _, *others = [after - before for before, after in pairwise(totals)]
    assert len(others) > 3
    assert all(number >= 8 for number in others[: -params.n])  # each completion has an end


def test_an_interval_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="stream_interval=0"):
        AsyncLLM("there is no such model", stream_interval=0)


@pytest.mark.parametrize("when", ["before it is read", "after one output", "by cancelling"])
def test_a_stream_that_is_dropped_is_aborted(llm, when) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=DELTA)

    async def drop():
        stream = llm.generate([1, 2, 3], params)
        if when == "after one output":
            async for _ in stream:
                break
            wait_until(lambda: llm.engine.has_unfinished_requests())
        elif when == "by cancelling":
            task = asyncio.create_task(joined(stream))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        del stream
        await asyncio.sleep(0.02)

    asyncio.run(drop())
    gc.collect()
    wait_until(lambda: is_idle(llm))


def test_who_reads_late_gets_everything_in_one_output(llm, offline) -> None:
    """However many tokens come meanwhile, one output waits."""
    params = SamplingParams(n=3, max_tokens=60, ignore_eos=True, seed=5, logprobs=1)
    (expected,) = offline.generate([[7, 8, 9]], params, use_tqdm=False)

    async def read_late():
        process = llm.engine.input_processor.process
        late = with_kind(params, DELTA)
        reader = llm.open([process("late", [7, 8, 9], late)])
        first = await reader.read()
        while llm.engine.has_unfinished_requests():
            await asyncio.sleep(0.01)
            assert len(reader._unread) <= 1
        await asyncio.sleep(0.05)
        rest = await reader.read()
        assert reader.is_over
        return [*first, *rest]

    first, rest = asyncio.run(read_late())
    assert rest.finished and [completion.index for completion in rest.outputs] == [0, 1, 2]
    before = {completion.index: completion for completion in first.outputs}
    for late, whole in zip(rest.outputs, expected.outputs, strict=True):
        early = before.get(late.index)
        assert (early.text if early else "") + late.text == whole.text
        assert (early.token_ids if early else []) + late.token_ids == whole.token_ids
        assert len(early.logprobs if early else []) + len(late.logprobs) == len(whole.logprobs)


def test_one_wake_up_a_step_serves_all_streams(llm) -> None:
    """Not one for each output, of which there are sixteen a step."""
    params = SamplingParams(max_tokens=50, ignore_eos=True, output_kind=DELTA)

    async def count():
        loop, woken = asyncio.get_running_loop(), 0
        call_soon = loop.call_soon_threadsafe

        def counted(callback, *args, **kwargs):
            nonlocal woken
            woken += callback == llm._deliver
            return call_soon(callback, *args, **kwargs)

        loop.call_soon_threadsafe = counted
        steps = llm.engine.stats.num_steps
        await asyncio.gather(*(joined(llm.generate([i], params)) for i in range(1, 17)))
        return woken, llm.engine.stats.num_steps - steps

    woken, num_steps = asyncio.run(count())
    assert 1 <= woken <= num_steps + 1


def test_a_bad_request_is_refused_and_changes_nothing(llm) -> None:
    async def ask(*args, **kwargs):
        return [output async for output in llm.generate(*args, **kwargs)]

    async def ask_twice():
        params = SamplingParams(max_tokens=300, ignore_eos=True)
        first = asyncio.create_task(ask([1], params, "same"))
        await asyncio.sleep(0.02)
        with pytest.raises(ValueError, match="'same' is already in use"):
            await ask([1], params, "same")
        await first

    with pytest.raises(ValueError, match="the prompt is empty"):
        asyncio.run(ask([]))
    with pytest.raises(ValueError, match="max_model_len=512"):
        asyncio.run(ask([1] * 600))
    asyncio.run(ask_twice())
    wait_until(lambda: is_idle(llm))


def test_abort_by_id_ends_a_stream_with_what_there_is(llm) -> None:
    async def ask():
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        outputs = []
        async for output in llm.generate([1, 2], params, "to be aborted"):
            outputs.append(output)
            llm.abort("to be aborted")
        return outputs[-1]

    last = asyncio.run(ask())
    assert last.finished and last.outputs[0].finish_reason == "abort"


@pytest.fixture
def breakable():
    """An engine of its own, whose next steps can be made to raise."""
    llm = AsyncLLM("tiny-qwen3", **OPTIONS)
    executor, failures = llm.engine.executor, []
    forward = executor.forward

    def fail_or_forward(*args):
        if failures:
            raise failures.pop()
        return forward(*args)

    executor.forward = fail_or_forward
    yield llm, failures
    llm.shutdown()


def test_a_step_that_fails_once_costs_nobody_a_token(breakable, offline) -> None:
    llm, failures = breakable
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, output_kind=DELTA)
    (expected,) = offline.generate([[5, 6]], params, use_tqdm=False)

    async def ask():
        text = ""
        async for output in llm.generate([5, 6], params):
            text += output.outputs[0].text
            if len(text) > 5 and not llm.owner._num_failures and text != expected:
                failures[:] = [RuntimeError("out of memory, say")] if not asked else []
                asked.append(1)
        return text

    asked: list[int] = []
    assert asyncio.run(ask()) == expected.outputs[0].text and asked


def test_a_step_that_fails_twice_ends_its_requests_and_no_others(breakable) -> None:
    llm, failures = breakable
    params = SamplingParams(max_tokens=100, ignore_eos=True, output_kind=DELTA)

    async def ask():
        stream = llm.generate([5, 6], params)
        await anext(stream)
        failures[:] = [RuntimeError("broken")] * 2
        with pytest.raises(RuntimeError, match="broken"):
            async for _ in stream:
                pass
        return await joined(llm.generate([5, 6], params))

    assert len(asyncio.run(ask())[1]) == 100
    assert llm.is_running
    # pytest keeps the exception, with all frames that it went through, and they the reader.
    llm._readers.clear()
    wait_until(lambda: is_idle(llm))


def test_an_engine_that_fails_for_good_ends_every_stream_with_an_error(breakable) -> None:
    llm, failures = breakable
    params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=DELTA)

    async def ask():
        streams = [llm.generate([i], params) for i in range(1, 80)]  # more than run at once
        asked = [asyncio.create_task(joined(stream)) for stream in streams]
        await asyncio.sleep(0.05)
        failures[:] = [RuntimeError("the device is gone")] * 1000
        ended = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
        assert {type(end) for end in ended} <= {EngineDeadError, RuntimeError}
        assert EngineDeadError in {type(end) for end in ended}
        with pytest.raises(EngineDeadError):
            await joined(llm.generate([1], params))
        with pytest.raises(EngineDeadError):
            await llm.call_in_engine(lambda engine: None)

    asyncio.run(ask())
    assert not llm.is_running and "the device is gone" in str(llm.owner.error)


def test_an_executor_that_is_dead_ends_the_engine_with_its_first_failure(breakable) -> None:
    llm, failures = breakable
    params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=DELTA)

    async def ask():
        streams = [llm.generate([i], params) for i in range(1, 40)]
        asked = [asyncio.create_task(joined(stream)) for stream in streams]
        await asyncio.sleep(0.05)
        failures[:] = [ExecutorDeadError("a rank is gone")] * 9
        ended = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
        assert {type(end) for end in ended} == {EngineDeadError}

    asyncio.run(ask())
    assert len(failures) == 8  # it is not tried again
    assert not llm.is_running and "a rank is gone" in str(llm.owner.error)


def test_an_executor_that_dies_while_nobody_asks_ends_the_engine(breakable) -> None:
    llm, _ = breakable
    llm.engine.executor.failure = "a rank is gone"
    wait_until(lambda: not llm.is_running)
    assert "a rank is gone" in str(llm.owner.error)


def test_a_step_that_hangs_is_told_until_it_ends(breakable, monkeypatch) -> None:
    llm, _ = breakable
    monkeypatch.setattr(heartbeat, "IDLE_LIMIT", 1.0)
    forward, goes_on = llm.engine.executor.forward, threading.Event()

    def hang(*args):
        goes_on.wait()
        return forward(*args)

    llm.engine.executor.forward = hang

    async def ask():
        await llm.check_health()
        asked = asyncio.create_task(joined(llm.generate([1], SamplingParams(max_tokens=3))))
        try:
            while llm.stall is None:
                await asyncio.sleep(0.05)
            with pytest.raises(EngineDeadError, match="computed nothing for"):
                await llm.check_health()
            assert llm.is_running
        finally:
            goes_on.set()
        await asked
        while llm.stall is not None:
            await asyncio.sleep(0.05)
        await llm.check_health()

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_shutdown_does_not_wait_for_a_step_that_hangs(monkeypatch) -> None:
    monkeypatch.setattr(heartbeat, "IDLE_LIMIT", 1.0)
    llm, goes_on = AsyncLLM("tiny-qwen3", **OPTIONS), threading.Event()
    llm.call_soon(lambda engine: goes_on.wait())
    try:
        llm.shutdown()
        assert llm.stall is not None
    finally:
        goes_on.set()
    wait_until(lambda: not llm.owner.is_running)
    llm.owner.join()


def test_shutdown_ends_streams_and_threads() -> None:
    before = threading.active_count()
    llm = AsyncLLM("tiny-qwen3", **OPTIONS)

    async def ask():
        params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=DELTA)
        asked = asyncio.create_task(joined(llm.generate([1], params)))
        await asyncio.sleep(0.05)
        await asyncio.get_running_loop().run_in_executor(None, llm.shutdown)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(asked, 60)

    asyncio.run(ask())
    llm.shutdown()
    wait_until(lambda: threading.active_count() <= before)


def test_one_that_is_dropped_ends_its_thread_and_frees_its_weights() -> None:
    llm = AsyncLLM("tiny-qwen3", **OPTIONS)
    asyncio.run(joined(llm.generate([1, 2], SamplingParams(max_tokens=5))))
    thread, engine = llm.owner, weakref.ref(llm.engine)
    del llm
    gc.collect()
    thread.join()
    del thread
    gc.collect()
    assert engine() is None


def test_call_in_engine_runs_between_steps_in_the_engines_thread(llm) -> None:
    async def call():
        name = await llm.call_in_engine(lambda engine: threading.current_thread().name)
        with pytest.raises(ZeroDivisionError):
            await llm.call_in_engine(lambda engine: 1 / 0)
        return name

    assert asyncio.run(call()) == "nanoserve engine"
    assert llm.is_running


def test_two_event_loops_at_once_are_refused(llm) -> None:
    async def ask_from_another_loop():
        params = SamplingParams(max_tokens=300, ignore_eos=True)
        stream = llm.generate([1], params)
        await anext(stream)
        other = asyncio.to_thread(asyncio.run, joined(llm.generate([2], params)))
        with pytest.raises(RuntimeError, match="another event loop"):
            await other
        await stream.aclose()

    asyncio.run(ask_from_another_loop())
    wait_until(lambda: is_idle(llm))


@pytest.mark.parametrize(
    "engine_process",
    [
        pytest.param(False, id="thread"),
        pytest.param(True, id="process", marks=FULL),  # it must be started
    ],
)
def test_a_pause_stops_the_steps_and_loses_nothing(offline, engine_process) -> None:
    params = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
    shorter = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    expected = offline.generate("The KV cache", params, use_tqdm=False)[0].outputs[0]
    llm = AsyncLLM("tiny-qwen3", engine_process=engine_process, **OPTIONS)

    async def ask(prompt, counts, params=params):
        async for output in llm.generate(prompt, params):
            counts.append(len(output.outputs[0].token_ids))
        return output.outputs[0]

    async def pause_and_resume():
        counts, later = [], []
        asked = asyncio.create_task(ask("The KV cache", counts))
        while not counts:
            await asyncio.sleep(0)
        await llm.pause_generation(mode="keep")
        assert await llm.is_paused()
        num_made = await llm.call_in_engine(attrgetter("stats.num_output_tokens"))
        while counts[-1] < num_made:  # what was posted before may still be on its way
            await asyncio.sleep(0.001)
        num_read = len(counts)
        asked_later = asyncio.create_task(ask("The KV cache", later))
        await asyncio.sleep(0.1)
        assert len(counts) == num_read < 300 and later == []
        await llm.resume_generation()
        assert not await llm.is_paused()
        answers = await asyncio.gather(asked, asked_later)
        assert [answer.token_ids for answer in answers] == [expected.token_ids] * 2

        asked = asyncio.create_task(ask("The KV cache", counts := []))
        while not counts:
            await asyncio.sleep(0)
        await llm.pause_generation()
        ended = await asked
        assert ended.finish_reason == "abort" and len(ended.token_ids) < 300
        await llm.resume_generation()
        assert (await ask("The KV cache", [], shorter)).token_ids == expected.token_ids[:20]
        for options in ({"mode": "wait"}, {"wait_for_inflight_requests": True}):
            with pytest.raises(ValueError, match=r"mode='wait'|requests=True is not supported"):
                await llm.pause_generation(**options)

    asyncio.run(pause_and_resume())
    asyncio.run(llm.pause_generation())
    llm.shutdown()  # paused or not


def test_its_tokenizer_is_transformers(llm, offline) -> None:
    tokenizer = asyncio.run(llm.get_tokenizer())
    assert tokenizer.encode("The KV cache") == offline.get_tokenizer().encode("The KV cache")


@pytest.mark.size("full")  # whole programs; what becomes of a dropped engine is shown above
@pytest.mark.parametrize("kept", ["", "global llm; "], ids=["dropped", "kept"])
def test_a_program_that_forgets_it_ends_in_peace(kept, by_size) -> None:
    """Nothing is torn down under an engine that is still closing: not even one that is no more.

    Each run is a fork of one process, which has imported what takes most of the time.
    """
    program = (
        "import asyncio, os, sys, transformers; from nanoserve import AsyncLLM\n"
        f"async def main():\n    {kept}llm = AsyncLLM('tiny-qwen3', num_kv_blocks=200)\n"
        "    async for _ in llm.generate('The KV cache'): pass\n"
        f"for _ in range({by_size(3, 3, 20)}):\n"
        "    if not (child := os.fork()):\n        asyncio.run(main())\n        break\n"
        "    if os.waitpid(child, 0)[1]: sys.exit('a run has failed')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    # On a busy machine loading takes long enough for a progress bar.
    told = [line for line in ended.stderr.splitlines() if not line.startswith("Loading weights")]
    assert (ended.returncode, "".join(told)) == (0, "")


def test_it_answers_to_what_servers_ask(llm, offline) -> None:
    async def ask():
        await llm.check_health()
        await llm.abort("there is no such request")
        await llm.abort(["nor", "this"])
        return await llm.reset_prefix_cache()

    assert asyncio.run(ask())
    ended = AsyncLLM("tiny-qwen3", **OPTIONS)
    ended.shutdown()
    with pytest.raises(EngineDeadError):
        asyncio.run(ended.check_health())
