"""Combine the tools of a request with the format of its content into one constraint."""

from dataclasses import replace

from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import ChatBody
from nanoserve.serve.http.tools.content_rules import unlike_calls
from nanoserve.serve.http.tools.grammar import (
    SpecialId,
    constraint_of_tools,
    field_that_needs_grammar,
    schemas_of_tools,
)
from nanoserve.serve.http.tools.tool_choice import ToolUse


def constrain(
    body: ChatBody,
    use: ToolUse,
    special_id: SpecialId,
    config: StructuredOutputsConfig | None = None,
) -> ToolUse:
    """Constrain the output of a request with tools, and return how its output is parsed.

    The output is free text with calls; or calls only, if a call is required; or if the request has
    a format such as `response_format`, calls or content in this format. A grammar or a structural
    tag describes the whole output, calls included. A required call takes precedence over
    `response_format`, which clients send with each turn of a conversation, but contradicts a
    constraint on this output.

    Raises `ApiError` that names the field which cannot be enforced.
    """
    content = body.constraint
    field = "response_format" if content is None else body.constraint_field
    if content is not None and use.must_call and not field.startswith("response_format"):
        message = f"{field} cannot be combined with a required tool call; omit it, or use "
        raise ApiError(400, f"{message}tool_choice='auto'", field, "unsupported")
    config = config or StructuredOutputsConfig()
    if content is not None and not use.must_call and (content.grammar or content.structural_tag):
        _check_alone(use, field)
        return use
    use = replace(use, is_either=content is not None and not use.must_call)
    constraint = constraint_of_tools(use, special_id, config, content, field)
    parts = schemas_of_tools(use)
    if content is not None and use.is_either:
        parts.append((field, unlike_calls(content, use, config, field)))
    body.constrain(constraint, parts)
    return use


def _check_alone(use: ToolUse, field: str) -> None:
    """Raise `ApiError` if the tools need a grammar of their own."""
    other = field_that_needs_grammar(use, field)
    if other not in (None, "parallel_tool_calls"):
        message = f"{field} describes the whole output, so {other} cannot be enforced as well; use "
        raise ApiError(400, f"{message}a JSON schema, or omit {other}", field, "unsupported")
