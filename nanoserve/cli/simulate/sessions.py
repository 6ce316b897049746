"""Sessions of chats, agents and batches: traffic whose requests follow each other.

A session begins at a random time with a prompt of its own behind a prefix that all sessions share.
Its next request repeats what was said, and arrives some time after the answer: a person reads and
types, a tool runs. So a slow engine gets requests later, and a router that sends a session
elsewhere loses its cached prefix.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from nanoserve.cli.simulate.traffic import Arrival
from nanoserve.utils.checks import check_choice, check_int, check_number

_POOL = 2**18  # random tokens, of which messages are parts: drawing each token would take longer


class Kind(NamedTuple):
    """The numbers of a kind of session. Lengths are in tokens: (mean of a lognormal, most).

    shared: tokens that all sessions begin with. turns: mean number of requests, geometric.
    pause: mean seconds between an answer and the next request, exponential.
    """

    shared: int
    turns: float
    message: tuple[float, int]
    output: tuple[float, int]
    pause: float


# Not measured on a service, but of the sizes that published traces of such services have: chats of
# a few turns with short messages, agents with long instructions and results of tools, and batches
# of documents without a conversation.
KINDS = {
    "chat": Kind(200, 4.0, (80, 2000), (200, 1000), 20.0),
    "agents": Kind(3000, 10.0, (400, 4000), (120, 800), 3.0),
    "batch": Kind(100, 1.0, (900, 6000), (150, 1000), 0.0),
}
_SPREAD = 0.8  # standard deviation of the logarithms of lengths


@dataclass
class Sessions:
    """Traffic of one kind, at `rate` requests a second on average, for `seconds`.

    At time 0 there are as many sessions under way as at any other time, with what they have said
    before, but nothing is cached yet. `vocab_size` has no stop token. A request has at most
    `longest` tokens, prompt and output together; a session ends before it would have more.
    """

    kind: str
    rate: float
    seconds: float
    vocab_size: int
    seed: int = 0
    longest: int = 16_000

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, [*KINDS])
        check_number("rate", self.rate, 0, excludes_low=True)
        check_number("seconds", self.seconds, 0, excludes_low=True)
        check_int("vocab_size", self.vocab_size, 2)
        self.numbers = KINDS[self.kind]
        check_int("longest", self.longest, self.numbers.shared + 100)
        self._pool = Random(self.seed).choices(range(self.vocab_size), k=_POOL)
        self.prefix = self._pool[: self.numbers.shared]

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the first request of each session; all requests of a batch come at once."""
        rng, turns, pause = Random(self.seed + 1), self.numbers.turns, self.numbers.pause
        if not pause:
            for number in range(max(1, round(self.rate * self.seconds))):
                yield Session(self, number).first(0.0)
            return
        # Numbers of turns are geometric and pauses exponential, so both have no memory: a session
        # under way is like a new one but for its past. Turns take little time beside pauses.
        under_way = round(self.rate * pause * (1 - 1 / turns))  # all but first requests follow them
        times = sorted(rng.expovariate(1 / pause) for _ in range(under_way))
        now, number = rng.expovariate(self.rate / turns), under_way
        for index, time in enumerate(times):
            while now < time:
                yield Session(self, number).first(now)
                now, number = now + rng.expovariate(self.rate / turns), number + 1
            yield Session(self, index, is_under_way=True).first(time)
        while now < self.seconds:
            yield Session(self, number).first(now)
            now, number = now + rng.expovariate(self.rate / turns), number + 1

    def tokens(self, rng: Random, number: int) -> list[int]:
        start = rng.randrange(_POOL - number)
        return self._pool[start : start + number]


class Session:
    """One chat, task or document; a source of follow-up requests."""

    def __init__(self, sessions: Sessions, number: int, is_under_way: bool = False) -> None:
        self._of, size = sessions, sessions.vocab_size
        # Of its own, so that a session is the same whatever other sessions do meanwhile.
        self._rng = Random(f"{sessions.seed} {number}")
        # Parts of one pool may be equal; these tokens make the block behind the prefix unique.
        unique = [number % size, number // size % size, number // size**2 % size]
        self._history = [*sessions.prefix, *unique]
        if is_under_way:
            self._arrival(0.0)  # extends the history
            while self._goes_on():
                self._arrival(0.0)

    def first(self, time: float) -> Arrival:
        return self._arrival(time)

    def next(self, finished_at: float) -> Arrival | None:
        """Return the next request, or None if the session, or the traffic, has ended."""
        if not self._goes_on():
            return None
        time = finished_at + self._rng.expovariate(1 / self._of.numbers.pause)
        return self._arrival(time) if time < self._of.seconds else None

    def _goes_on(self) -> bool:
        of, numbers = self._of, self._of.numbers
        expected = len(self._history) + numbers.message[0] + numbers.output[0]
        return expected < of.longest and self._rng.random() >= 1 / numbers.turns

    def _arrival(self, time: float) -> Arrival:
        of, numbers = self._of, self._of.numbers
        room = of.longest - len(self._history) - 1
        num_message = min(self._length(numbers.message), max(1, room // 2))
        prompt = [*self._history, *of.tokens(self._rng, num_message)]
        num_output = min(self._length(numbers.output), of.longest - len(prompt))
        output = of.tokens(self._rng, num_output)
        self._history = [*prompt, *output]
        return Arrival(time, prompt, output, conversation=self)

    def _length(self, of: tuple[float, int]) -> int:
        """Draw a length with the given mean and limit."""
        mean, most = of
        drawn = mean * self._rng.lognormvariate(-(_SPREAD**2) / 2, _SPREAD)
        return min(most, max(1, round(drawn)))
