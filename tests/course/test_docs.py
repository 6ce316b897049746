"""The pages of the course: their parts, what they copy, what they link to, what they leave unused.

`mkdocs build --strict` finds some of this too, but needs what only builders of the site install.
"""

import ast
import re
from functools import cache
from pathlib import Path

import facts
import macros
import pytest
import reading
import yaml
from regions import regions, replace_regions, without_regions

PAGES = sorted(facts.DOCS.rglob("*.md"))
CHAPTERS = facts.chapters()
PARTS = [
    "The problem, in numbers",
    "The idea",
    "The source",
    "See it happen",
    "Exercise",
    "Questions",
    "Further reading",
]
LACKING = (24, 25)  # chapters that show a table or a simulation, and no recorded run
INLINE_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.S)
LINK = re.compile(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


def name(page: Path | facts.Chapter) -> str:
    return page.page if isinstance(page, facts.Chapter) else page.relative_to(facts.DOCS).as_posix()


@cache
def written(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def plain(page: Path) -> str:
    """The page as a plain view shows it: with the values, without the comments that say them."""
    return replace_regions(written(page), lambda region: region.value or "")


def lines_with_content(text: str) -> list[str]:
    """Lines without their indentation, and without those that are brackets or a single word."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if len(re.findall(r"\w+", line)) > 1]


def triples(text: str) -> set[tuple[str, ...]]:
    lines = lines_with_content(text)
    return set(zip(lines, lines[1:], lines[2:], strict=False))


@cache
def triples_of_the_source() -> set[tuple[str, ...]]:
    rooms = (facts.ROOT / "nanoserve", facts.ROOT / "benchmarks")
    files = [path for room in rooms for path in room.rglob("*.py")]
    return set().union(*(triples(path.read_text(encoding="utf-8")) for path in files))


def test_source_is_quoted_and_not_copied() -> None:
    for page in PAGES:
        by_hand = replace_regions(written(page), lambda region: "")
        for fence in facts.FENCE.finditer(by_hand):
            copied = triples(fence[3]) & triples_of_the_source()
            assert not copied, f"{name(page)}: quote it with ::: instead of {copied}"


def prose(text: str) -> str:
    return INLINE_CODE.sub("", facts.without_fences(text))


@cache
def anchors(page: Path) -> set[str]:
    """Where a link to this page may lead: its headings, and the symbols that it quotes."""
    text = facts.without_fences(plain(page))
    found = {region.symbol for region in regions(written(page)) if region.symbol}
    found |= set(re.findall(r'<a id="([\w-]+)">', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        found.add(macros.slug(re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading)))
    return found


def test_every_link_leads_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in LINK.findall(prose(plain(page)))]
    for page, link in links:
        if re.match(r"(https?|mailto):", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        told = f"{name(page)}: {link}"
        assert target.is_relative_to(facts.ROOT) and target.is_file(), told
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), told


class SiteConfig(yaml.SafeLoader):
    """Reads `mkdocs.yml` but for the tags that only mkdocs understands."""


for prefix in ("!", "tag:yaml.org,2002:python/"):
    SiteConfig.add_multi_constructor(prefix, lambda loader, suffix, node: None)


def test_the_navigation_names_every_page() -> None:
    config = yaml.load((facts.ROOT / "mkdocs.yml").read_text(encoding="utf-8"), SiteConfig)
    listed = [file for group in config["nav"] for files in group.values() for file in files]
    assert sorted(listed) == sorted(map(name, PAGES))


def test_a_chapter_has_its_parts_in_order() -> None:
    for chapter in CHAPTERS:
        text, told = facts.without_fences(without_regions(chapter.text)), name(chapter)
        assert re.findall(r"^## (.+)$", text, re.M) == PARTS, told
        parts = dict(zip(PARTS, re.split(r"^## .+$", chapter.text, flags=re.M)[1:], strict=True))
        assert "{{" in parts["The problem, in numbers"], told
        assert "```mermaid" in parts["The idea"], told
        assert any(region.symbol for region in regions(parts["The source"])), told
        assert chapter.number in LACKING or '{{ trace("' in parts["See it happen"], told
        assert chapter.exercise and chapter.title and "explain" in chapter.promise, told


def reached(worked: Path, texts: list[str]) -> set[str]:
    """What of a worked example these texts use: what they name, and what that uses in turn."""
    uses: dict[str, set[str]] = {}
    for node in ast.parse(worked.read_text(encoding="utf-8")).body:
        inside = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        targets = getattr(node, "targets", [getattr(node, "target", node)])
        uses |= {getattr(each, "id", getattr(each, "name", "")): inside for each in targets}
    waiting = [each for each in uses if any(re.search(rf"\b{each}\b", text) for text in texts)]
    found: set[str] = set()
    while waiting:
        if (each := waiting.pop()) not in found:
            found.add(each)
            waiting += uses[each] & uses.keys()
    return found


WORKED = {facts.short_name(file.parent): file for file in facts.DOCS.glob("*/worked.py")}
SCENARIOS = [
    (file.with_name("index.md"), scenario)
    for file in sorted(facts.DOCS.glob("*/scenario.py"))
    for scenario in facts.functions_of(file)
]


def test_worked_examples_are_tested_and_used() -> None:
    said = [region.said for page in PAGES for region in regions(written(page))]
    for topic, file in sorted(WORKED.items()):
        functions = set(facts.functions_of(file))
        tests = file.with_name("test_worked.py").read_text(encoding="utf-8")
        assert functions - reached(file, [tests]) == set(), f"untested in {name(file)}"
        calls = [call for call in said if f"worked.{topic}." in call]
        assert functions - reached(file, calls) == set(), f"not used, of {name(file)}"


def test_a_scenario_is_shown_once() -> None:
    """By the chapter in whose folder it lies."""
    for chapter, scenario in SCENARIOS:
        shown = f'trace("{scenario}")'
        shown_by = [page for page in PAGES for _ in range(written(page).count(shown))]
        assert shown_by == [chapter], scenario


def test_the_map_is_that_of_the_reading_path() -> None:
    stops = reading.stops()
    assert stops and all(stop.words for stop in stops)
    table = macros.reading_order()
    for stop in stops:
        assert f"`{stop.file}`" in table and stop.words in table
    assert {"entry --> engine", "worker --> engine"} <= {
        line.strip() for line in macros.package_map().splitlines()
    }
    assert "engine --> worker" not in macros.package_map()


def test_each_term_of_the_glossary_has_an_anchor_of_its_own() -> None:
    terms = macros.load_glossary()
    assert len({macros.slug(term.term) for term in terms}) == len(terms)
    assert {macros.slug(term.term) for term in terms} <= anchors(facts.DOCS / "glossary.md")


def test_the_glossary_says_what_the_model_has_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = macros.glossary().count(macros.NOT_LEARNED)
    assert newer == len(macros.load_glossary()) - len(macros.trained_terms())
    fewer = macros.trained_terms()[1:]
    monkeypatch.setattr(macros, "trained_terms", lambda: fewer)
    assert macros.glossary().count(macros.NOT_LEARNED) == newer + 1
