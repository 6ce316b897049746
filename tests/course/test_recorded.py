"""What is recorded on the course's pages is what engine and worked examples say today."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import facts
import pytest
import quotes
import record
import regions
import site_hooks
from trace_pages import run_file, scenarios

PAGES = sorted(facts.DOCS.rglob("*.md"))
# These simulate many requests, or quantize a model in all ways; their own tests look at some.
LONG = {
    *("20-quantization/index.md", "23-scaling-out/index.md", "25-disaggregation/index.md"),
    "28-simulation/index.md",
}
# What is computed from the server's code, which needs the extra `serve`.
OF_THE_SERVER = {"reference/server.md", "reference/metrics.md"}
TO_DRAW = sorted(facts.DOCS.glob("*/figures.py"))


def name(path: Path) -> str:
    return path.relative_to(facts.DOCS).as_posix()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=[pytest.mark.size("full")] * (name(page) in LONG))
        for page in PAGES
    ],
)
def test_a_page_says_what_is_so_today(page: Path) -> None:
    if name(page) in OF_THE_SERVER:
        pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")
    assert page.read_text("utf-8") == record.recorded(page), "run `python docs/record.py`"


def test_figures_show_what_is_computed_today() -> None:
    for file in TO_DRAW:
        drawn = dict(record.figures(file))
        assert drawn, file
        for path, text in drawn.items():
            assert path.read_text("utf-8") == text, f"{path}: run `python docs/record.py`"


def test_every_picture_of_a_chapter_is_drawn_by_code_and_shown() -> None:
    drawn = {path for file in TO_DRAW for path, _ in record.figures(file)}
    drawn |= {run_file(scenario).with_suffix(".svg") for scenario in scenarios()}
    assert {*facts.DOCS.glob("*/*.svg")} == drawn
    for path in drawn:
        shown_by = [
            page for page in path.parent.glob("*.md") if f"({path.name})" in page.read_text("utf-8")
        ]
        assert shown_by, path


@pytest.mark.small(
    scenario=[
        *("chunked_prefill", "first_run", "guesses_from_the_conversation", "guided_run"),
        *("preemption", "shared_prefix", "text_in_three_ways"),
    ]
)
@pytest.mark.parametrize("scenario", sorted(scenarios()))
def test_a_recorded_run_is_what_the_engine_decides_today(scenario: str) -> None:
    recorded = record.decisions(run_file(scenario).read_text("utf-8"))
    try:
        again = record.run_again(scenario)
    except ValueError as error:
        if "pip install" in str(error):
            pytest.skip(str(error))
        raise
    assert recorded == record.decisions(again), "run `python docs/record.py --runs`"


def test_a_site_needs_neither_torch_nor_a_model() -> None:
    code = (
        "import sys, site_hooks; print(*(sys.modules.keys() & {'torch', 'transformers', 'jinja2'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=facts.DOCS, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_boxes_and_folded_answers_become_those_of_a_site() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        file = SimpleNamespace(src_uri=name(page), url=name(page).replace(".md", ".html"))
        shown = site_hooks.on_page_markdown(text, SimpleNamespace(file=file), {}, None)
        folded = re.findall(r'^\?\?\? question "[^"\n]+"$', shown, re.M)
        assert len(folded) == text.count("<details "), name(page)
        boxes = re.findall(r'^!!! \w+ "[^"\n]+"$', shown, re.M)
        assert len(boxes) == text.count("> [!"), name(page)
        assert "<details" not in shown and "<!-- {{" not in shown, name(page)


def of_four(region: regions.Region) -> str:
    return "a\nb" if "table" in region.said else "4"


PAGE = """# One of
{{ 2 + 2 }} apples, `{{ code }}`.

{{ table }}

```
# {{ fence }}
```

- {{ "%d"|format(2 + 2) }} pears, 4 of 4.5
"""
RECORDED = """# One of
4 apples, `{{ code }}`.

<!-- {{ table }} -->

a
b

<!--/-->

```
# {{ fence }}
```

- 4 pears, 4 of 4.5

<!-- computed
One of [4] = {{ 2 + 2 }}
``` - [4] = {{ "%d"|format(2 + 2) }}
-->
"""


def test_a_value_stands_in_the_text_and_its_expression_below() -> None:
    found = regions.with_values(PAGE, of_four)
    assert found == RECORDED
    assert regions.with_values(found, of_four) == found
    assert [region.value for region in regions.regions(found)] == ["\n\na\nb\n\n", "4", "4"]
    assert regions.without_regions(found).startswith("# One of\n4 apples, `{{ code }}`.\n\n\n")
    assert "computed" not in regions.without_regions(found)


def test_a_value_that_has_changed_is_replaced_where_it_stands() -> None:
    found = regions.with_values(RECORDED, lambda region: of_four(region).replace("4", "5,0"))
    assert "# One of\n5,0 apples" in found and "- 5,0 pears, 4 of 4.5\n" in found
    assert "One of [5,0] = {{ 2 + 2 }}\n" in found


def test_a_table_is_not_written_within_a_sentence() -> None:
    with pytest.raises(ValueError, match="between empty lines"):
        regions.with_values("One {{ table }}.\n", of_four)


def test_words_and_values_may_have_brackets() -> None:
    page = "A [link](a.md): [3, 5].\n\n<!-- computed\n[link](a.md): [[3, 5]] = {{ x }}\n-->\n"
    found = regions.with_values(page, lambda region: "[7]")
    assert found.startswith("A [link](a.md): [7].\n") and "(a.md): [[7]] = {{ x }}" in found
    page = "W is [[1, 0], [0, 1]].\n\n<!-- computed\nW is [[[1, 0], [0, 1]]] = {{ x }}\n-->\n"
    assert "W is [[[2], [3]]] = " in regions.with_values(page, lambda region: "[[2], [3]]")


def test_a_new_value_joins_those_of_its_section() -> None:
    page = (
        "# A\n\nOf all 1.\n\n<!-- computed\nOf all [1] = {{ 1 }}\n-->\n\n# B\n\nOf all {{ 1 }}.\n"
    )
    more = page.replace("Of all 1.", "Of all 1, not {{ 1 }}.")
    found = regions.with_values(more, lambda region: "1")
    assert found == (
        "# A\n\nOf all 1, not 1.\n\n<!-- computed\nOf all [1] = {{ 1 }}\n"
        "1, not [1] = {{ 1 }}\n-->\n\n# B\n\nOf all 1.\n\n"
        "<!-- computed\nOf all [1] = {{ 1 }}\n-->\n"
    )


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("One 4.\n\n<!-- computed\nTwo [4] = {{ 4 }}\n-->\n", "'Two 4' is 0 times"),
        ("One 44.\n\n<!-- computed\nOne [4] = {{ 4 }}\n-->\n", "'One 4' is 0 times"),
        ("One 4.4.\n\n<!-- computed\nOne [4] = {{ 4 }}\n-->\n", "'One 4' is 0 times"),
        ("An 4, an 4.\n\n<!-- computed\n[4] = {{ 4 }}\n-->\n", "'4' is 2 times"),
        ("One 4.\n\n<!-- computed\nOne 4 = {{ 4 }}\n-->\n", r"write `words \[value\]"),
        ("one 4, " * 20 + "one {{ 4 }}, " + "one 4, " * 20, "more than once"),
    ],
)
def test_a_value_is_where_its_comment_says(page: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regions.with_values(page, lambda region: "4")


def test_what_follows_a_folded_answer_is_markdown_again() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        assert not re.search(r"^</details>\n(?=\S)", text, re.M), name(page)
        summaries = re.findall(r"<summary>(.*?)</summary>", text, re.S)
        assert "`" not in "".join(summaries), name(page)


def test_a_quotation_is_the_source_with_a_link_to_its_file() -> None:
    found = quotes.quote("::: nanoserve.engine.plan.Plan.num_tokens", "docs/06-scheduler/index.md")
    head, code = found.split("\n\n", 1)
    assert (
        head == "[`Plan.num_tokens`](../../nanoserve/engine/plan.py) in `nanoserve/engine/plan.py`"
    )
    assert code.startswith("```python\n@property\ndef num_tokens(self)")
    chinese = quotes.quote("::: nanoserve.engine.plan.Plan.num_tokens", "docs/zh/06-scheduler.md")
    assert chinese == (
        "`nanoserve/engine/plan.py` 中的 [`Plan.num_tokens`](../../nanoserve/engine/plan.py)"
        f"\n\n{code}"
    )


def piece(first: str, last: str) -> str:
    """How a page quotes a part of a function, here of a kernel."""
    symbol = "nanoserve.kernels.triton.paged_attention_kernels.chunk_attention_kernel"
    return f'::: {symbol}\n    options:\n      from: "{first}"\n      to: "{last}"'


def test_a_piece_of_a_function_is_quoted_from_line_to_line() -> None:
    said = piece("block = tl.load(", "kv_offsets =")
    title, code = quotes.quote(said, "docs/09-attention-kernels/index.md").split("\n\n", 1)
    assert title == (
        "From [`chunk_attention_kernel`]"
        "(../../nanoserve/kernels/triton/paged_attention_kernels.py) "
        "in `nanoserve/kernels/triton/paged_attention_kernels.py`"
    )
    lines = code.splitlines()
    assert (lines[0], lines[-1]) == ("```python", "```")
    assert lines[1].startswith("block = tl.load(")
    assert lines[-2] == "kv_offsets = slot[:, None] + d[None, :]"
    assert len(lines) == 5


def test_a_piece_ends_with_the_whole_of_its_last_statement() -> None:
    code = quotes.quote(
        piece("visible = None", "acc, row_max, row_sum = online"), "docs/a/index.md"
    )
    assert code.endswith("DOT_PRECISION,\n)\n```")
    header = quotes.quote(piece("for i in range(", "for i in range("), "docs/a/index.md")
    assert header.endswith("\n\n```python\nfor i in range(begin, end):\n```")


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        ("no such line", "kv_offsets =", "0 lines begin with 'no such line'"),
        ("if sliding_window", "kv_offsets =", "lines begin with 'if sliding_window', and one must"),
        ("kv_offsets =", "block = tl.load(", "comes before"),
    ],
)
def test_the_ends_of_a_piece_are_lines_that_are_there_once(
    first: str, last: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        quotes.quote(piece(first, last), "docs/a/index.md")


def test_a_piece_has_two_ends() -> None:
    said = piece("block = tl.load(", "kv_offsets =").rsplit("\n", 1)[0]
    with pytest.raises(ValueError, match="`from:` and `to:`"):
        quotes.quote(said, "docs/a/index.md")


def test_the_site_shows_a_piece_as_it_was_recorded() -> None:
    said = piece("block = tl.load(", "kv_offsets =")
    page = regions.with_values(
        f"Before.\n\n{said}\n\nAfter.\n",
        lambda region: quotes.quote(region.said, "docs/09-attention-kernels/index.md"),
    )
    assert regions.regions(page)[0].symbol in said
    shown = regions.replace_regions(
        page, lambda region: site_hooks._on_the_site(region, "09-attention-kernels/index.html")
    )
    assert ":::" not in shown and "<!--" not in shown
    assert "After." in shown and "```python\nblock = tl.load(" in shown
    whole = regions.Region("::: nanoserve.engine.plan.Plan.num_tokens", None, True, "")
    assert site_hooks._on_the_site(whole, "a/index.html").startswith(whole.said)
