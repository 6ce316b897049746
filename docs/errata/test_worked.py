"""The numbers of the page on common errors, by hand; and whether its references exist."""

import re
from pathlib import Path

import pytest

from . import worked

ROOT = Path(__file__).parents[2]

PAGES = (
    *("14-tensor-parallel/index.md", "15-benchmarking/index.md"),
    *("16-adding-a-model/index.md", "errata/index.md"),
)


def test_speculation_pays_less_than_told() -> None:
    """0.8 + 0.64 + 0.512 + 0.4096 + 0.32768; one more; over 1.5."""
    assert worked.accepted_drafts(0.8, 5) == pytest.approx(2.68928)
    assert worked.tokens_per_round(0.8, 5) == pytest.approx(3.68928)
    assert worked.speculative_speedup(0.8, 5, 0.1) == pytest.approx(2.4595, abs=1e-4)


def test_only_the_residual_gives_back_the_target() -> None:
    """Accepted 0.5 and 0.2; the 0.3 that are rejected belong to the second token."""
    target, draft = [0.5, 0.5], [0.8, 0.2]
    found = worked.after_rejection(target, draft, residual=True)
    assert found == pytest.approx(target)
    assert worked.rounded(found, 2) == "0.50, 0.50"
    wrong = worked.after_rejection(target, draft, residual=False)
    assert wrong == pytest.approx([0.65, 0.35])


def test_a_border_that_is_met_exactly() -> None:
    seven = ["0.40", "0.25", "0.15", "0.10", "0.05", "0.03", "0.02"]
    assert worked.kept_by_top_p(seven, "0.9", drop_above=False) == 4
    assert worked.kept_by_top_p(seven, "0.9", drop_above=True) == 5
    assert worked.kept_by_top_p(seven, "0.89", drop_above=True) == 4


def test_memory_arithmetic() -> None:
    """32 x 14.5 / 30; 7.5 / 187.5 = 4 per cent; ten holes of one, every other free."""
    assert worked.batch_gain(14, 0.5, 32) == pytest.approx(15.467, abs=1e-3)
    assert worked.batch_gain(14, 0, 32) == 32
    assert worked.shortest_with_waste(4, 16) == pytest.approx(180)
    assert worked.largest_hole([1] * 10, [0, 2, 4, 6, 8]) == 1
    assert worked.largest_hole([1, 2, 3, 1], [1, 2]) == 5
    assert worked.pairs_seen(1000) == 500_500


def test_a_zero_point_is_a_code() -> None:
    """From -1 to 3 in 8 bits: 4 / 255 a step, and 0 is code 64."""
    codes = [worked.quantize(x, 4 / 255, 64) for x in (-1.0, 0.0, 3.0)]
    assert codes == [0, 64, 255]
    assert worked.subtracted_first(3.0, 4 / 255, 64) == -3889


def test_rank_groups() -> None:
    assert worked.rank_groups(4, 2, neighbours=True) == [[0, 1], [2, 3]]
    assert worked.rank_groups(4, 2, neighbours=False) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("page", PAGES)
def test_tests_and_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:tests|docs|nanoserve|benchmarks)/[\w/.-]+\.(?:py|md))", text))
    assert files, page
    for file in files:
        assert (ROOT / file).is_file(), file
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)", text):
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{file}::{name}"
    oracle = re.findall(r"`(tests/[\w/]+\.py)::test_the_oracle_catches\[(\w+)\]", text)
    for file, case in oracle:
        assert f"def {case}(" in (ROOT / file).read_text(encoding="utf-8")
