"""The Chinese pages keep step: whoever changes what one was made from has to look at it again."""

import re
from collections import Counter
from pathlib import Path

import facts
import pytest
from regions import regions, replace_regions, without_regions

CHINESE = facts.DOCS / "zh"
MADE_FROM = re.compile(r"<!-- 译自 (\S+): (\w{8}) -->")
CHAPTERS = {(facts.DOCS / chapter.page): chapter for chapter in facts.chapters()}


def sources(page: Path) -> list[tuple[Path, str]]:
    found = MADE_FROM.findall(page.read_text("utf-8"))
    return [((page.parent / source).resolve(), digest) for source, digest in found]


def said(source: Path, page: Path) -> str:
    """Of a chapter that is only summed up its outline; of what is translated everything."""
    if source in CHAPTERS:
        chapter = CHAPTERS[source]
        return chapter.outline if page.name == "chapters.md" else chapter.written
    return without_regions(source.read_text("utf-8"))


# Translations of whole chapters, and what they were made from.
WHOLE = [
    (page, source)
    for page in sorted(CHINESE.glob("*.md"))
    for source, _ in sources(page)
    if source in CHAPTERS and page.name != "chapters.md"
]


def parts(page: Path) -> dict[str, object]:
    """What must not get lost in translation: all that is not words, in order or by number."""
    text = page.read_text("utf-8")
    plain = replace_regions(text, lambda region: region.value or "")
    by_hand = replace_regions(text, lambda region: "")
    # A recorded run is shown by its own chapter; others link to its picture.
    blocks = [each.said for each in regions(text) if each.is_block and "trace(" not in each.said]
    return {
        "levels of the headings": re.findall(r"^#+(?= )", facts.without_fences(plain), re.M),
        "tables and quoted source": blocks,
        "sizes of all tables": [
            (len(rows.splitlines()), rows.split("\n", 1)[0].count("|"))
            for rows in re.findall(r"(?:^\|.*\|\n)+", plain, re.M)
        ],
        "computed values": Counter(each.said for each in regions(text) if not each.is_block),
        "pictures": [Path(link).name for link in re.findall(r"\]\(([^)]+\.svg)\)", plain)],
        "fences": [fence[2] for fence in facts.FENCE.finditer(by_hand)],
        "commands": re.findall(r"```bash\n.*?```", by_hand, re.S),
        "boxes": re.findall(r"^> \[!\w+\]", plain, re.M),
        "folded questions": plain.count("<details markdown><summary>"),
        "items of lists": len(re.findall(r"^- ", by_hand, re.M)),
        "terms": Counter(re.findall(r"glossary\.md#([\w-]+)", plain)),
        "links to other sites": re.findall(r"\]\((https://[^)]+)\)", plain),
        "runs": re.findall(r"`nanoserve trace (\S+)`", plain),
    }


@pytest.mark.parametrize("page", sorted(CHINESE.glob("*.md")), ids=lambda page: page.name)
def test_a_page_was_made_from_what_is_said_today(page: Path) -> None:
    for source, digest in sources(page):
        now = facts.digest(said(source, page))
        assert digest == now, f"{source.name} has changed: read {page.name} again, then put {now}"


def test_every_chapter_is_summed_up_in_order() -> None:
    assert [source for source, _ in sources(CHINESE / "chapters.md")] == list(CHAPTERS)


@pytest.mark.parametrize(("page", "source"), WHOLE, ids=lambda path: path.name)
def test_a_whole_chapter_has_all_parts_of_the_english_one(page: Path, source: Path) -> None:
    english, chinese = parts(source), parts(page)
    for what, here in english.items():
        assert chinese[what] == here, f"{what}, in {page.name}"


def test_the_summaries_lead_to_the_whole_chapters() -> None:
    summaries = re.split(r"^## ", (CHINESE / "chapters.md").read_text("utf-8"), flags=re.M)[1:]
    linked = {
        (CHINESE / found[1], source)
        for source, summary in zip(CHAPTERS, summaries, strict=True)
        if (found := re.search(r"\[中文全文\]\((\S+)\)", summary))
    }
    assert linked == {*WHOLE} != set()


def test_the_first_run_is_the_same_in_both_languages() -> None:
    english = (facts.DOCS / "00-first-run" / "index.md").read_text("utf-8")
    chinese = (CHINESE / "first-run.md").read_text("utf-8")
    code = [re.findall(r"```python\n(.*?)```", page, re.S) for page in (english, chinese)]
    assert code[0] == code[1] != []


def test_the_glossary_is_whole_in_both_languages() -> None:
    pages = [facts.DOCS / "glossary.md", CHINESE / "glossary.md"]
    english, chinese = (page.read_text("utf-8").count("\n### ") for page in pages)
    assert english == chinese > 100
