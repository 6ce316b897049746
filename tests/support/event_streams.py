"""Streams of typed events, read as bytes from a server, and left at any of them."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from serving import JSON, Served


def parsed(content: bytes) -> list[dict[str, Any]]:
    """The data of events, each of which names its type twice; comments are left out."""
    events = []
    for part in content.decode().split("\n\n"):
        lines = [line for line in part.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines
            assert name.startswith("event: ") and data.startswith("data: ")
            event = json.loads(data.removeprefix("data: "))
            assert event["type"] == name.removeprefix("event: ")
            events.append(event)
    return events


def streamed(server: Served, path: str, body: Any, headers: Any = None) -> list[dict[str, Any]]:
    """The events of a stream, to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    content = json.dumps(body | {"stream": True}).encode()
    connection.request("POST", path, content, dict(headers or JSON))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status == 200, text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return parsed(text)


def of_chat(content: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream of chat completions."""
    lines = [line.removeprefix("data: ") for line in content.decode().split("\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]" and not line.startswith(":")]


def leave(sock: socket.socket) -> None:
    """Reset a connection."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


@contextmanager
def open_stream(server: Served, path: str, body: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a stream as they come; the connection is reset at the end of the block."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    content = json.dumps(body | {"stream": True}).encode()
    connection.request("POST", path, content, JSON)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    read = of_chat if path.startswith("/v1/chat") else parsed

    def events() -> Iterator[dict[str, Any]]:
        lines: list[bytes] = []
        for line in answer:
            if line == b"\n":
                yield from read(b"".join(lines))
                lines = []
            else:
                lines.append(line)

    sock = connection.sock
    try:
        yield events()
    finally:
        leave(sock)
        answer.close()
        connection.close()
