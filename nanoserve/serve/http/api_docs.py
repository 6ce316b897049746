"""The schema of the API at `/openapi.json`, and a page of it at `/docs` (`--enable-offline-docs`).

Both are made from the routes and from the pydantic models of the request bodies. The page consists
of plain HTML without scripts, so that it works without a connection to the internet.
"""

import base64
import hashlib
import inspect
import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import FastAPI, Response
from fastapi.routing import APIRoute

from nanoserve import __version__
from nanoserve.serve.http.lora import LoadAdapterBody, UnloadAdapterBody
from nanoserve.serve.http.messages.errors import is_messages
from nanoserve.serve.http.messages.request import CountBody, MessagesBody
from nanoserve.serve.http.pooling.request import (
    ClassifyBody,
    EmbeddingBody,
    RawPoolingBody,
    RerankBody,
    ScoreBody,
)
from nanoserve.serve.http.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from nanoserve.serve.http.responses.request import ResponsesBody

# The body of each endpoint that has one. Another endpoint with a body is another entry.
BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/load_lora_adapter": LoadAdapterBody,
    "/v1/unload_lora_adapter": UnloadAdapterBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/embeddings": EmbeddingBody,
    "/pooling": RawPoolingBody,
    "/classify": ClassifyBody,
    **dict.fromkeys(("/score", "/v1/score"), ScoreBody),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RerankBody),
}
_SCHEMAS = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "description": "An error in OpenAI's format.",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The wrong request field."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR = {
    "type": "object",
    "description": "An error in the format of the Messages API.",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": ["string", "null"]},
    },
}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code,summary b{font-family:ui-monospace,monospace}summary{cursor:pointer;padding:.3rem 0}"
    "table{border-collapse:collapse;margin:.5rem 0 1rem 1rem}"
    "td{border-top:1px solid #8886;padding:.15rem 1rem .15rem 0;vertical-align:top}"
    "@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}a{color:#8ab4f8}}"
)
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def add_docs(app: FastAPI, root_path: str = "") -> None:
    """Serve `/openapi.json` and `/docs` about all routes of `app` that precede this call.

    root_path: prefix of the paths, for clients.
    """
    document = openapi(app, root_path)
    as_json, as_page = json.dumps(document).encode(), page_of(document).encode()

    async def schema() -> Response:
        """Return this schema of the API, in the format of OpenAPI 3.1."""
        return Response(as_json, media_type="application/json")

    async def docs() -> Response:
        """Return a page for a browser about the schema of the API."""
        return Response(as_page, media_type="text/html; charset=utf-8", headers=_HEADERS)

    for path, endpoint in {"/openapi.json": schema, "/docs": docs}.items():
        app.add_api_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False)


def openapi(app: FastAPI, root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI document of the routes of `app` that are not hidden from it."""
    schemas: dict[str, Any] = {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
    paths: dict[str, Any] = {}
    for route in app.routes:
        if not isinstance(route, APIRoute) or not route.include_in_schema:
            continue
        path = route.path.replace(":path}", "}")
        operations = {
            method.lower(): _operation(route, path, method, schemas)
            for method in sorted(route.methods - {"HEAD"})
        }
        paths.setdefault(path, {}).update(operations)
    return {
        "openapi": "3.1.0",
        "info": {"title": "nanoserve", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # a key is needed only if the server has one
    }


def _operation(route: APIRoute, path: str, method: str, schemas: dict[str, Any]) -> dict[str, Any]:
    text = inspect.cleandoc(route.endpoint.__doc__ or "")
    error = "MessagesError" if is_messages(path) else "Error"
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{path.replace('/', '_').strip('{}')}",
        "summary": text.partition("\n")[0],
        "description": text,
        "responses": {
            "200": {"description": "Success"},
            "default": {
                "description": "An error",
                "content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{error}"}}},
            },
        },
    }
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    body = BODIES.get(path)
    if body is not None and method == "POST":
        schema = body.model_json_schema(ref_template=f"{_SCHEMAS}{{model}}")
        schemas.update(schema.pop("$defs", {}))
        schemas[body.__name__] = schema
        content = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{body.__name__}"}}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def page_of(document: dict[str, Any]) -> str:
    """Return a page of HTML about an OpenAPI document."""
    schemas = document["components"]["schemas"]
    title = f"nanoserve {escape(document['info']['version'])}"
    return "\n".join([
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>",
        '<p>The endpoints of this server. <a href="openapi.json">openapi.json</a> has them for '
        "programs.</p>",
        *_sections(document["paths"], schemas),
        "</html>",
    ])  # fmt: skip


def _sections(paths: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    for path, operations in paths.items():
        for method, operation in operations.items():
            yield f"<details><summary><b>{method.upper()} {escape(path)}</b> "
            yield f"{escape(operation['summary'])}</summary>"
            content = operation.get("requestBody", {}).get("content", {})
            for described in content.values():
                name = described["schema"]["$ref"].removeprefix(_SCHEMAS)
                yield "<table>"
                for field, schema in schemas[name]["properties"].items():
                    kind = escape(type_of(schema))
                    yield f"<tr><td><code>{escape(field)}</code></td><td>{kind}</td></tr>"
                yield "</table>"
            yield "</details>"


def type_of(schema: dict[str, Any]) -> str:
    """Return the type of a field in words; null, which every field may be, is left out."""
    if "anyOf" in schema:
        kinds = [type_of(one) for one in schema["anyOf"] if one != {"type": "null"}]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return "object"
    kind = schema.get("type", "any")
    return f"array of {type_of(schema['items'])}" if kind == "array" else kind
