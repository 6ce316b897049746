"""A server in this process, so that a test can look at its engine."""

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nanoserve.serve.async_llm import AsyncLLM


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    """Fails with what was waited for."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, is_so
        time.sleep(0.005)


def is_idle(llm: AsyncLLM) -> bool:
    """Whether nothing of any request is left: no sequence, no block, no output, no reader."""
    engine = llm.engine
    blocks = engine.scheduler.block_manager
    return (
        not engine.has_unfinished_requests()
        and not engine.output_processor.requests
        and blocks.num_free_blocks == blocks.num_blocks
        and not llm.owner._orders.qsize()
        and not [*llm._readers]
    )


@dataclass
class Served:
    url: str  # without /v1
    api: Any

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait_until_idle(self) -> None:
        wait_until(lambda: is_idle(self.api.llm))


JSON = {"content-type": "application/json"}


def ask(
    server: Served, path: str, body: Any, headers: Any = None, method: str = "POST"
) -> tuple[int, http.client.HTTPMessage, Any]:
    """The status, the headers and the JSON of an answer, or its bytes if it is none."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, content, dict(headers or JSON))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    is_json = answer.headers.get("content-type") == "application/json"
    return answer.status, answer.headers, json.loads(text) if is_json else text


@contextmanager
def served(llm: AsyncLLM, grace: float = 5, **settings: Any) -> Iterator[Served]:
    """`llm` behind HTTP on a port of its own."""
    from nanoserve.serve.http.app import ApiServer
    from nanoserve.serve.http.settings import ServerSettings

    api = ApiServer(llm, ServerSettings(**{"served_model_name": ["tiny"], **settings}))
    with behind_http(api, grace) as one:
        yield one


@contextmanager
def behind_http(api: Any, grace: float = 5) -> Iterator[Served]:
    """An `ApiServer`."""
    from nanoserve.serve.http.run import Server, bind

    with bind("127.0.0.1", 0) as bound:
        server = Server(api, grace, access_log=False)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield Served(f"http://127.0.0.1:{bound.getsockname()[1]}", api)
        finally:
            server.should_exit = True
            thread.join()
