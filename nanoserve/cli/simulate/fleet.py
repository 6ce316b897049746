"""Simulated replicas behind the router that serves real replicas.

A heap of events drives the run: the ends of steps, arrivals, and changes of replicas. Events of the
same time are handled together, ends first, before any replica begins its next step: so a request
that arrives when a step ends is seen by the next step.
"""

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from nanoserve.cli.simulate.executor import VirtualClock
from nanoserve.cli.simulate.replica import Replica, Setup
from nanoserve.cli.simulate.results import Finished, Results
from nanoserve.cli.simulate.traffic import Arrival, RequestMaker, Traffic
from nanoserve.engine.request import Request
from nanoserve.outputs import RequestOutput
from nanoserve.serve.replicas.block_events import BlockEvents
from nanoserve.serve.replicas.messages import Order
from nanoserve.serve.replicas.routing import Placement
from nanoserve.utils.checks import check_choice, check_int, check_number, require

# Kinds of events, in their order at the same time.
_END, _FAIL, _RETURN, _RESEND, _FOLLOW_UP, _ARRIVAL = range(6)
_MOST_FAILURES = 2  # replicas that may fail with a request, as in a real fleet
_RETRY_SECONDS = 0.1  # until a request that found no replica is sent again


class Failure(NamedTuple):
    """A replica that fails at `time`, and is back with an empty cache `seconds` later."""

    time: float
    replica: int
    seconds: float


@dataclass(frozen=True)
class FleetSettings:
    """Settings of a fleet, validated on construction.

    router: how the router tracks cached blocks, "approximate" or "exact" (`ReplicaSettings`).
    speeds: by replica number, how many times faster than predicted it computes; 0.5 is slow.
    report_interval: seconds after which a replica that leaps reports its new tokens to the router;
        with 0, every step is computed and reported. Real replicas report every 10 ms.
    """

    num_replicas: int = 1
    router: str = "approximate"
    speeds: Mapping[int, float] | None = None
    failures: tuple[Failure, ...] = ()
    seed: int = 0
    report_interval: float = 0.25

    def __post_init__(self) -> None:
        number = check_int("num_replicas", self.num_replicas, 1)
        check_number("report_interval", self.report_interval, 0)
        check_choice("router", self.router, ("approximate", "exact"))
        for replica, speed in (self.speeds or {}).items():
            check_int("replica", replica, 0, number - 1)
            check_number(f"speed of replica {replica}", speed, 0, excludes_low=True)
        for failure in self.failures:
            check_number("time of a failure", failure.time, 0)
            check_int("replica", failure.replica, 0, number - 1)
            check_number("seconds of a failure", failure.seconds, 0)


@dataclass
class Flight:
    """A request on its way: where it came from, its order at the router, and its replica."""

    arrival: Arrival
    request: Request
    order: Order
    replica: str | None = None
    num_failures: int = 0  # replicas that failed while they had it

    def send_to(self, replica: str) -> None:
        self.replica = replica

    def lose(self, request: Request) -> None:
        """Note that its replica has failed, and replace the request by a new one."""
        self.replica, self.request = None, request
        self.num_failures += 1


class Fleet:
    """Simulated replicas, and the requests that they compute. `run` may be called once."""

    def __init__(self, setup: Setup, settings: FleetSettings | None = None) -> None:
        self.setup, self.settings = setup, settings or FleetSettings()
        self.clock = VirtualClock()
        self.finished, self.num_failed = Finished(), 0
        self.replicas: dict[str, Replica] = {}
        self._gone: list[Replica] = []  # failed replicas, for their statistics
        # A single replica has no router, as in a real server.
        self._placement: Placement | None = None
        if self.settings.num_replicas > 1:
            require(
                setup.config.prefix_cache_seed is not None,
                "several replicas need a prefix_cache_seed, so that the router's hashes are theirs",
            )
            self._placement = Placement(setup.config, Random(self.settings.seed))
        self._block_events: dict[str, BlockEvents] = {}
        self._flights: dict[str, Flight] = {}
        self._events: list[tuple[float, int, int, Any]] = []
        self._num_events = self._num_requests = 0
        self._touched: dict[str, None] = {}  # replicas that may begin a step now
        for number in range(self.settings.num_replicas):
            self._join(number)
        self._maker = RequestMaker(self.replicas["0"].engine)

    def run(self, traffic: Traffic, until: float | None = None) -> Results:
        """Run until all requests have ended, or until virtual time `until`."""
        pending = iter(traffic.arrivals())
        self._push_next(pending)
        for failure in self.settings.failures:
            self._push(failure.time, _FAIL, failure)
        handlers: dict[int, Callable[[Any], None]] = {
            _END: self._end,
            _FAIL: self._fail,
            _RETURN: self._join,
        }
        handlers |= {_RESEND: self._send, _FOLLOW_UP: self._arrive, _ARRIVAL: self._arrive}
        while self._events:
            now = self._events[0][0]
            if until is not None and now > until:
                break
            self.clock.advance_to(now)
            while self._events and self._events[0][0] == now:
                _, kind, _, what = heapq.heappop(self._events)
                handlers[kind](what)
                if kind == _ARRIVAL:
                    self._push_next(pending)
            self._begin()
        replicas = [*self.replicas.values(), *self._gone]
        # The last event may be the end of a leap that was cut short before.
        seconds = until if self._events else max(self.finished.end, default=0.0)
        return Results.of(self.finished, replicas, seconds, self.num_failed)

    # ------------------------------------------------------------------ events

    def _push(self, time: float, kind: int, what: Any) -> None:
        self._num_events += 1  # no two events compare equal
        heapq.heappush(self._events, (time, kind, self._num_events, what))

    def _push_next(self, pending: Iterator[Arrival]) -> None:
        """Schedule the next arrival that does not depend on others."""
        arrival = next(pending, None)
        if arrival is not None:
            self._push(arrival.time, _ARRIVAL, arrival)

    def _begin(self) -> None:
        """Begin the next steps of replicas that have changed."""
        for name in self._touched:
            replica = self.replicas.get(name)
            if replica is None:
                continue
            replica.begin(self.clock.now)
            if replica.busy_until is not None:
                self._push(replica.busy_until, _END, replica)
        self._touched.clear()

    def _end(self, replica: Replica) -> None:
        if replica.busy_until != self.clock.now or self.replicas.get(replica.name) is not replica:
            return  # a leap that was cut short, or a replica that has failed
        for output in replica.end():
            self._finish(output)
        if self._placement is not None:
            self._report(replica, self._placement)
        self._touched[replica.name] = None

    def _arrive(self, arrival: Arrival) -> None:
        request = self._maker.make(str(self._num_requests), arrival, self.clock.now)
        self._num_requests += 1
        place = _only_one if self._placement is None else self._placement.choose
        flight = Flight(arrival, request, Order(request, b"", place))
        self._flights[request.request_id] = flight
        if self._placement is not None:
            self._placement.hash(flight.order)
        self._send(flight)

    def _send(self, flight: Flight) -> None:
        """Send a request to the replica that the router chooses; without one, try again later."""
        name = flight.order.choose(self.replicas)
        if name is None:
            self._push(self.clock.now + _RETRY_SECONDS, _RESEND, flight)
            return
        flight.send_to(name)
        script = flight.arrival.script(self._maker.stop_token_id)
        replica = self.replicas[name]
        was_until = replica.busy_until
        replica.add(flight.request, [script], self.clock.now)
        if replica.busy_until not in (None, was_until):  # a leap was cut short
            self._push(replica.busy_until, _END, replica)
        self._touched[name] = None

    def _finish(self, output: RequestOutput) -> None:
        flight = self._flights.pop(output.request_id)
        self.finished.add(output)
        if self._placement is not None:
            self._placement.release(flight.order)
        conversation = flight.arrival.conversation
        following = None if conversation is None else conversation.next(self.clock.now)
        if following is not None:
            self._push(following.time, _FOLLOW_UP, following)

    def _report(self, replica: Replica, placement: Placement) -> None:
        """Report new tokens and blocks to the router, as replicas do after their steps."""
        for seq in replica.engine.scheduler.running:
            order = self._flights[seq.request_id].order
            num_new = seq.num_output_tokens - order.num_tokens
            if num_new > 0:
                placement.note_tokens(order, num_new)
        if replica.name in self._block_events:
            placement.note_blocks(replica.name, *self._block_events[replica.name].take())

    # ------------------------------------------------------------------ replicas

    def _join(self, number: int) -> None:
        """Add a replica with an empty cache."""
        name, speeds = str(number), self.settings.speeds or {}
        longest = float("inf") if self._placement is None else self.settings.report_interval
        replica = Replica(self.setup, name, speeds.get(number, 1.0), longest)
        self.replicas[name] = replica
        if self._placement is None:
            return
        self._placement.join(name, replica.executor.num_kv_blocks)
        if self.settings.router == "exact":
            manager = replica.engine.scheduler.block_manager
            self._block_events[name] = BlockEvents(manager)
            self._placement.note_blocks(name, [], [])

    def _fail(self, failure: Failure) -> None:
        """Remove a replica; its requests without output are sent to another one."""
        name = str(failure.replica)
        replica = self.replicas.pop(name, None)
        if replica is None:
            return  # it has failed already
        self._gone.append(replica)
        self._block_events.pop(name, None)
        if self._placement is not None:
            self._placement.leave(name)
        self._push(self.clock.now + failure.seconds, _RETURN, failure.replica)
        replica.interrupt(self.clock.now)
        for flight in [f for f in self._flights.values() if f.replica == name]:
            self._lose(flight)

    def _lose(self, flight: Flight) -> None:
        lost, first = flight.request, flight.request.sequences[0]
        if self._placement is not None:
            self._placement.release(flight.order)
        again = self._maker.make(lost.request_id, flight.arrival, first.metrics.arrival_time)
        flight.lose(again)
        if first.num_output_tokens or flight.num_failures >= _MOST_FAILURES:
            del self._flights[lost.request_id]
            self.num_failed += 1
            return
        self._send(flight)


def _only_one(order: Order, candidates: Collection[str]) -> str | None:
    """Return the only replica, or None if it has failed."""
    return next(iter(candidates), None)
