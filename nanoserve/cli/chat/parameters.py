"""The sampling parameters that `nanoserve chat` has flags for, and those that `/set` can change."""

import json
from difflib import get_close_matches
from typing import Any

from nanoserve.utils.parameter_table import PARAMETERS

# An answer has one completion, and no log-probabilities are shown.
SETTABLE = {name: row for name, row in PARAMETERS.items() if row.is_http}
for _name in ("n", "prompt_logprobs"):
    del SETTABLE[_name]


def checked_name(name: str) -> str:
    """Return the name of a parameter. Raises `ValueError`, with similar names, if it is unknown."""
    name = name.replace("-", "_")
    if name in SETTABLE:
        return name
    near = get_close_matches(name, SETTABLE, n=2)
    similar = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"{name!r} is not one of the parameters {', '.join(SETTABLE)}{similar}")


def checked_value(name: str, text: str) -> Any:
    """Return the value of a parameter, written as JSON or as plain text; `ValueError` if invalid.

    >>> checked_value("temperature", "0.5"), checked_value("stop", "END")
    (0.5, 'END')
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return SETTABLE[name].check(name, value)
