"""Run a batch job with several engines. Ray Data maps the input over actors with one engine each.

Only the positions of lines and their answers are sent between processes. Each replica reads the
input itself, a chunk of lines at a time, so the file must exist on every machine.
"""

import asyncio
import inspect
import json
import logging
import math
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from nanoserve.compat.options import engine_config
from nanoserve.config import EngineConfig
from nanoserve.serve.batch.request_executor import Answered, Answerer
from nanoserve.serve.batch.requests import Todo
from nanoserve.serve.batch.restarts import RestartingAnswerer
from nanoserve.utils.checks import require

_LEAST_LINES, _MOST_LINES = 8, 1024  # per chunk: a Ray task costs about 10 ms
_CHUNKS_PER_REPLICA = 8  # at least, so that all replicas finish at about the same time
_LINES_PER_SLOT = 2  # concurrent lines of a replica, as in `here`
_MOST_CHUNKS = 32  # concurrent chunks of a replica, each in a thread


class Replica:
    """The state of a Ray Data actor, an engine. Chunks overlap to keep the engine busy.

    A failure of the engine is returned as the result of line 0, because Ray would print a hundred
    lines for a raised error, or retry.
    """

    def __init__(self, path: Path, num_bytes: int, salt: str, answerer: dict[str, Any]) -> None:
        self._path, self._salt, self._failure = path, salt, ""
        self._running: set[asyncio.Task[Answered]] = set()
        try:
            is_there = path.is_file() and path.stat().st_size == num_bytes
            require(is_there, f"{path} must exist on every machine, with the same content")
            self._answerer = RestartingAnswerer(partial(Answerer, **answerer))
        except (ValueError, OSError, RuntimeError) as error:
            self._failure = str(error)

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        (places,) = batch["places"]
        try:
            done = await self._answers(json.loads(places))
        except (ValueError, OSError, RuntimeError) as error:
            done = [Answered(0, b"", str(error))]
        # Strings, because numpy strips zeros at the end of bytes as padding.
        contents = [answered.content.decode() for answered in done]
        yield {
            "number": np.array([answered.number for answered in done]),
            "content": np.array(contents, dtype=object),
            "error": np.array([answered.error for answered in done], dtype=object),
        }

    async def _answers(self, places: list[tuple[int, int]]) -> list[Answered]:
        require(not self._failure, self._failure)
        lines = Todo(places).lines(self._path, self._salt)
        tasks = [asyncio.ensure_future(self._answerer.answer(line)) for line in lines]
        self._running.update(tasks)  # neither Ray nor the event loop keeps references to them
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            self._running.difference_update(tasks)


def answer_on_ray(
    path: Path,
    salt: str,
    todo: Todo,
    answerer: dict[str, Any],
    take: Callable[[Answered], None],
    replicas: int,
    address: str | None,
) -> int:
    """Answer the lines in `todo` on replicas, and pass each answer to `take`.

    answerer: arguments of `Answerer`. address: of a Ray cluster; None starts Ray on this machine,
    for as long as this process runs. salt: see `parse`.

    Returns the signal that ended the job early, or 0. A signal drops unwritten answers. Raises
    `ValueError` if Ray lacks resources for the replicas, and `RuntimeError` if a replica fails.
    """
    options = answerer["options"]
    for name in ("trace", "kv_events_config", "kv_offloading_path"):
        require(name not in options, f"{name} needs a single engine; remove it or --replicas")
    config = engine_config(answerer["model"], options)
    connector = config.kv_connector
    pairs = "the KV connector 'socket' needs a single engine; remove it or --replicas"
    require(connector is None or connector.kv_connector != "socket", pairs)
    backend = config.distributed_executor_backend
    message = (
        f"distributed_executor_backend={backend!r} must be 'mp' with --replicas: all ranks of "
    )
    require(backend in (None, "mp"), f"{message}a replica run on one machine")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray sends usage statistics
    import ray
    from ray.data import DataContext

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    cores = os.cpu_count() or 1
    where: dict[str, Any] = {}
    if not address:
        where = {"num_cpus": max(cores, replicas), "include_dashboard": False}
    ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **where)
    try:
        DataContext.get_current().enable_progress_bars = False
        share = config.num_threads or (1 if address else max(1, cores // replicas))
        needs = _resources(config, share, replicas, ray.cluster_resources())
        chunks = _chunks(todo, config.max_num_seqs, replicas)
        enough = math.ceil(_LINES_PER_SLOT * config.max_num_seqs / len(chunks[0]))
        at_once = min(max(2, enough), _MOST_CHUNKS)
        items = [{"places": json.dumps(places)} for places in chunks]
        batches = (
            ray.data.from_items(items, override_num_blocks=len(items))
            .map_batches(
                Replica,
                batch_size=None,
                fn_constructor_args=(path.resolve(), path.stat().st_size, salt, answerer),
                **_pool(replicas, at_once),
                **needs,
            )
            .iter_batches(batch_size=None, prefetch_batches=0)
        )
        return _take_all(batches, take)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise RuntimeError(f"a replica has failed: {str(cause).splitlines()[0]}") from error
    finally:
        ray.shutdown()


def _chunks(todo: Todo, max_num_seqs: int, replicas: int) -> list[list[tuple[int, int]]]:
    """Split the positions of the lines into chunks, each of which is sent to a replica at once."""
    fair = len(todo) // (replicas * _CHUNKS_PER_REPLICA)
    size = max(1, min(fair, max(_LEAST_LINES, max_num_seqs // 2), _MOST_LINES))
    return [todo.places(start, start + size) for start in range(0, len(todo), size)]


def _resources(
    config: EngineConfig, num_cpus: int, replicas: int, there: dict[str, float]
) -> dict[str, Any]:
    """Return the Ray resources of a replica.

    Raises `ValueError` if Ray has too few for all replicas, for which it would wait forever.
    """
    needs = {"num_cpus": num_cpus, "num_gpus": 0}
    if config.device == "cuda" or (config.device == "auto" and there.get("GPU")):
        needs["num_gpus"] = config.tensor_parallel_size * config.pipeline_parallel_size
    for name, each in (("CPU", needs["num_cpus"]), ("GPU", needs["num_gpus"])):
        has = there.get(name, 0)
        message = (
            f"replicas={replicas} need {each} {name}s each, but Ray has {has:g}; use fewer replicas"
        )
        require(replicas * each <= has, message)
    return needs


def _pool(replicas: int, at_once: int) -> dict[str, Any]:
    """Return the arguments for a pool of `replicas` actors with `at_once` concurrent chunks each.

    The option for concurrent chunks has another name in older versions of Ray.
    """
    from ray.data import ActorPoolStrategy

    pool: dict[str, Any] = {"size": replicas, "max_tasks_in_flight_per_actor": at_once}
    others = {}
    name = "max_concurrent_calls_per_actor"
    if name in inspect.signature(ActorPoolStrategy).parameters:
        pool[name] = at_once
    else:
        others["max_concurrency"] = at_once
    return {"compute": ActorPoolStrategy(**pool), **others}


def _take_all(batches: Iterable[dict[str, Any]], take: Callable[[Answered], None]) -> int:
    """Pass the answers of all batches to `take`; return the signal that ended it early, or 0.

    A signal interrupts the wait for a batch, but not the writing of one.
    """
    stopped_by, is_writing = 0, False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped_by
        stopped_by = number
        if not is_writing:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for batch in batches:
            is_writing = True
            columns = (batch[name] for name in Answered._fields)
            for number, content, error in zip(*columns, strict=True):
                require(number > 0, f"a replica has failed: {error}")
                take(Answered(int(number), content.encode(), error))
            is_writing = False
            if stopped_by:
                break
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return stopped_by
