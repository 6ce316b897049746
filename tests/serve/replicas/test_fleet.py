"""A fleet of replicas in this process: what becomes of requests when replicas come and go."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("ray.serve", reason="needs the extra nanoserve[ray]")
pytest.importorskip("fastapi", reason="needs the extra nanoserve[serve]")

from fake_serve import OPTIONS, FakeServe
from ray.exceptions import RayTaskError
from serving import wait_until

from nanoserve import SamplingParams
from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.engine_thread import EngineDeadError
from nanoserve.serve.replicas.fleet_llm import FleetLLM

LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def serve() -> Iterator[FakeServe]:
    serve = FakeServe()
    serve.start("a")
    yield serve
    serve.close()


@asynccontextmanager
async def fleet(serve: FakeServe) -> AsyncIterator[FleetLLM]:
    loop = asyncio.get_running_loop()
    llm = await loop.run_in_executor(None, FleetLLM, serve)
    try:
        yield llm
    finally:
        await loop.run_in_executor(None, llm.shutdown)


async def text_of(llm: AsyncLLM, prompt: str, params: SamplingParams = SHORT) -> str:
    outputs = [output async for output in llm.generate(prompt, params)]
    assert outputs[-1].finished
    return outputs[-1].outputs[0].text


async def until(is_so) -> None:
    await asyncio.get_running_loop().run_in_executor(None, wait_until, is_so)


def num_unfinished(engine) -> int:
    return len(engine.output_processor.requests)


async def texts_of_one_engine(prompts: list[str], params: SamplingParams) -> list[str]:
    async with AsyncLLM("tiny-qwen3", **OPTIONS) as llm:
        return [await text_of(llm, prompt, params) for prompt in prompts]


def test_answers_are_those_of_one_engine_wherever_they_come_from(serve: FakeServe) -> None:
    prompts = [f"{number} is" for number in range(12)]

    async def run() -> None:
        serve.start("b")
        async with fleet(serve) as llm:
            await until(lambda: len(llm.owner.replicas) == 2)
            texts = await asyncio.gather(*(text_of(llm, prompt) for prompt in prompts))
            assert texts == await texts_of_one_engine(prompts, SHORT)
            assert {name for method, name in serve.sent if method == "generate"} == {"a", "b"}
            assert llm.owner.backlog == -8 and not llm.owner._orders

    asyncio.run(run())


def test_what_has_begun_ends_with_an_error_and_what_has_not_is_begun_elsewhere(
    serve: FakeServe,
) -> None:
    async def run() -> None:
        async with fleet(serve) as llm:
            running = [llm.generate(f"{i} is", LONG) for i in range(4)]
            for stream in running:
                await anext(stream)  # all slots are taken
            waiting = [asyncio.ensure_future(text_of(llm, f"{i} was")) for i in range(3)]
            await until(lambda: llm.owner.backlog == 3)
            serve.kill("a")
            for stream in running:
                with pytest.raises(EngineDeadError, match="has failed; try again"):
                    async for _ in stream:
                        pass
            assert not any(task.done() for task in waiting) and not llm.owner.replicas
            serve.start("b")
            texts = await asyncio.gather(*waiting)
            assert texts == await texts_of_one_engine([f"{i} was" for i in range(3)], SHORT)
            assert list(llm.owner.replicas) == [0]  # in the place of the one that has died

    asyncio.run(run())


def test_a_request_that_kills_replicas_kills_two_and_no_more(serve: FakeServe) -> None:
    async def run() -> None:
        serve.start("b")
        serve.start("c")
        async with fleet(serve) as llm:
            await until(lambda: len(llm.owner.replicas) == 3)
            serve.dies_of_requests = True
            with pytest.raises(EngineDeadError):
                await text_of(llm, "deadly", LONG)
            await until(lambda: len(serve.replicas) == 1)
            serve.dies_of_requests = False
            assert await text_of(llm, "harmless")

    asyncio.run(run())


def test_a_request_that_is_refused_is_told_and_its_replica_stays(serve: FakeServe) -> None:
    async def run() -> None:
        async with fleet(serve) as llm:
            other = llm.generate("other", LONG)
            await anext(other)
            serve.refuses_to_generate = RayTaskError("generate", "traceback", ValueError("no"))
            with pytest.raises(EngineDeadError):
                await text_of(llm, "refused")
            serve.refuses_to_generate = None
            assert await anext(other) and await text_of(llm, "good")
            await other.aclose()

    asyncio.run(run())


def test_who_goes_aborts_and_who_is_aborted_gets_a_last_output(serve: FakeServe) -> None:
    async def run() -> None:
        async with fleet(serve) as llm:
            stream = llm.generate("a", LONG, request_id="mine")
            await anext(stream)
            await stream.aclose()
            while any((await llm.call_in_engine(num_unfinished)).values()):
                await asyncio.sleep(0.01)
            stream = llm.generate("a", LONG, request_id="mine")  # the name is free again
            await anext(stream)
            llm.abort("mine")
            outputs = [output async for output in stream]
            assert outputs[-1].outputs[0].finish_reason == "abort" and outputs[-1].outputs[0].text

    asyncio.run(run())


def test_an_abort_of_what_was_never_sent(serve: FakeServe) -> None:
    async def run() -> None:
        async with fleet(serve) as llm:
            serve.kill("a")
            await until(lambda: not llm.owner.replicas)
            stream = llm.generate("a", LONG, request_id="mine")
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.1)
            llm.abort("mine")
            output = await first
            assert output.finished and output.outputs[0].finish_reason == "abort"

    asyncio.run(run())


def test_a_replica_that_is_stopped_finishes_what_it_has_and_is_left(serve: FakeServe) -> None:
    async def run() -> None:
        async with fleet(serve) as llm:
            old = serve.replicas["a"]
            stream = llm.generate("a", LONG)
            await anext(stream)
            serve.stop("a")
            serve.start("b")
            await until(lambda: len(llm.owner.replicas) == 2)
            assert await text_of(llm, "b")
            assert serve.sent[-1] != ("generate", "a") and ("generate", "b") in serve.sent
            outputs = [output async for output in stream]
            assert outputs[-1].outputs[0].finish_reason == "length"
            await until(lambda: list(llm.owner.replicas) == [1])
            await until(lambda: not any(one.num_listeners for one in old._ingresses.values()))

    asyncio.run(run())


def test_a_pause_is_for_those_that_come_later_too(serve: FakeServe) -> None:
    async def run() -> None:
        async with fleet(serve) as llm:
            await llm.pause_generation(mode="keep")
            serve.start("b")
            await until(lambda: len(llm.owner.replicas) == 2)
            tasks = [asyncio.ensure_future(text_of(llm, f"{i}")) for i in range(4)]
            await asyncio.sleep(0.3)
            assert not any(task.done() for task in tasks)
            assert (await llm.call_in_engine(num_unfinished)) == {0: 2, 1: 2}
            await llm.resume_generation()
            assert all(await asyncio.gather(*tasks))
            assert await llm.reset_prefix_cache()

    asyncio.run(run())


def test_what_is_asked_of_one_replica(serve: FakeServe) -> None:
    async def run() -> None:
        async with fleet(serve) as llm:
            assert await llm.call_in_replica(0, num_unfinished) == 0
            with pytest.raises(ValueError, match="replica=3 must be one of"):
                await llm.call_in_replica(3, num_unfinished)
            with pytest.raises(AttributeError):
                await llm.call_in_engine(fail)

    asyncio.run(run())


def fail(engine) -> None:
    engine.nothing_of_this_name()


def test_a_fleet_that_is_shut_down_ends_what_runs(serve: FakeServe) -> None:
    async def run() -> None:
        async with fleet(serve) as llm:
            stream = llm.generate("a", LONG)
            await anext(stream)
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass
        engine = serve.replicas["a"]._engine
        await until(lambda: not num_unfinished(engine))

    asyncio.run(run())


def test_the_router_may_be_told_exactly_what_is_cached(serve: FakeServe) -> None:
    """It then knows what other ingresses have sent, and what was evicted."""

    async def run() -> None:
        serve.kill("a")
        serve.start("b", is_exact=True)
        serve.start("c", is_exact=True)
        prompt = "The quick brown fox jumps over the lazy dog. " * 8
        async with fleet(serve) as first:
            await until(lambda: len(first.owner.replicas) == 2)
            await text_of(first, prompt)
            (owner,) = {name for method, name in serve.sent if method == "generate"}
            async with fleet(serve) as second:
                await until(lambda: len(second.owner.replicas) == 2)
                for number in range(3):
                    await text_of(second, prompt + str(number))
                    assert serve.sent[-1] == ("generate", owner) or serve.sent[-1][0] == "heartbeat"
                generated = [name for method, name in serve.sent if method == "generate"]
                assert generated == [owner] * 4
                known = second.owner._placement._router._known[owner]
                blocks = serve.replicas[owner]._engine.scheduler.block_manager
                await until(lambda: set(known.blocks) == set(blocks.prefix_cache.hashes()))
                await second.reset_prefix_cache()
                await text_of(second, "x")  # a step, after which it is told
                await until(lambda: set(known.blocks) == set(blocks.prefix_cache.hashes()))

    asyncio.run(run())
