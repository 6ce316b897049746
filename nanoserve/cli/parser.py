"""`Parser` is an `ArgumentParser` that reads flags as vLLM does, and suggests corrections.

Flags cannot be abbreviated, as a prefix may be a flag of another server. Flags are written with
dashes or underscores, and entries of JSON also one by one (`--speculative-config.method ngram`).
The error for an unknown flag names similar flags, or the equivalent of another server's flag.
"""

import json
import re
import sys
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from difflib import get_close_matches
from typing import Any, NoReturn

from nanoserve.compat.server_flags import ELSEWHERE

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_LONG = re.compile(r"--[a-z][a-z-]+")
_SHORT = re.compile(r"-[A-Za-z]")


class Parser(ArgumentParser):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_args(  # type: ignore[override]
        self, args: AbstractSequence[str] | None = None, namespace: Any = None
    ) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        parsed, unknown = self.parse_known_args(given, namespace)
        if unknown:
            self.error("; ".join(self._describe_unknown(unknown)))
        return parsed

    def parse_known_args(  # type: ignore[override]
        self, args: AbstractSequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        given = with_dashes(sys.argv[1:] if args is None else list(args))
        given, unknown_flags = self._split_off_short_flags(self._with_entries(given))
        parsed, unknown = super().parse_known_args(given, namespace)
        return parsed, [*unknown_flags, *unknown]

    def _split_off_short_flags(self, arguments: list[str]) -> tuple[list[str], list[str]]:
        """Split off unknown single-dash flags.

        argparse would take `-t`, a flag of llama.cpp, for the beginning of `-tp`.
        """
        known: list[str] = []
        unknown_flags: list[str] = []
        ours = self._option_string_actions
        if self._subparsers is not None:  # subcommands have flags of their own
            return arguments, unknown_flags
        for number, argument in enumerate(arguments):
            if argument == "--":
                return known + arguments[number:], unknown_flags
            name = argument.partition("=")[0]
            is_flag = name in ours or (name[:2] in ours and name not in ELSEWHERE)  # as -O3
            (known if is_flag or not _SHORT.match(argument) else unknown_flags).append(argument)
        return known, unknown_flags

    def _with_entries(self, arguments: list[str]) -> list[str]:
        """Return `--config.a.b 1 --config.c x` as `--config '{"a": {"b": 1}, "c": "x"}'`."""
        kept: list[str] = []
        entries: dict[str, dict[str, Any]] = {}
        waiting = iter(arguments)
        for argument in waiting:
            name, equals, value = argument.partition("=")
            flag, *keys = name.split(".")
            if not (keys and flag in self._option_string_actions and flag.startswith("-")):
                kept.append(argument)
                continue
            if not equals:
                value = next(waiting, "")
            inner = entries.setdefault(flag, {})
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
                if not isinstance(inner, dict):
                    self.error(f"{name}: {key} is set as a value and as an object; set it once")
            inner[keys[-1]] = json_or_text(value)
        return kept + [part for flag, own in entries.items() for part in (flag, json.dumps(own))]

    def error(self, message: str) -> NoReturn:
        """Exit with the message in one line, without the long usage."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _describe_unknown(self, unknown: Iterable[str]) -> list[str]:
        ours = self._option_string_actions
        shown = [flag for flag, action in sorted(ours.items()) if action.help != SUPPRESS]
        elsewhere = {  # advice that names flags of this command only
            flag: text for flag, text in ELSEWHERE.items() if {*_LONG.findall(text)} <= ours.keys()
        }
        messages: list[str] = []
        for argument in unknown:
            name = argument.partition("=")[0]
            for known in (name, name.rstrip("0123456789")):  # -c4096, as for llama.cpp
                if known in elsewhere:
                    messages.append(f"unrecognized argument {name}: {elsewhere[known]}")
                    break
            else:
                if name.startswith("-"):
                    near = _near(name, shown, elsewhere)
                    messages.append(f"unrecognized argument {name}{near}")
                elif not messages:  # else it may be the value of the unknown flag before it
                    messages.append(f"unrecognized argument {argument}")
        return messages


def _near(name: str, ours: list[str], elsewhere: Mapping[str, str]) -> str:
    near = get_close_matches(name, [*ours, *elsewhere], n=2, cutoff=0.75)
    if not near:
        return ""
    if near[0] in elsewhere:
        return f": did you mean {near[0]}? {elsewhere[near[0]]}"
    return f": did you mean {' or '.join(flag for flag in near if flag in ours)}?"


class Words(Action):
    """An argument action that takes several words or one JSON list, as some of vLLM's flags do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"nargs": "+", **kwargs})

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, flag: str | None = None
    ) -> None:
        if len(values) == 1 and values[0].lstrip().startswith("["):
            try:
                values = json.loads(values[0])
            except ValueError as error:
                parser.error(f"argument {flag}: {values[0]!r} is not JSON: {error}")
            if not all(isinstance(value, str) for value in values):
                parser.error(f"argument {flag}: {json.dumps(values)} must be a list of strings")
        setattr(namespace, self.dest, values)


def whole_number(text: str) -> int:
    """Read an integer as vLLM's `human_readable_int` does.

    Units k, m, g and t are powers of 1000, and may follow a decimal fraction; K, M, G and T are
    powers of 1024, and follow an integer: 1k is 1000, 2.5k is 2500, 1K is 1024. Raises
    `ArgumentTypeError` for any other string.
    """
    text = text.strip()
    found = _WITH_UNIT.fullmatch(text)
    try:
        if found is None:
            return int(text)
        number, unit = found.groups()
        return round(float(number) * _UNITS[unit]) if unit.islower() else int(number) * _UNITS[unit]
    except ValueError as error:
        message = f"{text!r} must be an integer, as 4096, 4k (4000), 4.5k (4500) or 4K (4096)"
        if found is not None:
            number, unit = found.groups()
            message += f": {unit} takes no decimal fraction; did you mean {number}{unit.lower()}?"
        raise ArgumentTypeError(message) from error


def length_or_auto(text: str) -> int | None:
    """Read a length as `whole_number` does. -1 and "auto" are None, as in vLLM."""
    return None if text.strip().lower() in ("-1", "auto") else whole_number(text)


def json_or_text(text: str) -> Any:
    """Return the value of a JSON string, or the string itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def from_json(text: str) -> Any:
    """Return the value of a JSON string. Raises `ArgumentTypeError` if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not JSON: {error}") from error


def with_dashes(arguments: list[str]) -> list[str]:
    """Replace underscores in flags by dashes, as scripts for vLLM may have `--max_model_len`.

    In an entry of JSON, such as `--speculative-config.num_x 4`, only the flag's name is changed.
    """
    dashed = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            flag, dot, keys = name.partition(".")
            argument = flag.replace("_", "-") + dot + keys + equals + value
        dashed.append(argument)
    return dashed


def add_model(parser: ArgumentParser, text: str) -> None:
    """Add the model as a positional argument with help `text`, and as `--model`.

    vLLM's older server and its configuration files have the flag.
    """
    parser.add_argument("model", nargs="?", help=text)
    flag = "The model, as a flag. Default: the positional argument."
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help=flag)


def model_of(args: Namespace, default: str | None = None) -> Any:
    """Return the model that was passed. Raises `ValueError` if two different models were."""
    by_place, by_flag = args.model, args.model_flag
    if by_place is not None and by_flag is not None and by_place != by_flag:
        raise ValueError(f"got two models, {by_place!r} and --model {by_flag!r}; pass only one")
    return by_place or by_flag or default
