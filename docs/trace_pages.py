"""Recorded runs for the pages of the course: a scenario runs when the site is built, and once.

`mkdocs serve` builds again whenever a file is saved. This module stays loaded meanwhile, and a
scenario runs again only if its file has changed.
"""

import ast
import tempfile
from functools import cache
from pathlib import Path

from facts import DOCS, load

from nanoserve.trace.page import make_page
from nanoserve.trace.reader import read_trace


def scenarios() -> dict[str, Path]:
    """The file of each scenario: a public function of a chapter's `scenario.py`."""
    found: dict[str, Path] = {}
    for path in sorted(DOCS.glob("*/scenario.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                if node.name in found:
                    raise ValueError(f"{path} and {found[node.name]} have a {node.name}")
                found[node.name] = path
    return found


def trace_page(name: str) -> str:
    """The HTML page on which the run of a scenario can be looked at step by step."""
    path = scenarios()[name]
    return _run(name, path, path.read_text(encoding="utf-8"))


@cache
def _run(name: str, path: Path, source: str) -> str:
    module = load(path)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run.jsonl"
        getattr(module, name)(run)
        return make_page(read_trace(run))
