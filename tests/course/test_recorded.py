"""What is recorded on the course's pages is what engine and worked examples say today."""

import subprocess
import sys
from pathlib import Path

import facts
import pytest
import quotes
import record
import regions
from trace_pages import run_file, scenarios

PAGES = sorted(facts.DOCS.rglob("*.md"))
TO_DRAW = sorted(facts.DOCS.glob("*/figures.py"))


def name(path: Path) -> str:
    return path.relative_to(facts.DOCS).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_says_what_is_so_today(page: Path) -> None:
    assert page.read_text("utf-8") == record.recorded(page), "run `python docs/record.py`"


@pytest.mark.parametrize("file", TO_DRAW, ids=name)
def test_figures_show_what_is_computed_today(file: Path) -> None:
    drawn = dict(record.figures(file))
    assert drawn
    for path, text in drawn.items():
        assert path.read_text("utf-8") == text, f"{path}: run `python docs/record.py`"


def test_every_picture_of_a_chapter_is_drawn_by_code_and_shown() -> None:
    drawn = {path for file in TO_DRAW for path, _ in record.figures(file)}
    drawn |= {run_file(scenario).with_suffix(".svg") for scenario in scenarios()}
    assert {*facts.DOCS.glob("[0-9]*/*.svg")} == drawn
    for path in drawn:
        shown_by = [
            page for page in path.parent.glob("*.md") if f"({path.name})" in page.read_text("utf-8")
        ]
        assert shown_by, path


@pytest.mark.parametrize("scenario", sorted(scenarios()))
def test_a_recorded_run_is_what_the_engine_decides_today(scenario: str) -> None:
    recorded = record.without_clocks(run_file(scenario).read_text("utf-8"))
    assert recorded == record.without_clocks(record.run_again(scenario)), (
        "run `python docs/record.py --runs`"
    )


def test_a_site_needs_neither_torch_nor_a_model() -> None:
    code = (
        "import sys, site_hooks; print(*(sys.modules.keys() & {'torch', 'transformers', 'jinja2'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=facts.DOCS, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_values_are_put_beside_what_says_them() -> None:
    page = "One of\n{{ 2 + 2 }} apples, `{{ code }}`.\n\n{{ table }}\n\n```\n{{ fence }}\n```\n"
    found = regions.with_values(page, lambda region: "a\nb" if "table" in region.said else "4")
    assert found == (
        "One of <!-- {{ 2 + 2 }} -->4<!--/--> apples, `{{ code }}`.\n\n"
        "<!-- {{ table }} -->\n\na\nb\n\n<!--/-->\n\n```\n{{ fence }}\n```\n"
    )
    assert regions.with_values(found, lambda region: region.value) == found
    assert regions.without_regions(found).startswith("One of 4 apples, `{{ code }}`.\n\n\n")


def test_a_number_may_not_begin_an_item() -> None:
    with pytest.raises(ValueError, match="begin with a word"):
        regions.with_values("- {{ 2 }} apples", lambda region: "2")


def test_a_quotation_is_the_source_with_a_link_to_its_file() -> None:
    found = quotes.quote("::: nanoserve.engine.plan.Plan.num_tokens", "docs/06-scheduler/index.md")
    head, code = found.split("\n\n", 1)
    assert (
        head == "[`Plan.num_tokens`](../../nanoserve/engine/plan.py) in `nanoserve/engine/plan.py`"
    )
    assert code.startswith("```python\n@property\ndef num_tokens(self)")
