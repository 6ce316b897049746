"""What the Markdown of the course may say between double braces.

So that no page can say what is no longer so, numbers and lists come from the worked examples
(`worked.py`), the source, the README and the glossary. `record.py` computes them, and tests do.
"""

import os
import re
import sys
from collections import defaultdict
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# The bundled model is tiny: more threads than one wait for each other. Set before torch is loaded.
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

FRONT = "front_door"


def names() -> dict[str, Any]:
    """All names that a page may use, but for `trace`, which shows a scenario's recorded run."""
    functions = (
        *(file, lines, how_many, num_chapters, readme, evening_lines, other_files),
        *(reading_order, map_of_the_rooms, glossary, glossary_in_chinese, how_many_terms),
        *(stops, hours, vllm_options, vllm_parameters, own_options),
    )
    modules = {"worked": worked(), "reference": reference_tables}
    return {**modules, **{function.__name__: function for function in functions}}


def worked() -> SimpleNamespace:
    """The folders' worked examples: `worked.preemption` is `07-preemption/worked.py`.

    Raises `ValueError` if two folders have one name behind their numbers.
    """
    found: dict[str, Path] = {}
    for file in sorted(DOCS.glob("*/worked.py")):
        name = facts.short_name(file.parent)
        if name in found:
            raise ValueError(f"{file.parent.name} and {found[name].parent.name} are both {name!r}")
        found[name] = file
    return SimpleNamespace(**{name: facts.load(file) for name, file in found.items()})


def file(name: str, language: str = "") -> str:
    """A file of the repository, as it is."""
    text = (facts.ROOT / name).read_text(encoding="utf-8").rstrip()
    return f"```{language}\n{text}\n```"


def num_chapters() -> int:
    return len(facts.chapters())


def how_many(*patterns: str) -> int:
    """Files that match: `how_many("docs/museum/*.patch")`."""
    return sum(1 for pattern in patterns for _ in facts.ROOT.glob(pattern))


def lines(*patterns: str) -> int:
    """Lines of code of the Python files that match: `lines("nanoserve/engine/*.py")`."""
    files = [path for pattern in patterns for path in facts.ROOT.glob(pattern)]
    if not files:
        raise ValueError(f"no files match {patterns}")
    return sum(map(lines_of_code, files))


def evening_lines() -> int:
    """Lines of code of the whole reading path."""
    return lines(*(stop.file for stop in reading.stops()))


def reading_order() -> str:
    """The reading path as a table: each file, what it answers, its length, who explains it."""
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
    return table(("", "file", "what it answers", "lines of code", "quoted in chapter"), rows)


def map_of_the_rooms() -> str:
    """The rooms of the reading path and who calls whom, as the text of a Mermaid figure."""
    files = [stop.file for stop in reading.stops()]
    rooms: dict[str, list[str]] = defaultdict(list)
    for name in files:
        rooms[_room(name)].append(Path(name).name)
    doors = {
        (_room(name), _room(imported))
        for name in files
        for imported in facts.imports(name)
        if _room(imported) in rooms.keys() - {FRONT, _room(name)}
    }
    boxes = [
        f'    {room}["<b>{room.replace("_", " ")}</b><br>{"<br>".join(inside)}"]'
        for room, inside in rooms.items()
    ]
    arrows = [f"    {start} --> {end}" for start, end in sorted(doors)]
    return "\n".join(["```mermaid", "flowchart TD", *boxes, *arrows, "```"])


def other_files() -> str:
    """The files that are not on the reading path, folder by folder, with their first lines."""
    parts = []
    for folder, files in reading.other_files().items():
        heading = "nanoserve/" if folder == "." else f"{folder}/"
        rows = [(f"`{name}`", words.replace("|", "\\|")) for name, words in files]
        parts += [f"### `{heading}`", table(("file", "what it is"), rows)]
    return "\n\n".join(parts)


def _room(name: str) -> str:
    parent = Path(name).parent.name
    return FRONT if parent == "nanoserve" else parent


def stops(*numbers: int) -> str:
    """A learning path as a list: chapters, what they promise, how long they take, exercises."""
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
    """How long the chapters of a path take together."""
    minutes = sum(chapter.minutes for chapter in facts.chapters() if chapter.number in numbers)
    return f"{round(minutes / 60)} hours"


def how_many_terms() -> int:
    return len(load_glossary())


def glossary() -> str:
    """All terms of the model's glossary, each under an anchor of its own."""
    known = {term.term for term in trained_terms()}
    parts, letter = [], ""
    for term in sorted(load_glossary(), key=lambda term: term.term.lower()):
        if term.term[0].upper() != letter:
            letter = term.term[0].upper()
            parts.append(f"## {letter}")
        parts.append(f"### {term.term}")
        parts.append(escape(term.en, quote=False))
        also = f"Also: {', '.join(term.aliases)}. " if term.aliases else ""
        parts.append(f'<p class="also" markdown>{also}<b>{term.zh_term}</b>: {term.zh}</p>')
        if term.term not in known:
            parts.append("*Newer than the bundled model, which has not learned it yet.*")
    return "\n\n".join(parts)


def glossary_in_chinese() -> str:
    """The same terms with their Chinese names and definitions."""
    terms = sorted(load_glossary(), key=lambda term: term.term.lower())
    return "\n\n".join(f"### {term.zh_term}（{term.term}）\n\n{term.zh}" for term in terms)


def vllm_options() -> str:
    """vLLM's options, and what becomes of each."""
    return table(("option of vLLM's", "here", "instead"), api_tables.vllm_options())


def vllm_parameters() -> str:
    """vLLM's sampling parameters, and what becomes of each."""
    return table(("parameter of vLLM's", "here", "instead"), api_tables.vllm_parameters())


def own_options() -> str:
    """Those that vLLM does not have."""
    return ", ".join(f"`{name}`" for name in api_tables.own_options())


def slug(term: str) -> str:
    """The anchor of a term: lower case, spaces as hyphens, other punctuation gone."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", term.lower())).strip("-")
