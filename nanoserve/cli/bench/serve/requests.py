"""Send the requests of a measurement with only the fields that the server accepts."""

import json
from typing import Any

from nanoserve.cli.bench.serve.connection import Server
from nanoserve.cli.bench.serve.response import Response
from nanoserve.cli.bench.serve.stream import error_in

PATHS = {"chat": "chat/completions", "completions": "completions"}
# Fields that not all servers accept, the least important first. vLLM and nanoserve know
# `ignore_eos`; other servers reject or ignore an unknown field.
_OPTIONAL: dict[str, Any] = {
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}


class Requests:
    def __init__(
        self, server: Server, endpoint: str, model: str, temperature: float, ignore_eos: bool
    ) -> None:
        self.server, self.path, self.is_chat = server, PATHS[endpoint], endpoint == "chat"
        self.common = {"model": model, "temperature": temperature, "stream": True}
        self.optional = {k: v for k, v in _OPTIONAL.items() if ignore_eos or k != "ignore_eos"}
        self.refused: list[str] = []
        self.max_tokens = "max_tokens"

    def make(self, prompt: str | list[int], output_len: int) -> bytes:
        body = self.common | self.optional | {self.max_tokens: output_len}
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return self.server.request(self.path, json.dumps(body).encode())

    async def first(self, prompt: str | list[int], output_len: int) -> Response:
        """Send a request, and again without the fields that the server rejects.

        Raises `ValueError` with the server's first message if it rejects all variants.
        """
        first_error = None
        while True:
            response = await self.server.send(self.make(prompt, output_len))
            if response.status == 200:
                return response
            message = error_in(response.body)
            refusal = f"{response.status} {response.reason}: {message[:500]}"
            first_error = first_error or f"the server rejects a request: {refusal}"
            if response.status not in (400, 422) or not self._drop_field(message):
                raise ValueError(first_error)

    def _drop_field(self, message: str) -> bool:
        """Drop or rename the field that an error names. Returns False if no field is left."""
        if "max_completion_tokens" in message and self.max_tokens == "max_tokens":
            self.max_tokens = "max_completion_tokens"  # the only name for OpenAI's newer models
            return True
        named = [name for name in self.optional if name in message] or [*self.optional]
        if not named:
            return False
        del self.optional[named[0]]
        self.refused.append(named[0])
        return True


async def first_model(server: Server) -> str:
    """Return the first model that the server lists. Raises `ValueError` if it lists none."""
    response = await server.send(server.request("models"))
    try:
        return str(json.loads(response.body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        message = f"{server.url}/models lists no model ({response.status}); set --model"
        raise ValueError(message) from None
