"""What an answer says, as far as it has come."""

from typing import NamedTuple

from nanoserve.serve.http.tools.partial_json import ObjectSoFar, text_of


class ToolCall(NamedTuple):
    """arguments: JSON as the model has written it, so far."""

    name: str
    arguments: str
    is_complete: bool


class Parsed(NamedTuple):
    """All three only grow while an answer does: what was sent need never be taken back."""

    reasoning: str
    content: str
    calls: list[ToolCall]


class Text:
    """What is no call, piece by piece; spaces around calls are none of it."""

    def __init__(self) -> None:
        self._pieces = [""]  # before, between and behind the calls

    def add(self, text: str) -> None:
        self._pieces[-1] += text

    def end_piece(self) -> None:
        """A call stands here."""
        self._pieces.append("")

    def joined(self, is_whole: bool) -> str:
        """A space at the end may turn out to be one before a call."""
        first, *others = self._pieces
        if not others:
            return first if is_whole else first.rstrip()
        return "\n".join(filter(None, [first.rstrip(), *map(str.strip, others)]))


def call_of(text: str, found: ObjectSoFar, needs_arguments: bool = False) -> ToolCall | None:
    """The call that an object is, once its name is known and its arguments have begun.

    needs_arguments: without them it is no call, but JSON that has a name.
    """
    member, is_whole = found.members.get("name"), found.end is not None
    if member is None or not member.is_complete or text[member.start] != '"':
        return None
    name = text_of(text[member.start : member.end])
    keys = [key for key in found.members if key in ("arguments", "parameters")]
    arguments: str | None = "{}" if is_whole and not needs_arguments else None
    if keys:
        member = found.members[keys[0]]
        arguments = arguments_of(text[member.start : member.end], member.is_complete)
    if not name or arguments is None:
        return None
    return ToolCall(name, arguments, is_whole)


def arguments_of(written: str, is_complete: bool) -> str | None:
    """An object as it is written. Models also write null for none, and JSON within a text: what
    these are is known at their end. None if it is not known yet."""
    if written[:1] in ("{", "["):
        return written
    if not is_complete:
        return None
    if written == "null":
        return "{}"
    inner = text_of(written)
    return inner if inner is not None and inner.lstrip()[:1] == "{" else written


def without_beginning_of(text: str, tags: tuple[str, ...]) -> str:
    """Without what may be the beginning of a tag, at the end."""
    for length in range(min(len(text), max(map(len, tags)) - 1), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return text[:-length]
    return text
