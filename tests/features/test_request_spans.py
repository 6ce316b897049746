"""A span of each request, with vLLM's attributes, in the trace of who has sent the request."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk.trace", reason="pip install 'nanoserve[otel]'")
from counting_executor import make_engine
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from serving import JSON, ask, served, wait_until

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.engine.guard import GuardedEngine
from nanoserve.features import request_spans
from nanoserve.features.request_spans import (
    RequestSpans,
    make_exporter,
    make_provider,
    protocol_of,
)
from nanoserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoserve.serve.async_llm import AsyncLLM

INSTALL = "pip install 'nanoserve[otel]'"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


class Spans:
    """An engine without a model, and the spans of its requests."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.engine: GuardedEngine = make_engine(num_kv_blocks=40, max_num_seqs=4)
        provider = make_provider(SimpleSpanProcessor(self._exporter))
        self.listener = RequestSpans("a-model", self.engine.clock, provider)
        self.engine.listeners.append(self.listener)

    def add(self, request_id: str, headers: Any = None, **params: Any) -> None:
        process = self.engine.input_processor.process
        request = process(request_id, [1, 2, 3], SamplingParams(max_tokens=5, **params))
        request.trace_headers = headers
        self.engine.add(request)

    def run(self) -> list[Any]:
        """Steps to the end; returns the spans."""
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return [*self._exporter.get_finished_spans()]


@pytest.fixture
def spans() -> Spans:
    return Spans()


def test_a_span_has_vllms_attributes(spans: Spans) -> None:
    before = time.time_ns()
    spans.add("one", temperature=0.5, top_p=0.9, n=2)
    (span,) = spans.run()
    assert (span.name, span.kind, span.parent) == ("llm_request", SpanKind.SERVER, None)
    assert before - 1e9 < span.start_time < span.end_time <= time.time_ns()
    told = dict(span.attributes)
    times = {name: told.pop(name) for name in list(told) if ".latency." in name}
    assert told == {
        "gen_ai.request.id": "one",
        "gen_ai.response.model": "a-model",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.response.finish_reasons": ("length", "length"),
    }
    names = ("time_in_queue", "time_to_first_token", "e2e")
    names += ("time_in_model_prefill", "time_in_model_decode", "time_in_model_inference")
    assert times.keys() == {f"gen_ai.latency.{name}" for name in names}
    queue, first, e2e, prefill, decode, whole = (times[f"gen_ai.latency.{name}"] for name in names)
    assert 0 <= queue <= first <= e2e and abs(prefill + decode - whole) < 1e-9
    assert abs(queue + prefill - first) < 1e-9
    assert abs((span.end_time - span.start_time) / 1e9 - e2e) < 1e-6


def test_the_parent_is_the_clients_span(spans: Spans) -> None:
    spans.add("child", SAMPLED | {"x-request-id": "of-http"})
    spans.add("unsampled", {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    spans.add("invalid", {"traceparent": "00-zz-1-01"})
    spans.add("none", {})
    told = {span.attributes["gen_ai.request.id"]: span for span in spans.run()}
    assert told.keys() == {"of-http", "invalid", "none"}  # the client does not record the other
    child = told["of-http"]
    assert f"{child.context.trace_id:032x}" == TRACE and f"{child.parent.span_id:016x}" == PARENT
    assert child.context.trace_state.get("vendor") == "1"
    for name in ("invalid", "none"):
        assert told[name].parent is None and told[name].context.trace_id != int(TRACE, 16)


def test_requests_that_do_not_end_by_themselves_have_spans_too(spans: Spans) -> None:
    spans.add("running")
    spans.engine.step()
    spans.add("waiting")
    for request_id in ("running", "waiting"):
        spans.engine.abort_request(request_id)
    told = {span.attributes["gen_ai.request.id"]: span for span in spans.run()}
    assert told.keys() == {"running", "waiting"} and not spans.listener._requests
    for span in told.values():
        assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)
        assert span.status.status_code is StatusCode.UNSET
    assert "gen_ai.latency.time_to_first_token" not in told["waiting"].attributes


def test_an_error_is_told_by_its_kind_only(spans: Spans) -> None:
    spans.add("failing")
    completion = CompletionOutput(0, "", [], "error", None)
    metrics = RequestMetrics(spans.engine.clock())
    error = RuntimeError("the prompt says: secret")
    output = RequestOutput("failing", None, [1, 2, 3], [completion], True, metrics, error=error)
    spans.listener.on_finish(output)
    (span,) = spans._exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "RuntimeError" and "secret" not in span.to_json()


def test_the_name_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    def name() -> Any:
        return make_provider(SimpleSpanProcessor(InMemorySpanExporter())).resource.attributes

    assert name()["service.name"] == "nanoserve"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    assert name()["service.name"] == "mine"
    assert name()["deployment.environment.name"] == "test" and name()["service.version"]


# ---------------------------------------------------------------- endpoints


@pytest.mark.parametrize(
    ("endpoint", "environment", "protocol"),
    [
        ("http://localhost:4318/v1/traces", None, "http/protobuf"),
        ("https://collector", None, "http/protobuf"),
        ("grpc://localhost:4317", None, "grpc"),
        ("grpcs://collector:4317", "http/protobuf", "grpc"),
        ("http://localhost:4317", "grpc", "grpc"),
    ],
)
def test_the_protocol_of_an_endpoint(
    endpoint: str, environment: str | None, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
        if environment is not None:
            monkeypatch.setenv(name, environment)
    assert protocol_of(endpoint) == protocol
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", reason=INSTALL)
    exporter = make_exporter(endpoint)
    assert f".proto.{protocol.partition('/')[0]}." in type(exporter).__module__
    if endpoint == "https://collector":
        assert exporter._endpoint == "https://collector/v1/traces"
    exporter.shutdown()


@pytest.mark.parametrize("endpoint", ["", "localhost:4317", "ftp://x", "http://", "http://[", 5])
def test_what_is_no_endpoint_is_refused_before_loading(endpoint: Any) -> None:
    with pytest.raises(ValueError, match=r"otlp_traces_endpoint=.* must be a URL such as"):
        LLM("tiny-qwen3", otlp_traces_endpoint=endpoint)


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ValueError, match="'http/json' must be 'http/protobuf' or 'grpc'"):
        protocol_of("http://localhost:4318")


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for protocol in ("grpc", "http"):
        name = f"opentelemetry.exporter.otlp.proto.{protocol}"
        monkeypatch.setitem(sys.modules, name, None)
    config = EngineConfig("none", otlp_traces_endpoint="http://localhost:4318")
    with pytest.raises(ValueError, match=r"pip install 'nanoserve\[otel\]'"):
        request_spans.prepare_request_spans(config, None)


# ---------------------------------------------------------------- a collector


class Collector:
    """An OTLP/HTTP collector, which may leave its clients without an answer."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, bytes]] = []
        self.num_answered = 0
        self.answers = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.bodies.append((self.path, body))
                collector.answers.wait(60)
                collector.num_answered += 1
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        found = []
        for path, body in self.bodies:
            assert path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    found += scope.spans
        return found


@contextmanager
def collecting(answers: bool = True) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter", reason=INSTALL)
    collector = Collector()
    if answers:
        collector.answers.set()
    try:
        yield collector
    finally:
        collector.close()


OPTIONS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 100, "max_model_len": 256}


@pytest.mark.parametrize(
    "engine_process", [False, pytest.param(True, marks=pytest.mark.size("full"))]
)
def test_a_collector_receives_the_spans_of_a_server(engine_process: bool) -> None:
    pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")
    with collecting() as collector:
        endpoint = {"otlp_traces_endpoint": collector.url}
        llm = AsyncLLM("tiny-qwen3", engine_process=engine_process, **OPTIONS, **endpoint)
        with served(llm) as server:
            body = {"prompt": ["The KV", "cache"], "max_tokens": 3, "temperature": 0}
            headers = JSON | SAMPLED | {"x-request-id": "mine"}
            assert ask(server, "/v1/completions", body, headers)[0] == 200
            messages = [{"role": "user", "content": "What is a KV cache?"}]
            body = {"model": "tiny", "messages": messages, "max_tokens": 2}
            assert ask(server, "/v1/messages", body, headers)[0] == 200
            body = {"input": "What is a KV cache?", "max_output_tokens": 2}
            assert ask(server, "/v1/responses", body, headers)[0] == 200
            chat = {"messages": messages, "max_tokens": 2, "stream": True}
            assert ask(server, "/v1/chat/completions", chat)[0] == 200
            assert ask(server, "/v1/chat/completions", {"messages": []})[0] == 400
        llm.shutdown()  # sends what is queued
        wait_until(lambda: len(collector.spans()) == 5)
        *ours, last = sorted(collector.spans(), key=lambda span: span.start_time_unix_nano)
    for span in ours:
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        (named,) = (one for one in span.attributes if one.key == "gen_ai.request.id")
        assert named.value.string_value == "mine"
    assert last.trace_id.hex() != TRACE and not last.parent_span_id


def test_nobody_waits_for_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")  # milliseconds between two exports
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "600")  # who waits, waits for an answer
    monkeypatch.setattr(request_spans, "_FLUSH_SECONDS", 0.01)
    with collecting(answers=False) as collector:
        llm = LLM("tiny-qwen3", **OPTIONS, otlp_traces_endpoint=collector.url)
        for _ in range(2):
            assert llm.generate("The KV", SamplingParams(max_tokens=2), use_tqdm=False)
            wait_until(lambda: bool(collector.bodies))
        llm.close()
        assert collector.num_answered == 0


def test_a_stream_of_a_program_has_a_parent_too() -> None:
    exporter = InMemorySpanExporter()
    llm = AsyncLLM("tiny-qwen3", **OPTIONS)

    def listen(engine: GuardedEngine) -> None:
        provider = make_provider(SimpleSpanProcessor(exporter))
        engine.listeners.append(RequestSpans("tiny", engine.clock, provider))

    async def run() -> None:
        await llm.call_in_engine(listen)
        params = SamplingParams(max_tokens=2)
        async for _ in llm.generate("The KV", params, trace_headers=SAMPLED):
            pass

    asyncio.run(run())
    llm.shutdown()
    (span,) = exporter.get_finished_spans()
    assert f"{span.parent.span_id:016x}" == PARENT


def test_an_engine_without_the_option_has_no_listener() -> None:
    assert not make_engine().listeners and EngineConfig("none").otlp_traces_endpoint is None
