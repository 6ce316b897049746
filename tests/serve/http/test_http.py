"""Clients of every kind: that go away, that send nonsense, that send too much or too little."""

import http.client
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import is_idle, served, wait_until

from nanoserve.features.parallel import heartbeat

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

JSON = {"content-type": "application/json"}
LONG = {"prompt": [1, 2, 3], "max_tokens": 1000, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 5}


def ask(server, path: str, body, headers=JSON, method: str = "POST"):
    """The status, the headers and the JSON of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, content, dict(headers))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    is_json = answer.headers.get("content-type") == "application/json"
    return answer.status, answer.headers, json.loads(text) if is_json else text


def is_well(server) -> bool:
    return ask(server, "/v1/chat/completions", CHAT)[0] == 200


BAD = {
    "not JSON": (b"{", None),
    "empty": (b"", None),
    "a list": (b"[]", None),
    "malformed UTF-8": (b'{"prompt": "\xff\xfe"}', None),
    "half a surrogate": (b'{"prompt": "\\ud800"}', None),
    "10,000 deep": (b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", None),
    "no prompt": ({}, "prompt"),
    "prompt of objects": ({"prompt": {"a": 1}}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "too many prompts": ({"prompt": ["a"] * 2000}, "prompt"),
    "token out of range": ({"prompt": [10**6]}, None),
    "token of 1e400": (b'{"prompt": [1e400]}', "prompt"),
    "negative token": ({"prompt": [-1]}, None),
    "temperature in words": ({"prompt": "a", "temperature": "hot"}, "temperature"),
    "temperature below zero": ({"prompt": "a", "temperature": -1}, "temperature"),
    "temperature of NaN": (b'{"prompt": "a", "temperature": NaN}', "temperature"),
    "temperature of infinity": (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    "top_p of 2": ({"prompt": "a", "top_p": 2}, "top_p"),
    "n of 0": ({"prompt": "a", "n": 0}, "n"),
    "n of 65": ({"prompt": "a", "n": 65, "temperature": 1}, "n"),
    "n of 10 ** 30": ({"prompt": "a", "n": 10**30}, "n"),
    "max_tokens of 0": ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    "max_tokens beyond the context": ({"prompt": "a", "max_tokens": 10**6}, "max_tokens"),
    "a prompt beyond the context": ({"prompt": [1] * 1024}, "prompt"),
    "a text beyond the context": ({"prompt": "word " * 10_000}, "prompt"),
    "min over max": ({"prompt": "a", "min_tokens": 9, "max_tokens": 2}, "min_tokens"),
    "stop of numbers": ({"prompt": "a", "stop": [1]}, "stop"),
    "stop that is empty": ({"prompt": "a", "stop": ""}, "stop"),
    "bias by word": ({"prompt": "a", "logit_bias": {"word": 1}}, "logit_bias"),
    "logprobs of 1000": ({"prompt": "a", "logprobs": 1000}, "logprobs"),
    "best_of": ({"prompt": "a", "best_of": 3}, "best_of"),
    "suffix": ({"prompt": "a", "suffix": "b"}, "suffix"),
    "priority": ({"prompt": "a", "priority": 3}, "priority"),
    "streamed prompt_logprobs": (
        {"prompt": "a", "stream": True, "prompt_logprobs": 1},
        "prompt_logprobs",
    ),
}
BAD_CHATS = {
    "no messages": ({}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "messages of text": ({"messages": ["hello"]}, "messages"),
    "an unknown role": ({"messages": [{"role": "king", "content": "a"}]}, "messages"),
    "no role": ({"messages": [{"content": "a"}]}, "messages"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
    ),
    "content of a number": ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    "tools": (CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "a forced tool": (CHAT | {"tool_choice": "required"}, "tool_choice"),
    "XML asked for": (CHAT | {"response_format": {"type": "xml"}}, "response_format"),
    "a template": (CHAT | {"chat_template": "{{ 1 }}"}, "chat_template"),
    "a template inside": (
        CHAT | {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "chat_template_kwargs.chat_template",
    ),
    "top_logprobs alone": (CHAT | {"top_logprobs": 2}, "top_logprobs"),
    "guided twice": (CHAT | {"guided_json": {}, "guided_regex": "a+"}, "guided_regex"),
    "echo": (CHAT | {"echo": True}, "echo"),
    "effort": (CHAT | {"reasoning_effort": "hihg"}, "reasoning_effort"),
}


@pytest.mark.parametrize("name", [*BAD, *BAD_CHATS])
def test_a_bad_request_is_a_400_that_names_the_field(server, name) -> None:
    is_chat = name in BAD_CHATS
    body, param = (BAD_CHATS if is_chat else BAD)[name]
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    status, _, answer = ask(server, path, body)
    assert status == 400, answer
    error = answer["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param, error
    assert len(error["message"]) < 600 and "/" + "nanoserve" not in error["message"]
    server.wait_until_idle()


def random_value(rng: random.Random, depth: int = 0):
    kinds = [None, True, -1, 0, 2**63, 1e308, "", "a", "\u0000", "\U0001f600" * 3]
    if depth < 3 and rng.random() < 0.4:
        if rng.random() < 0.5:
            return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
        return {rng.choice("abc"): random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))}
    return rng.choice(kinds)


@pytest.mark.small(seed=[0])
@pytest.mark.parametrize("seed", range(4))
def test_random_bodies_are_answered_or_refused_and_never_an_error_of_the_server(
    server, seed
) -> None:
    from nanoserve.compat.request_names import FOREIGN
    from nanoserve.serve.http.protocol import ChatBody, CompletionBody

    rng = random.Random(seed)
    for _ in range(60):
        kind, path, good = rng.choice(
            [
                (CompletionBody, "/v1/completions", {"prompt": "a"}),
                (ChatBody, "/v1/chat/completions", dict(CHAT)),
            ]
        )
        names = rng.sample([*kind.model_fields, *FOREIGN], rng.randint(1, 2))
        body = good | {"max_tokens": 2} | {name: random_value(rng) for name in names}
        status, _, answer = ask(server, path, body)
        assert status in (200, 400, 404), (body, answer)
    assert is_well(server)
    server.wait_until_idle()


def test_wrong_paths_methods_and_types_are_told_in_openais_shape(server) -> None:
    for expected, path, method, headers in (
        (404, "/v1/nothing", "POST", JSON),
        (405, "/v1/models", "POST", JSON),
        (405, "/v1/completions", "GET", JSON),
        (415, "/v1/completions", "POST", {"content-type": "text/plain"}),
        (415, "/v1/completions", "POST", {}),
    ):
        status, _, answer = ask(server, path, b"{}", headers, method)
        assert status == expected and set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
def test_a_client_that_goes_away_frees_its_blocks(server, server_llm, stream) -> None:
    rng = random.Random(4)
    for _ in range(8):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        body = LONG | {"stream": stream, "n": 3, "temperature": 1}
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        wait_until(lambda: not is_idle(server_llm))
        if stream:
            answer = connection.getresponse()
            for _ in range(rng.randint(0, 5)):
                answer.readline()
            answer.close()
        time.sleep(rng.random() * 0.02)
        connection.close()
        aborted_after = server_llm.engine.stats.num_steps
        server.wait_until_idle()
        assert server_llm.engine.stats.num_steps - aborted_after < 60  # of a thousand
    assert is_well(server)


def test_who_never_reads_is_no_burden_and_ends_as_it_would(server, server_llm) -> None:
    """The client's window is full, and the rest waits as one output until the request has ended."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", server.port))
        content = json.dumps(LONG | {"stream": True, "n": 8, "temperature": 1, "logprobs": 5})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
        client.sendall(f"{head}content-type: application/json\r\n\r\n{content}".encode())
        wait_until(lambda: not is_idle(server_llm))
        wait_until(lambda: not server_llm.engine.has_unfinished_requests(), 60)
        (reader,) = set(server_llm._readers.values())
        assert len(reader._unread) <= 1
        del reader
        received = b""
        while b"[DONE]" not in received[-100:]:  # now it reads, and nothing was lost
            received += client.recv(65536)
    assert received.count(b'"finish_reason": "length"') == 8
    server.wait_until_idle()


def test_half_open_connections_and_floods_leave_room_for_others(server) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    for number, client in enumerate(idle):
        client.sendall(
            [b"", b"GET /he", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"][number % 3]
        )
    assert is_well(server)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: is_well(server), range(100)))
    assert all(answers)
    for client in idle:
        client.close()
    server.wait_until_idle()


def raw(server, content: bytes, rest: bytes = b"", pause: float = 0) -> bytes:
    """What comes back until the server closes the connection, or has nothing to say."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=15) as client:
        received = b""
        try:
            client.sendall(content)
            time.sleep(pause)
            client.sendall(rest)
            while piece := client.recv(65536):
                received += piece
        except ConnectionError:
            pass
        return received


def test_headers_without_end_are_refused(server) -> None:
    begin = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    assert b" 431 " in raw(server, begin + b"a: b\r\n" * 20_000)
    assert b" 431 " in raw(server, begin + b"x: " + b"y" * 300_000)
    assert is_well(server)


def test_headers_that_take_too_long_are_given_up(server, monkeypatch) -> None:
    from nanoserve.serve.http import connection

    monkeypatch.setattr(connection, "_HEADER_SECONDS", 0.2)
    assert b" 408 " in raw(server, b"GET /health HTTP/1.1\r\nho")
    assert b" 408 " in raw(server, b"")
    assert is_well(server)


def test_bodies_have_a_limit_and_a_time(server_llm) -> None:
    with served(server_llm, max_body_bytes=2000, body_timeout=0.3) as server:
        assert is_well(server)
        status, headers, answer = ask(server, "/v1/completions", {"prompt": "a" * 3000})
        assert status == 413 and headers["connection"] == "close" and "2000" in str(answer)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        assert b" 413 " in raw(server, head + b"content-length: 1000000000000\r\n\r\n")
        assert b" 400 " in raw(server, head + b"content-length: " + b"9" * 30 + b"\r\n\r\n{")
        chunks = b"transfer-encoding: chunked\r\n\r\n" + b"400\r\n" + b"a" * 1024 + b"\r\n"
        assert b" 413 " in raw(server, head + chunks, b"400\r\n" + b"a" * 1024 + b"\r\n", 0.05)
        assert b" 408 " in raw(server, head + b"content-length: 100\r\n\r\n{")
        assert is_well(server)


def test_a_body_of_a_gigabyte_takes_no_memory(server) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    piece = b"a" * 2**20
    with socket.create_connection(("127.0.0.1", server.port), timeout=15) as client:
        client.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        try:
            for _ in range(1024):
                client.sendall(b"100000\r\n" + piece + b"\r\n")
        except ConnectionError:
            pass
        else:
            pytest.fail("all of it was taken")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    assert is_well(server)


def test_keys_are_asked_for_where_there_are_any(server_llm) -> None:
    with served(server_llm, api_key=["first", "second"]) as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "first"}):
            status, told, answer = ask(server, "/v1/chat/completions", CHAT, JSON | headers)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
            assert told["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/tokenize", "/detokenize", "/nothing", "//v1/models"):
            assert ask(server, path, b"", {}, "GET")[0] == 401, path
        for key in ("first", "second"):
            headers = JSON | {"authorization": f"Bearer {key}"}
            assert ask(server, "/v1/chat/completions", CHAT, headers)[0] == 200
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert ask(server, path, b"", {}, "GET")[0] == 200


def test_other_sites_may_ask_only_if_they_are_named(server, server_llm) -> None:
    asked = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    _, headers, _ = ask(server, "/v1/models", b"", asked, "GET")
    assert "access-control-allow-origin" not in headers
    with served(server_llm, allowed_origins=["https://elsewhere.example"]) as open_server:
        _, headers, _ = ask(open_server, "/v1/models", b"", asked, "GET")
        assert headers["access-control-allow-origin"] == "https://elsewhere.example"
        assert ask(open_server, "/v1/models", b"", asked, "OPTIONS")[0] == 200


def test_a_full_queue_says_when_to_come_again(server_llm) -> None:
    with served(server_llm, max_queue=4) as server, ThreadPoolExecutor(80) as pool:
        body = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True}
        answers = list(pool.map(lambda _: ask(server, "/v1/completions", body), range(80)))
        statuses = [status for status, _, _ in answers]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 32 + 4
        for status, headers, answer in answers:
            if status == 429:
                assert int(headers["retry-after"]) >= 1
                assert answer["error"]["type"] == "rate_limit_error"
            else:
                assert answer["usage"]["completion_tokens"] == 200
        server.wait_until_idle()


def test_a_silent_stream_shows_that_it_lives(server_llm) -> None:
    """A proxy would end a connection that says nothing while a long prompt is computed."""
    with served(server_llm, heartbeat_interval=0.05) as server:
        forward, blocked = server_llm.engine.executor.forward, [True]

        def slow(*args):
            if blocked.pop() if blocked else False:
                time.sleep(0.5)
            return forward(*args)

        server_llm.engine.executor.forward = slow
        try:
            _, _, text = ask(server, "/v1/completions", {"prompt": "a", "stream": True})
        finally:
            server_llm.engine.executor.forward = forward
        comments = [line for line in text.split(b"\n\n") if line.startswith(b":")]
        assert len(comments) >= 3 and text.rstrip().endswith(b"data: [DONE]")


def test_an_engine_that_fails_in_a_stream_is_told_in_it(server_llm) -> None:
    """Twice the same step: its requests end with an error, and the server serves on."""
    with served(server_llm) as server:
        forward, failures = server_llm.engine.executor.forward, []

        def failing(*args):
            if failures:
                raise failures.pop()
            return forward(*args)

        server_llm.engine.executor.forward = failing
        try:
            for stream in (True, False):
                failures[:] = [RuntimeError("/secret/path is broken")] * 2
                status, _, answer = ask(server, "/v1/completions", LONG | {"stream": stream})
                assert status == (200 if stream else 500)
                text = answer.decode() if stream else json.dumps(answer)
                assert '"server_error"' in text and "secret" not in text
                assert not stream or text.rstrip().endswith("data: [DONE]")
            assert is_well(server)
        finally:
            server_llm.engine.executor.forward = forward
        server_llm._readers.clear()  # pytest keeps the exceptions, and they their frames
        server.wait_until_idle()


def test_while_a_step_hangs_nobody_is_sent_here(server_llm, monkeypatch) -> None:
    monkeypatch.setattr(heartbeat, "IDLE_LIMIT", 1.0)
    goes_on = threading.Event()
    with served(server_llm) as server:
        server_llm.call_soon(lambda engine: goes_on.wait())
        try:
            wait_until(lambda: ask(server, "/health", b"", {}, "GET")[0] == 503)
            status, headers, answer = ask(server, "/v1/completions", LONG)
            assert (status, answer["error"]["code"]) == (503, "engine_stalled")
            assert "retry-after" in headers
        finally:
            goes_on.set()
        wait_until(lambda: ask(server, "/health", b"", {}, "GET")[0] == 200)
        assert is_well(server)


def test_a_stopping_server_takes_nothing_new_and_ends_what_runs(server_llm) -> None:
    with served(server_llm) as server, ThreadPoolExecutor(1) as pool:
        wait_until(lambda: is_idle(server_llm))  # or what another test has left would pass for it
        asked = pool.submit(ask, server, "/v1/completions", LONG)
        wait_until(lambda: not is_idle(server_llm))
        server.api.is_draining = True
        status, headers, _ = ask(server, "/v1/completions", LONG)
        assert status == 503 and "retry-after" in headers
        assert ask(server, "/health", b"", {}, "GET")[0] == 503
        status, _, answer = asked.result()
        assert status == 200 and answer["usage"]["completion_tokens"] == 1000
