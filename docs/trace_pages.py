"""Recorded runs of the chapters' `scenario.py` files.

`python docs/record.py --runs` records them; pages are made from these files, without an engine.
"""

import ast
from pathlib import Path

from facts import DOCS

from nanoserve.features.trace.page import make_page
from nanoserve.features.trace.reader import read_trace


def scenarios() -> dict[str, Path]:
    """Return the file of each scenario: a public function of a chapter's `scenario.py`."""
    found: dict[str, Path] = {}
    for path in sorted(DOCS.glob("*/scenario.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                if node.name in found:
                    raise ValueError(f"{path} and {found[node.name]} have a {node.name}")
                found[node.name] = path
    return found


def run_file(name: str) -> Path:
    """Return the path of a scenario's recorded run."""
    return scenarios()[name].with_name(f"{name.replace('_', '-')}.jsonl")


def trace_page(name: str) -> str:
    """Return the HTML page that shows the run of a scenario step by step.

    Raises `FileNotFoundError` if it has not been recorded.
    """
    run = run_file(name)
    if not run.is_file():
        folder = run.parent.name
        raise FileNotFoundError(f"{run}: record it with `python docs/record.py {folder} --runs`")
    return make_page(read_trace(run))
