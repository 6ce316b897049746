"""How much there is to read: the README's evening path, file by file, and their lines of code."""

import io
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Stop:
    """One item of the evening path: the files that are read together, and the README's words."""

    files: tuple[str, ...]
    words: str


def readme(heading: str) -> str:
    """What stands under a second-level heading of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, found, rest = text.partition(f"\n## {heading}\n")
    if not found:
        raise ValueError(f"README.md has no heading {heading!r}")
    return rest.split("\n## ")[0].strip()


def evening_path() -> list[Stop]:
    """The stops that the README lists, in reading order."""
    listed = readme("The evening path").split("\nBeside ")[0]
    stops = []
    for item in re.split(r"^\d+\. ", listed, flags=re.M)[1:]:
        item = " ".join(item.split())
        files = re.findall(r"`(nanoserve/[\w/]+\.py)`", item)
        words = re.sub(r"`nanoserve/[\w/]+\.py`(,| and|:)? ?", "", item).strip(" .:")
        stops.append(Stop(tuple(files), words))
    return stops


def beside_the_path() -> str:
    """The paragraphs of the README on the files that are not on the evening path."""
    return "Beside " + readme("The evening path").split("\nBeside ")[1]


def lines_of_code(path: Path) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    skipped = (
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT),
        *(tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER),
    )
    lines: set[int] = set()
    source = path.read_text(encoding="utf-8")
    previous = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        starts_statement = previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        is_docstring = token.type == tokenize.STRING and starts_statement
        if token.type not in skipped and not is_docstring:
            lines |= set(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            previous = token.type
    return len(lines)
