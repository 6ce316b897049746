"""Parse an incomplete output, and find the difference between two states of it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from nanoserve.serve.http.tools.parse_result import Parsed
from nanoserve.serve.http.tools.parsers import ToolFormat
from nanoserve.serve.http.tools.reasoning import THINK, ReasoningFormat, split

NOTHING = Parsed("", "", [])


class CallDelta(NamedTuple):
    """A new part of a tool call. `name` is None except in the first part of a call."""

    index: int  # type: ignore[assignment]  # tuple.index is not used
    name: str | None
    arguments: str


@dataclass
class Delta:
    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


def parse_answer(
    text: str,
    is_final: bool,
    tools: ToolFormat | None,
    is_inside: bool | None,
    thoughts: ReasoningFormat = THINK,
    call_starts: tuple[str, ...] = (),
) -> Parsed:
    """Parse the text so far. Calls are searched for only after the reasoning.

    is_inside: True if the text begins inside the reasoning; None if reasoning is not parsed.
    thoughts: the format of the reasoning.
    call_starts: if any, the answer has calls only if it begins with one of these.
    """
    reasoning = ""
    if is_inside is not None:
        reasoning, text = split(text, is_final, is_inside, thoughts)
    if tools is None:
        return Parsed(reasoning, text, [])
    if call_starts and not text.startswith(call_starts):
        may_start = not is_final and any(start.startswith(text) for start in call_starts)
        return Parsed(reasoning, "" if may_start else text, [])
    content, calls = tools.parse(text, is_final)
    return Parsed(reasoning, content, calls)


def difference(before: Parsed, now: Parsed) -> Delta:
    """Return the parts of `now` that are new since `before`."""
    delta = Delta(now.reasoning[len(before.reasoning) :], now.content[len(before.content) :])
    for index, call in enumerate(now.calls):
        is_new = index >= len(before.calls)
        known = 0 if is_new else len(before.calls[index].arguments)
        if is_new or len(call.arguments) > known:
            name = call.name if is_new else None
            delta.calls.append(CallDelta(index, name, call.arguments[known:]))
    return delta
