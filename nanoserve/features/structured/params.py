"""Request options of structured output (`SamplingParams.structured_outputs`), as in vLLM."""

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from nanoserve.features.structured.backends import check
from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.grammar import Source
from nanoserve.features.structured.schema_numbers import float_of
from nanoserve.features.structured.schemas import rewritten
from nanoserve.utils.checks import check_bool, check_list, is_text, require, shown

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# The most characters of each kind, far above practical sizes. Longer texts are rejected at once.
_MOST_CHARACTERS = {
    "json": 2**19,
    "regex": 2**14,
    "choice": 2**19,
    "grammar": 2**15,
    "%llguidance": 2**19,  # grammars that the server makes for tool calls
    "structural_tag": 2**19,
    "whitespace_pattern": 2**8,
}
_MOST_CHOICES = 10_000
_MOST_STRUCTURES = 128
_WHITESPACE = r"[ \n\r\t]*"
_DEEPEST = 100  # nesting of lists and objects


@dataclass
class StructuredOutputsParams:
    """A constraint that an output satisfies from the first character to the last.

    Exactly one of these is set:

    json: a JSON schema, as a dictionary or a string; the output is JSON that is valid under it.
    regex: a regular expression that matches the whole output.
    choice: a list of strings; the output is one of them.
    grammar: a context-free grammar, in Lark's syntax or in GBNF.
    json_object: True: the output is any JSON object.
    structural_tag: free text, in which everything after a trigger must be one of these structures:
        {"structures": [{"begin": text, "schema": {...}, "end": text}, ...],
        "triggers": [text, ...]}, as a dictionary or a string.

    These are options:

    disable_any_whitespace: False allows any whitespace between the parts of JSON; some models then
        generate it without end. None: as in the engine's `structured_outputs_config`.
    disable_additional_properties: if True, objects have only the properties that the schema names,
        unless it allows others (`"additionalProperties": true`). None: as in the engine's
        `structured_outputs_config`.
    lenient: if True, keywords of a schema that cannot be enforced (`uniqueItems`, a look-ahead) are
        ignored and logged. None: as in the engine's `structured_outputs_config`.
    whitespace_pattern: a regular expression for the whitespace between the parts of JSON.

    Raises `ValueError` unless exactly one constraint is set, and if it is too large. If the backend
    does not support a construct, adding the request raises `ValueError` that names the construct.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    lenient: bool | None = None
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise `ValueError` for wrong types, and unless exactly one constraint is set.

        Called on construction, and again when a request is added, as fields can be assigned to.
        """
        if self.json_object is not None:
            check_bool("json_object", self.json_object)
        for name in ("disable_any_whitespace", "disable_additional_properties", "lenient"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name))
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        require(
            len(given) == 1,
            f"structured_outputs must have exactly one of {KINDS}; {given} are given",
        )
        if self.whitespace_pattern is not None:
            _check_text("whitespace_pattern", self.whitespace_pattern)
        kind = given[0]
        if kind == "choice":
            choice: Any = self.choice
            num = len(choice) if isinstance(choice, list | tuple) else 0
            message = f"choice has {num} strings; at most {_MOST_CHOICES} are allowed"
            require(num <= _MOST_CHOICES, message)
            check_list("choice", choice, is_text, "non-empty strings", False)
            _check_size("choice", sum(map(len, choice)))
            _check_encodes("choice", "".join(choice))
        elif kind in ("regex", "grammar"):
            text = getattr(self, kind)
            is_llguidance = is_text(text) and text.startswith("%llguidance")
            _check_text("%llguidance" if is_llguidance else kind, text)

    def source(self, config: StructuredOutputsConfig) -> Source:
        """Return the grammar as text, with the defaults of the engine's `config`."""
        if self.regex is not None:
            return Source("regex", self.regex)
        if self.choice is not None:
            return Source("choice", json.dumps(self.choice))
        if self.grammar is not None:
            return Source("grammar", self.grammar)
        if self.structural_tag is not None:
            text, tag = _dumped("structural_tag", self.structural_tag)
            _check_tag(tag)
            return Source("structural_tag", self._rewritten_tag(tag, config))
        text = '{"type": "object"}'
        if self.json is not None:
            text = self._rewritten("json", _dumped("json", self.json)[0], config)
        is_compact = self.disable_any_whitespace
        if is_compact is None:
            is_compact = config.disable_any_whitespace
        return Source("json", text, self.whitespace_pattern or ("" if is_compact else _WHITESPACE))

    def _rewritten(self, kind: str, schema: str, config: StructuredOutputsConfig) -> str:
        """Return a schema rewritten with keywords that the backends support."""
        own = self.disable_additional_properties, self.lenient
        closes, is_lenient = (
            theirs if mine is None else mine
            for mine, theirs in zip(
                own, (config.disable_additional_properties, config.lenient), strict=True
            )
        )
        try:
            return rewritten(schema, closes, is_lenient)
        except ValueError as error:
            raise ValueError(f"structured_outputs: {kind}: {error}") from None

    def _rewritten_tag(self, tag: dict[str, Any], config: StructuredOutputsConfig) -> str:
        made = []
        for structure in tag["structures"]:
            schema = self._rewritten("structural_tag", json.dumps(structure["schema"]), config)
            made.append(structure | {"schema": json.loads(schema)})
        return json.dumps(tag | {"structures": made})

    def check(self, config: StructuredOutputsConfig | None, tokenizer: Any) -> None:
        """Raise `ValueError` that names a construct of the grammar if it is not supported.

        config, tokenizer: the engine's.
        """
        require(
            tokenizer is not None,
            "structured_outputs needs a tokenizer, but the engine has none; remove "
            "skip_tokenizer_init=True",
        )
        config = config or StructuredOutputsConfig()
        check(config.backend_name, self.source(config))

    @classmethod
    def of(cls, value: Any) -> "StructuredOutputsParams":
        """Return a copy of the value passed to `SamplingParams`, as `StructuredOutputsParams`.

        value: an instance, or a dictionary of its fields.
        """
        if isinstance(value, cls):
            return replace(value)  # a copy for this request, which is validated again
        require(
            isinstance(value, dict) and all(isinstance(name, str) for name in value),
            f"structured_outputs={shown(value)} must be StructuredOutputsParams, or a dictionary "
            f"of its fields",
        )
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(value) - set(known))
        require(not unknown, f"unknown field(s) {unknown} in structured_outputs; known: {known}")
        return cls(**value)


def _check_text(name: str, value: Any) -> None:
    require(is_text(value), f"{name}={shown(value)} must be a non-empty string")
    _check_size(name, len(value))
    _check_encodes(name, value)


def _check_encodes(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode text: {error}") from error


def _check_size(name: str, size: int) -> None:
    most = _MOST_CHARACTERS[name]
    require(size <= most, f"{name} has {size} characters; at most {most} are allowed")


def _dumped(name: str, value: Any) -> tuple[str, Any]:
    """Return a JSON object as a string and as a dictionary, from either of them."""
    if isinstance(value, str):
        _check_text(name, value)
    elif not isinstance(value, dict):
        raise ValueError(f"{name}={shown(value)} must be a dictionary, or a string of JSON")
    try:
        value = json.loads(value, parse_float=float_of) if isinstance(value, str) else value
        text = json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    require(isinstance(value, dict), f"{name}={shown(value)} must be a JSON object")
    _check_size(name, len(text))
    require(
        _depth(text) <= _DEEPEST,
        f"{name} has lists and objects nested {_depth(text)} deep; at most {_DEEPEST} levels are "
        f"allowed",
    )
    return text, value


def _check_tag(tag: dict[str, Any]) -> None:
    expected = (
        "structural_tag must be {'structures': [{'begin': text, 'schema': {...}, 'end': text}, "
        "...], 'triggers': [text, ...]}"
    )
    structures: Any = tag.get("structures")
    triggers: Any = tag.get("triggers")
    require(isinstance(structures, list) and isinstance(triggers, list), expected)
    require(structures != [], expected)
    require(all(map(is_text, triggers)), expected)
    num = len(structures)
    message = f"structural_tag has {num} structures; at most {_MOST_STRUCTURES} are allowed"
    require(num <= _MOST_STRUCTURES, message)
    for structure in structures:
        is_whole = isinstance(structure, dict) and isinstance(structure.get("schema"), dict)
        require(is_whole and is_text(structure.get("begin")), expected)
        require(isinstance(structure.get("end"), str), expected)
        begin = structure["begin"]
        is_triggered = any(begin.startswith(trigger) for trigger in triggers)
        require(
            is_triggered,
            f"structural_tag: begin={begin!r} must start with one of its triggers, {triggers}",
        )


def _depth(text: str) -> int:
    """Return the nesting depth of lists and objects in JSON text."""
    depth = deepest = 0
    is_inside = is_escaped = False
    for character in text:
        if is_inside:
            is_inside = is_escaped or character != '"'
            is_escaped = not is_escaped and character == "\\"
        elif character == '"':
            is_inside = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest
