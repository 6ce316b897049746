"""Count how much there is to read: the reading path of `docs/reading_path.toml`, file by file."""

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
LISTS = ("first_hour", "evening")  # in reading order


@dataclass(frozen=True)
class Stop:
    """One file of the reading path, with the words that introduce it."""

    file: str
    words: str


@cache
def reading_path() -> dict[str, Any]:
    """Return the data file, as it is."""
    return tomllib.loads((ROOT / "docs" / "reading_path.toml").read_text(encoding="utf-8"))


def stops(*lists: str) -> list[Stop]:
    """Return the files of these lists (by default of both), in reading order."""
    data = reading_path()
    files = [file for name in lists or LISTS for file in data[name]["files"]]
    return [Stop(file, data["words"][file]) for file in files]


def as_markdown(name: str) -> str:
    """Return a list as the README has it: numbered from the first file of the first hour."""
    first = 1 + sum(len(stops(other)) for other in LISTS[: LISTS.index(name)])
    return "\n".join(
        f"{number}. `{stop.file}`: {stop.words}" for number, stop in enumerate(stops(name), first)
    )


def readme(heading: str) -> str:
    """Return the text below a second-level heading of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, found, rest = text.partition(f"\n## {heading}\n")
    if not found:
        raise ValueError(f"README.md has no heading {heading!r}")
    return rest.split("\n## ")[0].strip()


def other_files() -> dict[str, list[tuple[str, str]]]:
    """Return the files that are not on the reading path, by folder, each with its first line.

    Folders and files are relative to `nanoserve/`; the first line is that of the docstring.
    """
    listed = {ROOT / stop.file for stop in stops()}
    folders: dict[str, list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "nanoserve").rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if path in listed or path.name.startswith("__") or docstring is None:
            continue
        folder = path.parent.relative_to(ROOT / "nanoserve").as_posix()
        folders.setdefault(folder, []).append((path.name, docstring.split("\n")[0]))
    return folders


def num_tokens(path: Path) -> int:
    """Return the number of tokens of source: names, numbers, operators and strings.

    Comments and docstrings do not count; nor do line ends, so that packing gains nothing.
    """
    return len(_tokens_of_code(path))


def lines_of_code(path: Path) -> int:
    """Return the number of lines that hold code: no blank lines, comments or docstrings."""
    tokens = _tokens_of_code(path)
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)})


def _tokens_of_code(path: Path) -> list[tokenize.TokenInfo]:
    skipped = (
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT),
        *(tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER),
    )
    found: list[tokenize.TokenInfo] = []
    previous = tokenize.NEWLINE
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        starts_statement = previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        is_docstring = token.type == tokenize.STRING and starts_statement
        if token.type not in skipped and not is_docstring:
            found.append(token)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            previous = token.type
    return found
