"""An HTTP connection of uvicorn, with limits on the size and the arrival time of headers."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST_HEADER_BYTES = 2**16
_HEADER_SECONDS = 10.0


class Connection(HttpToolsProtocol):
    """A connection that closes if headers are too long (64 KiB) or incomplete after 10 seconds.

    uvicorn's own parser keeps headers of any length in memory, and waits forever for their end.

    A client may send more data, valid or not, while its request is still being answered. An error
    response to that data waits until the current response is complete, which it must not corrupt.
    """

    _num_bytes = 0  # bytes received since the beginning of the unfinished headers
    _is_waiting = True  # True until the headers are complete
    _is_rejected = False
    _late_error: bytes | None = None  # status of an error to send after the current response
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._is_waiting = False
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answering:  # the next of several pipelined requests
            return
        if self._late_error is not None:
            self._reject(self._late_error)
        elif self._is_waiting:
            self._unset_keepalive_if_required()
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        """Reject data that cannot be parsed, without cutting off the current response.

        uvicorn calls this method, whose original would cut off the current response. If the invalid
        data is the rest of a body that the application still waits for, the original is right.
        """
        if self._is_answering and (self.pipeline or not self.cycle.more_body):
            self._reject(b"400 Bad Request")
        else:
            super().send_400_response(msg)

    def data_received(self, data: bytes) -> None:
        if self._is_rejected:
            return
        super().data_received(data)
        if self._is_waiting:
            self._num_bytes += len(data)
            if self._num_bytes > _MOST_HEADER_BYTES:
                self._reject(b"431 Request Header Fields Too Large")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._stop_timer()
        self._num_bytes, self._is_waiting = 0, True
        if not self._is_answering:
            self._start_timer()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        late = b"408 Request Timeout"
        self._timer = self.loop.call_later(_HEADER_SECONDS, self._reject, late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _reject(self, status: bytes) -> None:
        """Send an error status, and close the connection a second later.

        Closing at once, while data still arrives, would reset the connection and lose the response.
        """
        self._stop_timer()
        if self.transport.is_closing():
            return
        self._is_rejected = True
        if self._is_answering:
            self._late_error = status
            return
        self._unset_keepalive_if_required()
        head = b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        self.transport.write(head)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(1, self.transport.close)
