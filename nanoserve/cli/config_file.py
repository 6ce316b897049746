"""Flags in a YAML file, `--config FILE`, as in vLLM."""

import json
from argparse import Action, ArgumentParser, BooleanOptionalAction
from collections.abc import Mapping
from typing import Any

from nanoserve.cli.parser import Words, from_json, json_or_text, with_dashes


def with_config_file(arguments: list[str], parser: ArgumentParser) -> list[str]:
    """Return the flags of the YAML file that `--config` names, then `arguments`, as vLLM does.

    An entry is a flag without its dashes: true and false switch it, a list becomes several words,
    an object becomes JSON, and null is the flag's default; "model" is the model, unless `arguments`
    have one. A flag in `arguments` replaces that of the file. Raises `ValueError` for a file that
    cannot be read as flags; the parser rejects unknown ones.
    """
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--config":
            if not equals and number + 1 >= len(arguments):
                raise ValueError("--config needs a YAML file")
            rest = arguments[number + (1 if equals else 2) :]
            path = value if equals else arguments[number + 1]
            others = [*arguments[:number], *rest]
            if any(other.partition("=")[0] == "--config" for other in rest):
                raise ValueError("--config is given twice; one file has all flags")
            return [*_flags_in(path, parser._option_string_actions, others), *others]
    return arguments


def _flags_in(path: str, known: Mapping[str, Action], others: list[str]) -> list[str]:
    """Return the flags in a YAML file, except those that `others` have."""
    entries = _entries(path)
    given = {argument.partition("=")[0] for argument in others}
    words: list[str] = []
    for name, value in entries.items():
        (flag,) = with_dashes([f"--{name}"])
        action = known.get(flag)
        if action is not None and given & {*action.option_strings}:
            continue
        try:
            words += _words(flag, value, action, is_known=flag.partition(".")[0] in known)
        except ValueError as error:
            raise ValueError(f"--config {path}: {error}") from None
    return words


def _entries(path: str) -> dict[str, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            entries = yaml.safe_load(file) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries):
        raise ValueError(f"--config {path} must be a YAML mapping of flags to values")
    if "config" in entries:
        raise ValueError(
            f"--config {path} has an entry 'config', which is not supported in a file; remove it"
        )
    return entries


def _words(flag: str, value: Any, action: Action | None, is_known: bool) -> list[str]:
    """Return an entry as words of a command line, of which none takes a word that follows."""
    if not is_known:
        return [flag]  # for the parser's own error, whatever its value is
    if value is None:
        return []
    if isinstance(value, bool):
        return _switch(flag, value, action)
    if isinstance(value, list):
        texts = [str(one) for one in value]
        if isinstance(action, Words):  # in one word, as another one might be taken for a part of it
            return [f"{flag}={json.dumps(texts)}"] if texts else []
        if action is not None and action.nargs == "+":
            return [f"{flag}={text}" for text in texts]
        return [f"{flag}={json.dumps(value)}"]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]


def _switch(flag: str, value: bool, action: Action | None) -> list[str]:
    text = json.dumps(value)
    if isinstance(action, BooleanOptionalAction):
        return [flag if value else f"--no-{flag[2:]}"]
    if action is not None and action.nargs == 0:
        return [flag] if value else []
    if action is None or action.type in (json_or_text, from_json):  # None: an entry of an object
        return [f"{flag}={text}"]
    message = f"{flag[2:]}: {text} is not a value of {flag}"
    raise ValueError(f"{message}; YAML reads on, off, yes and no as booleans: write it in quotes")
