"""What pages and tests say about the source and the course is read from them, here.

The chapters with what they quote, the modules in their folders, and where a symbol is defined.
"""

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from regions import regions, without_regions

WORDS_PER_MINUTE = 130  # dense prose, with figures to look at
MINUTES_PER_QUOTE = 3
DOCS = Path(__file__).parent
ROOT = DOCS.parent
FENCE = re.compile(r"^ *(`{3,})([^\n]*)\n(.*?)^ *\1 *$", re.M | re.S)


@dataclass(frozen=True)
class Chapter:
    """A numbered folder of `docs/`: its text is `index.md`."""

    folder: Path

    @cached_property
    def text(self) -> str:
        return (self.folder / "index.md").read_text(encoding="utf-8")

    @cached_property
    def written(self) -> str:
        """The text without what was recorded in lines of its own, such as source."""
        return without_regions(self.text)

    @property
    def page(self) -> str:
        """Where its text lies, seen from `docs/`: `03-kv-cache/index.md`."""
        return f"{self.folder.name}/index.md"

    @property
    def number(self) -> int:
        return int(self.folder.name.split("-")[0])

    @property
    def title(self) -> str:
        text = without_fences(self.written)
        (title,) = re.findall(r"^# (?:\d+\. )?(.+)$", text, re.M)
        return title

    @property
    def promise(self) -> str:
        """The first sentence: what one will be able to explain."""
        (paragraph,) = re.findall(r"\A.*?^# .+?\n\n(.+?)\n\n", self.written, re.M | re.S)
        # A link would lead from where the chapter lies, not from where this is shown.
        return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", first_sentence(paragraph))

    @property
    def outline(self) -> str:
        """Its title, promise and headings: what a summary in another language tells."""
        headings = re.findall(r"^##+ .+$", without_fences(self.written), re.M)
        return "\n".join([self.title, self.promise, *headings])

    @property
    def quotes(self) -> list[str]:
        """The symbols whose source it shows."""
        return [region.symbol for region in regions(self.text) if region.symbol]

    @property
    def exercise(self) -> str:
        """What its exercise asks for."""
        stub = (self.folder / "exercise.py").relative_to(ROOT).as_posix()
        return summary(stub).removeprefix("Exercise: ").rstrip(".")

    @property
    def minutes(self) -> int:
        """To read it slowly, to the next five; the exercise takes its own time."""
        words = len(without_fences(self.written).split())
        quotes = [region.said for region in regions(self.text) if region.symbol]
        pieces = sum("from:" in said for said in quotes)  # of a function that is explained beside
        whole = len(quotes) - pieces
        minutes = words / WORDS_PER_MINUTE + MINUTES_PER_QUOTE * whole + pieces
        return 5 * math.ceil(minutes / 5)


def without_fences(text: str) -> str:
    return FENCE.sub("", text)


def chapters() -> list[Chapter]:
    """Those with parts and an exercise; chapter 0 is a page to begin with."""
    return [
        Chapter(path.parent)
        for path in sorted(DOCS.glob("[0-9]*/index.md"))
        if not path.parent.name.startswith("00-")
    ]


def short_name(folder: Path) -> str:
    """What pages call a folder's module: `preemption` for `07-preemption`."""
    return re.sub(r"^\d+-", "", folder.name).replace("-", "_")


def digest(text: str) -> str:
    """Of a text's words: eight digits that change when one of them does."""
    return sha256(" ".join(text.split()).encode()).hexdigest()[:8]


def load(path: Path) -> ModuleType:
    """A module of a folder such as `07-preemption`, which no import statement could name.

    It is loaded anew each time: `mkdocs serve` asks again after every change.
    """
    spec = spec_from_file_location(f"{short_name(path.parent)}_{path.stem}", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def functions_of(path: Path) -> list[str]:
    """The public functions of a module."""
    return [
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]


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


def module_of(symbol: str) -> str:
    """The longest beginning of a dotted name that is a module."""
    return file_of(symbol).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(name: str) -> Iterator[str]:
    """The files of nanoserve that a file imports when it is loaded."""
    for node in ast.parse((ROOT / name).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanoserve."):
            yield file_of(node.module)
