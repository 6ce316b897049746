"""Validation helpers, which raise `ValueError` with a message `name=value must be ...`.

Python and numpy numbers are accepted and returned as Python numbers, because numpy integers have a
fixed size, so that 127 + 1 may be -128. A bool is not accepted as a number.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from reprlib import Repr
from typing import Any

import numpy as np

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_MAX_SHOWN = 200  # characters of a value in a message
_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, _MAX_SHOWN, _MAX_SHOWN


def require(condition: bool, message: str) -> None:
    """Raise `ValueError` with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def shown(value: Any) -> str:
    """Return `repr` for a message, shortened: values may be very long or deeply nested."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def json_object(content: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in `content`, which is UTF-8; `where` is its name in errors."""
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:  # nesting may exceed Python's recursion limit
        raise ValueError(f"{where} is not JSON: {error}") from error
    require(isinstance(value, dict), f"{where} is not a JSON object")
    return value


def is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return True for a number that is finite, also in float32, which tensors may store it in."""
    if not is_int(value) and not isinstance(value, (float, np.floating)):
        return False
    return abs(_as_pythons(value)) <= _FLOAT32_MAX  # False for NaN


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def attribute_error(owner: object, name: str, advice: Mapping[str, str]) -> AttributeError:
    """Return the error for a missing attribute of `owner`, with `advice` on it if there is any.

    For use in `__getattr__`, which must not read attributes of the object: it may be half
    initialized.
    """
    message = f"{type(owner).__name__!r} object has no attribute {name!r}"
    return AttributeError(f"{message}: {advice[name]}" if name in advice else message)


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    is_good = is_int(value) and low <= int(value) and (high is None or int(value) <= high)
    allowed = f">= {low}" if high is None else f"in [{low}, {high}]"
    require(is_good, f"{name}={shown(value)} must be an integer {allowed}")
    return int(value)


def check_number(
    name: str, value: Any, low: float, high: float | None = None, *, excludes_low: bool = False
) -> int | float:
    is_good = is_number(value) and low <= value and (high is None or value <= high)
    if high is None:
        allowed = f", finite and {'>' if excludes_low else '>='} {low}"
    else:
        allowed = f" in {'(' if excludes_low else '['}{low}, {high}]"
    is_good = is_good and not (excludes_low and value == low)
    require(is_good, f"{name}={shown(value)} must be a number{allowed}")
    return _as_pythons(value)


def check_bool(name: str, value: Any) -> None:
    require(isinstance(value, bool), f"{name}={shown(value)} must be True or False")


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    require(value in choices, f"{name}={shown(value)} is not one of {list(choices)}")


def check_list(
    name: str, value: Any, is_good: Callable[[Any], bool], what: str, may_be_empty: bool = True
) -> None:
    """Raise `ValueError` unless `value` is a list of good elements; `what` is their plural noun."""
    is_list = isinstance(value, (list, tuple)) and all(map(is_good, value))
    if not is_list or not (may_be_empty or value):
        at_least = "" if may_be_empty else ", at least one"
        raise ValueError(f"{name}={shown(value)} must be a list of {what}{at_least}")


def _as_pythons(value: Any) -> int | float:
    return int(value) if is_int(value) else float(value)


def check_names(name: str, options: Any, kind: type, example: str) -> None:
    """Raise `ValueError` unless `options` is a dictionary of fields of the dataclass `kind`."""
    is_mapping = isinstance(options, Mapping) and all(isinstance(key, str) for key in options)
    require(is_mapping, f"{name}={shown(options)} must be a dictionary such as {example}")
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(options) - set(known))
    require(not unknown, f"unknown option(s) {unknown} in {name}; the known options are {known}")
