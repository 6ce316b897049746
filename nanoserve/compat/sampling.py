"""Sampling parameters of other engines, rejected with an error that says what to use instead."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from nanoserve.compat import request_names
from nanoserve.utils.parameter_table import PARAMETERS

# Names of HTTP requests only, and the parameters that they are converted to.
_OVER_HTTP = {
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    **dict.fromkeys(
        ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "structured_outputs",
    ),
}
LIKE = {name: one.ours for name, one in request_names.FOREIGN.items() if one.ours} | _OVER_HTTP
# Names that are rejected only over HTTP.
_OF_PROGRAMS = {"prompt", *PARAMETERS}
# By name: what to use instead, and the values that have no effect.
FOREIGN: dict[str, tuple[str, tuple[Any, ...]]] = {
    name: (one.in_python or one.instead, one.neutral)
    for name, one in request_names.FOREIGN.items()
    if one.ours is None and name not in _OF_PROGRAMS
}
FOREIGN["thinking_token_budget"] = (
    "requests to a server with --reasoning-parser have it; a program may use the logits processor "
    "nanoserve.sampling.thinking_budget.ThinkingBudget",
    (-1,),
)
FOREIGN["stream"] = ("llm.stream(prompt, params) yields text as it is generated", (False,))


def without_foreign(given: Mapping[str, Any], ours: Collection[str]) -> dict[str, Any]:
    """Return the parameters that are `ours`.

    Raises `ValueError` for any other parameter, unless it is vLLM's and its value has no effect.
    """
    known, messages = {}, []
    for name, value in given.items():
        if name in ours:
            known[name] = value
        elif name == "best_of" and value == given.get("n", 1):
            continue
        elif name not in FOREIGN or not request_names.has_no_effect(value, FOREIGN[name][1]):
            messages.append(_rejection(name, ours))
    if messages:
        raise ValueError("; ".join(sorted(messages)))
    return known


def _rejection(name: str, ours: Collection[str]) -> str:
    """Return the error message for a parameter that is not `ours`."""
    if name in FOREIGN:
        return f"{name} is not supported: {FOREIGN[name][0]}"
    near = [LIKE[name]] if name in LIKE else get_close_matches(name, sorted(ours), n=2)
    if near:
        return f"unknown sampling parameter {name!r}: did you mean {' or '.join(near)}?"
    return f"unknown sampling parameter {name!r}; known parameters are {sorted(ours)}"
