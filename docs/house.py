"""What pages and tests say about the source and the course is read from them, here.

Files and their lines, the stops of the README's evening path, the chapters with what they quote.
"""

import ast
import io
import math
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

WORDS_PER_MINUTE = 130  # dense prose, with figures to look at
MINUTES_PER_QUOTE = 3
DOCS = Path(__file__).parent
ROOT = DOCS.parent
QUOTE = re.compile(r"^ *::: ([\w.]+)$", re.M)
FENCE = re.compile(r"^ *(`{3,})([^\n]*)\n(.*?)^ *\1 *$", re.M | re.S)


@dataclass(frozen=True)
class Stop:
    """One item of the evening path: the files that are read together, and the README's words."""

    files: tuple[str, ...]
    words: str


@dataclass(frozen=True)
class Chapter:
    """One Markdown file of `docs/chapters`."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def name(self) -> str:
        """Where it lies, seen from `docs/`: `chapters/03-kv-cache.md`."""
        return self.path.relative_to(DOCS).as_posix()

    @property
    def number(self) -> int:
        return int(self.path.name.split("-")[0])

    @property
    def title(self) -> str:
        (title,) = re.findall(r"^# (?:\d+\. )?(.+)$", without_fences(self.text), re.M)
        return title

    @property
    def promise(self) -> str:
        """The first sentence: what one will be able to explain."""
        (paragraph,) = re.findall(r"\A.*?^# .+?\n\n(.+?)\n\n", self.text, re.M | re.S)
        # A link would lead from where the chapter lies, not from where this is shown.
        return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", first_sentence(paragraph))

    @property
    def quotes(self) -> list[str]:
        """The symbols whose source it shows."""
        return QUOTE.findall(self.text)

    @property
    def exercises(self) -> list[str]:
        """The exercises it sets: the tests that it names."""
        return sorted(set(re.findall(r"docs/exercises/test_(\w+)\.py", self.text)))

    @property
    def minutes(self) -> int:
        """To read it slowly, to the next five; the exercise takes its own time."""
        words = len(without_fences(self.text).split())
        minutes = words / WORDS_PER_MINUTE + MINUTES_PER_QUOTE * len(self.quotes)
        return 5 * math.ceil(minutes / 5)


def without_fences(text: str) -> str:
    return FENCE.sub("", text)


def chapters() -> list[Chapter]:
    return [Chapter(path) for path in sorted((DOCS / "chapters").glob("*.md"))]


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
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
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


def summary(name: str) -> str:
    """The first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse((ROOT / name).read_text(encoding="utf-8"))) or ""
    return first_sentence(docstring.split("\n\n")[0])


def first_sentence(paragraph: str) -> str:
    """On one line. "et al." ends none."""
    return re.split(r"(?<=[.!?])(?<! al\.)\s", " ".join(paragraph.split()))[0]


def file_of(symbol: str) -> str | None:
    """The file in which a dotted name is defined: its longest beginning that is a module."""
    parts = symbol.split(".")
    for length in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:length])
        for path in (module.with_suffix(".py"), module / "__init__.py"):
            if path.is_file():
                return path.relative_to(ROOT).as_posix()
    return None


def imports(name: str) -> Iterator[str]:
    """The files of nanoserve that a file imports when it is loaded."""
    for node in ast.parse((ROOT / name).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanoserve."):
            yield file_of(node.module)
