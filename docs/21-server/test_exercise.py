"""Tests of the exercise of chapter 21: a hub between an engine thread and readers."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from .exercise import Hub, HubError, News

LONG = 1_000_000  # tokens: more than any test reads


class FakeEngine:
    """Engine whose tokens are 0, 1, 2, ... for each request. It records how it is called."""

    def __init__(self, seed: int = 0, fails_at: int | None = None, at_random: bool = False) -> None:
        self._rng, self._fails_at, self._at_random = random.Random(seed), fails_at, at_random
        self._sent: dict[str, int] = {}
        self._wanted: dict[str, int] = {}
        self._threads: set[int] = set()
        self.aborted: list[str] = []
        self.num_steps = self.num_with_news = self.num_polls = 0
        self.is_closed = False

    def add(self, request_id: str, num_tokens: int) -> None:
        self._record_call()
        self._sent[request_id], self._wanted[request_id] = 0, num_tokens

    def abort(self, request_id: str) -> None:
        self._record_call()
        self.aborted.append(request_id)
        self._sent.pop(request_id, None)

    def has_work(self) -> bool:
        self._record_call()
        self.num_polls += 1
        return bool(self._sent)

    def step(self) -> list[News]:
        self._record_call()
        assert self._sent, "a step without work"
        time.sleep(0.0005)
        self.num_steps += 1
        if self.num_steps == self._fails_at:
            raise ArithmeticError("the model is broken")
        news = []
        for request_id, sent in list(self._sent.items()):
            count = self._rng.choice([0, 1, 1, 3]) if self._at_random else 1
            end = min(sent + count, self._wanted[request_id])
            is_last = end == self._wanted[request_id]
            if count:
                news.append(News(request_id, list(range(sent, end)), is_last))
                self._sent[request_id] = end
                if is_last:
                    del self._sent[request_id]
        self.num_with_news += bool(news)
        return news

    def close(self) -> None:
        self._record_call()
        self.is_closed = True

    def is_idle(self) -> bool:
        return not self._sent

    @property
    def num_threads(self) -> int:
        return len(self._threads)

    def _record_call(self) -> None:
        self._threads.add(threading.get_ident())
        assert threading.current_thread() is not threading.main_thread(), (
            "called in another thread than the hub's"
        )
        assert not self.is_closed, "called after close()"


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail(f"waited 5 seconds until {what}")


def play(engine: FakeEngine, life: Callable[[Hub], Coroutine[Any, Any, None]]) -> None:
    """Run `life` with a hub, close it, and check that the thread has ended."""

    async def whole() -> None:
        hub = Hub(engine)
        await life(hub)
        hub.close()
        await until(lambda: engine.is_closed, "the thread has closed the engine")

    asyncio.run(asyncio.wait_for(whole(), 30))
    assert engine.num_threads == 1, "the engine was called from several threads"


async def read(hub: Hub, name: str, num_tokens: int) -> list[list[int]]:
    return [tokens async for tokens in hub.stream(name, num_tokens)]


def joined(pieces: list[list[int]]) -> list[int]:
    assert all(pieces), f"an empty list among {pieces}"
    return [token for tokens in pieces for token in tokens]


def test_a_stream_yields_each_token_once_and_ends() -> None:
    async def life(hub: Hub) -> None:
        pieces = await read(hub, "a", 40)
        assert joined(pieces) == list(range(40)), f"one request for 40 tokens yielded {pieces}"

    engine = FakeEngine()
    play(engine, life)
    assert engine.aborted == [], "a finished request was aborted"


def test_concurrent_streams_get_their_own_tokens() -> None:
    async def life(hub: Hub) -> None:
        lengths = {f"request {n}": n for n in (1, 2, 5, 40)}
        every = await asyncio.gather(*(read(hub, name, n) for name, n in lengths.items()))
        for (name, n), pieces in zip(lengths.items(), every, strict=True):
            assert joined(pieces) == list(range(n)), f"{name} of {n} tokens yielded {pieces}"

    play(FakeEngine(), life)


def test_a_slow_reader_delays_no_other_and_gets_one_list() -> None:
    engine = FakeEngine()

    async def life(hub: Hub) -> None:
        async with aclosing(hub.stream("slow", 60)) as stream:
            first = await anext(stream)
            others = await read(hub, "quick", 60)  # the slow one reads nothing in the meantime
            assert joined(others) == list(range(60)), f"the quick reader got {others}"
            await until(
                engine.is_idle, "the slow reader's request has finished, although it is not read"
            )
            await asyncio.sleep(0.05)  # for its last news to arrive
            rest = [tokens async for tokens in stream]
        assert joined([first, *rest]) == list(range(60)), (
            f"the slow reader got {first}, then {rest}"
        )
        assert len(rest) == 1, f"the unread tokens came in {len(rest)} lists: {rest}"

    play(engine, life)


def test_an_engine_without_work_is_not_polled() -> None:
    engine = FakeEngine()

    async def life(hub: Hub) -> None:
        await read(hub, "a", 3)
        before = engine.num_polls
        await asyncio.sleep(0.1)
        assert engine.num_polls - before <= 2, (
            f"{engine.num_polls - before} calls of has_work in 0.1 s"
        )
        assert joined(await read(hub, "b", 3)) == [0, 1, 2], "the thread must wake up again"

    play(engine, life)


def test_a_stream_that_is_left_aborts_its_request_once() -> None:
    engine = FakeEngine()

    async def life(hub: Hub) -> None:
        async with aclosing(hub.stream("leaves", LONG)) as stream:
            async for _ in stream:
                break
        await until(engine.is_idle, "the request of the stream that was left is aborted")
        assert engine.aborted == ["leaves"]
        assert joined(await read(hub, "leaves", 4)) == [0, 1, 2, 3], "its name may be used again"

    play(engine, life)
    assert engine.aborted == ["leaves"], f"aborted: {engine.aborted}"


def test_a_cancelled_task_aborts_its_request() -> None:
    engine = FakeEngine()

    async def life(hub: Hub) -> None:
        task = asyncio.create_task(read(hub, "cancelled", LONG))
        await until(lambda: not engine.is_idle(), "the request has reached the engine")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(engine.is_idle, "the request of the cancelled task is aborted")

    play(engine, life)
    assert engine.aborted == ["cancelled"]


def test_one_wake_up_per_step_serves_all_readers() -> None:
    engine, wake_ups = FakeEngine(), []

    async def life(hub: Hub) -> None:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def counted(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                wake_ups.append(args[0])
            return call(*args, **options)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        await asyncio.gather(*(read(hub, f"request {n}", 30) for n in range(20)))
        case = f"{len(wake_ups)} wake-ups in {engine.num_steps} steps, for 20 requests of 30 tokens"
        assert len(wake_ups) <= engine.num_with_news, case

    play(engine, life)


def test_a_step_that_raises_ends_every_stream_with_its_error() -> None:
    engine = FakeEngine(fails_at=6)

    async def life(hub: Hub) -> None:
        async def reader(name: str) -> None:
            got: list[list[int]] = []
            with pytest.raises(HubError) as raised:
                async for tokens in hub.stream(name, LONG):
                    got.append(tokens)
            assert isinstance(raised.value.__cause__, ArithmeticError), f"{name}: its cause"
            count = len(joined(got))
            assert joined(got) == list(range(count)) and count, f"{name} got {got} before it"

        await asyncio.gather(*map(reader, "abc"))
        with pytest.raises(HubError) as raised:
            await asyncio.wait_for(read(hub, "later", 1), 5)
        assert isinstance(raised.value.__cause__, ArithmeticError), "a stream that comes later"

    play(engine, life)


def test_close_ends_open_streams() -> None:
    engine = FakeEngine()

    async def life(hub: Hub) -> None:
        task = asyncio.create_task(read(hub, "open", LONG))
        await until(lambda: engine.num_steps > 3, "some steps were taken")
        hub.close()
        with pytest.raises(HubError):
            await asyncio.wait_for(task, 5)

    play(engine, life)


@pytest.mark.parametrize("seed", range(20))
def test_random_readers(seed: int) -> None:
    """Some read all, some sleep, some leave, some are cancelled; none gets a wrong token."""
    rng, engine = random.Random(seed), FakeEngine(seed, at_random=True)
    gone: list[str] = []

    async def reader(hub: Hub, name: str) -> None:
        num_tokens, leaves_at = rng.randint(1, 60), rng.choice([None, None, rng.randint(0, 40)])
        case = f"seed {seed}, {name}: {num_tokens} tokens, leaves at {leaves_at}"
        await asyncio.sleep(rng.random() * 0.02)
        got: list[int] = []
        async with aclosing(hub.stream(name, num_tokens)) as stream:
            async for tokens in stream:
                assert tokens, f"{case}: an empty list after {got}"
                got += tokens
                if leaves_at is not None and len(got) >= leaves_at:
                    gone.append(name)
                    break
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.random() * 0.02)
        expected = list(range(num_tokens if name not in gone else len(got)))
        assert got == expected, f"{case}: got {got}"

    async def life(hub: Hub) -> None:
        tasks = [asyncio.create_task(reader(hub, f"reader {n}")) for n in range(12)]
        victim = rng.choice(tasks)
        await asyncio.sleep(rng.random() * 0.03)
        victim.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
                raise end
        await until(engine.is_idle, f"seed {seed}: no request is running")

    play(engine, life)
    case = f"seed {seed}: aborted {engine.aborted}, left {gone}"
    assert len(engine.aborted) == len(set(engine.aborted)), case
