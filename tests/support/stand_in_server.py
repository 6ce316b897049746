"""A server in a thread that answers as it is told, byte by byte and when it is told."""

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

# Seconds to wait, and then what to write; None drops the connection.
Steps = Iterator[tuple[float, bytes | None]]

STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(value).encode()


def plain(status: str, value: Any) -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def said(text: str | None, finish_reason: str | None = None) -> bytes:
    """A chunk of a chat."""
    delta = {"role": "assistant"} if text is None else {"content": text}
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def usage(num_in: int, num_out: int) -> bytes:
    counted = {"prompt_tokens": num_in, "completion_tokens": num_out}
    return event({"choices": [], "usage": counted})


def num_words(body: dict[str, Any]) -> int:
    prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    return len(prompt.split() if isinstance(prompt, str) else prompt)


def talk(
    body: dict[str, Any], ttft: float = 0.0, gap: float = 0.0, tokens_a_chunk: int = 1
) -> Steps:
    """As it should be: a role, content at these times, a reason, the usage, the end.

    A word is two tokens, and the template seven.
    """
    num_tokens = body["max_tokens"]
    yield 0.0, STREAM + chunk(said(None))
    sent = 0
    while sent < num_tokens:
        yield gap if sent else ttft, chunk(said("word "))
        sent += tokens_a_chunk
    yield 0.0, chunk(said("", "length"))
    yield 0.0, chunk(usage(2 * num_words(body) + 7, num_tokens)) + chunk(DONE) + END


class StandIn:
    """`with StandIn(answer) as server:` listens at `server.url`; `answer(body, number)` says how.

    What it was asked is in `bodies` and `heads`; `GET` is answered with names of models. `times`
    has of each request when it came, and when content was written: on a busy machine a sleep is
    longer than it should be.
    """

    def __init__(
        self, answer: Callable[[dict[str, Any], int], Steps], tls: ssl.SSLContext | None = None
    ) -> None:
        self.answer, self.tls, self.num_connections = answer, tls, 0
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.times: list[list[float]] = []
        self._loop, self._started = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "StandIn":
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        listening = asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        server = self._loop.run_until_complete(listening)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has left, or the test is over
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        if head.startswith("GET"):
            writer.write(plain("200 OK", {"data": [{"id": "stand-in"}, {"id": "other"}]}))
            return True
        length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        times = [time.perf_counter()]
        self.times.append(times)
        for wait, data in self.answer(body, len(self.bodies) - 1):
            await asyncio.sleep(wait)
            if data is None:
                return False
            times += [time.perf_counter()] * (b"word" in data)
            writer.write(data)
            await writer.drain()
        return True
