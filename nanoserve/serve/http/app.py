"""HTTP endpoints of the server."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from nanoserve import __version__
from nanoserve.engine.text_limit import ContextLengthError
from nanoserve.features.metrics import exposition, start_metrics
from nanoserve.features.request_spans import TRACE_HEADERS
from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.http.api_docs import add_docs
from nanoserve.serve.http.body_reader import BodyReader
from nanoserve.serve.http.chat_completions import chat_requests
from nanoserve.serve.http.completions import (
    CompletionAnswer,
    check_completion,
    completion_requests,
)
from nanoserve.serve.http.dashboard import LiveView, add_live
from nanoserve.serve.http.dev_endpoints import add_dev_endpoints
from nanoserve.serve.http.dialect import AnswerKind
from nanoserve.serve.http.error_handlers import add_error_handlers
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.lora import ServedAdapters, add_adapters
from nanoserve.serve.http.messages.endpoints import add_messages
from nanoserve.serve.http.middleware import (
    Guard,
    RequestId,
    SharedAnswer,
    request_id_of,
)
from nanoserve.serve.http.model_card import describe_model
from nanoserve.serve.http.own_middleware import add_middleware
from nanoserve.serve.http.page import add_page
from nanoserve.serve.http.protocol import (
    ChatBody,
    CompletionBody,
    GenerationBody,
)
from nanoserve.serve.http.response_format import refusal
from nanoserve.serve.http.response_writer import EventStream, whole_response
from nanoserve.serve.http.responses.endpoints import add_responses
from nanoserve.serve.http.responses.store import ResponseStore
from nanoserve.serve.http.root_path import RootPath
from nanoserve.serve.http.server_load import CountRequests, ServerLoad
from nanoserve.serve.http.settings import ServerSettings
from nanoserve.serve.http.templates import Templates
from nanoserve.serve.http.token_endpoints import TokenEndpoints
from nanoserve.serve.http.tools.reasoning import special_tokens_of
from nanoserve.serve.http.tools.tool_choice import tool_use_of
from nanoserve.serve.http.tools.tool_constraints import constrain
from nanoserve.serve.http.tools.tool_output import chat_answer

_METRICS_SECONDS = 0.25  # least time between two reads of the engine's metrics
_TURN_SECONDS = 0.01  # tokenizing time of one request before other requests get a turn


class ApiServer:
    """An OpenAI-compatible API for an `AsyncLLM`; `app` is the ASGI application."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        if llm.engine.tokenizer is None:
            raise ValueError("skip_tokenizer_init=True is not supported by a server; remove it")
        self.llm, self.settings = llm, settings
        self._tokenizer = llm.engine.tokenizer
        self.names = [*(settings.served_model_name or [llm.engine.config.model])]
        self.templates = Templates(settings, self._tokenizer)
        engine = llm.engine
        longest = engine.input_processor.max_model_len + engine.model_config.vocab_size
        configs, lora = (engine.config, engine.model_config), settings.lora_modules
        self.adapters = ServedAdapters(*configs, self.names, lora, settings.lora_root)
        self.bodies = BodyReader(settings, self.templates, self.names, longest)
        self.tokens = TokenEndpoints(llm, self._tokenizer, self.bodies, self.prepare)
        self.is_draining = False  # running requests may finish, new ones are rejected
        self._started = int(time.time())
        self._measure()
        self._metrics = SharedAnswer(self._read_metrics, _METRICS_SECONDS)
        self._load = ServerLoad()
        self.app = FastAPI(
            title="nanoserve",
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            redirect_slashes=False,
        )
        self._add_routes()
        self.tokens.add_to(self.app)
        self.responses = ResponseStore(*settings.response_limits)
        add_responses(self.app, self, self.responses)
        add_messages(self.app, self)
        if engine.model_config.pooling is not None:
            from nanoserve.serve.http.pooling.endpoints import add_pooling

            add_pooling(self.app, self)
        if settings.lora_root is not None:
            add_adapters(self.app, self, self.adapters)
        if settings.enable_dev_endpoints:
            add_dev_endpoints(self.app, llm, settings)
        if settings.enable_server_load_tracking:
            self.app.add_api_route("/load", self._load.show, methods=["GET", "HEAD"])
        if settings.enable_offline_docs:
            add_docs(self.app, settings.root_path)
        add_page(self.app)
        self.live = self._show_live()
        add_error_handlers(self.app)
        # Each middleware wraps those before it.
        self.app.add_middleware(CountRequests, load=self._load)
        self.app.add_middleware(Guard, settings=settings)
        if settings.allowed_origins:
            from starlette.middleware.cors import CORSMiddleware

            origins = settings.allowed_origins
            self.app.add_middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_credentials=settings.allow_credentials,
                allow_methods=settings.allowed_methods,
                allow_headers=settings.allowed_headers,
                expose_headers=["x-request-id", "request-id"],
            )
        add_middleware(self.app, settings.middleware)
        if settings.root_path:
            self.app.add_middleware(RootPath, root_path=settings.root_path)
        self.app.add_middleware(RequestId)  # last, so that each response has an id

    def _measure(self) -> None:
        name, prefix = self.names[0], self.settings.metrics_prefix
        self.llm.call_soon(partial(start_metrics, name, prefix))

    def _show_live(self) -> LiveView:
        return add_live(self.app, self.llm.call_in_engine)

    def _add_routes(self) -> None:
        add = self.app.add_api_route
        endpoint: Callable[..., Any]
        for path, endpoint in (
            ("/health", self.health),
            ("/ping", self.health),
            ("/healthz", self.health),
            ("/readyz", self.ready),
            ("/livez", self.alive),
            ("/version", self.version),
            ("/metrics", self.show_metrics),
            ("/v1/models", self.models),
            ("/v1/models/{name:path}", self.model),
        ):
            add(path, endpoint, methods=["GET", "HEAD"], response_model=None)
        for path, endpoint in (
            ("/v1/completions", self.completions),
            ("/v1/chat/completions", self.chat_completions),
        ):
            add(path, endpoint, methods=["POST"], response_model=None)

    async def health(self) -> Response:
        """Return 200 while requests are served, otherwise 503.

        Requests are not served if the engine has failed, a step hangs, or the server is stopping.
        """
        is_well = self.llm.is_running and self.llm.stall is None and not self.is_draining
        return Response(status_code=200 if is_well else 503)

    async def ready(self) -> Response:
        """Return 200 while a new request would be computed: `health`, and the engine is awake."""
        is_idle = await self.llm.is_sleeping() or await self.llm.is_paused()
        return Response(status_code=503) if is_idle else await self.health()

    async def alive(self) -> Response:
        """Return 200 unless only a restart can help: the engine has failed, or a step hangs."""
        is_alive = self.llm.is_running and self.llm.stall is None
        return Response(status_code=200 if is_alive else 503)

    async def version(self) -> dict[str, str]:
        """Return the version of nanoserve."""
        return {"version": __version__}

    async def show_metrics(self) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(await self._metrics.get(), media_type=CONTENT_TYPE_LATEST)

    async def _read_metrics(self) -> bytes:
        return await self.llm.call_in_engine(exposition)

    async def models(self) -> dict[str, Any]:
        """Return the served names, each with its `max_model_len`."""
        return {"object": "list", "data": [self._about(name) for name in self.names]}

    async def model(self, name: str) -> dict[str, Any]:
        """Return one of the served names; 404 for any other."""
        self.bodies.check_model(name)
        return self._about(name)

    async def completions(self, request: Request) -> Response:
        """Return the continuation of prompts, or with `stream` server-sent events of it."""
        body = await self.bodies.read(request, CompletionBody)
        check_completion(body, self.settings.max_prompts, self.settings.max_n)
        if body.embeds() and not self.llm.engine.config.enable_prompt_embeds:
            message = "prompt_embeds need a server with --enable-prompt-embeds"
            raise ApiError(400, message, "prompt_embeds", "unsupported")
        return await self._generate(request, body, completion_requests, CompletionAnswer)

    async def chat_completions(self, request: Request) -> Response:
        """Return an answer to a conversation, or with `stream` server-sent events of it."""
        return await self.answer_chat(
            request, await self.bodies.read(request, ChatBody), chat_answer
        )

    async def answer_chat(
        self, request: Request, body: ChatBody, answer_kind: AnswerKind
    ) -> Response:
        """Answer a conversation, whatever API the request has used.

        answer_kind: called with the tools that may be called, the name of the reasoning parser, the
        body, the model's name, the engine's requests and the tokenizer.
        """
        own = body.tools, body.tool_choice, body.parallel_tool_calls
        use = tool_use_of(*own, *self.templates.tool_format(body))
        reasoning_parser = self.templates.reasoning_parser
        specials = () if reasoning_parser is None else special_tokens_of(reasoning_parser)
        special_id = self._tokenizer.special_tokens.id_of
        if use is not None:
            specials += use.format.special_tokens
            config = self.llm.engine.config.structured_outputs_config
            use = await self.prepare(partial(constrain, body, use, special_id, config))
        make = partial(chat_requests, kept_specials=specials, reasoning_parser=reasoning_parser)
        answer = partial(answer_kind, use, reasoning_parser)
        return await self._generate(request, body, make, answer)

    def drain(self) -> None:
        """Reject new requests from now on; running ones may finish."""
        self.is_draining = True

    async def _generate(
        self,
        request: Request,
        body: GenerationBody,
        make: Callable[..., Iterable[Any]],
        answer_kind: AnswerKind,
    ) -> Response:
        """Tokenize and queue a request; return its complete output or a stream of it."""
        arrived = self.llm.engine.clock()
        self._admit(body)
        engine, new_id = self.llm.engine, self.llm.new_request_id
        if body.request_id is None:
            body.request_id = request_id_of(request.scope)  # the id of the response, as in vLLM
        headers = self.trace_headers(request, body.request_id)
        await self._check_guide(body)
        requests = await self.prepare_each(
            lambda: make(body, engine, new_id), body.is_large, body.prompt_field
        )
        self.note_arrival(requests, arrived, headers, body.model)
        for one in requests:
            if not body.may_reach_end:
                self._check_length(body, len(one.prompt_token_ids), one.params.max_tokens)
        answer = answer_kind(body, body.model or self.names[0], requests, engine.tokenizer)
        reader = self.llm.open(requests)
        if body.stream:
            return EventStream(answer, reader, self.settings.heartbeat_interval)
        return await whole_response(answer, reader, request.receive)

    def note_arrival(
        self,
        requests: Iterable[Any],
        arrived: float,
        headers: dict[str, str] | None,
        model: str | None,
    ) -> None:
        """Set what requests that are not queued yet have of HTTP.

        This is their arrival, headers, and the adapter that `model` names, if it is one's name.
        """
        self.adapters.give_to(requests, model)
        for one in requests:
            one.sequences[0].metrics.arrival_time = arrived  # tokenizing counts as latency
            one.trace_headers = headers

    def trace_headers(self, request: Request, request_id: str | None) -> dict[str, str] | None:
        """Return what a span of the request needs; None if the engine makes no spans."""
        if self.llm.engine.config.otlp_traces_endpoint is None:
            return None
        given = {name: request.headers.get(name) for name in TRACE_HEADERS}
        given["x-request-id"] = request_id
        return {name: value for name, value in given.items() if value is not None}

    async def _check_guide(self, body: GenerationBody) -> None:
        """Raise `ApiError`, naming the field, for an invalid structured output constraint."""
        try:
            await self.llm.check_constraint(body.constraint)
        except ValueError as error:
            for field, part in body.constraint_parts:
                try:
                    await self.llm.check_constraint(part)
                except ValueError as of_part:
                    raise refusal(of_part, field) from None
            raise refusal(error, body.constraint_field) from None

    def _admit(self, body: GenerationBody) -> None:
        """Raise `ApiError` for a request that cannot be served now, before it costs anything."""
        n, most = body.n or 1, self.settings.max_n
        if n > most:
            raise ApiError(400, f"n={n} must be at most {most} (max_n of the server)", "n")
        if body.prompt_logprobs is not None and body.stream:
            message = "prompt_logprobs cannot be streamed"
            raise ApiError(400, message, "prompt_logprobs", "unsupported")
        self.check_open()

    def check_open(self) -> None:
        """Raise `ApiError` if the server cannot take a request now."""
        if self.is_draining:
            raise ApiError(503, "the server is stopping", code="stopping", headers=_later(5))
        self.llm.check_awake()
        if self.llm.is_running and (stall := self.llm.stall) is not None:
            raise ApiError(503, stall, code="engine_stalled", headers=_later(5))
        longest, waiting = self.settings.max_queue, self.llm.num_waiting
        if longest is not None and waiting >= longest:
            message = f"{waiting} requests are already waiting; try again later"
            raise ApiError(429, message, code="queue_full", headers=_later(1))

    def _check_length(
        self, body: GenerationBody, num_prompt_tokens: int, max_tokens: int | None
    ) -> None:
        """Raise `ApiError` if the prompt and `max_tokens` exceed the context length."""
        limit = self.llm.engine.input_processor.max_model_len
        if max_tokens is not None and num_prompt_tokens + max_tokens > limit:
            error = ContextLengthError.of(limit, num_prompt_tokens, max_tokens)
            raise ApiError.too_long(error, body.most_tokens[0])

    def _about(self, name: str) -> dict[str, Any]:
        length = self.llm.engine.input_processor.max_model_len
        about = {"id": name, "object": "model", "created": self._started, "owned_by": "nanoserve"}
        about |= {"root": name, "parent": None, "max_model_len": length}
        about |= describe_model(
            self.llm.engine.config,
            self.llm.engine.model_config,
            has_template=self._tokenizer.has_chat_template,
            shows_tools=self.templates.shows_tools,
            reasons=self.templates.reasoning_parser is not None,
        )
        return self.adapters.about(name, about)

    def abort(self, request_id: str) -> None:
        """End a request of the engine."""
        self.llm.abort(request_id)

    async def prepare_each(
        self, make: Callable[[], Iterable[Any]], is_large: bool, prompt_field: str
    ) -> list[Any]:
        """Return all items that `make()` yields.

        They are produced in turns of `_TURN_SECONDS`, between which other requests can run.
        """
        made: list[Any] = []
        rest: Iterator[Any] | None = None

        def take() -> bool:
            nonlocal rest
            end = time.monotonic() + _TURN_SECONDS
            rest = iter(make()) if rest is None else rest
            for one in rest:
                made.append(one)
                if time.monotonic() > end:
                    return False
            return True

        while not await self.prepare(take, is_large, prompt_field):
            pass
        return made

    async def prepare(
        self, make: Callable[[], Any], is_large: bool = False, prompt_field: str = "prompt"
    ) -> Any:
        """Call `make()` off the event loop and return its result; a `ValueError` returns 400."""
        try:
            return await self.llm.prepare(make, is_large)
        except ContextLengthError as error:
            raise ApiError.too_long(error, prompt_field) from None
        except ValueError as error:
            raise ApiError.of(error) from None


def _later(seconds: int) -> dict[str, str]:
    return {"retry-after": str(seconds)}
