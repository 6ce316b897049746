"""Functions that the Markdown of the course may call between double braces.

Numbers and lists are computed from the worked examples (`worked.py`), the source, the README and
the glossary, so that no page goes out of date: `record.py` writes them, and tests compare them.
"""

import os
import re
import sys
from collections import defaultdict
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# The bundled model is tiny, so several threads would slow each other down. Set this before torch
# is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

DOCS = Path(__file__).parent
for folder in (DOCS, DOCS.parent / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

import api_tables  # noqa: E402
import facts  # noqa: E402
import reading  # noqa: E402
import reference_tables  # noqa: E402
from reading import lines_of_code, readme  # noqa: E402
from tables import table  # noqa: E402

from training.corpus import load_glossary, trained_terms  # noqa: E402

FRONT = "entry"
# Marks after definitions of the glossary, which its first paragraph explains.
NOT_LEARNED, EARLIER_WORDING = " \\*", " †"


def names() -> dict[str, Any]:
    """Return all names that a page may use, except `trace`, which shows a recorded run."""
    functions = (
        *(file, lines, how_many, num_chapters, readme, evening_lines, other_files),
        *(reading_order, package_map, glossary, glossary_in_chinese, how_many_terms),
        *(stops, hours, vllm_options, vllm_parameters, own_options),
    )
    modules = {"worked": worked(), "reference": reference_tables}
    return {**modules, **{function.__name__: function for function in functions}}


def worked() -> SimpleNamespace:
    """Load the folders' worked examples: `worked.preemption` is `07-preemption/worked.py`.

    Raises `ValueError` if two folders have the same name after their numbers.
    """
    found: dict[str, Path] = {}
    for file in sorted(DOCS.glob("*/worked.py")):
        name = facts.short_name(file.parent)
        if name in found:
            raise ValueError(f"{file.parent.name} and {found[name].parent.name} are both {name!r}")
        found[name] = file
    return SimpleNamespace(**{name: facts.load(file) for name, file in found.items()})


def file(name: str, language: str = "") -> str:
    """Return a file of the repository as a code block."""
    text = (facts.ROOT / name).read_text(encoding="utf-8").rstrip()
    return f"```{language}\n{text}\n```"


def num_chapters() -> int:
    return len(facts.chapters())


def how_many(*patterns: str) -> int:
    """Return the number of files that match: `how_many("docs/museum/*.patch")`."""
    return sum(1 for pattern in patterns for _ in facts.ROOT.glob(pattern))


def lines(*patterns: str) -> int:
    """Return the lines of code of matching Python files: `lines("nanoserve/engine/*.py")`."""
    files = [path for pattern in patterns for path in facts.ROOT.glob(pattern)]
    if not files:
        raise ValueError(f"no files match {patterns}")
    return sum(map(lines_of_code, files))


def evening_lines() -> int:
    """Return the lines of code of the whole reading path."""
    return lines(*(stop.file for stop in reading.stops()))


def reading_order() -> str:
    """Return the reading path as a table: file, contents, length, chapters that quote it."""
    quoted_in = defaultdict(list)
    for chapter in facts.chapters():
        for name in dict.fromkeys(map(facts.file_of, chapter.quotes)):
            quoted_in[name].append(f"[{chapter.number}]({chapter.page})")
    rows = []
    for number, stop in enumerate(reading.stops(), 1):
        length = lines_of_code(facts.ROOT / stop.file)
        quoted = ", ".join(quoted_in[stop.file])
        rows.append((number, f"`{stop.file}`", stop.words, length, quoted))
    rows.append(("", "together", "", f"{evening_lines():,}", ""))
    return table(("", "file", "contents", "lines of code", "quoted in chapter"), rows)


def package_map() -> str:
    """Return the packages of the reading path and their imports as a Mermaid figure."""
    files = [stop.file for stop in reading.stops()]
    packages: dict[str, list[str]] = defaultdict(list)
    for name in files:
        packages[_package(name)].append(Path(name).name)
    imports = {
        (_package(name), _package(imported))
        for name in files
        for imported in facts.imports(name)
        if _package(imported) in packages.keys() - {FRONT, _package(name)}
    }
    boxes = [
        f'    {package}["<b>{package.replace("_", " ")}</b><br>{"<br>".join(inside)}"]'
        for package, inside in packages.items()
    ]
    arrows = [f"    {start} --> {end}" for start, end in sorted(imports)]
    return "\n".join(["```mermaid", "flowchart TD", *boxes, *arrows, "```"])


def other_files() -> str:
    """Return the files that are not on the reading path, by folder, with their first lines."""
    parts = []
    for folder, files in reading.other_files().items():
        heading = "nanoserve/" if folder == "." else f"{folder}/"
        rows = [(f"`{name}`", words.replace("|", "\\|")) for name, words in files]
        parts += [f"### `{heading}`", table(("file", "what it is"), rows)]
    return "\n\n".join(parts)


def _package(name: str) -> str:
    parent = Path(name).parent.name
    return FRONT if parent == "nanoserve" else parent


def stops(*numbers: int) -> str:
    """Return a learning path as a list: chapters, promises, reading times, exercises."""
    by_number = {chapter.number: chapter for chapter in facts.chapters()}
    items = []
    for number in numbers:
        chapter = by_number[number]
        promise = chapter.promise.removeprefix("After this chapter you can ").rstrip(".")
        items.append(
            f"- **[{number}. {chapter.title}]({chapter.page})**, {chapter.minutes} min: {promise}. "
            f"*Exercise: {chapter.exercise}.*"
        )
    return "\n".join(items)


def hours(*numbers: int) -> str:
    """Return the reading time of the chapters of a path, to the next half hour."""
    minutes = sum(chapter.minutes for chapter in facts.chapters() if chapter.number in numbers)
    return f"{round(minutes / 30) / 2:g} hours"


def how_many_terms() -> int:
    return len(load_glossary())


def glossary() -> str:
    """Return all terms of the model's glossary, each under its own anchor.

    `NOT_LEARNED` and `EARLIER_WORDING` mark what the bundled model says in other words, or not.
    """
    known = {term.term for term in trained_terms()}
    parts, letter = [], ""
    for term in sorted(load_glossary(), key=lambda term: term.term.lower()):
        if term.term[0].upper() != letter:
            letter = term.term[0].upper()
            parts.append(f"## {letter}")
        parts.append(f"### {term.term}")
        definition = escape(term.course_en or term.en, quote=False)
        mark = NOT_LEARNED if term.term not in known else EARLIER_WORDING if term.course_en else ""
        parts.append(definition + mark)
        also = f"Also: {', '.join(term.aliases)}. " if term.aliases else ""
        zh = term.course_zh or term.zh
        parts.append(f'<p class="also" markdown>{also}<b>{term.zh_term}</b>: {zh}</p>')
    return "\n\n".join(parts)


def glossary_in_chinese() -> str:
    """Return the terms with Chinese names and definitions, and the English page's anchors."""
    terms = sorted(load_glossary(), key=lambda term: term.term.lower())
    return "\n\n".join(
        f'<a id="{slug(term.term)}"></a>\n\n'
        f"### {term.zh_term}（{term.term}）\n\n{term.course_zh or term.zh}"
        for term in terms
    )


def vllm_options() -> str:
    """Return a table of vLLM's options and how each is handled."""
    return table(("option of vLLM", "here", "instead"), api_tables.vllm_options())


def vllm_parameters() -> str:
    """Return a table of vLLM's sampling parameters and how each is handled."""
    return table(("parameter of vLLM", "here", "instead"), api_tables.vllm_parameters())


def own_options() -> str:
    """Return the options that vLLM does not have."""
    return ", ".join(f"`{name}`" for name in api_tables.own_options())


def slug(term: str) -> str:
    """Return the anchor of a term: lower case, hyphens for spaces, no other punctuation."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", term.lower())).strip("-")
