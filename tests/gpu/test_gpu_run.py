"""`pytest -m` must not hide the GPU from tests that it has selected for it."""

import pytest
from gpu_run import is_gpu_run


@pytest.mark.parametrize(
    "markexpr",
    ["gpu", " gpu ", "gpu and small", "gpu and not slow", "(small or x) and gpu", "not (not gpu)"],
)
def test_what_selects_nothing_but_tests_for_the_gpu_runs_on_it(markexpr: str) -> None:
    assert is_gpu_run(markexpr)


@pytest.mark.parametrize(
    "markexpr", ["", "not gpu", "small", "gpu or small", "not small", "gpu and not gpu"]
)
def test_all_else_runs_without(markexpr: str) -> None:
    assert not is_gpu_run(markexpr)


def test_a_wrong_expression_is_told_in_pytests_words() -> None:
    with pytest.raises(pytest.UsageError, match="Wrong expression passed to '-m': gpu and"):
        is_gpu_run("gpu and")
