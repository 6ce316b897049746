"""Endpoints /v1/embeddings, /pooling, /classify, /score and /rerank of a model that pools."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from nanoserve.engine.input_processor import Prompt
from nanoserve.engine.request import Request
from nanoserve.features.pooling.requests import pooling_request
from nanoserve.features.pooling.scores import Scorer
from nanoserve.outputs import RequestOutput
from nanoserve.pooling_params import PoolingParams
from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.http.body_reader import BodyReader
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.middleware import request_id_of
from nanoserve.serve.http.pooling.answer import (
    Entries,
    PoolingAnswer,
    classes,
    embeddings,
    pooled_data,
    ranks,
    scores,
)
from nanoserve.serve.http.pooling.request import (
    ClassifyBody,
    EmbeddingBody,
    InputBody,
    PairsBody,
    PoolingBody,
    RawPoolingBody,
    RerankBody,
    ScoreBody,
    check_count,
    check_pooling_fields,
)
from nanoserve.serve.http.response_writer import whole_response
from nanoserve.serve.http.settings import ServerSettings

BodyType = TypeVar("BodyType", bound=PoolingBody)
Pairs = list[tuple[Prompt, Prompt]]


class PoolingServer(Protocol):
    """The part of `ApiServer` that these endpoints need."""

    llm: AsyncLLM
    settings: ServerSettings
    bodies: BodyReader
    names: list[str]

    def check_open(self) -> None: ...

    def trace_headers(self, request: HttpRequest, request_id: str | None) -> Any: ...

    def note_arrival(
        self, requests: list[Request], arrived: float, headers: Any, model: str | None
    ) -> None: ...

    async def prepare_each(
        self, make: Callable[[], Any], is_large: bool, prompt_field: str
    ) -> list[Any]: ...


def add_pooling(app: FastAPI, api: PoolingServer) -> None:
    """Add the routes to the application of a server whose model pools."""
    endpoints = PoolingEndpoints(api)
    for path, endpoint in {
        "/v1/embeddings": endpoints.embed,
        "/pooling": endpoints.pool,
        "/classify": endpoints.classify,
        "/score": endpoints.score,
        "/v1/score": endpoints.score,
        "/rerank": endpoints.rerank,
        "/v1/rerank": endpoints.rerank,
        "/v2/rerank": endpoints.rerank,
    }.items():
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)


class PoolingEndpoints:
    """The endpoints of a server."""

    def __init__(self, api: PoolingServer) -> None:
        self._api = api

    async def embed(self, request: HttpRequest) -> Response:
        """Return an embedding of each text, as numbers or in base64, in OpenAI's format."""
        body = await self._read(request, EmbeddingBody)
        entries = partial(embeddings, encoding_format=body.encoding_format)
        return await self._of_inputs(request, body, body.params(task="embed"), entries, "embd")

    async def pool(self, request: HttpRequest) -> Response:
        """Return the pooled hidden states of each text; for type ALL, a row for each token."""
        body = await self._read(request, RawPoolingBody)
        entries = partial(pooled_data, encoding_format=body.encoding_format)
        return await self._of_inputs(request, body, body.params(), entries, "pool")

    async def classify(self, request: HttpRequest) -> Response:
        """Return the probabilities of the classes for each text, in vLLM's format."""
        body = await self._read(request, ClassifyBody)
        labels = self._api.llm.engine.model_config.pooling.labels
        entries = partial(classes, labels=labels)
        params = body.params(task="classify")
        return await self._of_inputs(request, body, params, entries, "classify")

    async def score(self, request: HttpRequest) -> Response:
        """Return the score of each pair of texts, in vLLM's format."""
        body = await self._read(request, ScoreBody)
        first, second = body.texts()
        most = self._api.settings.max_prompts
        check_count("text_1", first, most)
        check_count("text_2", second, most)
        return await self._of_pairs(request, body, first, second, scores, "score")

    async def rerank(self, request: HttpRequest) -> Response:
        """Return the documents by their relevance to a query, in the format of Jina and Cohere."""
        body = await self._read(request, RerankBody)
        texts = body.texts()
        check_count("documents", texts, self._api.settings.max_prompts)
        if body.top_n is not None and body.top_n < 1:
            raise ApiError(400, f"top_n={body.top_n} must be at least 1", "top_n")
        shows = body.return_documents is not False
        entries = partial(ranks, texts=texts, top_n=body.top_n, shows_documents=shows)
        return await self._of_pairs(
            request, body, [body.query], [*texts], entries, "rerank", has_list=False
        )

    async def _read(self, request: HttpRequest, kind: type[BodyType]) -> BodyType:
        return await self._api.bodies.read(request, kind, check_pooling_fields)

    async def _of_inputs(
        self,
        request: HttpRequest,
        body: InputBody,
        params: PoolingParams,
        entries: Entries,
        kind: str,
    ) -> Response:
        """Pool each text by itself, and return the response."""
        inputs = body.inputs()
        check_count("input", inputs, self._api.settings.max_prompts)
        engine, new_id = self._api.llm.engine, self._api.llm.new_request_id

        def make() -> Iterator[Request]:
            for content in inputs:
                if isinstance(content, str) and body.add_special_tokens is False:
                    if params.truncate_prompt_tokens is None:
                        engine.input_processor.text_limit.check(content)
                    content = engine.tokenizer.encode(content, add_special_tokens=False)
                prompt, priority = body.prompt_of(content), body.priority or 0
                yield pooling_request(engine, new_id(), prompt, params, priority)

        return await self._answer(request, body, make, entries, kind)

    async def _of_pairs(
        self,
        request: HttpRequest,
        body: PairsBody,
        first: list[Any],
        second: list[Any],
        entries: Callable[[list[Any]], dict[str, Any]],
        kind: str,
        has_list: bool = True,
    ) -> Response:
        """Score pairs of texts, and return the response."""
        engine, new_id = self._api.llm.engine, self._api.llm.new_request_id
        try:
            scorer = Scorer(engine, body.params(), instruction=body.instruction)
            pairs = scorer.pairs(first, second)
        except ValueError as error:
            raise ApiError.of(error) from None

        def make() -> Iterator[Request]:
            salted, priority = body.cache_salt, body.priority or 0
            return scorer.requests(pairs, new_id, priority, cache_salt=salted)

        def scored(outputs: list[RequestOutput]) -> dict[str, Any]:
            return entries(scorer.outputs(pairs, outputs))

        return await self._answer(request, body, make, scored, kind, has_list)

    async def _answer(
        self,
        request: HttpRequest,
        body: PoolingBody,
        make: Callable[[], Iterator[Request]],
        entries: Entries,
        kind: str,
        has_list: bool = True,
    ) -> Response:
        """Queue the requests that `make` yields, and return the response with all results."""
        llm, api = self._api.llm, self._api
        arrived = llm.engine.clock()
        api.check_open()
        request_id = body.request_id or request_id_of(request.scope)
        headers = api.trace_headers(request, request_id)
        requests = await api.prepare_each(make, body.is_large, body.fields[0])
        api.note_arrival(requests, arrived, headers, body.model)
        model = body.model or api.names[0]
        answer = PoolingAnswer(requests, entries, kind, request_id, model, has_list)
        return await whole_response(answer, llm.open(requests), request.receive)
