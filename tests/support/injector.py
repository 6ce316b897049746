"""Lets something happen between two bytecodes of the engine: an interrupt, an exception, anything.

A trace function is called before every bytecode of the chosen files; at the chosen one it acts.
What it raises is raised there.
"""

import dis
import sys
from collections.abc import Callable, Collection
from functools import cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

Position = tuple[CodeType, int]  # a bytecode


@cache
def _after_calls(code: CodeType) -> set[int]:
    looks = ("CALL", "JUMP_BACKWARD", "RESUME")
    pairs = pairwise(dis.get_instructions(code))
    return {after.offset for before, after in pairs if before.opname.startswith(looks)}


def looks_for_signals(frame: FrameType) -> bool:
    """Whether CPython may have called a signal's handler just before the frame's next bytecode.

    It does so after calls and jumps back. Elsewhere, as between the last line of a `with` and its
    `__exit__`, an exception would be one that cannot be.
    """
    return frame.f_lasti in _after_calls(frame.f_code)


class Injector:
    """Acts before the bytecodes with the numbers `at`, counting those that are run in `files`.

    `positions` has the bytecode of every number that was reached.
    """

    def __init__(
        self,
        files: Collection[str],
        action: Callable[[FrameType], Any] = lambda frame: None,
        at: Collection[int] = (),
    ) -> None:
        self._files, self._action = files, action
        self._at, self._last = set(at), max(at, default=None)
        self.positions: list[Position] = []

    def __enter__(self) -> "Injector":
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            number = len(self.positions)
            self.positions.append((frame.f_code, frame.f_lasti))
            if number == self._last:
                sys.settrace(None)
            if number in self._at:
                self._action(frame)
        return self._trace
