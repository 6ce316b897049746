"""Facts about the source and the course, for pages and tests.

Chapters and their quotations, the modules in their folders, and the file that defines a symbol.
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
LINES_PER_MINUTE = 8  # of quoted source; a quotation takes a minute or more
DOCS = Path(__file__).parent
ROOT = DOCS.parent
FENCE = re.compile(r"^ *(`{3,})([^\n]*)\n(.*?)^ *\1 *$", re.M | re.S)


@dataclass(frozen=True)
class Chapter:
    """A chapter: a numbered folder of `docs/` whose text is `index.md`."""

    folder: Path

    @cached_property
    def text(self) -> str:
        return (self.folder / "index.md").read_text(encoding="utf-8")

    @cached_property
    def written(self) -> str:
        """Return the text without recorded blocks, such as quoted source."""
        return without_regions(self.text)

    @property
    def page(self) -> str:
        """Return the path of the text relative to `docs/`: `03-kv-cache/index.md`."""
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
        """Return the first sentence: what a reader will be able to explain."""
        (paragraph,) = re.findall(r"\A.*?^# .+?\n\n(.+?)\n\n", self.written, re.M | re.S)
        # A relative link would be wrong on another page.
        return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", first_sentence(paragraph))

    @property
    def outline(self) -> str:
        """Return title, promise and headings, the source of a summary in another language."""
        headings = re.findall(r"^##+ .+$", without_fences(self.written), re.M)
        return "\n".join([self.title, self.promise, *headings])

    @property
    def quotes(self) -> list[str]:
        """Return the symbols whose source the chapter quotes."""
        return [region.symbol for region in regions(self.text) if region.symbol]

    @property
    def exercise(self) -> str:
        """Return the task of the exercise."""
        stub = (self.folder / "exercise.py").relative_to(ROOT).as_posix()
        return summary(stub).removeprefix("Exercise: ").rstrip(".")

    @property
    def minutes(self) -> int:
        """Return the minutes of slow reading, rounded up to five, without the exercise."""
        words = len(without_fences(self.written).split())
        quotes = [region.value or "" for region in regions(self.text) if region.symbol]
        lines = [sum(fence[3].count("\n") for fence in FENCE.finditer(text)) for text in quotes]
        source = sum(max(1, count / LINES_PER_MINUTE) for count in lines)
        return 5 * math.ceil((words / WORDS_PER_MINUTE + source) / 5)


def without_fences(text: str) -> str:
    return FENCE.sub("", text)


def chapters() -> list[Chapter]:
    """Return the chapters with parts and an exercise, which excludes chapter 0."""
    return [
        Chapter(path.parent)
        for path in sorted(DOCS.glob("[0-9]*/index.md"))
        if not path.parent.name.startswith("00-")
    ]


def short_name(folder: Path) -> str:
    """Return the name of a folder's module on pages: `preemption` for `07-preemption`."""
    return re.sub(r"^\d+-", "", folder.name).replace("-", "_")


def digest(text: str) -> str:
    """Return eight hexadecimal digits of a hash of the text's words."""
    return sha256(" ".join(text.split()).encode()).hexdigest()[:8]


def load(path: Path) -> ModuleType:
    """Load a module of a folder such as `07-preemption`, which no import statement can name.

    It is loaded again each time, because `mkdocs serve` needs it after every change.
    """
    spec = spec_from_file_location(f"{short_name(path.parent)}_{path.stem}", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def functions_of(path: Path) -> list[str]:
    """Return the names of the public functions of a module."""
    return [
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]


def summary(name: str) -> str:
    """Return the first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse((ROOT / name).read_text(encoding="utf-8"))) or ""
    return first_sentence(docstring.split("\n\n")[0])


def first_sentence(paragraph: str) -> str:
    """Return the first sentence, on one line; "et al." does not end a sentence."""
    return re.split(r"(?<=[.!?])(?<! al\.)\s", " ".join(paragraph.split()))[0]


def file_of(symbol: str) -> str | None:
    """Return the file that defines a dotted name: its longest prefix that is a module."""
    parts = symbol.split(".")
    for length in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:length])
        for path in (module.with_suffix(".py"), module / "__init__.py"):
            if path.is_file():
                return path.relative_to(ROOT).as_posix()
    return None


def module_of(symbol: str) -> str:
    """Return the longest prefix of a dotted name that is a module."""
    return file_of(symbol).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(name: str) -> Iterator[str]:
    """Yield the files of nanoserve that a file imports when it is loaded."""
    for node in ast.parse((ROOT / name).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanoserve."):
            yield file_of(node.module)
