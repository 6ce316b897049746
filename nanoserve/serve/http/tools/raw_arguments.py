"""Grammars for arguments that are not one JSON object: between tags, or as keywords of Python."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from nanoserve.features.structured.schema_keywords import assertions_of
from nanoserve.serve.http.tools.raw_strings import UnsupportedString, literals, string_terminal
from nanoserve.serve.http.tools.schema_types import target_of
from nanoserve.serve.http.tools.tagged import Tags

Schema = dict[str, Any]
JsonRule = Callable[[Schema], str]  # returns the right-hand side of a rule for JSON
_MOST_ARGUMENTS = 16  # of a function without a schema
_MOST_FOLLOWED = 64
# Keywords for objects that a sequence of arguments cannot follow.
_FOR_WHOLE = (
    *("anyOf", "oneOf", "allOf", "not", "if", "$ref", "enum", "const", "patternProperties"),
    *("propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
)
_DEFINITIONS = ("$defs", "definitions")
_TAG_NAME = re.compile(r"[^<>\"\s]+( [^<>\"\s]+)*")


class ArgumentWriter(Protocol):
    """Writes the rules for the arguments of one function, in Lark's syntax."""

    def rules(self, name: str, schema: Schema | None, json_rule: JsonRule) -> list[str]:
        """Return the rule `name` and those that it needs. None as a schema allows anything.

        Raises `ValueError` for a keyword that the format cannot follow.
        """


class _Argument(NamedTuple):
    name: str
    schema: Schema
    is_required: bool


@dataclass(frozen=True)
class TaggedArguments:
    """Arguments between tags: `begin` with the name, a value, `close`, and `behind`."""

    tags: Tags
    begin: str
    close: str
    behind: str

    def rules(self, name: str, schema: Schema | None, json_rule: JsonRule) -> list[str]:
        number = name.upper()
        if schema is None or _is_open(schema):
            before, after = map(json.dumps, self.begin.split("%s"))
            value = self._terminal({}, True)
            return [
                f"{name}: any_{name}{{0,{_MOST_ARGUMENTS}}}",
                f"any_{name}: {before} KEY_{number} {after} RAW_{number} {_literal(self.behind)}",
                rf"KEY_{number}: /[A-Za-z_][A-Za-z0-9_-]*/",
                f"RAW_{number}: {value}",
            ]
        rules, parts = [], []
        for index, argument in enumerate(_arguments_of(schema)):
            if _TAG_NAME.fullmatch(argument.name) is None:
                raise ValueError(f"the name {argument.name!r:.50} cannot be written in a tag")
            own = f"{name}_{index}"
            parts.append(f"{own}{'' if argument.is_required else '?'}")
            values, more = self._values(own, argument.schema, schema, json_rule)
            begin = _literal(self.begin % argument.name)
            rules += [f"{own}: {begin} ({' | '.join(values)}) {_literal(self.behind)}", *more]
        return [f"{name}: {' '.join(parts)}", *rules]

    def _values(
        self, name: str, schema: Schema, root: Schema, json_rule: JsonRule
    ) -> tuple[list[str], list[str]]:
        """Return the alternatives for a value and the closing tag, and the rules they need."""
        strings, others, texts = _branches(schema, root)
        values, rules = [], []
        if texts:
            values += literals(texts, self.close, self.tags.ends_of_value)
        for index, one in enumerate(strings):
            terminal = f"RAW_{name.upper()}_{index}"
            values.append(terminal)
            rules.append(f"{terminal}: {self._terminal(one, not others)}")
        if others:
            definitions = {key: root[key] for key in _DEFINITIONS if key in root}
            part = others[0] if len(others) == 1 else {"anyOf": others}
            rules.append(f"json_{name}: {json_rule({**part, **definitions})}")
            values.append(f"json_{name} {_literal(self.close)}")
        return values, rules

    def _terminal(self, schema: Schema, is_alone: bool) -> str:
        try:
            return string_terminal(schema, self.close, self.tags.ends_of_value, is_alone)
        except UnsupportedString as error:
            raise UnsupportedString(
                f"{error} is not supported in arguments without quotes"
            ) from None


class PythonArguments:
    """Keywords of Python with values in JSON, which Python can read but for three constants."""

    def rules(self, name: str, schema: Schema | None, json_rule: JsonRule) -> list[str]:
        if schema is None or _is_open(schema):
            return [
                f'{name}: (any_{name} (", " any_{name}){{0,{_MOST_ARGUMENTS - 1}}})?',
                f'any_{name}: KEY_{name.upper()} "=" value_{name}',
                rf"KEY_{name.upper()}: /[A-Za-z_][A-Za-z0-9_]*/",
                f"value_{name}: {json_rule({})}",
            ]
        arguments = _arguments_of(schema)
        definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
        rules = [f"{name}: first_{name}_0"]
        # `first` has no comma before it, `next` has one; both are empty after the last argument.
        for index, argument in enumerate(arguments):
            if not argument.name.isidentifier() or not argument.name.isascii():
                raise ValueError(f"the name {argument.name!r:.50} is no keyword of Python")
            own, rest = f"{name}_{index}", f"next_{name}_{index + 1}"
            skipped = "" if argument.is_required else " | {}_" + f"{name}_{index + 1}"
            rules += [
                f"first_{own}: {own} {rest}{skipped.format('first')}",
                f'next_{own}: ", " {own} {rest}{skipped.format("next")}',
                f"{own}: {_literal(argument.name + '=')} value_{own}",
                f"value_{own}: {json_rule({**argument.schema, **definitions})}",
            ]
        end = f"{name}_{len(arguments)}"
        return [*rules, f'first_{end}: ""', f'next_{end}: ""']


def _is_open(schema: Schema) -> bool:
    """Return True if a schema says nothing about the names of arguments."""
    return not schema.get("properties") and schema.get("additionalProperties") is not False


def _arguments_of(schema: Schema) -> list[_Argument]:
    """Return the arguments that a schema names, in its order."""
    for keyword in _FOR_WHOLE:
        if schema.get(keyword) is not None:
            raise ValueError(f"{keyword} for all arguments is not supported in this format")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    named = properties | {name: {} for name in required if name not in properties}
    return [
        _Argument(name, one if isinstance(one, dict) else {}, name in required)
        for name, one in named.items()
    ]


def _branches(schema: Schema, root: Schema) -> tuple[list[Schema], list[Schema], list[str]]:
    """Split a schema: return its strings, its values of other types, and single strings.

    A schema without a type is a string, as the parser reads it.
    """
    strings: list[Schema] = []
    others: list[Schema] = []
    texts: list[str] = []
    waiting, num_seen = [schema], 0
    while waiting:
        one, num_seen = waiting.pop(0), num_seen + 1
        target = target_of(one.get("$ref"), root)
        choices = one.get("anyOf") or one.get("oneOf")
        values = [one["const"]] if "const" in one else one.get("enum")
        beside = assertions_of(one).keys() - {"anyOf", "oneOf", "$ref", "type"}
        is_choice = isinstance(target, dict) or isinstance(choices, list)
        if num_seen > _MOST_FOLLOWED or "allOf" in beside or (is_choice and beside):
            problem = ", ".join(sorted(beside)) or "a choice of so many schemas"
            raise ValueError(f"{problem} for one argument is not supported in this format")
        if isinstance(target, dict):
            waiting.append(target)
        elif isinstance(choices, list):
            waiting += [choice for choice in choices if isinstance(choice, dict)]
        elif isinstance(values, list):
            texts += [value for value in values if isinstance(value, str)]
            kept = [value for value in values if not isinstance(value, str)]
            others += [{"enum": kept}] if kept else []
        else:
            types = one.get("type", "string")
            for kind in types if isinstance(types, list) else [types]:
                (strings if kind == "string" else others).append(one | {"type": kind})
    return strings, others, texts


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'
