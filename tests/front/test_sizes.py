"""The three sizes of the suite: what marks select, and how a run sums up what it skipped."""

from types import SimpleNamespace

import pytest
import sizes


def item(*marks: pytest.MarkDecorator, **parameters: object) -> SimpleNamespace:
    """Return what `runs_at` reads of a test with these marks and parameters."""
    return SimpleNamespace(
        iter_markers=lambda name: [each.mark for each in marks if each.mark.name == name],
        callspec=SimpleNamespace(params=parameters),
    )


def sizes_of(*marks: pytest.MarkDecorator, **parameters: object) -> list[str]:
    test = item(*marks, **parameters)
    return [name for size, name in enumerate(sizes.SIZES) if sizes.runs_at(test, size)]


def test_marks_choose_the_sizes_in_which_a_case_runs() -> None:
    mark = pytest.mark
    assert sizes_of() == ["small", "full", "soak"]
    assert sizes_of(mark.size("full")) == ["full", "soak"]
    assert sizes_of(mark.size("full"), mark.size("soak")) == ["soak"]
    few, some = mark.small(seed=[0], kind=["a", "b"]), mark.full(seed=[0, 1])
    assert sizes_of(few, seed=0, kind="b") == ["small", "full", "soak"]
    assert sizes_of(few, seed=1, kind="b") == ["full", "soak"]
    assert sizes_of(few, some, seed=1, kind="c") == ["full", "soak"]
    assert sizes_of(few, some, seed=2, kind="a") == ["soak"]
    with pytest.raises(ValueError):
        sizes_of(mark.size("ful"))


def test_skips_are_summed_up_in_five_lines() -> None:
    reasons = ["Skipped: needs an NVIDIA GPU"] * 9 + [
        "Skipped: could not import 'llguidance': No module named 'llguidance'",
        "Skipped: pip install 'nanoserve[guided]'",
        "Skipped: needs the extra nanoserve[ray]",
        "Skipped: needs the extra nanoserve[ray]",
        "Skipped: pip install mypy",
        "Skipped: could not import 'matplotlib': No module named 'matplotlib'",
        "Skipped: needs oneDNN to pack as we do",
        "Skipped: numba's kernels have no float16",
    ]
    assert sizes.summary_of_skips(reasons) == [
        "    9  an NVIDIA GPU",
        "    2  pip install 'nanoserve[guided]'",
        "    2  pip install 'nanoserve[ray]'",
        "    1  pip install of what they compare with",
        "    3  pip install 'nanoserve[bench]'; needs oneDNN to pack as we do; "
        "numba's kernels have no float16",
    ]
    assert sizes.summary_of_skips([]) == []
