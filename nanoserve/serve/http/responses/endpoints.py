"""Endpoints /v1/responses and below."""

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response

from nanoserve.serve.http.dialect import ChatServer, renamed_fields
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import ChatBody
from nanoserve.serve.http.responses.answer import ResponsesAnswer, Turn
from nanoserve.serve.http.responses.fields import check_responses_fields
from nanoserve.serve.http.responses.items import normalized
from nanoserve.serve.http.responses.request import FIELD_NAMES, ResponsesBody
from nanoserve.serve.http.responses.store import ResponseStore

_MOST_ITEMS = 100  # of one page of input items
_LOST = (
    "responses are kept in the memory of the process that has answered, up to its limits "
    "(--max-stored-responses), if they were not sent with store=false"
)


def add_responses(app: FastAPI, api: ChatServer, store: ResponseStore) -> None:
    """Add the routes to the application of a server."""
    endpoints, path = ResponsesEndpoints(api, store), "/v1/responses"
    one = f"{path}/{{response_id}}"
    routes: list[tuple[str, str, Callable[..., Any]]] = [
        ("POST", path, endpoints.create),
        ("POST", f"{path}/input_tokens", endpoints.count),
        ("GET", one, endpoints.retrieve),
        ("DELETE", one, endpoints.delete),
        ("POST", f"{one}/cancel", endpoints.cancel),
        ("GET", f"{one}/input_items", endpoints.input_items),
    ]
    for method, place, endpoint in routes:
        methods = [method, "HEAD"] if method == "GET" else [method]
        app.add_api_route(place, endpoint, methods=methods, response_model=None)


class ResponsesEndpoints:
    """The endpoints of a server, with the responses that it has stored."""

    def __init__(self, api: ChatServer, store: ResponseStore) -> None:
        self._api, self._store = api, store

    async def create(self, request: Request) -> Response:
        """Answer a request; the response can be continued by its id unless store is false."""
        body = await self._api.bodies.read(request, ResponsesBody, check_responses_fields)
        with renamed_fields(FIELD_NAMES):
            turn, chat = await self._translated(body)
            return await self._api.answer_chat(request, chat, partial(ResponsesAnswer, turn))

    async def count(self, request: Request) -> dict[str, Any]:
        """Return the number of tokens of the input of such a request."""
        body = await self._api.bodies.read(request, ResponsesBody, check_responses_fields)
        with renamed_fields(FIELD_NAMES):
            _, chat = await self._translated(body)
            number = await self._api.tokens.count_tokens(chat)
        return {"object": "response.input_tokens", "input_tokens": number}

    async def retrieve(self, request: Request, response_id: str) -> dict[str, Any]:
        """Return a response, complete or as far as it is generated."""
        query = request.query_params
        if query.get("stream", "false").lower() != "false" or "starting_after" in query:
            message = "stream: only the request itself can be streamed"
            raise ApiError(400, message, "stream", "unsupported")
        running = self._store.running.get(response_id)
        response = self._store.get(response_id)
        if response is None and running is not None:
            return running.snapshot()
        if response is None:
            raise _unknown(response_id)
        return response

    async def delete(self, response_id: str) -> dict[str, Any]:
        """Forget a response."""
        if not self._store.delete(response_id):
            raise _unknown(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def cancel(self, response_id: str) -> dict[str, Any]:
        """End a response that is being generated; return it as far as it is."""
        running = self._store.running.get(response_id)
        if running is None and self._store.get(response_id) is None:
            raise _unknown(response_id)
        if running is None or not running.cancel():
            message = f"the response {response_id!r:.100} has ended already"
            raise ApiError(400, message, "response_id", "response_not_running")
        self._api.abort(running.request.request_id)
        return running.snapshot()

    async def input_items(self, request: Request, response_id: str) -> dict[str, Any]:
        """Return the items from which a response was generated, the latest first, page by page."""
        items = self._store.input_items(response_id)
        if items is None:
            raise _unknown(response_id)
        query = request.query_params
        order, limit = query.get("order", "desc"), query.get("limit", "20")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order={order!r:.50} must be 'asc' or 'desc'", "order")
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MOST_ITEMS:
            message = f"limit={limit!r:.50} must be an integer in [1, {_MOST_ITEMS}]"
            raise ApiError(400, message, "limit")
        if order == "desc":
            items.reverse()
        if after := query.get("after"):
            places = [number for number, item in enumerate(items) if item["id"] == after]
            if not places:
                raise ApiError(400, f"after={after!r:.100} is the id of no item", "after")
            items = items[places[0] + 1 :]
        page = items[: int(limit)]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        has_more = len(items) > len(page)
        return {"object": "list", "data": page, **ends, "has_more": has_more}

    async def _translated(self, body: ResponsesBody) -> tuple[Turn, ChatBody]:
        """Return a request with the items that it adds, and as a chat."""
        body.check()
        link = self._link(body.previous_response_id)
        is_large = body.is_large or self._store.is_long(link)

        def translate() -> tuple[Turn, ChatBody]:
            items = normalized(body.input, self._store.item)
            fields = body.chat_fields(self._store.conversation(link) + items)
            chat = self._api.bodies.checked(ChatBody.model_validate(fields), is_large)
            return Turn(body, items, link, self._store), chat

        return await self._api.bodies.read_in_turn(translate, is_large)

    def _link(self, response_id: str | None) -> Any:
        if response_id is None:
            return None
        link = self._store.link(response_id)
        if link is None:
            running = self._store.running.get(response_id)
            reason = _LOST if running is None else "it is still being generated"
            message = f"previous_response_id: the response {response_id!r:.100} is not known: "
            code = "previous_response_not_found"
            raise ApiError(400, message + reason, "previous_response_id", code)
        return link


def _unknown(response_id: str) -> ApiError:
    message = f"the response {response_id!r:.100} is not known: {_LOST}"
    return ApiError(404, message, "response_id", "response_not_found")
