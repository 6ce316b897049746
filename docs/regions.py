"""Regions of the course's Markdown: expressions and the values recorded for them.

An author writes `{{ worked.serving.users(8) }}` for a number, or `::: nanoserve.engine.plan.Row`
for source. `python docs/record.py` computes the value and keeps both in the page, the expression as
a comment:

    <!-- {{ worked.serving.users(8) }} -->431<!--/-->

So a repository's file view shows complete pages, a site can be built without the engine, and a
test computes everything again.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

END = "<!--/-->"
# Alternatives in the order in which they are tried at a place: what is recorded may hold fences.
_PIECES = re.compile(
    r"<!-- (?P<said>\{\{.*?\}\}|::: .*?)\s*-->(?P<value>.*?)<!--/-->"
    r"|^[> ]*(?P<fence>`{3,})[^\n]*\n.*?^[> ]*(?P=fence) *$"
    r"|(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)"
    r"|(?P<expression>\{\{.*?\}\})"
    r"|^(?P<quote>::: [\w.]+(?:\n    [^\n]*)*)$",
    re.M | re.S,
)
# An HTML comment at the beginning of a line would end a paragraph.
_COMMENT_FIRST = re.compile(r"(?<=\S)[ \t]*\n[> ]*(?=<!-- \{\{[^\n]*?-->[^\n])")
# A bar ends a table's cell, in a comment too.
_CELL_WITH_BAR = re.compile(r"^[> ]*\|.*?<!-- \{\{(?:(?!-->)[^\n])*?\|.*$", re.M)
_ITEM_BY_COMMENT = re.compile(r"^[> ]*(?:[-*] |\d+\. )?<!-- \{\{[^\n]*?-->[^\n].*$", re.M)


@dataclass(frozen=True)
class Region:
    """An expression or quotation, and its recorded value.

    said: an expression in double braces, or `::: ` with a symbol and mkdocstrings' options.
    value: None before it is recorded.
    is_block: it has lines of its own, as a table does.
    prefix: the text before it on its line: spaces, or the ">" of a quotation.
    """

    said: str
    value: str | None
    is_block: bool
    prefix: str

    @property
    def expression(self) -> str | None:
        """Return the text between the braces; None for a quotation of source."""
        return self.said[2:-2].strip() if self.said.startswith("{{") else None

    @property
    def symbol(self) -> str | None:
        """Return the dotted name whose source is quoted; None for an expression."""
        return None if self.expression is not None else self.said.split()[1]


def replace_regions(text: str, replacement: Callable[[Region], str]) -> str:
    """Return the text with each region replaced, recorded or not; code is not changed."""

    def replaced(match: re.Match[str]) -> str:
        if match["fence"] or match["ticks"]:
            return match[0]
        return replacement(_region(text, match))

    return _PIECES.sub(replaced, text)


def regions(text: str) -> list[Region]:
    """Return all regions of a page, in order."""
    found: list[Region] = []
    replace_regions(text, lambda region: found.append(region) or "")
    return found


def with_values(text: str, value: Callable[[Region], str]) -> str:
    """Return the text with every value recorded again.

    Raises `ValueError` for regions that a plain view would display differently: a list's item or a
    paragraph that begins with a computed number, whose comment ends the paragraph; and a bar in the
    comment of a table's cell, which ends the cell.
    """

    def recorded(region: Region) -> str:
        found = value(region).strip("\n")
        said = f"<!-- {region.said} -->"
        if region.symbol and "\n" in region.said:
            said = f"<!-- {region.said}\n-->"
        if not region.is_block:
            return f"{said}{found}{END}"
        lines = "\n".join((region.prefix + line).rstrip() for line in found.splitlines())
        edge = region.prefix.rstrip()
        return f"{said}\n{edge}\n{lines}\n{edge}\n{region.prefix}{END}"

    text = _COMMENT_FIRST.sub(" ", replace_regions(text, recorded))
    if wrong := _ITEM_BY_COMMENT.search(text):
        raise ValueError(f"begin with a word, not with what is computed: {wrong[0][:160]}")
    if wrong := _CELL_WITH_BAR.search(text):
        raise ValueError(f"in a table's cell write % and not |format: {wrong[0][-160:]}")
    return text


def without_regions(text: str) -> str:
    """Return the written text of a page: with values, without tables, source and comments."""
    return replace_regions(text, lambda region: "" if region.is_block else region.value or "")


def _region(text: str, match: re.Match[str]) -> Region:
    start = text.rfind("\n", 0, match.start()) + 1
    before, after = text[start : match.start()], text[match.end() :].split("\n", 1)[0]
    alone = not before.strip("> ") and not after.strip()
    said, value = match["said"], match["value"]
    if said is None:
        said = match["expression"] or match["quote"]
    if value is not None:
        is_block = "\n" in value
    else:
        above = text[: max(start - 1, 0)].rsplit("\n", 1)[-1]
        below = text[match.end() :].removeprefix(after).removeprefix("\n").split("\n", 1)[0]
        is_block = alone and not above.strip("> ") and not below.strip("> ")
    return Region(said.rstrip(), value, is_block, before if alone else "")
