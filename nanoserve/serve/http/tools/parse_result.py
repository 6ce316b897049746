"""The parts of a parsed output, complete or not: reasoning, content and tool calls."""

from typing import NamedTuple

from nanoserve.serve.http.tools.partial_json import ObjectSoFar, text_of


class ToolCall(NamedTuple):
    """A tool call. `arguments` is the JSON that the model has written so far.

    id: the id that the model has given it, in formats that have one.
    """

    name: str
    arguments: str
    is_complete: bool
    id: str | None = None


class Parsed(NamedTuple):
    """A parsed output. Each part only grows with the output, so nothing sent is revoked."""

    reasoning: str
    content: str
    calls: list[ToolCall]


class Text:
    """The content of an output, i.e. the text around its calls without adjacent whitespace."""

    def __init__(self) -> None:
        self._pieces = [""]  # before, between and after the calls

    def add(self, text: str) -> None:
        self._pieces[-1] += text

    def end_piece(self) -> None:
        """Begin a new piece after a call."""
        self._pieces.append("")

    def joined(self, is_whole: bool) -> str:
        """Return the content so far.

        Unless the output is complete, whitespace at its end is held back: a call may follow it.
        """
        first, *others = self._pieces
        if not others:
            return first if is_whole else first.rstrip()
        return "\n".join(filter(None, [first.rstrip(), *map(str.strip, others)]))


def call_of(text: str, found: ObjectSoFar, needs_arguments: bool = False) -> ToolCall | None:
    """Return the call that an object represents, or None.

    None: its name is not complete, its arguments have not begun, or it is not a call.

    needs_arguments: an object without arguments is not a call, but other JSON with a name.
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
    """Return the arguments as JSON of an object; None if that is not known yet.

    Models also write null for no arguments, and a string that contains JSON; both can be converted
    only when they are complete.
    """
    if written[:1] in ("{", "["):
        return written
    if not is_complete:
        return None
    if written == "null":
        return "{}"
    inner = text_of(written)
    return inner if inner is not None and inner.lstrip()[:1] == "{" else written


def without_beginning_of(text: str, tags: tuple[str, ...]) -> str:
    """Return `text` without a suffix that may be the beginning of one of the tags."""
    for length in range(min(len(text), max(map(len, tags)) - 1), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return text[:-length]
    return text
