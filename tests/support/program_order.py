"""Triton's interpreter runs programs one after the other; here in another order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

# A program's number and how many there are -> the number of the one that runs in its place.
ORDERS: dict[str, Callable[[int, int], int]] = {
    "forwards": lambda number, count: number,
    "backwards": lambda number, count: count - 1 - number,
    "in turns": lambda number, count: (3 if count % 3 else 1) * (number + 1) % count,
}


@contextmanager
def programs_in_order(axis: int, order: str) -> Iterator[list[int]]:
    """Within, programs run in that order along an axis of the grid; yields those that have."""
    from triton.runtime.interpreter import interpreter_builder as builder

    ran: list[int] = []
    grid, set_size, set_index = [1, 1, 1], builder.set_grid_dim, builder.set_grid_idx

    def set_size_and_note(*size: int) -> None:
        grid[:] = size
        set_size(*size)

    def set_other_index(*index: int) -> None:
        other = [*index]
        other[axis] = ORDERS[order](index[axis], grid[axis])
        ran.append(other[axis])
        set_index(*other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "set_grid_dim", set_size_and_note)
        patch.setattr(builder, "set_grid_idx", set_other_index)
        yield ran
