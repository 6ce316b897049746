"""What those who watch the engine are told is what the engine does, and nothing of what it says."""

import asyncio
import json
import random
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

import pytest
from counting_executor import byte_tokenizer, make_engine, run
from serving import served, wait_until

from nanoserve import SamplingParams
from nanoserve.engine.guard import GuardedEngine
from nanoserve.serve.async_llm import AsyncLLM

pytest.importorskip("fastapi", reason="needs the extra nanoserve[serve]")

from nanoserve.serve.http.dashboard import MAX_WATCHERS, LiveResponse, LiveView
from nanoserve.serve.http.dashboard_state import StepTotals, change, runs, snapshot

NODE = shutil.which("node")


class Replay:
    """Who holds what, as a client knows it: from JSON alone."""

    def __init__(self) -> None:
        self.tables: dict[int, list[int]] = {}
        self.cached: set[int] = set()

    def take(self, name: str, event: dict[str, Any]) -> None:
        if name == "snapshot":
            self.tables = {int(seq): blocks_in(table) for seq, table in event["tables"].items()}
            self.cached = set(blocks_in(event["cached"]))
            return
        for seq in event["ended"]:
            del self.tables[seq]
        for seq, (num_kept, added) in event["tables"].items():
            kept = self.tables.get(int(seq), [])[:num_kept]
            assert len(kept) == num_kept
            self.tables[int(seq)] = kept + blocks_in(added)
        removed, added = (set(blocks_in(event["cached"][what])) for what in ("removed", "added"))
        assert removed <= self.cached and not added & self.cached
        self.cached = self.cached - removed | added

    def check(self, engine: GuardedEngine) -> None:
        """It is what the block manager itself has."""
        manager = engine.scheduler.block_manager
        assert self.cached == set(
            filter(manager.prefix_cache.has, range(1, manager.num_blocks + 1))
        )
        held = [0] * (manager.num_blocks + 1)
        for table in self.tables.values():
            for block in table:
                held[block] += 1
        assert held == manager._ref_counts
        assert self.tables == {seq.arrival: seq.block_table for seq in engine.scheduler.running}


def blocks_in(pairs: list[int]) -> list[int]:
    starts = zip(pairs[::2], pairs[1::2], strict=True)
    return [block for first, length in starts for block in range(first, first + length)]


def ask(prompt: Any, max_tokens: int = 3, **params: Any) -> dict[str, Any]:
    return {"prompt": prompt, "params": SamplingParams(max_tokens=max_tokens, **params)}


def test_runs_stand_for_their_blocks_in_order() -> None:
    assert runs([5, 8, 9, 10]) == [5, 1, 8, 3]
    assert runs([]) == []
    rng = random.Random(0)
    for _ in range(200):
        blocks = [rng.randint(1, 12) for _ in range(rng.randint(0, 30))]
        assert blocks_in(runs(blocks)) == blocks


# ---------------------------------------------------------------- random runs


class WatchedRun:
    """A random run that is looked at now and then, from some moment on."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        max_num_seqs = rng.randint(1, 6)
        self.engine = make_engine(
            num_kv_blocks=rng.randint(8, 20),
            block_size=rng.randint(1, 4),
            max_model_len=8,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 2, 10]),
            enable_prefix_caching=rng.random() < 0.9,
            async_scheduling=rng.random() < 0.5,
        )
        self.totals, self.replay, self.state = StepTotals(), Replay(), None
        self.events: list[tuple[str, Any]] = []
        self.states: list[tuple[dict[int, list[int]], set[int]]] = []

    def run(self) -> None:
        begins = self.rng.randint(0, 12)  # somebody comes to watch
        for step in range(40):
            while self.rng.random() < 0.4:
                self._arrive(f"r{step}-{self.rng.random()}")
            if self.rng.random() < 0.1 and (waiting := self.engine.output_processor.requests):
                self.engine.abort_request(self.rng.choice(list(waiting)))
            if self.rng.random() < 0.05 and self.engine.scheduler.waiting:
                self._fail()
            elif self.engine.has_unfinished_requests():
                self.engine.step()
            if step == begins:
                self.engine.observers.append(self.totals)
            if step >= begins and self.rng.random() < 0.6:
                self._look()
        run(self.engine)
        self._look()
        assert self.state.is_idle and not self.replay.tables

    def _arrive(self, name: str) -> None:
        length, first = self.rng.randint(1, 7), self.rng.randint(0, 1)
        params = SamplingParams(n=self.rng.choice([1, 1, 2]), max_tokens=self.rng.choice([1, 3]))
        self.engine.add_request(name, list(range(first, first + length)), params)

    def _fail(self) -> None:
        self.engine.executor.fail_next = True
        with pytest.raises(RuntimeError, match="on fire"):
            while True:  # a step may have nothing to launch
                self.engine.step()

    def _look(self) -> None:
        before, self.state = self.state, self.totals.read(self.engine)
        if before is None:
            event = "snapshot", snapshot(self.state)
        else:
            event = "change", change(before, self.state)
        self.events.append(json.loads(json.dumps(event)))
        self.replay.take(*self.events[-1])
        self.replay.check(self.engine)
        self.states.append((dict(self.replay.tables), self.replay.cached))


def test_the_events_lead_to_the_engines_own_pool_in_random_runs(
    by_size: Callable[..., int],
) -> None:
    num_runs = by_size(30, 60, 1000)
    seen = dict.fromkeys(("shared", "preempted", "evicted", "ended", "grown"), 0)
    for seed in range(num_runs):
        watched = WatchedRun(seed)
        try:
            watched.run()
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")
        for name, event in watched.events:
            if name == "change":
                seen["evicted"] += bool(event["cached"]["removed"])
                seen["ended"] += len(event["ended"])
                seen["grown"] += any(kept for kept, _ in event["tables"].values())
        for tables, _ in watched.states:
            blocks = [block for table in tables.values() for block in table]
            seen["shared"] += len(blocks) != len(set(blocks))
        seen["preempted"] += watched.engine.stats.num_preemptions
    assert min(seen.values()) > 0.2 * num_runs, seen  # hard enough to mean something


_FOLLOW = """
const follow = (events) => {
  const pool = new Pool();
  return events.map(([name, event]) => {
    if (name === "snapshot") pool.load(event);
    else pool.apply(event);
    const { tables, holders, cached, numShared, numCachedFree } = pool;
    return structuredClone([[...tables], [...holders], [...cached], numShared, numCachedFree]);
  });
};
console.log(JSON.stringify(runs.map(follow)));
"""


@pytest.mark.skipif(NODE is None, reason="the page's program runs outside a browser with node")
def test_the_page_follows_the_same_events_to_the_same_pool() -> None:
    runs_watched = [WatchedRun(seed) for seed in range(12)]
    for watched in runs_watched:
        watched.run()
    program = files("nanoserve.serve.http").joinpath("page", "pool.js").read_text("utf-8")
    data = json.dumps([watched.events for watched in runs_watched])
    script = f"{program}\nconst runs = {data};\n{_FOLLOW}"
    done = subprocess.run(
        [NODE, "--input-type=module", "-"], input=script, capture_output=True, text=True, check=True
    )
    for watched, states in zip(runs_watched, json.loads(done.stdout), strict=True):
        for (tables, cached), state in zip(watched.states, states, strict=True):
            shown_tables, holders, shown_cached, num_shared, num_cached_free = state
            owners: dict[int, set[int]] = {}
            for seq, table in tables.items():
                for block in table:
                    owners.setdefault(block, set()).add(seq)
            assert dict(shown_tables) == tables and set(shown_cached) == cached
            assert {block: set(seqs) for block, seqs in holders} == owners
            assert num_shared == sum(len(seqs) > 1 for seqs in owners.values())
            assert num_cached_free == len(cached - set(owners))


# ---------------------------------------------------------------- what is told


def test_requests_and_totals_are_those_of_the_engine() -> None:
    now = [0.0]
    engine = make_engine(block_size=4, max_num_seqs=2, clock=lambda: now[0])
    totals = StepTotals()
    engine.observers.append(totals)
    for name in ("a", "b", "c"):
        engine.add_request(name, **ask(list(range(10)), max_tokens=4))
    now[0] = 0.25
    engine.step()
    state = totals.read(engine)
    # The second one found two blocks of the first one's prompt; the third one waits.
    assert state.requests == [[1, 10, 0, 10, 1], [2, 10, 8, 10, 1]]
    assert state.waiting == [[3, 10, 0, 0, 0]]
    numbers = state.numbers
    assert (numbers["num_steps"], numbers["num_waiting"], numbers["num_held"]) == (1, 1, 0)
    assert (numbers["num_computed_tokens"], numbers["num_output_tokens"]) == (12, 2)
    assert (numbers["num_first_tokens"], numbers["ttfts"]) == (2, [0.25, 0.25])
    assert (numbers["prefix_cache_queries"], numbers["prefix_cache_hits"]) == (20, 8)
    run(engine)
    numbers = totals.read(engine).numbers
    assert (numbers["num_output_tokens"], numbers["num_first_tokens"]) == (12, 3)


def test_nothing_that_anybody_wrote_is_told() -> None:
    """Neither as text nor as tokens, and no name of a request, which may be somebody's."""
    secret = "my-password"
    engine = make_engine(tokenizer=byte_tokenizer(), block_size=4)
    totals = StepTotals()
    engine.observers.append(totals)
    engine.add_request(f"request of {secret}", **ask(secret, max_tokens=40))
    told, before = [], None
    for _ in range(20):
        engine.step()
        state = totals.read(engine)
        told.append(json.dumps(snapshot(state) if before is None else change(before, state)))
        before = state
    assert not any("password" in event or "request of" in event for event in told)
    for event in map(json.loads, told):
        allowed = {"pool", "tables", "ended", "cached", "requests", "waiting", "numbers"}
        assert event.keys() <= allowed
        assert all(len(row) == 5 for row in event["requests"] + event["waiting"])


# ---------------------------------------------------------------- watchers


class Server:
    """In the place of AsyncLLM: functions are called in order, when the event loop comes to it."""

    def __init__(self, **options: Any) -> None:
        self.engine = make_engine(block_size=4, **options)
        self.is_dead = False

    async def call_in_engine(self, function: Callable[[GuardedEngine], Any]) -> Any:
        await asyncio.sleep(0)
        if self.is_dead:
            raise RuntimeError("the engine is not running")
        return function(self.engine)


def watch(scenario: Callable[[Server, LiveView], Awaitable[None]], **options: Any) -> None:
    """Run `scenario` with a server and its view."""

    async def main() -> None:
        server = Server()
        await scenario(server, LiveView(server.call_in_engine, **{"interval": 0.01, **options}))

    asyncio.run(asyncio.wait_for(main(), 60))


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    head, data, *rest = text.split("\n")
    assert rest == ["", ""]
    return head.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_nobody_watches_and_nothing_is_observed() -> None:
    async def scenario(server: Server, view: LiveView) -> None:
        assert server.engine.observers == []
        with view.watching():
            with view.watching():
                await until(lambda: len(server.engine.observers) == 1)
            await asyncio.sleep(0.05)
            assert len(server.engine.observers) == 1
        await until(lambda: server.engine.observers == [])
        with view.watching():  # and once more
            await until(lambda: len(server.engine.observers) == 1)
        await until(lambda: server.engine.observers == [])

    watch(scenario)


def test_who_goes_before_the_observer_is_there_leaves_none() -> None:
    async def scenario(server: Server, view: LiveView) -> None:
        for num_turns in range(6):
            with view.watching():
                for _ in range(num_turns):
                    await asyncio.sleep(0)
            await asyncio.sleep(0.02)
            assert server.engine.observers == []

    watch(scenario)


def test_a_watcher_gets_a_snapshot_and_then_changes_and_a_slow_one_snapshots() -> None:
    async def scenario(server: Server, view: LiveView) -> None:
        for number in range(3):
            server.engine.add_request(f"r{number}", **ask(list(range(9)), max_tokens=40))
        server.engine.step()
        with view.watching():
            quick, slow = view.events(), view.events()
            replays, names = [Replay(), Replay()], [[], []]
            for turn in range(12):
                for which, events in enumerate((quick, slow)):
                    if which == 0 or turn % 4 == 0:
                        name, event = parsed(await anext(events))
                        names[which].append(name)
                        replays[which].take(name, event)
                        replays[which].check(server.engine)
                version = view._version
                server.engine.step()
                await until(lambda version=version: view._version > version)
            assert names == [["snapshot", *["change"] * 11], ["snapshot"] * 3]
            await quick.aclose()
            await slow.aclose()

    watch(scenario)


def test_an_idle_engine_is_left_alone_and_an_abort_without_a_step_is_seen() -> None:
    async def scenario(server: Server, view: LiveView) -> None:
        server.engine.add_request("a", **ask([1, 2, 3], max_tokens=9))
        server.engine.step()
        with view.watching():
            await until(lambda: view._state is not None)
            server.engine.abort_request("a")
            await until(lambda: view._state.is_idle)
            version = view._version
            await asyncio.sleep(0.1)
            assert view._version == version
            server.engine.add_request("b", **ask([1, 2, 3], max_tokens=1))
            server.engine.step()
            await until(lambda: view._version > version)

    watch(scenario)


def test_silence_is_broken_by_comments() -> None:
    async def scenario(server: Server, view: LiveView) -> None:
        with view.watching():
            events = view.events()
            assert parsed(await anext(events))[0] == "snapshot"
            assert (await anext(events)).startswith(":") and (await anext(events))[-2:] == "\n\n"
            await events.aclose()

    watch(scenario, heartbeat=0.03)


@pytest.mark.parametrize("ends_by", ["death", "close"])
def test_streams_end_with_the_engine_and_with_the_server(ends_by: str) -> None:
    async def scenario(server: Server, view: LiveView) -> None:
        server.engine.add_request("a", **ask([1, 2, 3], max_tokens=9))  # so that it is asked again
        with view.watching():
            events = view.events()
            await anext(events)
            server.is_dead = ends_by == "death"
            if ends_by == "close":
                view.close()
            async for event in events:
                parsed(event)

    watch(scenario)


def test_too_many_watchers_are_turned_away_and_a_place_is_free_again() -> None:
    async def scenario(server: Server, view: LiveView) -> None:
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        def sent_to(messages: list[dict[str, Any]]) -> Callable[[Any], Awaitable[None]]:
            async def send(message: dict[str, Any]) -> None:
                messages.append(message)

            return send

        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        received: list[list[dict[str, Any]]] = [[] for _ in range(MAX_WATCHERS)]
        watchers = [
            asyncio.create_task(LiveResponse(view)(scope, receive, sent_to(messages)))
            for messages in received
        ]
        await until(lambda: all(len(messages) >= 2 for messages in received))
        assert {messages[0]["status"] for messages in received} == {200}
        refused: list[dict[str, Any]] = []
        await LiveResponse(view)(scope, receive, sent_to(refused))
        assert refused[0]["status"] == 503 and b"retry-after" in dict(refused[0]["headers"])
        assert "watchers" in json.loads(refused[1]["body"])["error"]["message"]
        gone.set()
        await asyncio.gather(*watchers)
        assert view.num_watchers == 0
        await until(lambda: server.engine.observers == [])

    watch(scenario)


def test_a_server_tells_it_over_http_and_stops_though_somebody_watches(
    server_llm: AsyncLLM,
) -> None:
    observers = server_llm.engine.observers
    with served(server_llm, grace=60) as server:
        num_others = len(observers)
        with urllib.request.urlopen(f"{server.url}/live", timeout=10) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["cache-control"] == "no-store"
            assert response.readline() == b"event: snapshot\n"
            assert json.loads(response.readline()[6:])["pool"]["num_blocks"] == 1000
            assert len(observers) == num_others + 1
        wait_until(lambda: len(observers) == num_others)
        watching = urllib.request.urlopen(f"{server.url}/live", timeout=10)
        watching.readline()
        began = time.monotonic()
    assert time.monotonic() - began < 50  # it does not wait for them
    watching.read()  # to its end
    watching.close()
