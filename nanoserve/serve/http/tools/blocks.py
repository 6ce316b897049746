"""An output as blocks in the order in which the model wrote them: reasoning, text, tool calls.

/v1/responses (whose blocks are items) and /v1/messages stream them one after the other. The parsers
return the reasoning, the content and the calls of a text without their order. It follows from their
results for the beginnings of the text, so that every way to cut a stream yields the same blocks.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from nanoserve.serve.http.tools.output_parser import OutputParser
from nanoserve.serve.http.tools.parse_result import Parsed
from nanoserve.serve.http.tools.parser_state import NOTHING, Delta, difference

# Texts parsed to find the order of the parts of an output. A model that alternates between text and
# calls for pages would need more: the rest has the usual order.
_MOST_PARSED = 512


class Change(Enum):
    """A change of a block."""

    BEGIN = "begin"
    GROW = "grow"
    END = "end"


@dataclass
class Block:
    """A part of an output. `text` is its text so far: of a call, its arguments as JSON.

    index: position among the blocks of the output. name, call_id: of a call, otherwise "".
    is_complete: True if it has ended by itself, and not because the output was cut.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    name: str = ""
    call_id: str = ""
    text: str = ""
    is_complete: bool = False

    def grow(self, text: str) -> "Step":
        """Add text to the block."""
        self.text += text
        return Step(Change.GROW, self, text)

    def end(self, is_complete: bool) -> "Step":
        """End the block."""
        self.is_complete = is_complete
        return Step(Change.END, self)


class Step(NamedTuple):
    """A change of a block; `text` is what it grows by."""

    change: Change
    block: Block
    text: str = ""


class BlockStream:
    """The blocks of an output whose text arrives in pieces."""

    def __init__(self, parser: OutputParser) -> None:
        self.blocks: list[Block] = []
        self._parser = parser
        self._text, self._parsed = "", NOTHING
        self._calls: list[Block] = []
        self._open: Block | None = None
        self._num_parsed = 0

    def add(self, text: str, is_final: bool, is_cut: bool = False) -> list[Step]:
        """Add new text and return the changes of the blocks.

        is_final: nothing follows. is_cut: the output ends because it has reached a limit.
        """
        start, self._text = len(self._text), self._text + text
        end = len(self._text)
        steps: list[Step] = []
        so_far = self._parser(self._text, False)
        for delta, parsed in self._in_order(start, self._parsed, end, so_far):
            steps += self._steps(delta, parsed)
        self._parsed = so_far
        if is_final:
            self._parsed = self._parser(self._text, True)
            steps += self._steps(difference(so_far, self._parsed), self._parsed)
            steps += self._end(is_cut)
        return steps

    def _in_order(
        self, low: int, before: Parsed, high: int, now: Parsed
    ) -> Iterator[tuple[Delta, Parsed]]:
        """Yield the differences between two states, each with the state after it.

        A difference has one kind of block if possible.

        low, high: lengths of the text in these states. A difference with several kinds is split by
        parsing the text half-way between them.
        """
        delta = difference(before, now)
        num_kinds = bool(delta.reasoning) + bool(delta.content) + bool(delta.calls)
        if num_kinds <= 1 or high - low <= 1 or self._num_parsed >= _MOST_PARSED:
            yield delta, now
            return
        self._num_parsed += 1
        middle = (low + high) // 2
        between = self._parser(self._text[:middle], False)
        yield from self._in_order(low, before, middle, between)
        yield from self._in_order(middle, between, high, now)

    def _steps(self, delta: Delta, parsed: Parsed) -> Iterator[Step]:
        if delta.reasoning:
            yield from self._grow_last("reasoning", delta.reasoning)
        if delta.content:
            yield from self._grow_last("text", delta.content)
        for number, name, arguments in delta.calls:
            if name is not None:
                taken = [call.call_id for call in self._calls]
                call_id = self._parser.id_of(parsed.calls[number], taken)
                block = Block("call", len(self.blocks), name, call_id)
                self._calls.append(block)
                yield from self._begin(block)
            if arguments:
                yield self._calls[number].grow(arguments)

    def _grow_last(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[Step]:
        if self._open is None or self._open.kind != kind:
            if any(block.kind == kind for block in self.blocks):
                text = text.removeprefix("\n")  # by which the parsers join the parts of one kind
            yield from self._begin(Block(kind, len(self.blocks)))
        if text:
            yield self.blocks[-1].grow(text)

    def _begin(self, block: Block) -> Iterator[Step]:
        yield from self._close()
        self.blocks.append(block)
        self._open = block
        yield Step(Change.BEGIN, block)

    def _close(self, is_complete: bool = True) -> Iterator[Step]:
        if self._open is not None:
            block, self._open = self._open, None
            yield block.end(is_complete)

    def _end(self, is_cut: bool) -> Iterator[Step]:
        """End the last block, which a limit or the end of the output may have cut.

        An answer has text or a call, even if that text is empty, unless it was cut before.
        """
        is_complete = not is_cut
        if self._open is not None and self._open.kind == "call":
            is_complete = self._parsed.calls[-1].is_complete
        yield from self._close(is_complete)
        has_answer = any(block.kind != "reasoning" for block in self.blocks)
        if not has_answer and not (is_cut and self.blocks):
            yield from self._begin(Block("text", len(self.blocks)))
            yield from self._close(not is_cut)


# Around arguments that are no object, in APIs whose calls have only objects.
NO_OBJECT = ('{"arguments": ', "}")


def is_no_object(arguments: str) -> bool:
    """Return True if the arguments of a call, as far as they are known, are another JSON value."""
    begun = arguments.lstrip()
    return bool(begun) and not begun.startswith("{")


def object_so_far(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call, which may be incomplete, as an object.

    Members that have not ended are left out. What is no object becomes one, as with `NO_OBJECT`.
    A number beyond the largest float becomes that float, since JSON has no infinity.
    """
    try:
        value = _finite(from_json(arguments or "{}", allow_partial=True))
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return list(map(_finite, value))
    is_beyond = isinstance(value, float) and not math.isfinite(value)
    return math.copysign(sys.float_info.max, value) if is_beyond else value
