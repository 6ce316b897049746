"""A port that is held from the first moment on, and serves nobody before it is opened."""

import contextlib
import selectors
import socket
import struct
import threading

_STALLED_SECONDS = 60  # that a client may take nothing of what was sent to it
_QUIET_SECONDS = 60  # after which one is asked whether it is still there
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER


class Port(socket.socket):
    """A listening socket. Until `open` is called, whoever connects is reset at once.

    A socket that is bound and does not listen holds nothing: with SO_REUSEADDR, which a server that
    is started anew needs, two can be bound to one port, and the later `listen` fails, a model's
    loading later. One that listens without accepting would keep clients waiting for that long.
    """

    def __init__(self, host: str, port: int) -> None:
        """Raises `OSError`, with the address in its text."""
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
                if hasattr(socket, name):  # macOS has not all of them
                    self.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            try:
                self.bind((host, port))
                self.listen(128)
            except OSError as error:
                told = f"{host} port {port}: {error.strerror}"
                raise OSError(error.errno, told) from None
            self.setblocking(False)
            self._woken, self._waker = socket.socketpair()
            self._thread = threading.Thread(target=self._refuse, name="nanoserve port", daemon=True)
            self._thread.start()
        except BaseException:
            super().close()
            raise

    def open(self) -> None:
        """Leave those who connect from here on to whoever accepts them. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waker.close()
            thread.join()

    def close(self) -> None:
        self.open()
        super().close()

    def _refuse(self) -> None:
        with self._woken, selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while all(key.fileobj is self for key, _ in selector.select()):
                with contextlib.suppress(OSError):  # it has gone by itself, or files are short
                    client, _ = self.accept()
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                    client.close()
