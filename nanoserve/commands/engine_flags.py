"""`EngineConfig` on the command line: its fields are the flags, under vLLM's names."""

import json
from argparse import (
    SUPPRESS,
    ArgumentParser,
    ArgumentTypeError,
    BooleanOptionalAction,
    Namespace,
)
from collections.abc import Callable, Collection
from dataclasses import Field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from nanoserve.config import EngineConfig
from nanoserve.drop_in.options import FOREIGN, RENAMED

_SWITCHES = ("enable_", "disable_", "use_", "skip_", "calculate_", "fully_", "worker_use_")
_IN_PROGRAMS_ONLY = ("model", "logits_processors")
_AS_JSON = (
    *("speculative_config", "structured_outputs_config"),
    *("override_generation_config", "hf_overrides"),
)


def add_engine_flags(parser: ArgumentParser, but: Collection[str] = ()) -> None:
    """A flag for each option of the engine. What is not given is not in the namespace."""
    group = parser.add_argument_group(
        "engine", "as LLM(model, ...) takes them; the README says what each does"
    )
    for field in _options():
        if field.name in but:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        told = "" if field.default is None else f"({field.default})"
        if _kind(field) is bool:
            action = BooleanOptionalAction
            group.add_argument(flag, action=action, default=SUPPRESS, help=told)
        else:
            kind, shown = _kind(field), field.name.upper()
            group.add_argument(flag, type=kind, default=SUPPRESS, metavar=shown, help=told)
    taken = {*but, *parser._option_string_actions}
    for name in {*FOREIGN, *RENAMED}:  # vLLM's, which are refused, or accepted, with a reason
        flag = f"--{name.replace('_', '-')}"
        if flag not in taken and name.startswith(_SWITCHES):
            action = BooleanOptionalAction
            group.add_argument(flag, action=action, default=SUPPRESS, help=SUPPRESS)
        elif flag not in taken:
            group.add_argument(flag, type=_value, default=SUPPRESS, help=SUPPRESS)


def engine_options(args: Namespace, but: Collection[str] = ()) -> dict[str, Any]:
    """What was given of them."""
    names = [*(field.name for field in _options()), *FOREIGN, *RENAMED]
    return {name: getattr(args, name) for name in names if name in args and name not in but}


def with_dashes(arguments: list[str]) -> list[str]:
    """vLLM takes `--max_model_len` for `--max-model-len`, and so do scripts written for it."""
    return [
        name.replace("_", "-") + equals + value if name.startswith("--") else argument
        for argument in arguments
        for name, equals, value in [argument.partition("=")]
    ]


def _options() -> list[Field[Any]]:
    return [field for field in fields(EngineConfig) if field.name not in _IN_PROGRAMS_ONLY]


def _kind(field: Field[Any]) -> Callable[[str], Any]:
    """What a flag's value is made with: the first type that is not None."""
    if field.name in _AS_JSON:
        return _from_json
    kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
    return str if kinds[0] is Path else kinds[0]


def _value(text: str) -> Any:
    """JSON, or else a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
