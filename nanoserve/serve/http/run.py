"""The server process, with its socket, its signals and its shutdown."""

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn

from nanoserve.serve.http.app import ApiServer
from nanoserve.serve.http.certificate import CertificateFiles
from nanoserve.serve.http.connection import Connection
from nanoserve.serve.http.port import Listener, Port, SocketFile

logger = logging.getLogger(__name__)

_TICKS_OF_CERTIFICATES = 100  # of 0.1 s, between two looks at the files of a certificate
_FORCED_SECONDS = 2.0  # wait for open streams after a second Ctrl-C
_ALWAYS = (signal.SIGINT, signal.SIGTERM)
_ENDING = (*_ALWAYS, *(getattr(signal, name) for name in ("SIGHUP",) if hasattr(signal, name)))


def bind(host: str, port: int, uds: str | None = None) -> Listener:
    """Bind the socket for `Server` before the model is loaded, so that a port in use shows at once.

    uds: path of a Unix domain socket, instead of host and port.

    It resets connections until the server starts, so no client waits while the model loads. Its
    TCP options apply to each connection: the system closes one whose client has vanished or reads
    nothing. Raises `OSError`.
    """
    return Port(host, port) if uds is None else SocketFile(uds)


class Server(uvicorn.Server):
    """An HTTP server of uvicorn with a graceful shutdown.

    After SIGTERM, SIGINT (Ctrl-C) or SIGHUP (a closed terminal), new requests are rejected, running
    requests have `grace` seconds to finish, and the process exits with status 0. A second Ctrl-C
    does not wait. If the engine fails, the process exits with status 1.
    """

    def __init__(
        self,
        api: ApiServer,
        grace: float,
        access_log: bool,
        log_level: str | None = None,
        ssl_refresh: bool = False,
        **options: Any,
    ) -> None:
        config = uvicorn.Config(
            api.app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=log_level or ("info" if access_log else "warning"),
            access_log=access_log,
            server_header=False,
            limit_concurrency=api.settings.max_connections,
            backlog=2048,
            timeout_graceful_shutdown=int(grace) + 10,  # for responses that outlast `grace`
            **options,
        )
        super().__init__(config)
        self._api, self._grace, self._refreshes = api, grace, ssl_refresh
        self._certificate: CertificateFiles | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for bound in sockets or []:
            if isinstance(bound, Listener):
                bound.open()
        await super().startup(sockets)
        if not self.servers[0].sockets or self.servers[0].sockets[0] is None:
            # uvloop reports in this way that it cannot listen; asyncio raises.
            raise OSError(errno.EADDRINUSE, "the port is in use by another program")
        if self._refreshes:
            files = self.config.ssl_certfile, self.config.ssl_keyfile
            self._certificate = CertificateFiles(self.config.ssl, *map(str, files))
        message = f"{self._api.names[0]} at {self._address(self.servers[0].sockets[0])}"
        with contextlib.suppress(OSError):  # serve even if stderr is on a full disk
            print(message, file=sys.stderr, flush=True)

    def _address(self, bound: socket.socket) -> str:
        """Return the address of a listening socket, and the base URL of its clients."""
        scheme, root = "https" if self.config.is_ssl else "http", self._api.settings.root_path
        name = bound.getsockname()
        if isinstance(name, str):
            return f"unix:{name}  (OpenAI clients: {scheme}://localhost{root}/v1 over this socket)"
        host, port = name[:2]
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{root}"
        return f"{url}  (OpenAI clients: {url}/v1)"

    async def on_tick(self, counter: int) -> bool:
        if self._certificate is not None and counter % _TICKS_OF_CERTIFICATES == 0:
            self._certificate.refresh()
        return await super().on_tick(counter) or not self._api.llm.is_running

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._api.drain()
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals like uvicorn's method, but do not raise them again after the shutdown."""
        is_main = threading.current_thread() is threading.main_thread()  # only it gets signals
        with contextlib.ExitStack() as restoring:
            for number in _ENDING if is_main else ():
                if number not in _ALWAYS and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # started by nohup, which ignores SIGHUP
                before = signal.signal(number, self.handle_exit)
                restoring.callback(signal.signal, number, before)
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop, llm = asyncio.get_running_loop(), self._api.llm
        self._api.live.close()  # its streams would never end by themselves
        # Ends the remaining streams with an error that clients can recognise.
        late = loop.call_later(self._grace, loop.run_in_executor, None, llm.shutdown)
        await super().shutdown(sockets)
        late.cancel()
        if self.force_exit and self.server_state.tasks:
            # Streams end with that error here as well, but only `_FORCED_SECONDS` are allowed.
            ending = loop.run_in_executor(None, llm.shutdown)
            await asyncio.wait([ending, *self.server_state.tasks], timeout=_FORCED_SECONDS)
            await asyncio.sleep(0)


def serve(
    api: ApiServer, bound: socket.socket, grace: float, access_log: bool, **options: Any
) -> int:
    """Serve until a signal arrives or the engine fails; return the exit status of the process.

    options: of `Server`, for TLS and the log.
    """
    _raise_file_limit()
    server = Server(api, grace, access_log, **options)
    gc.collect()
    gc.freeze()  # loaded objects stay alive; a full collection of them would stall every stream
    server.run([bound])
    if api.llm.owner.error is not None:
        logger.critical("the engine has failed: %r", api.llm.owner.error)
        return 1
    return 0


def _raise_file_limit() -> None:
    """Raise the limit on open files to its maximum.

    Every connection is a file, and the default limit of many systems is 1,024.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
