"""Whether a run of pytest is one on the GPU."""

import itertools
import re

from _pytest.mark import _parse_expression
from _pytest.mark.expression import Expression


def is_gpu_run(markexpr: str) -> bool:
    """Whether `-m markexpr` selects tests that are marked gpu, and no others.

    Whatever other marks they have: each that the expression names may be there or not. A wrong
    expression is told in pytest's own words.
    """
    if not markexpr.strip():
        return False
    expression = _parse_expression(markexpr, "Wrong expression passed to '-m'")
    others = set(re.findall(r"\w+", markexpr)) - {"gpu"}

    subsets = itertools.chain.from_iterable(
        itertools.combinations(others, size) for size in range(len(others) + 1)
    )
    selected = {
        has_gpu
        for marks in subsets
        for has_gpu in (True, False)
        if _selects(expression, {*marks, *(["gpu"] if has_gpu else [])})
    }
    return selected == {True}


def _selects(expression: Expression, marks: set[str]) -> bool:
    return expression.evaluate(lambda name, **_: name in marks)
