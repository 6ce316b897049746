"""Grammar rules for the content of an answer, alone or as the alternative to tool calls.

An output with tools and a format is calls or content, as its first characters decide. So content
may not begin like a call. Tags never begin JSON; where a call is JSON itself, content that is an
object must differ in its properties.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.params import StructuredOutputsParams
from nanoserve.features.structured.regex import portable
from nanoserve.features.structured.schema_numbers import spelled
from nanoserve.features.structured.schemas import COMPACT, json_rule
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.response_format import refusal
from nanoserve.serve.http.tools.tool_choice import ToolUse

# What is written in another way between the slashes of a terminal; other escapes stay.
_UNWRITTEN = re.compile(r"\\?\n|\\.|/")
_PARTS = ("allOf", "anyOf", "oneOf")


def rules_of(
    constraint: StructuredOutputsParams,
    config: StructuredOutputsConfig,
    field: str,
    name: str = "content",
    use: ToolUse | None = None,
) -> list[str]:
    """Return the rule `name` for a constraint of a request, and the rules that it needs.

    field: the request field that an `ApiError` names for a constraint that has no such rule.
    use: tools that may be called instead, if any.
    """
    try:
        source = constraint.source(config)
    except ValueError as error:
        raise refusal(error, field) from error
    starts = () if use is None else use.call_starts
    if source.kind == "regex":
        regex = _UNWRITTEN.sub(_written, portable(source.text))
        return [f"{name}: {name.upper()}", f"{name.upper()}: /{regex}/{not_beginning(starts)}"]
    if source.kind == "choice":
        choices = [json.dumps(one, ensure_ascii=False) for one in constraint.choice or ()]
        return [f"{name}: CHOICE", f"CHOICE: ({' | '.join(choices)}){not_beginning(starts)}"]
    if source.kind == "json":
        schema = source.text if use is None else _unlike_calls(source.text, use, field)
        is_compact = not source.whitespace or (use is not None and use.format.keys_of_calls)
        options = COMPACT if is_compact else {"whitespace_pattern": source.whitespace}
        return [f"{name}: {json_rule(spelled(schema), options)}"]
    message = "with tools or --reasoning-parser, only JSON, regular expressions and choices are "
    raise ApiError(400, f"{field}: {message}supported", field, "unsupported")


def _written(found: re.Match[str]) -> str:
    if found[0].endswith("\n"):
        return r"\n"
    return r"\/" if found[0] == "/" else found[0]


def not_beginning(starts: Sequence[str]) -> str:
    """Return the part of a terminal that excludes texts which begin with one of `starts`."""
    return f" & ~/({'|'.join(map(escaped, starts))})(.|\\n)*/" if starts else ""


def not_within(texts: Sequence[str]) -> str:
    """Return the part of a terminal that excludes texts which contain one of `texts`."""
    return f" & ~/(.|\\n)*({'|'.join(map(escaped, texts))})(.|\\n)*/" if texts else ""


def escaped(text: str) -> str:
    """Return a regular expression that matches `text`, for a terminal between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n")


def unlike_calls(
    constraint: StructuredOutputsParams, use: ToolUse, config: StructuredOutputsConfig, field: str
) -> StructuredOutputsParams:
    """Return a constraint restricted to content that does not begin like a call.

    It is for error messages about this part of a grammar, so only JSON is restricted.
    """
    source = constraint.source(config)
    if source.kind != "json":
        return constraint
    return StructuredOutputsParams(
        json=_unlike_calls(source.text, use, field),
        disable_additional_properties=False,
        whitespace_pattern=source.whitespace or None,
    )


def _unlike_calls(schema: str, use: ToolUse, field: str) -> str:
    """Return a schema whose objects do not have all properties of a call, if a call is JSON.

    Raises `ApiError` for a schema that names all of them.
    """
    keys = use.format.keys_of_calls
    if not keys:
        return schema
    root = json.loads(schema)
    declared, is_open = _properties_of(root, root)
    missing = [key for key in keys if key not in declared]
    if not missing:
        named = " and ".join(map(repr, keys))
        message = f"an object with the properties {named} is a tool call in the format "
        message += f"{use.format.name!r} of this model; rename one, or omit tools"
        raise ApiError(400, f"{field}: {message}", field, "unsupported")
    if not is_open:
        return schema
    whole = {key: root.pop(key) for key in ("$schema", "$defs") if key in root}
    excluded: dict[str, Any] = {"properties": {missing[-1]: False}}
    return json.dumps(whole | {"allOf": [root, excluded]})


def _properties_of(schema: Any, root: Any) -> tuple[set[str], bool]:
    """Return the property names of an object's schema, and True if it may have others."""
    names: set[str] = set()
    is_open, waiting, seen = False, [schema], set()
    while waiting:
        one = waiting.pop()
        reference = one.get("$ref") if isinstance(one, dict) else None
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            waiting.append(root.get("$defs", {}).get(reference.removeprefix("#/$defs/")))
        parts = [one[part] for part in _PARTS if isinstance(one, dict) and part in one]
        waiting += [inner for part in parts if isinstance(part, list) for inner in part]
        if not isinstance(one, dict) or (reference is None and not parts):
            is_open |= not isinstance(one, dict) or one.get("additionalProperties") is not False
        if isinstance(one, dict):
            names |= set(one.get("properties") or ()) | set(one.get("required") or ())
    return names, is_open
