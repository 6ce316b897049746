"""Addresses of the connector "socket": a TCP port, or the path of a Unix socket."""

import contextlib
import os
import socket
import stat
from typing import NamedTuple


class Address(NamedTuple):
    """An address. `host` with a slash is the path of a Unix socket, which has no port."""

    host: str
    port: int

    def __str__(self) -> str:
        return self.host if self.is_path else f"{self.host}:{self.port}"

    @property
    def is_path(self) -> bool:
        return "/" in self.host

    def connect(self, timeout: float) -> socket.socket:
        """Return a connected socket; raises `OSError`."""
        if not self.is_path:
            connected = socket.create_connection((self.host, self.port), timeout)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connected
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(timeout)
            connected.connect(self.host)
        except OSError:
            connected.close()
            raise
        return connected

    def listen(self) -> socket.socket:
        """Return a listening socket; raises `ValueError` if the address cannot be used."""
        try:
            if self.is_path:
                return self._listen_at_path()
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family, backlog=128)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ValueError(
                f"KV blocks cannot be sent from {self}: {reason}; choose kv_ip, "
                f"an address of this machine or the path of a Unix socket, and a free kv_port"
            ) from None

    def _listen_at_path(self) -> socket.socket:
        """Listen at a path, of which a killed process may have left its socket."""
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(self.host).st_mode):
                try:
                    self.connect(1).close()
                except ConnectionRefusedError:
                    os.unlink(self.host)
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(self.host)
            os.chmod(self.host, 0o600)
            listening.listen(128)
        except OSError:
            listening.close()
            raise
        return listening

    def remove(self) -> None:
        """Remove the path of a Unix socket that this process has listened at."""
        if self.is_path:
            with contextlib.suppress(OSError):
                os.unlink(self.host)
