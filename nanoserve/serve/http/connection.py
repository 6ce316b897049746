"""uvicorn's connection, with limits on what comes before a request reaches the application."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST_HEADER_BYTES = 2**16
_HEADER_SECONDS = 10.0


class Connection(HttpToolsProtocol):
    """Whoever connects has to send a request, its headers within some seconds and not too many.

    uvicorn's own parser keeps headers of any length in memory, and waits for their end for ever.

    What a client sends behind a request, while that is being answered, may be the next one or
    anything else. A refusal of it waits until the answer is complete: nothing may be written into
    the middle of that.
    """

    _num_bytes = 0  # since the first one of the request whose headers have not ended
    _is_waiting = True  # for the end of some headers
    _is_refused = False
    _late_refusal: bytes | None = None  # a status that is to follow the answer under way
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
        if self._is_answering:  # the next of several requests that came at once
            return
        if self._late_refusal is not None:
            self._refuse(self._late_refusal)
        elif self._is_waiting:
            self._unset_keepalive_if_required()
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be parsed. Called by uvicorn, which would cut an answer under way.

        It may also be the rest of a body that an answer still waits for: then nothing else comes.
        """
        if self._is_answering and (self.pipeline or not self.cycle.more_body):
            self._refuse(b"400 Bad Request")
        else:
            super().send_400_response(msg)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self._is_waiting:
            self._num_bytes += len(data)
            if self._num_bytes > _MOST_HEADER_BYTES:
                self._refuse(b"431 Request Header Fields Too Large")

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
        self._timer = self.loop.call_later(_HEADER_SECONDS, self._refuse, late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: bytes) -> None:
        """Answer, and listen for another second: to close at once what still receives would reset
        the connection, and the answer would be lost."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        self._is_refused = True
        if self._is_answering:
            self._late_refusal = status
            return
        self._unset_keepalive_if_required()
        head = b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        self.transport.write(head)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(1, self.transport.close)
