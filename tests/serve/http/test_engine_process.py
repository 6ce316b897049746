"""An engine in a process of its own says what one in this process says, and ends as it should."""

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import in_engine
import pytest
from in_engine import fail, fail_for_good, hang, num_free_blocks, process_id, sleep_long
from serving import wait_until

from nanoserve import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from nanoserve.serve.engine_thread import EngineDeadError

OPTIONS = {"dtype": "float32", "max_num_seqs": 16, "num_kv_blocks": 200, "max_model_len": 512}
KINDS = [*RequestOutputKind]


@pytest.fixture(autouse=True, scope="module")
def importable():
    """Functions that are called in the other process must be found there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(in_engine.__file__).parent), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def started(importable):
    """Return a function that returns an engine, the last one's again if it still runs.

    To start one takes seconds. `forget=True`: it is the caller's alone.
    """
    engines: list[AsyncLLM] = []

    def start(forget: bool = False) -> AsyncLLM:
        if not engines or not engines[-1].is_running:
            engines[:] = [AsyncLLM("tiny-qwen3", engine_process=True, **OPTIONS)]
        return engines.pop() if forget else engines[-1]

    yield start
    for llm in engines:
        llm.shutdown()


@pytest.fixture
def llm(started):
    return started()


async def last_of(outputs, is_delta: bool):
    """Text, token ids, log-probabilities and reason of every completion."""
    told: dict[int, list] = {}
    async for output in outputs:
        for one in output.outputs:
            before = told.get(one.index, ["", [], []]) if is_delta else ["", [], []]
            logprobs = [sorted(entry) for entry in one.logprobs or ()]
            parts = [before[0] + one.text, before[1] + one.token_ids, before[2] + logprobs]
            told[one.index] = [*parts, one.finish_reason, one.stop_reason]
    return [told[index] for index in sorted(told)]


def test_its_answers_are_those_of_an_engine_here(llm, by_size) -> None:
    rng = random.Random(3)
    requests = []
    for number in range(by_size(30, 80)):
        params = SamplingParams(
            n=rng.choice([1, 3]),
            temperature=0.9,
            seed=number,
            max_tokens=rng.randint(1, 30),
            logprobs=rng.choice([None, None, 2]),
            stop=rng.choice([None, None, ["a", "的"]]),
            stop_token_ids=rng.choice([None, [265]]),
            skip_special_tokens=rng.choice([True, False]),
            ignore_eos=rng.choice([True, False]),
            output_kind=rng.choice(KINDS),
        )
        requests.append(([rng.randrange(2048) for _ in range(rng.randint(1, 40))], params))

    async def ask_all():
        delta = RequestOutputKind.DELTA
        asked = [last_of(llm.generate(p, s), s.output_kind is delta) for p, s in requests]
        return await asyncio.gather(*asked), await llm.call_in_engine(num_free_blocks)

    answers, num_free = asyncio.run(ask_all())
    assert num_free == 200
    prompts, params = zip(*requests, strict=True)
    with LLM("tiny-qwen3", **OPTIONS) as here:
        expected = here.generate(list(prompts), list(params), use_tqdm=False)
    for told, output in zip(answers, expected, strict=True):
        assert told == [
            [
                one.text,
                one.token_ids,
                [sorted(entry) for entry in one.logprobs or ()],
                one.finish_reason,
                one.stop_reason,
            ]
            for one in output.outputs
        ]


def test_what_is_called_in_it_runs_there(llm) -> None:
    async def call():
        with pytest.raises(ZeroDivisionError, match="as asked"):
            await llm.call_in_engine(fail)
        with pytest.raises((AttributeError, TypeError, ValueError), match=r"pickle|local"):
            await llm.call_in_engine(lambda engine: None)
        return await llm.call_in_engine(process_id)

    assert asyncio.run(call()) not in (os.getpid(), None)
    assert llm.is_running


def test_a_stream_that_is_dropped_ends_there_too(llm) -> None:
    async def drop():
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        stream = llm.generate([1, 2, 3], params)
        await anext(stream)
        await stream.aclose()
        return await llm.call_in_engine(num_free_blocks)

    assert asyncio.run(drop()) == 200


@pytest.mark.size("full")  # two processes that import all that an engine needs
def test_what_is_refused_there_is_raised_here() -> None:
    with pytest.raises(ValueError, match="max_model_len=5000"):
        AsyncLLM("tiny-qwen3", engine_process=True, max_model_len=5000)
    with pytest.raises(ValueError, match="no-such-model"):
        AsyncLLM("no-such-model", engine_process=True)


ENDS = {  # what it dies of
    "stopped": "has sent no heartbeat",
    "killed": "status -9",
    "failing for good": "the device is gone",
}


@pytest.mark.small(how=["stopped"])
@pytest.mark.parametrize("how", ENDS)
def test_when_it_dies_every_stream_ends_with_an_error(started, how) -> None:
    llm = started(forget=True)

    async def ask():
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        streams = [llm.generate([i], params) for i in range(1, 60)]
        asked = [asyncio.create_task(last_of(stream, False)) for stream in streams]
        await asyncio.sleep(0.05)
        if how == "killed":
            os.kill(await llm.call_in_engine(process_id), signal.SIGKILL)
        elif how == "stopped":
            llm.owner._timeout = 2.0
            os.kill(await llm.call_in_engine(process_id), signal.SIGSTOP)
        else:
            await llm.call_in_engine(fail_for_good)
        ended = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
        assert {type(end) for end in ended} <= {EngineDeadError, RuntimeError}
        assert EngineDeadError in {type(end) for end in ended}
        with pytest.raises(EngineDeadError):
            await llm.call_in_engine(process_id)

    asyncio.run(ask())
    assert not llm.is_running
    assert ENDS[how] in str(llm.owner.error)
    llm.shutdown()
    assert llm.owner._process.poll() is not None


def test_one_that_is_killed_while_it_starts_ends_with_its_status(monkeypatch) -> None:
    """A batch tells that from an engine which cannot start: it starts another one."""
    start = subprocess.Popen

    def start_and_kill(*arguments, **options) -> subprocess.Popen:
        process = start(*arguments, **options)
        process.kill()
        return process

    monkeypatch.setattr(subprocess, "Popen", start_and_kill)
    with pytest.raises(EngineDeadError, match="ended with status -9"):
        AsyncLLM("tiny-qwen3", engine_process=True, **OPTIONS)


@pytest.mark.size("full")  # a further process
def test_one_that_is_stopped_for_a_moment_or_with_this_process_lives_on(llm) -> None:
    """What was stopped itself does not count the time in which it could hear nothing."""
    pid = llm.owner._process.pid
    llm.owner._timeout = 4.0
    stopper = f"import os, time; p = [{pid}, {os.getpid()}]; "
    stopper += "[os.kill(i, 19) for i in p]; time.sleep(6); [os.kill(i, 18) for i in p[::-1]]"
    subprocess.run([sys.executable, "-c", stopper], check=True)  # both, for longer than that
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(pid, signal.SIGCONT)
    assert asyncio.run(llm.call_in_engine(process_id)) == pid


@pytest.mark.size("full")  # a further process
def test_a_step_that_hangs_is_told_and_ends_with_it(started) -> None:
    llm = started(forget=True)

    async def ask():
        await llm.call_in_engine(hang)
        asked = asyncio.create_task(last_of(llm.generate([1, 2, 3]), False))
        while llm.stall is None:
            await asyncio.sleep(0.05)
        with pytest.raises(EngineDeadError, match="computed nothing"):
            await llm.check_health()
        assert llm.is_running  # it may still end
        await asyncio.get_running_loop().run_in_executor(None, llm.shutdown)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(asked, 60)

    asyncio.run(asyncio.wait_for(ask(), 120))
    assert llm.owner._process.poll() is not None


@pytest.mark.size("full")  # in small, one process is started for all tests of this file
def test_nothing_of_it_is_left_when_nobody_has_it_any_more() -> None:
    llm = AsyncLLM("tiny-qwen3", engine_process=True, **OPTIONS)
    process = llm.owner._process
    del llm
    gc.collect()
    wait_until(lambda: process.poll() is not None)
    assert process.returncode == 0


@pytest.mark.size("full")  # a further process
@pytest.mark.parametrize("hangs", [False, True])
def test_it_ends_with_whoever_has_started_it(hangs) -> None:
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        llm = AsyncLLM("tiny-qwen3", engine_process=True, **OPTIONS)
        if hangs:
            llm.call_soon(sleep_long)
        os.write(write, str(llm.owner._process.pid).encode())
        time.sleep(60)
        os._exit(1)
    os.close(write)
    engine = int(os.read(read, 100))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_until(lambda: not is_alive(engine))


def is_alive(pid: int) -> bool:
    """A process that has ended and that nobody has waited for is none."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
