"""Lets something happen between two bytecodes of the engine: an interrupt, an exception, anything.

A trace function is called before bytecodes of the chosen files; at the chosen one it acts. What it
raises is raised there.
"""

import dis
import sys
from collections.abc import Callable, Collection
from functools import cache
from itertools import count, pairwise
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

# They take what lies in the frame already and call nothing, on any Python.
_MOVES_ONLY = {
    "CACHE", "COPY", "EXTENDED_ARG", "KW_NAMES", "LOAD_CLOSURE", "LOAD_CONST", "LOAD_DEREF",
    "LOAD_FAST", "LOAD_GLOBAL", "NOP", "PRECALL", "PUSH_NULL", "SWAP",
}  # fmt: skip


class Moment(NamedTuple):
    """A bytecode about to be run: the `nth` since the call that is the `call`-th of the files'."""

    code: CodeType
    offset: int
    call: int
    nth: int


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


@cache
def _leaves_all_as_it_was(code: CodeType) -> set[int]:
    """Bytecodes before which and after which everything is the same, but for the frame's stack.

    Whatever is raised meets the same handler: on Pythons before 3.11, a bytecode that is not among
    these says where it begins and ends.
    """
    entries = getattr(dis.Bytecode(code), "exception_entries", ())

    def handlers(offset: int) -> list[int]:
        return [entry.target for entry in entries if entry.start <= offset < entry.end]

    return {
        before.offset
        for before, after in pairwise(dis.get_instructions(code))
        if before.opname in _MOVES_ONLY
        and handlers(before.offset) == handlers(after.offset)
        and before.offset not in _after_calls(code)
    }


def last_of_its_like(moments: list[Moment], number: int) -> int:
    """The last of the moments from this one on that nothing but the frame itself can tell apart."""
    while moments[number].offset in _leaves_all_as_it_was(moments[number].code):
        number += 1
    return number


class _Tracing:
    """Around a block: each frame that is entered in it is looked at."""

    def __enter__(self) -> "_Tracing":
        if sys.version_info >= (3, 13):
            # There, bytecodes of code that is entered for the first time are not told of.
            pytest.skip("Python 3.13 does not tell of each bytecode")
        # Python 3.12 tells of bytecodes only if some frame asks for them before.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        raise NotImplementedError


class Recorder(_Tracing):
    """Notes every bytecode that is run in `files`."""

    def __init__(self, files: Collection[str]) -> None:
        self._files, self._num_calls = files, count()
        self.moments: list[Moment] = []

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Also of a generator that is resumed."""
        if frame.f_code.co_filename not in self._files:
            return None
        call, number = next(self._num_calls), count()

        def note(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "opcode":
                moment = Moment(frame.f_code, frame.f_lasti, call, next(number))
                self.moments.append(moment)
            return note

        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return note


class Injector(_Tracing):
    """Acts at a moment of an earlier run of the same; with `again`, also so many bytecodes later.

    Up to the call that the moment belongs to, calls are counted and bytecodes are not: it is this
    that makes thousands of runs cheap. `acted` says whether the moment has come.
    """

    def __init__(
        self,
        files: Collection[str],
        action: Callable[[FrameType], Any],
        moment: Moment,
        again: int | None = None,
    ) -> None:
        self._files, self._action, self._moment, self._again = files, action, moment, again
        self._num_calls, self._left = 0, moment.nth
        self.acted = False

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        call, self._num_calls = self._num_calls, self._num_calls + 1
        return self._follow(frame) if self.acted or call == self._moment.call else None

    def _follow(self, frame: FrameType) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            if self._left == 0:
                self._act(frame)
            self._left -= 1
        return self._trace

    def _act(self, frame: FrameType) -> None:
        if self.acted or self._again is None:
            sys.settrace(None)
        else:
            self._left = self._again
            caller: FrameType | None = frame
            while (caller := caller.f_back) is not None:  # those that are under way count too
                if caller.f_code.co_filename in self._files:
                    caller.f_trace = self._follow(caller)
        if not self.acted and (frame.f_code, frame.f_lasti) != self._moment[:2]:
            return  # another run than the one that was recorded
        self.acted = True
        self._action(frame)
