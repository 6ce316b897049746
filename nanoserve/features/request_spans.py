"""Export a span of each request to OpenTelemetry, under vLLM's names (`otlp_traces_endpoint`).

A span is made when its request ends, from the times that the request has anyway, and is put into a
queue. A thread of the SDK sends the queue every few seconds, so the engine never waits for a
collector; if a collector is too slow or gone, spans are dropped and a warning is logged.

OpenTelemetry's environment variables apply: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_TRACES_HEADERS and so on.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nanoserve.engine.extension import Extension, PreparedFeature
from nanoserve.engine.listeners import RequestListener
from nanoserve.engine.request import Request
from nanoserve.outputs import RequestOutput
from nanoserve.utils.checks import require, shown

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from nanoserve.checkpoint.model_config import ModelConfig
    from nanoserve.config import EngineConfig
    from nanoserve.engine.guard import GuardedEngine

SPAN_NAME = "llm_request"
# Headers of an HTTP request that its span needs: W3C's trace context, and the id of the response.
TRACE_HEADERS = ("traceparent", "tracestate", "x-request-id")

_FLUSH_SECONDS = 3.0  # that closing an engine waits until the last spans are sent
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP, _GRPC = "http/protobuf", "grpc"
_PACKAGES = "otlp_traces_endpoint needs opentelemetry-sdk and opentelemetry-exporter-otlp"


class RequestSpans(Extension, RequestListener):
    """Makes the spans of an engine's requests. It is an extension so that the engine closes it.

    model: the name in the attribute gen_ai.response.model.
    clock: the clock of the times in `RequestMetrics`.
    """

    def __init__(self, model: str, clock: Callable[[], float], provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model, self._clock, self._provider = model, clock, provider
        self._tracer = provider.get_tracer("nanoserve")
        self._propagator = TraceContextTextMapPropagator()
        self._requests: dict[str, Request] = {}  # unfinished requests

    def on_start(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def on_finish(self, output: RequestOutput) -> None:
        request = self._requests.pop(output.request_id, None)
        if request is not None:  # None: it was added before this listener
            self._end(request, output)

    def close(self) -> None:
        """Send the spans that are queued, within a few seconds."""
        # In a thread of its own: the SDK may retry for much longer while a collector is gone.
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)

    def _end(self, request: Request, output: RequestOutput) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode

        # Times of spans are nanoseconds of the time of day, those of requests of another clock.
        seconds = max(0.0, self._clock() - output.metrics.arrival_time)
        now = time.time_ns()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(request.trace_headers or {}, context=Context()),
            kind=SpanKind.SERVER,
            attributes=self._attributes(request, output, seconds),
            start_time=now - int(seconds * 1e9),
        )
        if output.error is not None:
            # Only the kind of error: its message may quote the prompt.
            span.set_status(Status(StatusCode.ERROR, type(output.error).__name__))
        span.end(now)

    def _attributes(
        self, request: Request, output: RequestOutput, seconds: float
    ) -> Mapping[str, Any]:
        params, times = request.params, output.metrics
        scheduled, first, last = (
            times.first_scheduled_time,
            times.first_token_time,
            times.last_token_time,
        )
        request_id = (request.trace_headers or {}).get("x-request-id", request.request_id)
        attributes = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": self._model,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": times.num_output_tokens,
            "gen_ai.response.finish_reasons": [
                one.finish_reason for one in output.outputs if one.finish_reason is not None
            ],
            "gen_ai.latency.time_in_queue": times.queue_time,
            "gen_ai.latency.time_to_first_token": times.time_to_first_token,
            "gen_ai.latency.e2e": seconds,
            "gen_ai.latency.time_in_model_prefill": _between(scheduled, first),
            "gen_ai.latency.time_in_model_decode": _between(first, last),
            "gen_ai.latency.time_in_model_inference": _between(scheduled, last),
        }
        return {name: value for name, value in attributes.items() if value is not None}


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def prepare_request_spans(config: "EngineConfig", model_config: "ModelConfig") -> PreparedFeature:
    """Return a feature that adds `RequestSpans` to an engine.

    Raises `ValueError` for an endpoint that is no URL, and without OpenTelemetry's packages.
    """
    endpoint: str = config.otlp_traces_endpoint
    try:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter_class(protocol_of(endpoint))
    except ModuleNotFoundError as error:
        raise ValueError(f"{_PACKAGES} ({error}): pip install 'nanoserve[otel]'") from error

    def add_to(engine: "GuardedEngine") -> None:
        processor = BatchSpanProcessor(make_exporter(endpoint))
        spans = RequestSpans(engine.config.model, engine.clock, make_provider(processor))
        engine.listeners.append(spans)
        engine.add_extension(spans)

    return PreparedFeature(add_to)


def make_provider(processor: "SpanProcessor") -> "TracerProvider":
    """Return a provider of spans, which go to `processor`.

    It is not OpenTelemetry's global one, which may be the program's own.
    """
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider

    from nanoserve import __version__

    own = Resource.create({"service.name": "nanoserve", "service.version": __version__})
    of_environment = OTELResourceDetector().detect()  # OTEL_SERVICE_NAME and its like
    provider = TracerProvider(resource=own.merge(of_environment), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


def protocol_of(endpoint: str) -> str:
    """Return the protocol of an OTLP endpoint: "grpc" or "http/protobuf".

    grpc:// and grpcs:// (with TLS) determine it, and for http:// and https:// OpenTelemetry's
    environment variables do. Raises `ValueError` for any other endpoint or protocol.
    """
    try:
        parts = urlsplit(endpoint if isinstance(endpoint, str) else "")
    except ValueError:  # of an address in brackets
        parts = urlsplit("")
    schemes = ("http", "https", "grpc", "grpcs")
    require(
        parts.scheme in schemes and bool(parts.hostname),
        f"otlp_traces_endpoint={shown(endpoint)} must be a URL such as "
        "'http://localhost:4318/v1/traces' or 'grpc://localhost:4317'",
    )
    if parts.scheme.startswith("grpc"):
        return _GRPC
    given = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), _HTTP)
    require(
        given in (_HTTP, _GRPC),
        f"{_PROTOCOLS[0]}={given!r:.50} must be {_HTTP!r} or {_GRPC!r}",
    )
    return given


def exporter_class(protocol: str) -> Any:
    """Return the class of OTLP exporters for a protocol of `protocol_of`."""
    if protocol == _GRPC:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

        return over_grpc.OTLPSpanExporter
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

    return over_http.OTLPSpanExporter


def make_exporter(endpoint: str) -> "SpanExporter":
    """Return an exporter to an OTLP endpoint. No connection is made yet."""
    parts, protocol = urlsplit(endpoint), protocol_of(endpoint)
    exporter = exporter_class(protocol)
    if protocol == _GRPC:
        return exporter(endpoint=parts.netloc, insecure=parts.scheme in ("http", "grpc"))
    if parts.path in ("", "/"):  # the address of a collector: spans have a path of their own there
        endpoint = parts._replace(path="/v1/traces").geturl()
    return exporter(endpoint=endpoint)
