"""Ray Serve's handles without Ray: real replicas, in this process, that can be killed."""

import asyncio
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

from ray.exceptions import ActorDiedError
from ray.serve.exceptions import RequestCancelledError

from nanoserve.features.metrics import start_metrics
from nanoserve.serve.replicas.messages import FirstCall, NotThereError
from nanoserve.serve.replicas.replica import Replica

OPTIONS = {"num_kv_blocks": 100, "max_num_seqs": 4, "dtype": "float32", "prefix_cache_seed": 1}


class FakeServe:
    """Its handle is what a fleet is given."""

    deployment_name = "replicas"

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.replicas: dict[str, Replica] = {}  # candidates
        self.dead: set[str] = set()
        self.sent: list[tuple[str, str]] = []  # which method, to whom
        self.refuses_to_generate: Exception | None = None
        self.dies_of_requests = False
        self._tasks: dict[str, set[asyncio.Task]] = {}
        self._note = lambda names: None

    def start(self, name: str, is_exact: bool = False) -> None:
        measure = partial(start_metrics, "tiny", "vllm:")
        self.replicas[name] = Replica("tiny-qwen3", OPTIONS, measure, is_exact)
        self._tasks[name] = set()
        self._tell()

    def stop(self, name: str) -> None:
        """No candidate any more; what is there may end."""
        del self.replicas[name]
        self._tell()

    def kill(self, name: str) -> None:
        self.replicas.pop(name, None)
        self.dead.add(name)
        for task in list(self._tasks[name]):
            self.loop.call_soon_threadsafe(task.cancel, "killed")
        self._tell()

    def close(self) -> None:
        for replica in self.replicas.values():
            replica._thread.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def options(self, stream: bool) -> "FakeServe":
        return self

    def __getattr__(self, method: str) -> "FakeMethod":
        return FakeMethod(self, method)

    def _tell(self) -> None:
        self._note(set(self.replicas))

    def route(self, method: str, call: Any) -> tuple[str, Replica]:
        if isinstance(call, FirstCall):
            self._note = call.note_replicas
            self._tell()
        name = call.choose(list(self.replicas))
        if name is None:
            raise NotThereError("there is no such replica")
        self.sent.append((method, name))
        if method == "generate" and self.refuses_to_generate is not None:
            raise self.refuses_to_generate
        if method == "generate" and self.dies_of_requests:
            self.kill(name)
            raise ActorDiedError()
        return name, self.replicas[name]

    async def run(self, method: str, call: Any) -> Any:
        name, replica = self.route(method, call)
        task = asyncio.current_task()
        self._tasks[name].add(task)
        try:
            return await getattr(replica, method)(call.content)
        except asyncio.CancelledError as error:
            raise (ActorDiedError() if error.args else RequestCancelledError("a")) from None
        finally:
            self._tasks[name].discard(task)


class FakeMethod:
    def __init__(self, serve: FakeServe, method: str) -> None:
        self._serve, self._method = serve, method

    def remote(self, call: Any) -> Any:
        kind = FakeStream if self._method == "listen" else FakeResponse
        return kind(self._serve, self._method, call)


class FakeResponse:
    def __init__(self, serve: FakeServe, method: str, call: Any) -> None:
        self._future: Future[Any] = Future()
        self._task: asyncio.Task | None = None
        self._loop = serve.loop
        self._loop.call_soon_threadsafe(self._begin, serve.run(method, call))

    def _begin(self, work: Any) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task) -> None:
        if not self._future.done():
            error = RequestCancelledError("a") if task.cancelled() else task.exception()
            self._future.set_exception(error) if error else self._future.set_result(task.result())

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())

    def __await__(self) -> Any:
        return asyncio.wrap_future(self._future).__await__()


class FakeStream:
    """One item after another, across the two loops."""

    def __init__(self, serve: FakeServe, method: str, call: Any) -> None:
        self._serve, self._call = serve, call
        self._items: Any = None

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> Any:
        async def step() -> Any:
            name = self._place[0]
            if name in self._serve.dead:
                raise ActorDiedError()
            task = asyncio.current_task()
            self._serve._tasks[name].add(task)
            try:
                return await self._items.__anext__()
            except asyncio.CancelledError as error:
                if error.args:
                    raise ActorDiedError() from None
                return None  # nobody reads it any more
            finally:
                self._serve._tasks[name].discard(task)

        if self._items is None:
            self._place = self._serve.route("listen", self._call)
            self._items = self._place[1].listen(self._call.content)
        future = asyncio.run_coroutine_threadsafe(step(), self._serve.loop)
        return await asyncio.wrap_future(future)

    def cancel(self) -> None:
        if self._items is not None:
            asyncio.run_coroutine_threadsafe(self._items.aclose(), self._serve.loop)
