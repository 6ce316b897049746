"""Parse one HTTP/1.1 response (RFC 9112) that arrives in arbitrary pieces.

It supports only what a streaming client needs. A general client library spends more time on a chunk
than a fast server does, and takes that time from a server on the same machine.
"""

from collections.abc import Callable

_MAX_HEAD = 2**16  # bytes
_MAX_CHUNK = 2**24


class Response:
    """An HTTP response. Pass received bytes to `feed` until `is_complete`.

    The body is kept as it was received, `pieces[i]` at `times[i]`, and is parsed after the
    measurement. A body without a length ends with its connection, for which `end` is called.
    """

    def __init__(self) -> None:
        self.status, self.reason = 0, ""
        self.headers: dict[str, str] = {}
        # Two lists of plain values, which the garbage collector need not traverse.
        self.times: list[float] = []
        self.pieces: list[bytes] = []
        self.is_complete = False
        self._left = b""
        self._missing = 0  # bytes of a body with a length
        self._read: Callable[[bytes, float], bytes] = self._read_head

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def keeps_alive(self) -> bool:
        return self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes, now: float) -> None:
        """Add received bytes. Raises `ValueError` if they are not HTTP/1.1 or follow its end."""
        data = self._left + data if self._left else data
        self._left = self._read(data, now)
        if self.is_complete and self._left:
            raise ValueError("bytes after the end of the response")

    def end(self) -> None:
        """Handle the closing of the connection.

        Marks the response complete, or raises `ValueError` if it was cut short.
        """
        if self._read != self._read_to_the_end:
            raise ValueError("connection closed before the response was complete")
        self.is_complete = True

    def _read_head(self, data: bytes, now: float) -> bytes:
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            if len(data) > _MAX_HEAD:
                raise ValueError(f"the head of the response is longer than {_MAX_HEAD} bytes")
            return data
        status, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = status.partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0") or not status[:3].isdigit():
            raise ValueError(f"no HTTP/1.1: {head[:60]!r}")
        self.status, self.reason = int(status[:3]), status[4:]
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        if version == "HTTP/1.0":
            self.headers.setdefault("connection", "close")
        if 100 <= self.status < 200:  # an interim response
            return self._read_head(rest, now)
        self._read = self._body_reader()
        return self._read(rest, now)

    def _body_reader(self) -> Callable[[bytes, float], bytes]:
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return self._read_chunks
        length = self.headers.get("content-length")
        if length is None:
            self.headers["connection"] = "close"
            return self._read_to_the_end
        if not (length.isascii() and length.isdigit()):
            raise ValueError(f"Content-Length: {length[:60]!r}")
        self._missing = int(length)
        return self._read_length

    def _keep(self, data: bytes, now: float) -> None:
        if data:
            self.times.append(now)
            self.pieces.append(data)

    def _read_to_the_end(self, data: bytes, now: float) -> bytes:
        self._keep(data, now)
        return b""

    def _read_length(self, data: bytes, now: float) -> bytes:
        self._keep(data[: self._missing], now)
        rest = data[self._missing :]
        self._missing = max(0, self._missing - len(data))
        self.is_complete = self._missing == 0
        return rest

    def _read_chunks(self, data: bytes, now: float) -> bytes:
        """Read complete chunks. Returns the remaining bytes, which begin the next chunk."""
        body, start = [], 0
        while (line_end := data.find(b"\r\n", start)) >= 0:
            size = _chunk_size(data[start:line_end])
            if size == 0:  # then trailers, if any, and an empty line
                last = data.find(b"\r\n\r\n", line_end)
                if last >= 0:
                    start, self.is_complete = last + 4, True
                break
            chunk = line_end + 2
            if len(data) < chunk + size + 2:
                break
            if data[chunk + size : chunk + size + 2] != b"\r\n":
                raise ValueError("a chunk is longer than its size")
            body.append(data[chunk : chunk + size])
            start = chunk + size + 2
        self._keep(b"".join(body), now)
        rest = data[start:]
        if len(rest) > _MAX_CHUNK + _MAX_HEAD:
            raise ValueError("a chunk without an end")
        return rest


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()  # extensions are ignored
    try:
        size = int(digits, 16)
    except ValueError:
        raise ValueError(f"the size of a chunk is {line[:60]!r}") from None
    if not 0 <= size <= _MAX_CHUNK:
        raise ValueError(f"the size of a chunk is {line[:60]!r}")
    return size
