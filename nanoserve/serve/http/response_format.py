"""What an answer must look like: OpenAI's `response_format`, and vLLM's fields for the same."""

import re
from typing import Any

from nanoserve.features.structured.params import KINDS, StructuredOutputsParams
from nanoserve.serve.http.errors import ApiError

# vLLM's older fields, and what they are called in `structured_outputs`.
_ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# Behind `response_format`, by its type.
_FIELD_OF_FORMAT = {
    "json_schema": ".json_schema.schema",
    "json_object": ".schema",
    "structural_tag": ".structures",
}


class _FormatError(ValueError):
    """`response_format` itself is not of a known form."""


def guide_of(body: Any) -> StructuredOutputsParams | None:
    """What the body of a request asks for, or None. `ApiError` names the field that is wrong."""
    given = {name: getattr(body, name) for name in ("response_format", "structured_outputs")}
    given |= {name: getattr(body, name) for name in _ALIASES}
    if (given["response_format"] or {}).get("type") == "text":
        del given["response_format"]
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) > 1:
        raise ApiError(400, f"{' and '.join(asked)} ask for the same: give one", asked[1])
    if not asked:
        return None
    (name,) = asked
    try:
        guide = _guide_of(body, name, given[name])
    except _FormatError as error:
        raise ApiError(400, f"{name}: {error}", name) from error
    except ValueError as error:
        raise refusal(error, field_of_guide(body)) from error
    if guide.grammar is not None and "%llguidance" in guide.grammar:
        # It sets the library's own options, and what the server makes of tools is one.
        raise ApiError(400, f"{name}: %llguidance is not for a client to give", name, "unsupported")
    return guide


def _guide_of(body: Any, name: str, value: Any) -> StructuredOutputsParams:
    if name == "response_format":
        return StructuredOutputsParams(**_from_format(value))
    if name == "structured_outputs":
        return StructuredOutputsParams.of(value)
    more = {}
    if body.guided_whitespace_pattern is not None:
        more["whitespace_pattern"] = body.guided_whitespace_pattern
    return StructuredOutputsParams(**{_ALIASES[name]: value}, **more)


def field_of_guide(body: Any) -> str:
    """Return the field of a request from which its guide was made, as the client has written it."""
    asked = body.response_format
    if asked is not None and asked.get("type") != "text":
        return f"response_format{_FIELD_OF_FORMAT.get(asked.get('type'), '')}"
    if body.structured_outputs is not None:
        kinds = (k for k, value in body.structured_outputs.items() if value and k in KINDS)
        return f"structured_outputs.{next(kinds, '')}".rstrip(".")
    return next(name for name in _ALIASES if getattr(body, name) is not None)


def refusal(error: ValueError, field: str) -> ApiError:
    """Return what a client is told of a guide that cannot be obeyed.

    field: what it has sent, named in the place of what the guide is called further inside.
    """
    text = str(error).removeprefix("structured_outputs: ")
    for kind in KINDS:
        if re.match(rf"{kind}(: | has | is |=)", text):
            text = text.removeprefix(kind).removeprefix(":").lstrip()
            break
    return ApiError(400, f"{field}: {text}", field)


def _from_format(asked: dict[str, Any]) -> dict[str, Any]:
    kind = asked.get("type")
    if kind == "json_object":  # with a schema, as llama.cpp and others take it
        return {"json_object": True} if asked.get("schema") is None else {"json": asked["schema"]}
    if kind == "json_schema":
        described = asked.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise _FormatError("json_schema must be {'name': text, 'schema': {...}}")
        return {"json": schema}
    if kind == "structural_tag":
        tag = {name: asked.get(name) for name in ("structures", "triggers")}
        return {"structural_tag": tag}
    known = ("text", "json_object", "json_schema", "structural_tag")
    raise _FormatError(f"type={kind!r:.50} is not one of {known}")
