"""What no client may take from others: the event loop, memory, steps of the engine, a stream."""

import asyncio
import http.client
import json
import random
import socket
import threading

import pytest
from serving import served

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

from pydantic import ValidationError

from nanoserve.serve.http.body_cost import BodyCost
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.middleware import SharedAnswer
from nanoserve.serve.http.protocol import ChatBody, CompletionBody, DetokenizeBody
from nanoserve.serve.http.run import bind

JSON = {"content-type": "application/json"}
CHAT = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 5}
STRINGS = ("", "a,[{:", "\\", '"', '\\"', "\\\\\\", "ä", "\u2028")


def ask(server, path: str, body, headers=JSON, method: str = "POST"):
    """The status, the headers and the content of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, content, dict(headers))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, answer.headers, text


def random_value(rng: random.Random, depth: int = 0):
    kind = rng.randrange(5 if depth < 4 else 3)
    if kind == 0:
        return rng.choice((1.5, -3, True, None))
    if kind < 3:
        return rng.choice(STRINGS)
    values = [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return values if kind == 3 else {f"{rng.choice(STRINGS)}{i}": v for i, v in enumerate(values)}


def cost_of(value) -> int:
    """What `BodyCost` promises to count, of a value instead of its JSON."""
    if isinstance(value, list):
        return 16 + max(len(value) - 1, 0) + sum(map(cost_of, value))
    if isinstance(value, dict):
        return 16 + max(len(value) - 1, 0) + sum(3 + cost_of(inner) for inner in value.values())
    return 1 if isinstance(value, str) else 0


def test_the_cost_of_a_body_does_not_depend_on_how_it_arrives(fuzz_runs) -> None:
    for number in range(fuzz_runs):
        rng = random.Random(number)
        value = random_value(rng)
        for text in (json.dumps(value).encode(), json.dumps(value, ensure_ascii=False).encode()):
            whole, pieces, start = BodyCost(), BodyCost(), 0
            whole.add(text)
            while start < len(text):
                end = start + rng.randint(1, 4)
                pieces.add(text[start:end])
                start = end
            assert whole.total == pieces.total == cost_of(value), text


@pytest.mark.parametrize("item", [b"{}", b"[]", b'""', b"-1", b"true", b"[[1]]", b'{"a":1}'])
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (CompletionBody, b'{"prompt":[', b"]}"),
        (CompletionBody, b'{"prompt":[1,', b"]}"),
        (CompletionBody, b'{"prompt":[[1],', b"]}"),
        (CompletionBody, b'{"prompt":["a",', b"]}"),
        (CompletionBody, b'{"prompt":"a","stop":[', b"]}"),
        (CompletionBody, b'{"prompt":"a","stop_token_ids":[', b"]}"),
        (CompletionBody, b'{"prompt":"a","bad_words":[', b"]}"),
        (CompletionBody, b'{"prompt":"a","allowed_token_ids":[', b"]}"),
        (CompletionBody, b'{"prompt":"a","guided_choice":[', b"]}"),
        (ChatBody, b'{"messages":[', b"]}"),
        (ChatBody, b'{"messages":[],"tools":[', b"]}"),
        (ChatBody, b'{"messages":[],"documents":[', b"]}"),
        (DetokenizeBody, b'{"tokens":[', b"]}"),
    ],
)
def test_many_wrong_items_are_as_few_errors_as_one(kind, before, after, item) -> None:
    content = before + b",".join([item] * 1000) + after
    try:
        kind.model_validate_json(content)
    except ValidationError as error:
        assert error.error_count() <= 8
        assert ApiError.of(error).status == 400


def test_many_wrong_values_of_a_dictionary_are_told_by_its_name() -> None:
    bias = {str(i): "x" for i in range(2000)}
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate_json(json.dumps({"prompt": "a", "logit_bias": bias}))
    error = ApiError.of(caught.value)
    assert error.status == 400 and len(str(error)) < 300


BODIES = {
    "lists": ("/v1/completions", b'{"prompt":[%s]}', b"[],"),
    "objects": ("/v1/completions", b'{"prompt":[%s]}', b"{},"),
    "strings": ("/v1/completions", b'{"prompt":[%s]}', b'"",'),
    "unknown fields": ("/v1/completions", b'{"prompt":"a","x":{%s}}', b'"a":1,'),
    "messages": ("/v1/chat/completions", b'{"messages":[%s]}', b'{"role":"user"},'),
    "tools": ("/v1/chat/completions", b'{"messages":[],"tools":[%s]}', b"{},"),
    "a template's arguments": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"x":[%s]}}',
        b"{},",
    ),
    "a schema": ("/v1/completions", b'{"prompt":"a","guided_json":{"enum":[%s]}}', b"[],"),
    "numbers": ("/detokenize", b'{"tokens":[%s]}', b"1,"),
    "no JSON": ("/v1/completions", b"%s", b"["),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_many_items_is_refused_before_it_is_parsed(server, name, monkeypatch) -> None:
    path, form, item = BODIES[name]
    monkeypatch.setattr(
        "nanoserve.serve.http.protocol.Body.model_validate_json",
        lambda *_: pytest.fail("it is parsed"),
    )
    content = form % (item * (3 * 2**20 // len(item))).rstrip(b",")
    status, _, text = ask(server, path, content)
    assert status == 413 and "too many items" in text.decode()
    assert ask(server, "/health", b"", {}, "GET")[0] == 200


def test_arguments_of_calls_have_a_bounded_number_of_items(server) -> None:
    """They are JSON within a string, which costs next to nothing as such."""
    for item in ("1", "[]", '\\"\\"'):
        call = {"function": {"name": "a", "arguments": f'{{"a": [{",".join([item] * 10**5)}]}}'}}
        messages = [{"role": "assistant", "tool_calls": [call] * 4}]
        status, _, text = ask(server, "/v1/chat/completions", {"messages": messages})
        assert status == 400 and b"too many items" in text


def test_a_large_body_is_not_read_in_the_event_loop(server, monkeypatch) -> None:
    threads = []
    read = CompletionBody.model_validate_json

    def note(content):
        threads.append(threading.current_thread().name)
        return read(content)

    monkeypatch.setattr(CompletionBody, "model_validate_json", note)
    for prompt in ("a", "a" * 10**6, ["a"] * 2000):
        ask(server, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert ["bodies" in name for name in threads] == [False, True, True]


def test_a_prompt_of_as_many_tokens_as_the_model_takes_is_no_large_body(server_llm) -> None:
    """However few bytes a server allows."""
    with served(server_llm, max_body_bytes=2**13) as server:
        length = server_llm.engine.input_processor.max_model_len
        body = {"prompt": [5] * (length - 1), "max_tokens": 1}
        assert ask(server, "/v1/completions", body)[0] == 200


def test_many_prompts_leave_the_tokenizer_to_others_in_between(server, monkeypatch) -> None:
    from nanoserve.serve.http import app

    monkeypatch.setattr(app, "_TURN_SECONDS", 0.0)
    llm, turns = server.api.llm, []
    prepare = llm.prepare

    async def note(make, is_large=False):
        turns.append(is_large)
        return await prepare(make, is_large)

    monkeypatch.setattr(llm, "prepare", note)
    body = {"prompt": ["some words " * 50] * 40, "max_tokens": 1}
    assert ask(server, "/v1/completions", body)[0] == 200
    assert len(turns) >= 40 and all(turns)
    assert ask(server, "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
    assert turns[-1] is False  # which does not wait behind those


def test_a_large_answer_is_the_same_as_a_small_one(server, monkeypatch) -> None:
    from nanoserve.serve.http import response_writer

    body = {"prompt": ["one two", "three"], "max_tokens": 3, "echo": True, "logprobs": 3}
    answers = []
    for most, stream in ((128, False), (-1, False), (128, True), (-1, True)):
        monkeypatch.setattr(response_writer, "_MOST_ENTRIES", most)
        status, headers, text = ask(server, "/v1/completions", body | {"stream": stream})
        assert status == 200
        if not stream:
            assert headers["content-type"] == "application/json"
            answer = json.loads(text)
            answers.append((list(answer), answer["choices"], answer["usage"]))
        else:
            assert text.rstrip().endswith(b"[DONE]")
    assert answers[0] == answers[1]


def test_a_request_has_a_bounded_number_of_completions(server) -> None:
    body = {"prompt": ["a"] * 256, "n": 64, "temperature": 1, "max_tokens": 1}
    status, _, text = ask(server, "/v1/completions", body)
    assert status == 400 and json.loads(text)["error"]["param"] == "n" and b"16384" in text


def test_detokenize_takes_as_many_ids_as_the_context_has(server) -> None:
    most = server.api.llm.engine.input_processor.max_model_len
    assert ask(server, "/detokenize", {"tokens": [5] * most})[0] == 200
    status, _, text = ask(server, "/detokenize", {"tokens": [5] * (most + 1)})
    assert status == 400 and str(most) in text.decode()


def test_a_compressed_body_is_refused_by_name(server) -> None:
    for encoding in ("gzip", "br", "deflate, gzip"):
        headers = JSON | {"content-encoding": encoding}
        status, _, text = ask(server, "/v1/completions", b"\x1f\x8b", headers)
        assert status == 415 and b"content-encoding" in text
    headers = JSON | {"content-encoding": "identity"}
    assert ask(server, "/v1/chat/completions", CHAT, headers)[0] == 200


def test_monitors_may_ask_for_heads(server) -> None:
    for path in ("/health", "/ping", "/version", "/v1/models", "/v1/models/tiny", "/metrics", "/"):
        status, _, text = ask(server, path, b"", {}, "HEAD")
        assert (status, text) == (200, b""), path


def test_a_slash_too_many_leads_nowhere(server) -> None:
    for path in ("/v1/completions/", "/health/", "/v1/chat/completions//"):
        for method in ("GET", "POST"):
            headers = JSON | {"host": "elsewhere.example"}
            status, told, text = ask(server, path, CHAT, headers, method)
            assert status == 404 and "location" not in told and b"slash" in text


@pytest.mark.parametrize("role", [["user"], {"a": 1}, 5, True, None, []])
def test_a_role_of_any_type_is_a_400(server, role) -> None:
    body = {"messages": [{"role": role, "content": "a"}]}
    status, _, text = ask(server, "/v1/chat/completions", body)
    assert status == 400 and json.loads(text)["error"]["param"] == "messages"


def test_who_asks_at_once_shares_one_answer() -> None:
    async def run() -> None:
        calls = []

        async def make() -> int:
            calls.append(None)
            await asyncio.sleep(0.01)
            if len(calls) == 3:
                raise ValueError("the third")
            return len(calls)

        shared = SharedAnswer(make, interval=0.05)
        assert await asyncio.gather(*(shared.get() for _ in range(50))) == [1] * 50
        given_up = asyncio.create_task(shared.get())
        waiting = asyncio.create_task(shared.get())
        await asyncio.sleep(0)
        given_up.cancel()
        assert await waiting == 2  # one who gives up takes it from nobody
        errors = await asyncio.gather(*(shared.get() for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in errors] == ["the third"] * 3
        assert await shared.get() == 4

    asyncio.run(run())


def test_metrics_are_read_once_for_many_who_ask(server, monkeypatch) -> None:
    llm, calls = server.api.llm, []
    call = llm.call_in_engine

    async def note(function):
        calls.append(function)
        return await call(function)

    monkeypatch.setattr(llm, "call_in_engine", note)
    texts = []

    def flood() -> None:
        for _ in range(3):
            texts.append(ask(server, "/metrics", b"", {}, "GET")[2])

    clients = [threading.Thread(target=flood) for _ in range(20)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert len(texts) == 60 and all(b"vllm:num_requests_running" in text for text in texts)
    assert len(calls) <= 20


def test_calls_without_end_let_the_engine_step(server_llm) -> None:
    """Each call orders the next one, so there is always another one to be obeyed."""
    owner, stopped = server_llm.owner, threading.Event()

    def again(engine) -> None:
        if not stopped.is_set():
            owner.call(again, lambda value, error: None)

    async def run() -> int:
        for _ in range(3):
            owner.call(again, lambda value, error: None)
        async for output in server_llm.generate([1, 2, 3]):
            last = output
        return len(last.outputs[0].token_ids)

    try:
        assert asyncio.run(asyncio.wait_for(run(), 60)) > 0
    finally:
        stopped.set()


def raw_stream(server, rest: bytes, monkeypatch) -> bytes:
    """What comes of a stream with `rest` sent behind its request, until the connection ends."""
    from nanoserve.serve.http import connection

    monkeypatch.setattr(connection, "_HEADER_SECONDS", 0.05)
    body = json.dumps({"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True})
    head = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}{body}".encode())
        received = client.recv(65536)  # it has begun
        client.sendall(rest)
        try:
            while piece := client.recv(65536):
                received += piece
        except ConnectionError:
            pass
    return received


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"GET /version HTTP/1.1\r\nHost", b"408"),
        (b"GET /version HTTP/1.1\r\nx: " + b"y" * 200_000, b"431"),
        (b"\x00\x01 this is no request\r\n\r\n", b"400"),
    ],
)
def test_nothing_is_written_into_a_stream(server, monkeypatch, rest, status) -> None:
    """What follows a request is answered, or refused, behind the whole of its answer."""
    received = raw_stream(server, rest, monkeypatch)
    stream, end, behind = received.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert end and stream.count(b"HTTP/1.1") == 1
    assert behind.startswith(b"HTTP/1.1 " + status)


def test_a_port_is_held_before_anybody_serves() -> None:
    with bind("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(OSError, match=f"{port}.*in use"):
                bind(host, port)
        # Nobody waits for a model that is being loaded.
        address = ("127.0.0.1", port)
        with pytest.raises(ConnectionError), socket.create_connection(address, 30) as client:
            client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            client.recv(1)
        held.open()
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", port)
    bind("127.0.0.1", port).close()


def test_a_port_that_cannot_be_listened_on_is_an_error_with_a_message(server_llm) -> None:
    """uvloop says so with a None in place of a socket."""
    from nanoserve.serve.http.app import ApiServer
    from nanoserve.serve.http.run import Server
    from nanoserve.serve.http.settings import ServerSettings

    api = ApiServer(server_llm, ServerSettings(served_model_name=["tiny"]))
    with socket.socket() as taken, socket.socket() as ours:
        for one in (taken, ours):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        ours.bind(taken.getsockname())
        taken.listen()
        server = Server(api, 1, access_log=False)
        with pytest.raises(OSError, match=r"in use"):
            server.run([ours])


def test_a_body_that_breaks_off_is_refused_at_once(server) -> None:
    """There is no answer under way that a refusal could cut."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(head + b"transfer-encoding: chunked\r\n\r\nno size\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("name", ["self", "messages", "mark_text", "conversation", "tools", ""])
def test_no_argument_of_a_template_is_an_error_of_the_server(server, name) -> None:
    status, _, _ = ask(server, "/v1/chat/completions", CHAT | {"chat_template_kwargs": {name: 1}})
    assert status in (200, 400)
