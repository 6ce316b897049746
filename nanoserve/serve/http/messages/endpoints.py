"""Endpoints /v1/messages and /v1/messages/count_tokens."""

from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response

from nanoserve.serve.http.dialect import ChatServer, renamed_fields
from nanoserve.serve.http.messages.answer import MessagesAnswer
from nanoserve.serve.http.messages.errors import PATH
from nanoserve.serve.http.messages.fields import check_messages_fields
from nanoserve.serve.http.messages.request import FIELD_NAMES, CountBody, MessagesBody
from nanoserve.serve.http.protocol import ChatBody


def add_messages(app: FastAPI, api: ChatServer) -> None:
    """Add the routes to the application of a server."""
    endpoints = MessagesEndpoints(api)
    for path, endpoint in ((PATH, endpoints.create), (f"{PATH}/count_tokens", endpoints.count)):
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)


class MessagesEndpoints:
    """The endpoints of a server."""

    def __init__(self, api: ChatServer) -> None:
        self._api = api

    async def create(self, request: Request) -> Response:
        """Answer a request. An answer may go on to the end of the context, whatever max_tokens."""
        body = await self._api.bodies.read(request, MessagesBody, check_messages_fields)
        with renamed_fields(FIELD_NAMES):
            chat = await self._translated(body)
            chat.reach_end()
            return await self._api.answer_chat(request, chat, partial(MessagesAnswer, body))

    async def count(self, request: Request) -> dict[str, Any]:
        """Return the number of tokens of the prompt of such a request."""
        body = await self._api.bodies.read(request, CountBody, check_messages_fields)
        with renamed_fields(FIELD_NAMES):
            return {
                "input_tokens": await self._api.tokens.count_tokens(await self._translated(body))
            }

    async def _translated(self, body: MessagesBody) -> ChatBody:
        def translate() -> ChatBody:
            fields = body.chat_fields(self._api.templates)
            return self._api.bodies.checked(ChatBody.model_validate(fields), body.is_large)

        return await self._api.bodies.read_in_turn(translate, body.is_large)
