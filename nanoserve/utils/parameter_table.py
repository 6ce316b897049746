"""The table of sampling parameters, from which all other lists of parameters are derived.

A parameter is a field of `SamplingParams` and a row of `PARAMETERS`. The columns are used by:

    column          used by
    --------------  ------------------------------------------------------------------------------
    check           `SamplingParams.validate`
    stage, neutral  `SamplingParams.changes_logits`, `filters_logits`; a draft model, which keeps
                    temperature and filters (`features/speculative/draft_model.py`); the error of a
                    row whose constraints leave no token (`sampling/diagnostics.py`)
    is_http         bodies of HTTP requests (`serve/http/protocol.py`, where it is a field, too)
    recommended_as  the reader of generation_config.json (`checkpoint/model_config.py`)
    flag            the command line of `nanoserve chat` (`cli/chat/command.py`)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from nanoserve.outputs import RequestOutputKind
from nanoserve.utils.checks import check_bool, check_int, check_number, require
from nanoserve.utils.list_checks import (
    MOST_LOGPROB_IDS,
    check_bad_words,
    check_bias,
    check_callables,
    check_named,
    check_stop,
    token_ids,
)

Check = Callable[[str, Any], Any]  # (name, value) -> the value to keep, or `ValueError`
# Stages of the sampler, in their order.
Stage = Literal["mask", "bias", "penalty", "processor", "grammar", "temperature", "filter"]

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Parameter:
    """One row of the table.

    check: returns the value that a request keeps. optional: True if the value may be None.
    stage: the stage of the sampler that uses it; None if it does not change which token is sampled.
    neutral: the value at which that stage does nothing, in addition to 0, None and an empty list.
    is_http: True if a field of HTTP requests has its name and meaning.
    recommended_as: its name in a generation_config.json; None if no checkpoint can recommend it.
    flag: parses the argument of its flag of `nanoserve chat`; None if there is no such flag.
    """

    check: Check
    stage: Stage | None = None
    neutral: float | None = None
    optional: bool = False
    is_http: bool = False
    recommended_as: str | None = None
    flag: Callable[[str], Any] | None = None

    def is_set(self, value: Any) -> bool:
        """Return True if the stage has something to do at this value."""
        return bool(value) and value != self.neutral


def integer(low: int, high: int = INT32_MAX) -> Check:
    return lambda name, value: check_int(name, value, low, high)


def number(low: float, high: float | None = None, excludes_low: bool = False) -> Check:
    return lambda name, value: check_number(name, value, low, high, excludes_low=excludes_low)


def switch(name: str, value: Any) -> bool:
    check_bool(name, value)
    return value


def output_kind(name: str, value: Any) -> RequestOutputKind:
    is_kind = isinstance(value, RequestOutputKind)
    require(is_kind, f"{name}={value!r} must be a RequestOutputKind")
    return value


def structured_outputs(name: str, value: Any) -> Any:
    from nanoserve.features.structured.params import (
        StructuredOutputsParams,  # few requests have a grammar
    )

    return StructuredOutputsParams.of(value)


# Parameters that act on logits come first, in the order of the sampler.
PARAMETERS = {
    "allowed_token_ids": Parameter(
        token_ids(may_be_empty=False), "mask", optional=True, is_http=True
    ),
    "bad_words": Parameter(check_bad_words, "mask", optional=True, is_http=True),
    "min_tokens": Parameter(integer(0), "mask", is_http=True),
    "logit_bias": Parameter(check_bias, "bias", optional=True),
    "repetition_penalty": Parameter(
        number(0, excludes_low=True),
        "penalty",
        neutral=1,
        is_http=True,
        recommended_as="repetition_penalty",
    ),
    "frequency_penalty": Parameter(number(-2, 2), "penalty", is_http=True),
    "presence_penalty": Parameter(number(-2, 2), "penalty", is_http=True),
    "logits_processors": Parameter(check_callables, "processor", optional=True),
    "structured_outputs": Parameter(structured_outputs, "grammar", optional=True),
    "temperature": Parameter(
        number(0), "temperature", is_http=True, recommended_as="temperature", flag=float
    ),
    "min_p": Parameter(number(0, 1), "filter", is_http=True, recommended_as="min_p"),
    "top_k": Parameter(
        integer(-1), "filter", neutral=-1, is_http=True, recommended_as="top_k", flag=int
    ),
    "top_p": Parameter(
        number(0, 1, excludes_low=True),
        "filter",
        neutral=1,
        is_http=True,
        recommended_as="top_p",
        flag=float,
    ),
    # Number of completions, and their random draws.
    "n": Parameter(integer(1, 16_384), is_http=True),
    "seed": Parameter(integer(-1, 2**64 - 1), optional=True, is_http=True, flag=int),
    "num_speculative_tokens": Parameter(integer(0), optional=True, is_http=True),
    # Conditions for the end.
    "max_tokens": Parameter(
        integer(1), optional=True, is_http=True, recommended_as="max_new_tokens", flag=int
    ),
    "stop": Parameter(check_stop, optional=True, is_http=True),
    "stop_token_ids": Parameter(token_ids(), optional=True, is_http=True),
    "ignore_eos": Parameter(switch, is_http=True),
    # Content of the output.
    "include_stop_str_in_output": Parameter(switch, is_http=True),
    "logprobs": Parameter(integer(-1), optional=True),
    "prompt_logprobs": Parameter(integer(-1), optional=True, is_http=True),
    "logprob_token_ids": Parameter(token_ids(MOST_LOGPROB_IDS), optional=True),
    "detokenize": Parameter(switch),
    "skip_special_tokens": Parameter(switch, is_http=True),
    "spaces_between_special_tokens": Parameter(switch, is_http=True),
    "output_kind": Parameter(output_kind),
    "extra_args": Parameter(check_named, optional=True),
}


@cache
def names_of(*stages: Stage) -> tuple[str, ...]:
    """Return the names of the parameters of these stages, in the order of the sampler."""
    return tuple(name for name, row in PARAMETERS.items() if row.stage in stages)


@cache
def stages_before(stage: Stage) -> tuple[Stage, ...]:
    order = get_args(Stage)
    return order[: order.index(stage)]
