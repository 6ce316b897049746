"""Texts of an answer cut into pieces, and what a client has who puts the differences together."""

from collections.abc import Callable
from itertools import pairwise

from nanoserve.serve.http.tools.parse_result import Parsed, ToolCall
from nanoserve.serve.http.tools.parser_state import NOTHING, difference

Parse = Callable[[str, bool], Parsed]


def joined(parse: Parse, pieces: list[str]) -> Parsed:
    """Nothing that was sent is taken back. An id is sent with the name of its call.

    It is the format's; those that the server makes up are no part of a parsed text.
    """
    text, before, told = "", NOTHING, Parsed("", "", [])
    calls: list[list[str]] = []
    ids: list[str | None] = []
    for number, piece in enumerate([*pieces, ""]):
        text += piece
        now = parse(text, number == len(pieces))
        assert now.content.startswith(before.content), (before, now)
        assert now.reasoning.startswith(before.reasoning), (before, now)
        delta = difference(before, now)
        told = Parsed(told.reasoning + delta.reasoning, told.content + delta.content, [])
        for index, name, arguments in delta.calls:
            if name is not None:
                assert index == len(calls)
                calls.append([name, ""])
                ids.append(now.calls[index].id)
            calls[index][1] += arguments
        before = now
    ends = [one.is_complete for one in before.calls]
    whole = [ToolCall(*call, *more) for call, *more in zip(calls, ends, ids, strict=True)]
    return told._replace(calls=whole)


def check_cuts(parse: Parse, text: str) -> None:
    """Whole, in two pieces, and character by character, it says the same."""
    expected = parse(text, True)
    cuts: list[list[int]] = [[], *([i] for i in range(len(text))), [*range(len(text))]]
    for cut in cuts:
        borders = [0, *cut, len(text)]
        assert joined(parse, [text[a:b] for a, b in pairwise(borders)]) == expected, cut
