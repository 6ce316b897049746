"""What a page says, and what was recorded for it: the two forms of the course's Markdown.

An author writes `{{ worked.serving.users(8) }}` for a number, or `::: nanoserve.engine.plan.Row`
for source. `python docs/record.py` computes it and leaves both in the page, what was said as a
comment:

    <!-- {{ worked.serving.users(8) }} -->431<!--/-->

So the repository's own file view shows whole pages, a site is built from them without the engine,
and a test computes everything again.
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
    """Something said by its source, and its recorded value.

    said: an expression in double braces, or `::: ` with a symbol and mkdocstrings' options.
    value: None before it is recorded.
    is_block: it has lines of its own, as a table does.
    prefix: what stands before it on its line: spaces, or the ">" of a quotation.
    """

    said: str
    value: str | None
    is_block: bool
    prefix: str

    @property
    def expression(self) -> str | None:
        """What is between the braces; None of a quotation of source."""
        return self.said[2:-2].strip() if self.said.startswith("{{") else None

    @property
    def symbol(self) -> str | None:
        """The dotted name whose source is shown; None of an expression."""
        return None if self.expression is not None else self.said.split()[1]


def replace_regions(text: str, replacement: Callable[[Region], str]) -> str:
    """The text with each region replaced, recorded or not; code is left alone."""

    def replaced(match: re.Match[str]) -> str:
        if match["fence"] or match["ticks"]:
            return match[0]
        return replacement(_region(text, match))

    return _PIECES.sub(replaced, text)


def regions(text: str) -> list[Region]:
    """All regions of a page, in order."""
    found: list[Region] = []
    replace_regions(text, lambda region: found.append(region) or "")
    return found


def with_values(text: str, value: Callable[[Region], str]) -> str:
    """The text with every value recorded anew.

    Raises `ValueError` for what a plain view of the file would show otherwise: a list's item or a
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
    """What a person has written on a page: values stay, tables and source go, so do comments."""
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
