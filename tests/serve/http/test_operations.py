"""What stands around the endpoints: sockets, prefixes, middleware, ids, load, probes, schema."""

import asyncio
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")
from serving import JSON, Served, ask, behind_http, served, wait_until

from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.http import run
from nanoserve.serve.http.api_docs import BODIES, page_of
from nanoserve.serve.http.app import ApiServer
from nanoserve.serve.http.port import SocketFile
from nanoserve.serve.http.run import Server, bind
from nanoserve.serve.http.settings import ServerSettings

BODY = {"prompt": "The KV cache", "max_tokens": 4, "temperature": 0}
LONG = BODY | {"max_tokens": 900, "ignore_eos": True, "stream": True}
KEY = {"authorization": "Bearer secret"}
EVERYTHING: dict[str, Any] = {
    **{"root_path": "/page/v1", "api_key": ["secret"], "enable_dev_endpoints": True},
    **{"enable_server_load_tracking": True, "enable_offline_docs": True},
    "middleware": ["middleware_of_a_test:Marking", "middleware_of_a_test.mark"],
}


@pytest.fixture(scope="module")
def full(server_llm: AsyncLLM) -> Iterator[Served]:
    """A server that has everything."""
    with served(server_llm, **EVERYTHING) as one:
        yield one


def get(server: Served, path: str, headers: Any = None, method: str = "GET") -> Any:
    """The status, the headers, and the bytes of an answer without a body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, headers=headers or {})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


# ---------------------------------------------------------------- prefixes


def test_paths_have_a_prefix_or_none(full: Served) -> None:
    for path in ("/v1/models", "/page/v1/v1/models", "/page/v1/v1/models/tiny"):
        assert get(full, path, KEY)[0] == 200
    assert get(full, "/page/v1x/health")[0] == 404  # a file of the page that there is not
    status, headers, _ = get(full, "/page/v1")
    assert status == 307 and headers["location"] == "v1/" and headers["x-request-id"]
    assert b"<!doctype html>" in get(full, "/page/v1/")[2]
    assert get(full, "/page/v1/page/main.js")[0] == 200
    status, _, answer = ask(full, "/page/v1/v1/completions", BODY, JSON | KEY)
    assert status == 200 and answer["choices"]
    for prefix in ("", "/page/v1"):  # in the format of that API
        for query, kind in (("", "invalid_request_error"), ("?fail=1", "api_error")):
            _, headers, answer = ask(full, f"{prefix}/v1/messages{query}", BODY, JSON | KEY)
            assert answer["error"]["type"] == kind
            assert headers["request-id"] == headers["x-request-id"] == answer["request_id"]
    status, _, answer = ask(full, "/page/v1/nothing", BODY, JSON | KEY)
    assert status == 404 and "'/nothing'" in answer["error"]["message"]


def test_a_prefix_opens_no_door(full: Served) -> None:
    """/page/ needs no key, and nor would /page/v1/v1/models if the prefix were part of it."""
    for path in ("/v1/models", "/page/v1/v1/models", "/page/v1/page/v1/v1/models", "//v1/models"):
        assert get(full, path)[0] in (401, 404)
    assert ask(full, "/page/v1/v1/completions", BODY)[0] == 401
    assert get(full, "/page/v1/health")[0] == 200


def test_a_prefix_is_none_of_the_servers_paths(full: Served) -> None:
    for route in full.api.app.routes:
        path = route.path.partition("/{")[0]
        if path != "/":  # the page, which has no name of its own
            with pytest.raises(ValueError, match="one of the server's own paths"):
                ServerSettings(root_path=path)


# ---------------------------------------------------------------- middleware


def test_middleware_is_a_class_or_a_function(full: Served) -> None:
    for path, headers in (("/health", {}), ("/v1/models", {}), ("/v1/models", KEY)):
        answer = get(full, path, headers)[1]
        assert answer["x-class"] == "1" and answer["x-function"] == "1"
        assert len(answer.get_all("x-request-id")) == 1  # it surrounds them
    status, headers, content = get(full, "/health?refuse=1")
    assert status == 418 and content == b"refused" and headers["x-request-id"]
    status, headers, content = get(full, "/health?fail=1")
    assert status == 500 and json.loads(content)["error"]["type"] == "server_error"
    assert b"secret of a middleware" not in content


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_may_leave_through_middleware(full: Served, stream: bool) -> None:
    def load() -> Any:
        return json.loads(get(full, "/load")[2])["server_load"]

    connection = http.client.HTTPConnection("127.0.0.1", full.port, timeout=60)
    body = LONG | {"stream": stream}
    with slow_steps(full):  # so that the answer cannot be complete before
        connection.request("POST", "/v1/completions", json.dumps(body), JSON | KEY)
        if stream:
            answer = connection.getresponse()
            assert answer.readline().startswith(b"data: {")
            answer.close()
        wait_until(lambda: load() == 1)
        wait_until(lambda: full.api.llm.engine.has_unfinished_requests())
        connection.close()
        wait_until(lambda: load() == 0)
        full.wait_until_idle()


@contextmanager
def slow_steps(server: Served) -> Iterator[None]:
    """Let each step take 20 ms or more, and all of a long answer 18 s."""
    observers = server.api.llm.engine.observers
    observers.append(wait := lambda *step: time.sleep(0.02))
    yield
    observers.remove(wait)


# ---------------------------------------------------------------- ids, defaults


def test_an_answer_has_the_id_of_its_request(full: Served) -> None:
    _, headers, answer = ask(full, "/v1/completions", BODY, JSON | KEY | {"x-request-id": "my-1"})
    assert (answer["id"], headers["x-request-id"]) == ("cmpl-my-1", "my-1")
    _, headers, answer = ask(full, "/v1/completions", BODY, JSON | KEY)
    assert answer["id"] == f"cmpl-{headers['x-request-id']}"
    body = BODY | {"request_id": "body-1"}
    _, headers, answer = ask(full, "/v1/completions", body, JSON | KEY | {"x-request-id": "my-2"})
    assert (answer["id"], headers["x-request-id"]) == ("cmpl-body-1", "my-2")


def test_the_server_has_defaults_for_fields(server_llm: AsyncLLM) -> None:
    settings: dict[str, Any] = {"default_chat_template_kwargs": {"enable_thinking": False}}
    settings |= {"enable_force_include_usage": True, "return_tokens_as_token_ids": True}
    with served(server_llm, **settings) as server:
        body = BODY | {"logprobs": 0}
        answer = ask(server, "/v1/completions", body)[2]
        assert answer["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
        answer = ask(server, "/v1/completions", body | {"return_tokens_as_token_ids": False})[2]
        assert not answer["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
        for options in ({}, {"stream_options": {"continuous_usage_stats": True}}):
            text = ask(server, "/v1/completions", BODY | {"stream": True} | options)[2].decode()
            chunks = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
            assert chunks[-1]["usage"]["completion_tokens"] == 4 and not chunks[-1]["choices"]
            assert bool(chunks[0]["usage"]) == bool(options)
        assert ask(server, "/tokenize", {"prompt": "a"})[0] == 200


# ---------------------------------------------------------------- probes and information


def test_probes(full: Served) -> None:
    probes = ("/health", "/ping", "/healthz", "/readyz", "/livez")

    def statuses() -> list[int]:
        return [get(full, path)[0] for path in probes]

    assert statuses() == [200] * 5
    for order, end in (("/sleep", "/wake_up"), ("/pause?mode=keep", "/resume")):
        assert ask(full, order, b"", KEY)[0] == 200
        assert statuses() == [200, 200, 200, 503, 200]
        assert ask(full, end, b"", KEY)[0] == 200
        assert statuses() == [200] * 5
    full.api.is_draining = True
    assert statuses() == [503, 503, 503, 503, 200]
    full.api.is_draining = False


def test_every_get_has_a_head(full: Served) -> None:
    paths = [route.path for route in full.api.app.routes if "GET" in route.methods]
    assert len(paths) > 15
    for path in paths:
        expected = 404 if "{response_id}" in path else 200  # no response has this name
        path = path.replace("{name:path}", "tiny").replace("{name}", "main.js")
        status, headers, content = get(full, path, KEY, "HEAD")
        assert (status, content) == (expected, b""), path
        if path != "/live":  # which has no end
            status, again, _ = get(full, path, KEY)
            assert (status, headers["content-type"]) == (expected, again["content-type"]), path


def test_information_about_the_server_has_no_keys(full: Served) -> None:
    assert get(full, "/server_info")[0] == 401
    status, _, content = get(full, "/server_info?config_format=json", KEY)
    told = json.loads(content)
    assert status == 200 and b"secret" not in content
    assert told["config"]["max_model_len"] == 1024 and told["config"]["dtype"] == "float32"
    assert told["server"]["root_path"] == "/page/v1" and told["server"]["num_api_keys"] == 1
    assert get(full, "/server_info?config_format=text", KEY)[0] == 400


def test_without_their_flags_they_are_not_there(server: Served) -> None:
    for path, flag in (
        ("/load", "--enable-server-load-tracking"),
        ("/docs", "--enable-offline-docs"),
        ("/openapi.json", "--enable-offline-docs"),
        ("/server_info", "--enable-dev-endpoints"),
        ("/sleep", "--enable-dev-endpoints"),
    ):
        status, _, content = get(server, path)
        assert status == 404 and flag in json.loads(content)["error"]["message"]


# ---------------------------------------------------------------- the schema


def test_the_schema_has_every_route_and_field(full: Served) -> None:
    told = json.loads(get(full, "/openapi.json")[2])
    assert told["openapi"] == "3.1.0" and told["servers"] == [{"url": "/page/v1"}]
    hidden = {"/", "/page/{name}", "/live", "/docs", "/openapi.json"}
    routes = {route.path.replace(":path", "") for route in full.api.app.routes}
    assert told["paths"].keys() == routes - hidden
    schemas = told["components"]["schemas"]
    pooling = {"/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score"}
    pooling |= {"/rerank", "/v1/rerank", "/v2/rerank"}  # of other models: see test_pooling_server
    adapters = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}  # see test_lora_server
    assert BODIES.keys() - told["paths"].keys() == pooling | adapters
    for path, body in BODIES.items():
        if path in pooling | adapters:
            continue
        operation = told["paths"][path]["post"]
        assert operation["summary"].endswith(".")
        error = operation["responses"]["default"]["content"]["application/json"]["schema"]
        name = "MessagesError" if path.startswith("/v1/messages") else "Error"
        assert error == {"$ref": f"#/components/schemas/{name}"}
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{body.__name__}"}
        assert schemas[body.__name__]["properties"].keys() == body.model_fields.keys()
    names = {operation["operationId"] for each in told["paths"].values() for operation in
             each.values()}  # fmt: skip
    assert len(names) == sum(map(len, told["paths"].values()))
    for reference in _references(told):
        assert reference.removeprefix("#/components/schemas/") in schemas


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from [value["$ref"]] if "$ref" in value else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    for one in inner:
        yield from _references(one)


@pytest.mark.size("full")  # it compiles the schema of JSON schemas
def test_the_schemas_are_json_schemas(full: Served) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    told = json.loads(get(full, "/openapi.json")[2])
    for name, schema in told["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        if name == "CompletionBody":
            whole = schema | {"components": told["components"]}
            jsonschema.validate(BODY | {"stop": ["a"], "seed": None}, whole)
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(BODY | {"stop": 5}, whole)


def test_a_page_shows_the_schema_without_scripts(full: Served) -> None:
    status, headers, content = get(full, "/docs")
    page = content.decode()
    assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
    assert "<script" not in page and "http://" not in page and "https://" not in page
    assert "<b>POST /v1/chat/completions</b>" in page and "<code>max_tokens</code>" in page
    document = {
        "info": {"version": "<b>"},
        "components": {"schemas": {}},
        "paths": {"/<x>": {"get": {"summary": "<i>"}}},
    }
    assert "<x>" not in page_of(document) and "&lt;i&gt;" in page_of(document)


# ---------------------------------------------------------------- sockets in the file system


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def ask_file(path: Path, method: str, target: str, body: Any = None) -> tuple[int, bytes]:
    connection = UnixConnection(str(path))
    connection.request(method, target, json.dumps(body), JSON)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@contextmanager
def on_file(llm: AsyncLLM, path: Path) -> Iterator[None]:
    api = ApiServer(llm, ServerSettings(served_model_name=["tiny"]))
    with bind("", 0, str(path)) as bound:
        server = Server(api, 5, access_log=True)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield
        finally:
            server.should_exit = True
            thread.join()


def test_a_server_may_listen_on_a_file(server_llm: AsyncLLM, folder: Path, capsys: Any) -> None:
    path = folder / "llm.sock"
    with on_file(server_llm, path):
        assert f"tiny at unix:{path}" in capsys.readouterr().err
        status, content = ask_file(path, "POST", "/v1/completions", BODY)
        assert status == 200 and json.loads(content)["usage"]["completion_tokens"] == 4
        status, content = ask_file(path, "POST", "/v1/completions", LONG | {"max_tokens": 8})
        assert status == 200 and content.endswith(b"data: [DONE]\n\n")
        with pytest.raises(OSError, match="another server listens to this socket"):
            bind("", 0, str(path))
        assert ask_file(path, "GET", "/health")[0] == 200
    assert not path.exists()


def test_a_file_rejects_clients_until_it_is_opened(folder: Path) -> None:
    path = folder / "llm.sock"
    with SocketFile(str(path)), pytest.raises((OSError, http.client.HTTPException)):
        ask_file(path, "GET", "/health")
    assert not path.exists()


def test_a_file_left_by_a_killed_server_is_replaced_and_others_are_not(folder: Path) -> None:
    path = folder / "llm.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    assert path.exists()
    with SocketFile(str(path)) as first:
        path.unlink()  # by somebody else, who then starts another server
        with SocketFile(str(path)):
            first.close()
            assert path.exists()
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(OSError, match="exists and is not a socket"):
        SocketFile(str(path))
    assert path.read_text() == "mine"
    for wrong in (folder / "none" / "llm.sock", folder / ("x" * 120)):
        with pytest.raises(OSError, match=str(folder)):
            SocketFile(str(wrong))
    assert os.listdir(folder) == ["llm.sock"]


def test_middleware_that_cannot_be_made_ends_the_start(server_llm: AsyncLLM) -> None:
    settings = ServerSettings(middleware=["middleware_of_a_test:NOTHING"])
    with pytest.raises(ValueError, match="not int"):
        ApiServer(server_llm, settings)
    api = ApiServer(server_llm, ServerSettings(middleware=["middleware_of_a_test:Marking"]))
    with behind_http(api) as server:
        assert get(server, "/health")[1]["x-class"] == "1"


# ---------------------------------------------------------------- TLS


def make_certificate(folder: Path, name: str) -> str:
    """Write a key and a certificate for this name; return the certificate."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", f"/CN={name}", "-keyout", str(folder / "key.pem")]
    subprocess.run([*command, "-out", str(folder / "cert.pem")], check=True, capture_output=True)
    return (folder / "cert.pem").read_text()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_renewed_certificate_is_loaded(
    server_llm: AsyncLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(run, "_TICKS_OF_CERTIFICATES", 1)
    first = make_certificate(tmp_path, "one")
    files = {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}
    api = ApiServer(server_llm, ServerSettings(served_model_name=["tiny"]))
    with bind("127.0.0.1", 0) as bound:
        server = Server(api, 5, access_log=False, ssl_refresh=True, **files)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
        thread.start()
        try:
            wait_until(lambda: server.started)
            address = bound.getsockname()
            assert ssl.get_server_certificate(address).strip() == first.strip()
            (tmp_path / "cert.pem").write_text("not yet")
            wait_until(lambda: "cannot be loaded" in caplog.text)
            assert ssl.get_server_certificate(address).strip() == first.strip()
            second = make_certificate(tmp_path, "two")
            wait_until(lambda: ssl.get_server_certificate(address).strip() == second.strip())
        finally:
            server.should_exit = True
            thread.join()
