"""The pages of the course: what they quote is there, what they count is counted, what they link to.

`mkdocs build --strict` finds some of this too, but needs what only builders of the site install.
"""

import ast
import re
from functools import cache
from pathlib import Path
from textwrap import dedent

import facts
import macros
import pytest
import reading
import yaml
from jinja2 import Environment, StrictUndefined

PAGES = sorted(facts.DOCS.rglob("*.md"))
CHAPTERS = facts.chapters()
PARTS = [
    "The problem, in numbers",
    "The idea",
    "The source",
    "See it happen",
    "Exercise",
    "Further reading",
]
INLINE_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.S)
LINK = re.compile(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


def name(page: Path | facts.Chapter) -> str:
    return page.page if isinstance(page, facts.Chapter) else page.relative_to(facts.DOCS).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=name)
every_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=name)


@cache
def written(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def names_for_pages() -> dict[str, object]:
    def trace(scenario: str) -> str:
        return macros.trace_frame(scenario, "00-chapter/index.html")

    return {**macros.names(), "trace": trace}


@cache
def rendered(page: Path) -> str:
    """The page with its expressions computed, as mkdocs-macros hands it on."""
    template = Environment(undefined=StrictUndefined).from_string(written(page))
    return template.render(names_for_pages())


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


@every_page
def test_source_is_quoted_and_not_copied(page: Path) -> None:
    for fence in facts.FENCE.finditer(written(page)):
        copied = triples(fence[3]) & triples_of_the_source()
        assert not copied, f"quote it with ::: instead of {copied}"


def has(body: list[ast.stmt], parts: list[str]) -> bool:
    """Whether a dotted name is defined in these statements."""
    if not parts:
        return True
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = node.name == parts[0] and has(node.body, parts[1:])
        else:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            found = parts in [[getattr(target, "id", None)] for target in targets]
        if found:
            return True
    return False


def is_defined(symbol: str) -> bool:
    path = facts.file_of(symbol)
    if path is None:
        return False
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    tree = ast.parse((facts.ROOT / path).read_text(encoding="utf-8"))
    return has(tree.body, [part for part in symbol.removeprefix(module).split(".") if part])


@every_page
def test_what_is_quoted_is_in_the_source(page: Path) -> None:
    blocks = re.findall(r"^( *)::: ([\w.]+)\n((?:\1    .*\n)*)", written(page) + "\n", re.M)
    assert len(blocks) == written(page).count("::: ")
    for _, symbol, block in blocks:
        options = (yaml.safe_load(dedent(block)) or {}).get("options", {})
        members = [f"{symbol}.{member}" for member in options.get("members", [])]
        missing = [each for each in (symbol, *members) if not is_defined(each)]
        assert not missing, missing


@every_page
def test_every_expression_has_a_value(page: Path) -> None:
    assert "{%" not in written(page)
    for expression in re.findall(r"{{(.*?)}}", written(page), re.S):
        value = Environment(undefined=StrictUndefined).compile_expression(
            expression.strip(), undefined_to_none=False
        )(names_for_pages())
        assert isinstance(value, str | int | float), (expression, value)
    assert rendered(page)


def prose(text: str) -> str:
    return INLINE_CODE.sub("", facts.without_fences(text))


@cache
def anchors(page: Path) -> set[str]:
    """Where a link to this page may lead: its headings, and the symbols that it quotes."""
    text = facts.without_fences(rendered(page))
    found = set(re.findall(r"#([\w-]+) }$", text, re.M)) | set(facts.QUOTE.findall(text))
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        found.add(macros.slug(re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading)))
    return found


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(rendered(page))):
        if re.match(r"(https?|mailto):", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_relative_to(facts.DOCS) and target.is_file(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link
    for file in re.findall(r'^ *--8<-- "([^":]+)', written(page), re.M):
        assert (facts.ROOT / file).is_file(), file


class SiteConfig(yaml.SafeLoader):
    """Reads `mkdocs.yml` but for the tags that only mkdocs understands."""


for prefix in ("!", "tag:yaml.org,2002:python/"):
    SiteConfig.add_multi_constructor(prefix, lambda loader, suffix, node: None)


def test_the_navigation_names_every_page() -> None:
    config = yaml.load((facts.ROOT / "mkdocs.yml").read_text(encoding="utf-8"), SiteConfig)
    listed = [file for group in config["nav"] for files in group.values() for file in files]
    assert sorted(listed) == sorted(map(name, PAGES))


@every_chapter
def test_a_chapter_has_its_parts_in_order(chapter: facts.Chapter) -> None:
    text = facts.without_fences(chapter.text)
    assert re.findall(r"^## (.+)$", text, re.M) == PARTS
    parts = dict(zip(PARTS, re.split(r"^## .+$", chapter.text, flags=re.M)[1:], strict=True))
    assert "{{" in parts["The problem, in numbers"]
    assert "```mermaid" in parts["The idea"]
    assert facts.QUOTE.search(parts["The source"])
    assert '{{ trace("' in parts["See it happen"]
    assert chapter.exercise and chapter.title and "explain" in chapter.promise


def functions_of(file: Path) -> list[str]:
    """The public functions of a module."""
    return [
        node.name
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]


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
    for scenario in functions_of(file)
]


@pytest.mark.parametrize("topic", sorted(WORKED))
def test_worked_examples_are_tested_and_used(topic: str) -> None:
    file = WORKED[topic]
    functions = set(functions_of(file))
    tests = file.with_name("test_worked.py").read_text(encoding="utf-8")
    assert functions - reached(file, [tests]) == set()
    calls = [call for page in PAGES for call in re.findall(r"{{.*?}}", written(page), re.S)]
    calls = [call for call in calls if f"worked.{topic}." in call]
    assert functions - reached(file, calls) == set()


@pytest.mark.parametrize(("chapter", "scenario"), SCENARIOS, ids=[name for _, name in SCENARIOS])
def test_a_scenario_is_shown_once(chapter: Path, scenario: str) -> None:
    """By the chapter in whose folder it lies."""
    shown_by = [page for page in PAGES for _ in range(written(page).count(f'trace("{scenario}")'))]
    assert shown_by == [chapter]


def test_the_map_is_that_of_the_readme() -> None:
    stops = reading.evening_path()
    assert all(stop.files and stop.words for stop in stops)
    table = macros.reading_order()
    for stop in stops:
        assert all(f"`{file}`" in table for file in stop.files)
    assert {"front_door --> engine", "worker --> engine"} <= {
        line.strip() for line in macros.map_of_the_rooms().splitlines()
    }
    assert "engine --> worker" not in macros.map_of_the_rooms()


def test_each_term_of_the_glossary_has_an_anchor_of_its_own() -> None:
    terms = macros.load_glossary()
    assert len({macros.slug(term.term) for term in terms}) == len(terms)
    assert {macros.slug(term.term) for term in terms} <= anchors(facts.DOCS / "glossary.md")


def test_the_glossary_says_what_the_model_has_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = macros.glossary().count("has not learned")
    assert newer == len(macros.load_glossary()) - len(macros.trained_terms())
    fewer = macros.trained_terms()[1:]
    monkeypatch.setattr(macros, "trained_terms", lambda: fewer)
    assert macros.glossary().count("has not learned") == newer + 1
