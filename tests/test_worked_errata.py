"""The numbers on the page of errata, by hand; and whether what the pages point at is there."""

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "docs"))

from worked import errata as worked

ROOT = Path(__file__).parents[1]

PAGES = (
    "chapters/14-tensor-parallelism.md",
    "chapters/15-benchmarking.md",
    "chapters/16-adding-a-model.md",
    "errata.md",
)


def test_three_tokens_attend() -> None:
    """Every row of scores is [1, 1, 2], halved for d = 4."""
    assert worked.scores(worked.Q, worked.K) == [[1, 1, 2]] * 3
    for row in worked.attention_weights(worked.Q, worked.K):
        assert row == pytest.approx([0.2741, 0.2741, 0.4519], abs=1e-4)


@pytest.mark.parametrize(
    ("scores", "temperature", "expected"),
    [
        ([0.2, 0.4, 0.6], 1.0, [0.269, 0.329, 0.402]),
        ([0.1, 0.3, 0.5, 0.8], 1.0, [0.175, 0.213, 0.261, 0.352]),
        ([2.0, 1.0, 0.5, 0.1], 0.5, [0.828, 0.112, 0.041, 0.019]),
        ([2.0, 1.0, 0.5, 0.1], 1.0, [0.575, 0.211, 0.128, 0.086]),
        ([2.0, 1.0, 0.5, 0.1], 2.0, [0.406, 0.246, 0.192, 0.157]),
    ],
)
def test_softmax(scores: list[float], temperature: float, expected: list[float]) -> None:
    assert worked.softmax(scores, temperature) == pytest.approx(expected, abs=6e-4)
    assert worked.rounded([0.26933, 0.5]) == "0.269, 0.500"


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
    codes = [worked.quantise(x, 4 / 255, 64) for x in (-1.0, 0.0, 3.0)]
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
    for file, name in re.findall(r"`(tests/\w+\.py)::(\w+)", text):
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{file}::{name}"
    for case in re.findall(r"::test_the_oracle_catches\[(\w+)\]", text):
        assert f"def {case}(" in (ROOT / "tests/test_shadow_kv.py").read_text(encoding="utf-8")
