"""What to say of weights that are not those that their `config.json` describes."""

from collections.abc import Collection, Mapping
from typing import Any

from nanoserve.checks import shown

_MAX_LENGTH = 250  # characters of all names of a kind


def tell_misfits(
    expected: Mapping[str, Any], stored: Mapping[str, Any], optional: Collection[str]
) -> str:
    """Which tensors are missing, which unexpected, and which of another shape.

    `expected` maps names to shapes, and so does `stored`, which may have the `optional` ones too.
    """
    missing = sorted(expected.keys() - stored.keys())
    unexpected = sorted(stored.keys() - expected.keys() - set(optional))
    misshapen = [
        f"{name} is {shown(list(stored[name]))}, not {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    return "; ".join(f"{kind}: {some(names)}" for kind, names in problems.items() if names)


def some(names: list[str]) -> str:
    """The first of them. A model with many experts has tens of thousands; some files, long ones."""
    told: list[str] = []
    for name in names:
        if told and sum(map(len, told)) + len(name) > _MAX_LENGTH:
            break
        told.append(f"{name:.{_MAX_LENGTH}}")
    rest = len(names) - len(told)
    return ", ".join(told) + (f" and {rest} more" if rest else "")
