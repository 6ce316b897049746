"""A prefill engine in this process, behind the least of an HTTP server."""

import contextlib
import http.server
import json
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve import LLM, SamplingParams
from nanoserve.features.kv_transfer.calls import TransferStats
from nanoserve.features.kv_transfer.counters import counters
from nanoserve.features.kv_transfer.loads import ConnectorLoads

CONNECTOR = "socket"


@dataclass
class PrefillServer:
    llm: LLM
    url: str
    kv_ip: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)  # of the requests
    # Called with each body; returns a status. The engine gets it if that is None.
    before: Callable[[dict[str, Any]], int | None] = lambda body: None

    def answer(self, body: dict[str, Any]) -> int:
        self.bodies.append(body)
        status = self.before(body)
        if status is None:
            prompt = {"prompt_token_ids": body["prompt"]}
            if "cache_salt" in body:
                prompt["cache_salt"] = body["cache_salt"]
            params = SamplingParams(temperature=0, max_tokens=body["max_tokens"])
            self.llm.generate(prompt, params, use_tqdm=False)
        return status or 200

    def counter(self, name: str) -> int:
        return counter(self.llm, name)


def counter(llm: LLM, name: str) -> int:
    return {each.name: each.value for each in counters(llm.engine.extensions)}[name]


def stats_of(llm: LLM) -> TransferStats:
    (loads,) = [each for each in llm.engine.extensions if isinstance(each, ConnectorLoads)]
    return loads.stats


def num_open_leases(llm: LLM) -> int:
    """Leases of a prefill engine that have not ended."""
    ends = ("confirmed", "expired", "lost")
    ended = sum(counter(llm, f"kv_lease_{end}") for end in ends)
    return counter(llm, "kv_lease_requests") - ended


def wait_for_leases(llm: LLM, seconds: float = 10) -> None:
    """Wait until all leases of a prefill engine have ended."""
    until = time.monotonic() + seconds
    while num_open_leases(llm):
        assert time.monotonic() < until, "a lease is left"
        time.sleep(0.005)


@contextlib.contextmanager
def prefill_server(path: Path, **options: Any) -> Iterator[PrefillServer]:
    """A prefill engine whose blocks come from a Unix socket; `options` are the engine's."""
    folder = tempfile.mkdtemp(prefix="kv")  # a path of a socket must be short
    kv_ip = f"{folder}/kv"
    transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_producer", "kv_ip": kv_ip}
    transfer |= options.pop("kv_transfer_config", {})
    with LLM(path, kv_transfer_config=transfer, **options) as llm:
        server = PrefillServer(llm, "", kv_ip)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.keys.append(self.headers["Authorization"])
                length = int(self.headers["Content-Length"])
                status = server.answer(json.loads(self.rfile.read(length)))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b'{"answer": 1}')

            def log_message(self, *args: Any) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
            listening.handle_error = lambda *args: None  # a client has gone
            thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
            thread.start()
            server.url = f"http://127.0.0.1:{listening.server_port}"
            try:
                yield server
            finally:
                listening.shutdown()
                thread.join()
    shutil.rmtree(folder)


def decode_options(server: PrefillServer, **extra: Any) -> dict[str, Any]:
    """Options of a decode engine of this prefill server."""
    extra = {"prefill_server": server.url, "min_tokens": 8, "load_timeout": 20, **extra}
    transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_consumer", "kv_ip": server.kv_ip}
    return {"kv_transfer_config": transfer | {"kv_connector_extra_config": extra}}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
