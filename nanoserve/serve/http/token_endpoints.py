"""Endpoints /tokenize and /detokenize, and the number of tokens of a conversation."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request

from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.http.body_reader import BodyReader
from nanoserve.serve.http.chat_completions import chat_prompt
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import ChatBody, DetokenizeBody, TokenizeBody
from nanoserve.text.tokenizer import Tokenizer


class TokenEndpoints:
    """The endpoints of a server. prepare: see `ApiServer.prepare`."""

    def __init__(
        self,
        llm: AsyncLLM,
        tokenizer: Tokenizer,
        bodies: BodyReader,
        prepare: Callable[..., Awaitable[Any]],
    ) -> None:
        self._llm, self._tokenizer, self._bodies, self._prepare = llm, tokenizer, bodies, prepare

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to the application of a server."""
        for path, endpoint in (("/tokenize", self.tokenize), ("/detokenize", self.detokenize)):
            app.add_api_route(path, endpoint, methods=["POST"], response_model=None)

    async def count_tokens(self, body: ChatBody) -> int:
        """Return the number of tokens of a conversation."""
        make = partial(chat_prompt, body, self._llm.engine)
        prompt = await self._prepare(make, body.is_large, body.prompt_field)
        return len(prompt["prompt_token_ids"])

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Return the token ids of a string or of a conversation, as vLLM does."""
        body = await self._bodies.read(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "pass either prompt or messages", "prompt")
        engine = self._llm.engine

        def token_ids() -> list[int]:
            if body.messages is not None:
                return chat_prompt(body, engine)["prompt_token_ids"]
            engine.input_processor.text_limit.check(body.prompt)
            return self._tokenizer.encode(body.prompt, body.add_special_tokens is not False)

        tokens = await self._prepare(token_ids, body.is_large)
        max_model_len = engine.input_processor.max_model_len
        answer = {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = list(map(self._tokenizer.backend.id_to_token, tokens))
        return answer

    async def detokenize(self, request: Request) -> dict[str, str]:
        """Return the text of at most `max_model_len` token ids.

        vLLM has no limit. Millions of ids would occupy the tokenizer for seconds, and no prompt or
        output of the model has more tokens than its context.
        """
        body = await self._bodies.read(request, DetokenizeBody)
        vocab_size = self._llm.engine.model_config.vocab_size
        most = self._llm.engine.input_processor.max_model_len
        if len(body.tokens) > most:
            message = f"tokens has {len(body.tokens)} ids; at most max_model_len={most} are allowed"
            raise ApiError(400, message, "tokens")
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise ApiError(400, f"tokens: {token_id} is not in [0, {vocab_size})", "tokens")
        decode = self._tokenizer.decode
        return {"prompt": await self._prepare(lambda: decode(body.tokens, False), body.is_large)}
