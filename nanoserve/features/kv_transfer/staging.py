"""Staging places: the host's memory through which blocks pass on their way to a connector."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from nanoserve.engine.plan import Plan


class Staging:
    """`num_places` places of the host pool, from `first` on.

    A thread of a connector writes to a place at once, while a copy of a step may still be under way
    on the device. So a place that a step copies is given back only when that step, or a later one,
    has ended.
    """

    def __init__(self, first: int, num_places: int, memory: Callable[[], np.ndarray]) -> None:
        """`memory` returns the host pool's memory, uint8 [places, block_bytes]."""
        self.num_places, self._memory = num_places, memory
        self._free = list(range(first, first + num_places))
        self._in_steps: deque[tuple[Plan, list[int]]] = deque()  # given back when these end
        self._undone: list[int] = []  # of steps that have failed, and whose copies may still run

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_places: int) -> list[int]:
        """Return so many places; raises `IndexError` if fewer are free."""
        if num_places > len(self._free):
            raise IndexError(f"{num_places} staging places wanted, {len(self._free)} are free")
        cut = len(self._free) - num_places
        taken, self._free = self._free[cut:], self._free[:cut]
        return taken

    def give_back(self, places: Sequence[int]) -> None:
        """Free places that no step in flight uses."""
        self._free += places

    def views(self, places: Sequence[int]) -> list[np.ndarray]:
        """Return the memory of these places: uint8 [block_bytes] each."""
        memory = self._memory()
        return [memory[place] for place in places]

    def begin_step(self, plan: Plan, places: Sequence[int]) -> None:
        """Note that a step is launched; `places` are given back when it has ended."""
        self._in_steps.append((plan, [*places, *self._undone]))
        self._undone = []

    def end_step(self, plan: Plan) -> None:
        """Note that a step has ended, and all before it."""
        if any(each is plan for each, _ in self._in_steps):
            is_last = False
            while not is_last:
                each, places = self._in_steps.popleft()
                self.give_back(places)
                is_last = each is plan

    def discard_steps(self, places: Sequence[int] = ()) -> None:
        """Note that the results of all steps in flight are discarded, and these places, too."""
        self._undone += [place for _, used in self._in_steps for place in used]
        self._undone += places
        self._in_steps.clear()
