"""The requests of a measurement, as this server takes them."""

import json
from typing import Any

from nanoserve.cli.bench.serve.connection import Server
from nanoserve.cli.bench.serve.response import Response
from nanoserve.cli.bench.serve.stream import error_in

PATHS = {"chat": "chat/completions", "completions": "completions"}
# What not everybody takes, the least needed first. vLLM and nanoserve know `ignore_eos`; of the
# others some refuse a name that they do not know, and some ignore it.
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
        """Asks, and asks again without what the server refuses. Raises `ValueError` if it refuses
        all the same, with what it said at first."""
        told = None
        while True:
            response = await self.server.send(self.make(prompt, output_len))
            if response.status == 200:
                return response
            message = error_in(response.body)
            refusal = f"{response.status} {response.reason}: {message[:500]}"
            told = told or f"the server refuses: {refusal}"
            if response.status not in (400, 422) or not self._give_way(message):
                raise ValueError(told)

    def _give_way(self, message: str) -> bool:
        """Whether there is something else to try."""
        if "max_completion_tokens" in message and self.max_tokens == "max_tokens":
            self.max_tokens = "max_completion_tokens"  # OpenAI's newer models know no other
            return True
        named = [name for name in self.optional if name in message] or [*self.optional]
        if not named:
            return False
        del self.optional[named[0]]
        self.refused.append(named[0])
        return True


async def first_model(server: Server) -> str:
    """Raises `ValueError` if the server does not tell."""
    response = await server.send(server.request("models"))
    try:
        return str(json.loads(response.body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        told = f"{server.url}/models names none ({response.status}): give --model"
        raise ValueError(told) from None
