"""Structured output constraints of a request: OpenAI's `response_format` and vLLM's fields."""

import re
from typing import Any

from nanoserve.features.structured.params import KINDS, StructuredOutputsParams
from nanoserve.serve.http.errors import ApiError

# vLLM's older fields, and their names in `structured_outputs`.
_ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# Path below `response_format` to the constraint, by its type.
_FIELD_OF_FORMAT = {
    "json_schema": ".json_schema.schema",
    "json_object": ".schema",
    "structural_tag": ".structures",
}


class _FormatError(ValueError):
    """Raised if `response_format` does not have a known form."""


def constraint_of(body: Any) -> StructuredOutputsParams | None:
    """Return the structured output constraint of a request body, or None.

    Raises `ApiError` that names the wrong field.
    """
    given = {name: getattr(body, name) for name in ("response_format", "structured_outputs")}
    given |= {name: getattr(body, name) for name in _ALIASES}
    if (given["response_format"] or {}).get("type") == "text":
        del given["response_format"]
    requested = [name for name, value in given.items() if value is not None]
    if len(requested) > 1:
        raise ApiError(400, f"{' and '.join(requested)} cannot be combined; pass one", requested[1])
    if not requested:
        return None
    (name,) = requested
    try:
        constraint = _constraint_of(body, name, given[name])
    except _FormatError as error:
        raise ApiError(400, f"{name}: {error}", name) from error
    except ValueError as error:
        raise refusal(error, field_of_constraint(body)) from error
    if constraint.grammar is not None and "%llguidance" in constraint.grammar:
        # This directive sets options of the library, and marks the grammars that the server makes.
        raise ApiError(400, f"{name}: %llguidance cannot be set by a client", name, "unsupported")
    return constraint


def _constraint_of(body: Any, name: str, value: Any) -> StructuredOutputsParams:
    if name == "response_format":
        return StructuredOutputsParams(**_from_format(value))
    if name == "structured_outputs":
        return StructuredOutputsParams.of(value)
    more = {}
    if body.guided_whitespace_pattern is not None:
        more["whitespace_pattern"] = body.guided_whitespace_pattern
    return StructuredOutputsParams(**{_ALIASES[name]: value}, **more)


def field_of_constraint(body: Any) -> str:
    """Return the request field that holds the constraint, as the client has written it."""
    requested = body.response_format
    if requested is not None and requested.get("type") != "text":
        return f"response_format{_FIELD_OF_FORMAT.get(requested.get('type'), '')}"
    if body.structured_outputs is not None:
        kinds = (k for k, value in body.structured_outputs.items() if value and k in KINDS)
        return f"structured_outputs.{next(kinds, '')}".rstrip(".")
    return next(name for name in _ALIASES if getattr(body, name) is not None)


def refusal(error: ValueError, field: str) -> ApiError:
    """Return the error response for a structured output constraint that cannot be compiled.

    field: the request field, which replaces the internal name of the constraint in the message.
    """
    text = str(error).removeprefix("structured_outputs: ")
    for kind in KINDS:
        if re.match(rf"{kind}(: | has | is |=)", text):
            text = text.removeprefix(kind).removeprefix(":").lstrip()
            break
    return ApiError(400, f"{field}: {text}", field)


def _from_format(given: dict[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if kind == "json_object":  # with a schema, as llama.cpp and others take it
        return {"json_object": True} if given.get("schema") is None else {"json": given["schema"]}
    if kind == "json_schema":
        described = given.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise _FormatError("json_schema must be {'name': string, 'schema': {...}}")
        return {"json": schema}
    if kind == "structural_tag":
        tag = {name: given.get(name) for name in ("structures", "triggers")}
        return {"structural_tag": tag}
    known = ("text", "json_object", "json_schema", "structural_tag")
    raise _FormatError(f"type={kind!r:.50} is not one of {known}")
