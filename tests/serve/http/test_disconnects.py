"""Clients that leave, at any event and any byte of an answer, and of their request."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from event_streams import leave, open_stream
from scripted_model import scripted_llm
from serving import Served, served, wait_until

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEXTS = {"long": "la " * 200, "call": "<think>\nAsk.\n</think>\n\nI look.\n" + CALL}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]


def body(path: str, script: str, **more: Any) -> dict[str, Any]:
    text = f"script: {script}"
    messages = [{"role": "user", "content": text}]
    own: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "messages": messages,
            "tools": [{"type": "function", "function": FUNCTION}],
        },
        "/v1/responses": {"input": text, "tools": [{"type": "function", **FUNCTION}]},
        "/v1/messages": {
            "messages": messages,
            "max_tokens": 400,
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
        },
    }
    return {"model": "tiny", **own[path], **more}


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    with scripted_llm() as (llm, script):
        script.texts |= TEXTS
        with served(llm, reasoning_parser="qwen3") as server:
            yield server


def check_nothing_is_left(server: Served) -> None:
    """No request in the engine, no block, no response that is being generated."""
    server.wait_until_idle()
    wait_until(lambda: not server.api.responses.running)


def connect(server: Served, path: str, content: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode())
    return sock


def read(sock: socket.socket, number: int) -> int:
    """The number of bytes that came, `number` of them or all there are until the end."""
    received = 0
    while received < number and (more := sock.recv(min(number - received, 4096))):
        received += len(more)
        if more.endswith(b"0\r\n\r\n"):  # the end of a stream in chunks
            break
    return received


@pytest.mark.small(script=["long"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("script", list(TEXTS))
def test_at_any_event(tiny: Served, path: str, script: str, by_size: Any) -> None:
    most, step = by_size(5, 20, 200), by_size(2, 1, 1)
    for number in range(0, most, step):
        with open_stream(tiny, path, body(path, script)) as events:
            taken = sum(1 for _ in zip(range(number), events, strict=False))
        check_nothing_is_left(tiny)
        if taken < number:
            break  # it was the whole stream
    assert number > 0


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.size("full")
def test_at_any_byte_of_an_answer(tiny: Served, path: str, streams: bool, by_size: Any) -> None:
    """Also in the middle of the head, of a line and of a character."""
    content = json.dumps(body(path, "call", stream=streams)).encode()
    number, step = 0, by_size(500, 331, 7)
    while True:
        with connect(tiny, path, content) as sock:
            sock.sendall(content)
            is_over = read(sock, number) < number
            leave(sock)
        if number % 10 == 0 or is_over:
            check_nothing_is_left(tiny)
        if is_over or (not streams and number > 1000):
            break
        number += step
    assert number > 200


@pytest.mark.parametrize("path", PATHS)
def test_at_any_byte_of_a_request(tiny: Served, path: str, by_size: Any) -> None:
    """The engine never hears of it."""
    content = json.dumps(body(path, "long", stream=True)).encode()
    num_requests = len(tiny.api.llm.engine.output_processor.requests)
    for number in range(0, len(content), by_size(40, 3, 1)):
        with connect(tiny, path, content) as sock:
            sock.sendall(content[:number])
            leave(sock)
    assert len(tiny.api.llm.engine.output_processor.requests) == num_requests
    check_nothing_is_left(tiny)


def test_what_was_left_is_not_stored(tiny: Served) -> None:
    """It can neither be read nor continued, and its bytes count nowhere."""
    store, path = tiny.api.responses, "/v1/responses"
    before = len(store), store.num_bytes
    with open_stream(tiny, path, body(path, "long")) as events:
        response_id = next(events)["response"]["id"]
    check_nothing_is_left(tiny)
    assert store.get(response_id) is None
    assert (len(store), store.num_bytes) == before


@pytest.mark.size("full")
def test_many_leave_at_once(tiny: Served) -> None:
    """Those who stay get the whole answer."""
    path = "/v1/responses"
    with open_stream(tiny, path, body(path, "long")) as staying:
        next(staying)
        for number in range(12):
            other = PATHS[number % 3]
            with open_stream(tiny, other, body(other, "long")) as events:
                for _ in range(number // 3):
                    next(events)
        last = [*staying][-1]
    assert last["type"] == "response.completed"
    assert last["response"]["output"][0]["content"][0]["text"].rstrip() == TEXTS["long"].rstrip()
    check_nothing_is_left(tiny)
