"""What to say of weights that are not those that their `config.json` describes."""

from collections.abc import Collection, Mapping
from pathlib import Path
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


def tell_no_config(path: Path) -> str:
    """Of a folder; those of llama.cpp's models hold files that say everything themselves."""
    files = sorted(file.name for file in path.glob("*.gguf"))
    advice = f"give one of its files ({some(files)})" if files else "name the file as well"
    return (
        f"{path} is no checkpoint: it has no config.json; if it is a model in GGUF, {advice}, "
        f"as in 'folder/model-Q4_K_M.gguf' or, on the hub, 'organisation/model/model-Q4_K_M.gguf'"
    )


def some(names: list[str]) -> str:
    """The first of them. A model with many experts has tens of thousands; some files, long ones."""
    told: list[str] = []
    for name in names:
        if told and sum(map(len, told)) + len(name) > _MAX_LENGTH:
            break
        told.append(f"{name:.{_MAX_LENGTH}}")
    rest = len(names) - len(told)
    return ", ".join(told) + (f" and {rest} more" if rest else "")
