"""A listening socket, bound before the model is loaded, that rejects clients until opened."""

import contextlib
import errno
import os
import selectors
import socket
import stat
import struct
import threading
from typing import Any

_STALLED_SECONDS = 60  # for which a client may leave sent data unacknowledged
_QUIET_SECONDS = 60  # of silence before TCP keep-alive probes are sent
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER


class Listener(socket.socket):
    """A listening socket that resets every connection until `open` is called.

    A socket that is bound but does not listen does not reserve its address: with SO_REUSEADDR,
    which a restarted server needs, two sockets can be bound to one port, and the second `listen`
    fails only after its model has been loaded. A socket that listens without accepting would keep
    clients waiting for as long as the model loads.
    """

    def __init__(self, family: socket.AddressFamily, address: Any, name: str) -> None:
        """Bind and listen. Raises `OSError`, with the `name` of the address in its text."""
        super().__init__(family, socket.SOCK_STREAM)
        self._thread: threading.Thread | None = None
        try:
            self._set_options()
            try:
                self.bind(address)
                self.listen(128)
            except OSError as error:
                raise OSError(error.errno, f"{name}: {error.strerror or error}") from None
            self.setblocking(False)
            self._woken, self._waker = socket.socketpair()
            self._thread = threading.Thread(target=self._reject, name="nanoserve port", daemon=True)
            self._thread.start()
        except BaseException:
            super().close()
            raise

    def _set_options(self) -> None:
        """Set the options of the socket and of its connections."""

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


class Port(Listener):
    """A port of an address of this machine."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__(family, (host, port), f"{host} port {port}")

    def _set_options(self) -> None:
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


class SocketFile(Listener):
    """A Unix domain socket, for clients and proxies on this machine (`--uds`).

    Its file is created with the permissions of the umask, and removed by `close`. A file that a
    killed server has left is replaced.
    """

    def __init__(self, path: str) -> None:
        """Bind and listen. Raises `OSError` for a path in use, or of a file that is no socket."""
        self._path, self._file = path, None
        _remove_stale(path)
        super().__init__(socket.AF_UNIX, path, path)
        self._file = _identity(path)

    def close(self) -> None:
        super().close()
        own, self._file = self._file, None
        with contextlib.suppress(OSError):
            if own is not None and own == _identity(self._path):  # else another server's by now
                os.unlink(self._path)


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _remove_stale(path: str) -> None:
    """Remove the socket at `path` if no server listens to it."""
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise OSError(errno.EEXIST, f"{path}: the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise OSError(error.errno, f"{path}: {error.strerror}") from None
        else:
            raise OSError(errno.EADDRINUSE, f"{path}: another server listens to this socket")
