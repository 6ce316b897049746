"""The pages of the course: what they quote is there, what they count is counted, what they link to.

`mkdocs build --strict` finds some of this too, but needs what only builders of the site install.
"""

import ast
import re
from functools import cache
from pathlib import Path
from textwrap import dedent

import house
import macros
import pytest
import yaml
from jinja2 import Environment, StrictUndefined

PAGES = sorted(house.DOCS.rglob("*.md"))
CHAPTERS = house.chapters()
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


def name(page: Path | house.Chapter) -> str:
    path = page.path if isinstance(page, house.Chapter) else page
    return path.relative_to(house.DOCS).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=name)
every_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=name)


@cache
def written(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def names_for_pages() -> dict[str, object]:
    def trace(scenario: str) -> str:
        return macros.trace_frame(scenario, "chapters/page.html")

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
    rooms = (house.ROOT / "nanoserve", house.ROOT / "benchmarks")
    files = [path for room in rooms for path in room.rglob("*.py")]
    return set().union(*(triples(path.read_text(encoding="utf-8")) for path in files))


@every_page
def test_source_is_quoted_and_not_copied(page: Path) -> None:
    for fence in house.FENCE.finditer(written(page)):
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
    path = house.file_of(symbol)
    if path is None:
        return False
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    tree = ast.parse((house.ROOT / path).read_text(encoding="utf-8"))
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
    return INLINE_CODE.sub("", house.without_fences(text))


@cache
def anchors(page: Path) -> set[str]:
    """Where a link to this page may lead: its headings, and the symbols that it quotes."""
    text = house.without_fences(rendered(page))
    found = set(re.findall(r"#([\w-]+) }$", text, re.M)) | set(house.QUOTE.findall(text))
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
        assert target.is_relative_to(house.DOCS) and target.is_file(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link
    for file in re.findall(r'^ *--8<-- "([^":]+)', written(page), re.M):
        assert (house.ROOT / file).is_file(), file


class SiteConfig(yaml.SafeLoader):
    """Reads `mkdocs.yml` but for the tags that only mkdocs understands."""


for prefix in ("!", "tag:yaml.org,2002:python/"):
    SiteConfig.add_multi_constructor(prefix, lambda loader, suffix, node: None)


def test_the_navigation_names_every_page() -> None:
    config = yaml.load((house.ROOT / "mkdocs.yml").read_text(encoding="utf-8"), SiteConfig)
    listed = [file for group in config["nav"] for files in group.values() for file in files]
    assert sorted(listed) == sorted(map(name, PAGES))


@every_chapter
def test_a_chapter_has_its_parts_in_order(chapter: house.Chapter) -> None:
    text = house.without_fences(chapter.text)
    assert re.findall(r"^## (.+)$", text, re.M) == PARTS
    parts = dict(zip(PARTS, re.split(r"^## .+$", chapter.text, flags=re.M)[1:], strict=True))
    assert "{{" in parts["The problem, in numbers"]
    assert "```mermaid" in parts["The idea"]
    assert house.QUOTE.search(parts["The source"])
    assert '{{ trace("' in parts["See it happen"]
    assert chapter.exercises and chapter.title and "explain" in chapter.promise


def functions_of(folder: str) -> list[tuple[str, str]]:
    """(module, function) of each public function of a folder of `docs/`."""
    return [
        (path.stem, node.name)
        for path in sorted((house.DOCS / folder).glob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]


def reached(topic: str, texts: list[str]) -> set[str]:
    """What of a worked example these texts use: what they name, and what that uses in turn."""
    source = (house.DOCS / "worked" / f"{topic}.py").read_text(encoding="utf-8")
    uses: dict[str, set[str]] = {}
    for node in ast.parse(source).body:
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


TOPICS = sorted(path.stem for path in (house.DOCS / "worked").glob("*.py"))


@pytest.mark.parametrize("topic", TOPICS)
def test_worked_examples_are_tested_and_used(topic: str) -> None:
    functions = {function for module, function in functions_of("worked") if module == topic}
    tests = [path.read_text("utf-8") for path in Path(__file__).parent.glob("test_worked_*.py")]
    tests = [text for text in tests if re.search(rf"\b{topic}\b", text)]
    assert functions - reached(topic, tests) == set()
    calls = [call for page in PAGES for call in re.findall(r"{{.*?}}", written(page), re.S)]
    calls = [call for call in calls if f"worked.{topic}." in call]
    assert functions - reached(topic, calls) == set()


@pytest.mark.parametrize(("module", "scenario"), functions_of("scenarios"), ids=lambda part: part)
def test_a_scenario_is_shown_once(module: str, scenario: str) -> None:
    assert sum(written(page).count(f'trace("{scenario}")') for page in PAGES) == 1


def test_the_map_is_that_of_the_readme() -> None:
    stops = house.evening_path()
    assert all(stop.files and stop.words for stop in stops)
    table = macros.reading_order()
    for stop in stops:
        assert all(f"`{file}`" in table for file in stop.files)
    assert {"front_door --> engine", "worker --> engine"} <= {
        line.strip() for line in macros.house_map().splitlines()
    }
    assert "engine --> worker" not in macros.house_map()


def test_each_term_of_the_glossary_has_an_anchor_of_its_own() -> None:
    terms = macros.load_glossary()
    assert len({macros.slug(term.term) for term in terms}) == len(terms)
    assert {macros.slug(term.term) for term in terms} <= anchors(house.DOCS / "glossary.md")


def test_the_glossary_says_what_the_model_has_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = macros.glossary().count("has not learned")
    assert newer == len(macros.load_glossary()) - len(macros.trained_terms())
    fewer = macros.trained_terms()[1:]
    monkeypatch.setattr(macros, "trained_terms", lambda: fewer)
    assert macros.glossary().count("has not learned") == newer + 1
