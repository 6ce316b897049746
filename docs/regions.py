"""Regions of the course's Markdown: expressions and the values recorded for them.

An author writes `{{ worked.serving.table(8) }}` on a line of its own for a table, or
`::: nanoserve.engine.plan.Row` for source. `python docs/record.py` computes the value and keeps
both in the page, the expression as a comment:

    <!-- {{ worked.serving.table(8) }} -->

    | users | ...

    <!--/-->

An expression within a sentence is replaced by its value; `computed` notes it below the text. So a
repository's file view shows complete pages, a site can be built without the engine, and a test
computes everything again.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from computed import computed_values, new_place, note_new, update

END = "<!--/-->"
# Alternatives in the order in which they are tried at a place: what is recorded may hold fences.
_PIECES = re.compile(
    r"^<!-- computed\n(?P<computed>.*?)^-->$"
    r"|<!-- (?P<said>\{\{.*?\}\}|::: .*?)\s*-->(?P<value>.*?)<!--/-->"
    r"|^[> ]*(?P<fence>`{3,})[^\n]*\n.*?^[> ]*(?P=fence) *$"
    r"|(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)"
    r"|(?P<expression>\{\{.*?\}\})"
    r"|^(?P<quote>::: [\w.]+(?:\n    [^\n]*)*)$",
    re.M | re.S,
)


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
    """Return the text with each region replaced, recorded or not; code is not changed.

    Comments with expressions of values in running text are left out of what is returned, after
    `replacement` has been called for each of their values.
    """

    def replaced(match: re.Match[str]) -> str:
        if match["fence"] or match["ticks"]:
            return match[0]
        if match["computed"] is not None:
            for each in computed_values(match["computed"]):
                replacement(Region(f"{{{{ {each.expression} }}}}", each.value, False, ""))
            return ""
        return replacement(_region(text, match))

    return _PIECES.sub(replaced, text)


def regions(text: str) -> list[Region]:
    """Return all regions of a page, in order."""
    found: list[Region] = []
    replace_regions(text, lambda region: found.append(region) or "")
    return found


def with_values(text: str, value: Callable[[Region], str]) -> str:
    """Return the text with every value recorded again.

    Raises `ValueError` if a value in running text is not where its comment says, or cannot be told
    from another one (see `computed`).
    """
    expressions: list[str] = []

    def recorded(match: re.Match[str]) -> str:
        if match["fence"] or match["ticks"] or match["computed"] is not None:
            return match[0]
        region = _region(text, match)
        found = value(region).strip("\n")
        if not region.is_block and region.expression is not None:
            if "\n" in found:
                raise ValueError(f"{region.said} has several lines: write it between empty lines")
            expressions.append(region.expression)
            return new_place(len(expressions) - 1, found)
        said = f"<!-- {region.said} -->"
        if region.symbol and "\n" in region.said:
            said = f"<!-- {region.said}\n-->"
        lines = "\n".join((region.prefix + line).rstrip() for line in found.splitlines())
        edge = region.prefix.rstrip()
        return f"{said}\n{edge}\n{lines}\n{edge}\n{region.prefix}{END}"

    def again(expression: str) -> str:
        return value(Region(f"{{{{ {expression} }}}}", None, False, "")).strip("\n")

    found = note_new(update(_PIECES.sub(recorded, text), again), expressions)
    return found.rstrip("\n") + "\n" if text.endswith("\n") else found


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
