"""Send requests to one server over reusable connections."""

import asyncio
import re
import ssl
import time
from typing import cast
from urllib.parse import urlsplit

from nanoserve.cli.bench.serve.response import Response
from nanoserve.utils.checks import require, shown

_IDLE = 1.0  # seconds after which an idle connection is not reused: some servers close it soon


class Connection(asyncio.Protocol):
    """A connection with one request at a time. Bytes are time-stamped when they are received."""

    def __init__(self) -> None:
        self.is_open, self.idle_since = False, 0.0
        self._transport: asyncio.Transport
        self._response: Response | None = None
        self._waiter: asyncio.Future[Response]

    async def exchange(self, request: bytes, timeout: float) -> Response:
        """Send a request and return its response.

        Raises `TimeoutError` after `timeout` seconds, `OSError` if the connection is lost, and
        `ValueError` if the response is not HTTP. The connection is then closed.
        """
        loop = asyncio.get_running_loop()
        self._response, self._waiter = Response(), loop.create_future()
        timer = loop.call_later(timeout, self._fail, TimeoutError(f"no end after {timeout:g} s"))
        try:
            self._transport.write(request)
            return await self._waiter
        finally:
            timer.cancel()
            self._response = None

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._response is None or self._waiter.done():
            self.close()  # bytes without a request
            return
        try:
            self._response.feed(data, now)
        except ValueError as error:
            self._fail(error)
            return
        if self._response.is_complete:
            self._finish(self._response)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._response is None or self._waiter.done():
            return
        if not self._response.status:
            self._fail(error or ConnectionResetError("connection closed without a response"))
            return
        try:
            self._response.end()
        except ValueError as dropped:
            self._fail(ConnectionResetError(str(dropped)))
        else:
            self._finish(self._response)

    def _finish(self, response: Response) -> None:
        if not response.keeps_alive:
            self.close()
        self.idle_since = time.perf_counter()
        self._waiter.set_result(response)

    def _fail(self, error: Exception) -> None:
        self.close()
        if not self._waiter.done():
            self._waiter.set_exception(error)


class Server:
    """A server at `http://host:port/v1`, with or without the `/v1`.

    As many connections as concurrent requests are kept and reused. Proxies and redirects are not
    followed, because they could send the API key elsewhere.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        require(parts.username is None, "--url must not have a user name; use --api-key")
        given = f"--url {shown(url)}"
        is_plain = url.isascii() and url.isprintable() and " " not in url
        is_http = parts.scheme in ("http", "https") and parts.hostname
        require(bool(is_plain and is_http), f"{given} must be like http://127.0.0.1:8000/v1")
        require(not (parts.query or parts.fragment), f"{given} must end with its path")
        is_key = api_key is None or (api_key.isascii() and api_key.isprintable())
        require(is_key, "the API key must have only printable ASCII characters")
        self.path = parts.path.rstrip("/")
        if not re.search(r"/v\d+$", self.path):
            self.path += "/v1"
        self.url = f"{parts.scheme}://{parts.netloc}{self.path}"
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._name = self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._timeout = timeout
        self._head = f"Host: {parts.netloc}\r\nAccept: */*\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"
        self._idle: list[Connection] = []

    def request(self, path: str, body: bytes | None = None) -> bytes:
        """Return the bytes of a request, which is a POST if it has a body."""
        method = "GET" if body is None else "POST"
        head = f"{method} {self.path}/{path} HTTP/1.1\r\n{self._head}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"{head}\r\n".encode("ascii") + (body or b"")

    async def send(self, request: bytes) -> Response:
        """Send a request over an idle or new connection; raises as `Connection.exchange` does."""
        connection = await self._connection()
        response = await connection.exchange(request, self._timeout)
        if connection.is_open:
            self._idle.append(connection)
        return response

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connection(self) -> Connection:
        """Return the latest used connection, which the server will close last, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.perf_counter() - connection.idle_since < _IDLE:
                return connection
            connection.close()
        loop, name = asyncio.get_running_loop(), self._name if self._tls else None
        making = loop.create_connection(
            Connection, self._host, self._port, ssl=self._tls, server_hostname=name
        )
        try:
            transport, connection = await asyncio.wait_for(making, self._timeout)
        except asyncio.TimeoutError:  # Python 3.10's own
            raise TimeoutError(f"no connection after {self._timeout:g} s") from None
        self._host = transport.get_extra_info("peername")[0]  # a name look-up takes time
        return connection
