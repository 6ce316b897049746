"""Measures whether loading K and V takes less time than computing them."""

from dataclasses import dataclass

_DECAY = 0.9  # of earlier measurements, with each new one
_FEWEST_TOKENS = 32  # a step of fewer is a decode step, whose time is not a prompt's
_RETRY = 16  # one in so many is loaded although it does not pay: the times may have changed


@dataclass
class Line:
    """The line seconds = latency + rate * amount through recent measurements: least squares."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        new = (1.0, amount, seconds, amount * amount, amount * seconds)
        old = (self.weight, self.x, self.y, self.xx, self.xy)
        sums = [_DECAY * before + added for before, added in zip(old, new, strict=True)]
        self.weight, self.x, self.y, self.xx, self.xy = sums

    def seconds(self, amount: float) -> float | None:
        """Return the expected time; None before the first measurement."""
        if not self.x:
            return None
        spread = self.weight * self.xx - self.x * self.x
        rate = self.y / self.x
        if spread > 1e-6 * self.weight * self.xx:  # otherwise all amounts have been the same
            rate = (self.weight * self.xy - self.x * self.y) / spread
            rate = min(max(rate, 0.0), self.y / self.x)  # neither of the two is negative
        return (self.y - rate * self.x) / self.weight + rate * amount


class LoadRate:
    """Compares the expected time of a load with that of computing the same tokens."""

    def __init__(self) -> None:
        self.loads, self.steps = Line(), Line()  # by blocks, and by tokens
        self._num_declined = 0

    def note_load(self, num_blocks: int, seconds: float) -> None:
        if num_blocks:
            self.loads.add(num_blocks, seconds)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= _FEWEST_TOKENS:
            self.steps.add(num_tokens, seconds)

    def pays(self, num_blocks: int, num_tokens: int) -> bool:
        """Return True if loading so many blocks, for so many tokens, is expected to save time.

        It is if one of the two has not been measured yet.
        """
        load, compute = self.loads.seconds(num_blocks), self.steps.seconds(num_tokens)
        if load is None or compute is None or load < compute:
            return True
        self._num_declined += 1
        return self._num_declined % _RETRY == 0
