"""A server as a process: its socket, its signals, its end."""

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

import uvicorn

from nanoserve.serve.http.app import ApiServer
from nanoserve.serve.http.connection import Connection
from nanoserve.serve.http.port import Port

logger = logging.getLogger(__name__)

_FORCED_SECONDS = 2.0  # that a second Ctrl-C still waits
_ALWAYS = (signal.SIGINT, signal.SIGTERM)
_ENDING = (*_ALWAYS, *(getattr(signal, name) for name in ("SIGHUP",) if hasattr(signal, name)))


def bind(host: str, port: int) -> Port:
    """A socket for `Server`, held before a model is loaded: a port in use shows at once.

    It refuses whoever connects until the server starts, so nobody waits for a model that is being
    loaded. What is set here holds for each connection. One whose client is gone, without a word or
    with all that was sent to it unread, is ended by the system. Raises `OSError`.
    """
    return Port(host, port)


class Server(uvicorn.Server):
    """SIGTERM, Ctrl-C, or SIGHUP as when a terminal is closed: nothing new begins, what runs has
    `grace` seconds to end, and then the process exits with 0. A second Ctrl-C does not wait. If the
    engine dies, it exits with 1."""

    def __init__(self, api: ApiServer, grace: float, access_log: bool, **options: object) -> None:
        config = uvicorn.Config(
            api.app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="info" if access_log else "warning",
            access_log=access_log,
            server_header=False,
            limit_concurrency=api.settings.max_connections,
            backlog=2048,
            timeout_graceful_shutdown=int(grace) + 10,  # for what does not heed the end of ours
            **options,
        )
        super().__init__(config)
        self._api, self._grace = api, grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for bound in sockets or []:
            if isinstance(bound, Port):
                bound.open()
        await super().startup(sockets)
        if not self.servers[0].sockets or self.servers[0].sockets[0] is None:
            # uvloop's way to say that it cannot listen; asyncio's own raises.
            raise OSError(errno.EADDRINUSE, "the port is in use by another program")
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        scheme = "https" if self.config.is_ssl else "http"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        told = f"{self._api.names[0]} at {address}  (OpenAI clients: {address}/v1)"
        with contextlib.suppress(OSError):  # a full disk, say, is no reason not to serve
            print(told, file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or not self._api.llm.is_running

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._api.drain()
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, this one does not raise the signal again when all is over."""
        is_main = threading.current_thread() is threading.main_thread()  # where signals arrive
        with contextlib.ExitStack() as restoring:
            for number in _ENDING if is_main else ():
                if number not in _ALWAYS and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # as nohup wants it
                before = signal.signal(number, self.handle_exit)
                restoring.callback(signal.signal, number, before)
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop, llm = asyncio.get_running_loop(), self._api.llm
        self._api.live.close()  # it has no end of its own to wait for
        # The streams that are left then end with an error, which their clients can tell.
        late = loop.call_later(self._grace, loop.run_in_executor, None, llm.shutdown)
        await super().shutdown(sockets)
        late.cancel()
        if self.force_exit and self.server_state.tasks:
            # Streams end with that error, too, unless it takes longer than anybody wants to wait.
            ending = loop.run_in_executor(None, llm.shutdown)
            await asyncio.wait([ending, *self.server_state.tasks], timeout=_FORCED_SECONDS)
            await asyncio.sleep(0)


def serve(api: ApiServer, bound: socket.socket, grace: float, access_log: bool, **tls: str) -> int:
    """Serve until a signal comes; the exit status of the process."""
    _raise_file_limit()
    server = Server(api, grace, access_log, **tls)
    gc.collect()
    gc.freeze()  # what is loaded stays; to look through all of it again would halt every stream
    server.run([bound])
    if api.llm.owner.error is not None:
        logger.critical("the engine has died: %r", api.llm.owner.error)
        return 1
    return 0


def _raise_file_limit() -> None:
    """Every connection is a file, and many systems allow 1,024 unless one asks for more."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
