"""A listening socket, bound before the model is loaded, that rejects clients until opened."""

import contextlib
import selectors
import socket
import struct
import threading

_STALLED_SECONDS = 60  # for which a client may leave sent data unacknowledged
_QUIET_SECONDS = 60  # of silence before TCP keep-alive probes are sent
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER


class Port(socket.socket):
    """A listening socket that resets every connection until `open` is called.

    A socket that is bound but does not listen does not reserve its port: with SO_REUSEADDR, which a
    restarted server needs, two sockets can be bound to one port, and the second `listen` fails only
    after its model has been loaded. A socket that listens without accepting would keep clients
    waiting for as long as the model loads.
    """

    def __init__(self, host: str, port: int) -> None:
        """Bind and listen. Raises `OSError`, with the address in its text."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__(family, socket.SOCK_STREAM)
        self._thread: threading.Thread | None = None
        try:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (
                ("TCP_KEEPIDLE", _QUIET_SECONDS),
                ("TCP_KEEPINTVL", 10),
                ("TCP_KEEPCNT", 6),
                ("TCP_USER_TIMEOUT", 1000 * _STALLED_SECONDS),  # in milliseconds
            ):
                if hasattr(socket, name):  # macOS lacks some of them
                    self.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            try:
                self.bind((host, port))
                self.listen(128)
            except OSError as error:
                message = f"{host} port {port}: {error.strerror}"
                raise OSError(error.errno, message) from None
            self.setblocking(False)
            self._woken, self._waker = socket.socketpair()
            self._thread = threading.Thread(target=self._reject, name="nanoserve port", daemon=True)
            self._thread.start()
        except BaseException:
            super().close()
            raise

    def open(self) -> None:
        """Stop resetting connections, so that the owner can accept them. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waker.close()
            thread.join()

    def close(self) -> None:
        self.open()
        super().close()

    def _reject(self) -> None:
        with self._woken, selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while all(key.fileobj is self for key, _ in selector.select()):
                with contextlib.suppress(OSError):  # the client left, or no file is available
                    client, _ = self.accept()
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                    client.close()
