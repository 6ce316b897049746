"""The Chinese pages keep step: whoever changes what one was made from has to look at it again."""

import re
from pathlib import Path

import facts
import pytest
from regions import without_regions

CHINESE = facts.DOCS / "zh"
MADE_FROM = re.compile(r"<!-- 译自 (\S+): (\w{8}) -->")
CHAPTERS = {(facts.DOCS / chapter.page): chapter for chapter in facts.chapters()}


def sources(page: Path) -> list[tuple[Path, str]]:
    found = MADE_FROM.findall(page.read_text("utf-8"))
    return [((page.parent / source).resolve(), digest) for source, digest in found]


def said(source: Path) -> str:
    """Of a chapter its outline, since only that is summed up; of other pages everything."""
    if source in CHAPTERS:
        return CHAPTERS[source].outline
    return without_regions(source.read_text("utf-8"))


@pytest.mark.parametrize("page", sorted(CHINESE.glob("*.md")), ids=lambda page: page.name)
def test_a_page_was_made_from_what_is_said_today(page: Path) -> None:
    for source, digest in sources(page):
        now = facts.digest(said(source))
        assert digest == now, f"{source.name} has changed: read {page.name} again, then put {now}"


def test_every_chapter_is_summed_up_in_order() -> None:
    assert [source for source, _ in sources(CHINESE / "chapters.md")] == list(CHAPTERS)


def test_the_first_run_is_the_same_in_both_languages() -> None:
    english = (facts.DOCS / "00-first-run" / "index.md").read_text("utf-8")
    chinese = (CHINESE / "first-run.md").read_text("utf-8")
    code = [re.findall(r"```python\n(.*?)```", page, re.S) for page in (english, chinese)]
    assert code[0] == code[1] != []


def test_the_glossary_is_whole_in_both_languages() -> None:
    pages = [facts.DOCS / "glossary.md", CHINESE / "glossary.md"]
    english, chinese = (page.read_text("utf-8").count("\n### ") for page in pages)
    assert english == chinese > 100
