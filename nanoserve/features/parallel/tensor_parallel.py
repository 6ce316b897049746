"""Tensor parallelism splits one model over several processes, with batches in shared memory.

Rank 0 is the caller's process. It runs the engine loop, so per-request objects such as logits
processors stay in this process. The other ranks run the same model code on every batch, up to the
logits, with two all-reduces per layer (Shoeybi et al. 2019, "Megatron-LM").

Rank 0 packs each batch into shared memory, from which all ranks read it. Rank 0 announces the step
by writing its number to a pipe per worker. The pipe also acts as a memory barrier for the shared
batch, and EOF notifies each side that its peer has died.
"""

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.weight_files import Weights
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import ForwardInputs, SampleInputs, StepResult
from nanoserve.engine.interrupts import DeferredInterrupt
from nanoserve.features.parallel.process_group import (
    LOOPBACK,
    Group,
    anonymous_file,
    serve_store,
    shared_memory,
)
from nanoserve.features.parallel.ranks import join_ranks
from nanoserve.features.parallel.worker_processes import (
    CHECK_WEIGHTS,
    COPY_BLOCKS,
    DROP_WEIGHTS,
    LOAD_WEIGHTS,
    REPLACE_WEIGHTS,
    TAKE_EMBEDS,
    USE_ADAPTERS,
    USE_WEIGHTS,
    WorkerError,
    Workers,
)
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.tensor_parallel import TensorParallel
from nanoserve.models.registry import MODELS, model_class
from nanoserve.worker.heads import HEADS
from nanoserve.worker.model_runner import ModelRunner
from nanoserve.worker.weight_exchange import WeightExchange
from nanoserve.worker.worker_functions import call_function

_START_TIMEOUT = 120.0  # seconds: importing torch on a busy machine
_LOAD_TIMEOUT = 3600.0  # seconds: reading the weights, compiling and capturing
_LEFT_TIMEOUT = 2.0  # seconds to wait for ranks that are probably blocked in a collective


class TensorParallelExecutor:
    """An executor of several ranks, with rank 0's runner and the workers of the other ranks."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        path: Path,
        device: torch.device,
        make_runner: Callable[[ParallelContext], ModelRunner],
    ) -> None:
        tp_size, architecture = config.tensor_parallel_size, model_config.architecture
        size = tp_size * config.pipeline_parallel_size
        # On the meta device: raises if the model cannot be split over so many ranks.
        parallel, meta = ParallelContext(TensorParallel(0, tp_size)), torch.device("meta")
        shape_only = LayerContext(device=meta, parallel=parallel, num_positions=1)
        model_class(architecture)(model_config, shape_only)
        location = _model_location(architecture)
        self._stack = contextlib.ExitStack()  # what was opened, to be closed in reverse order
        self._close = weakref.finalize(self, _close, self._stack)  # also when Python ends
        _ENGINES.add(self)
        self._workers: Workers | None = None
        self._groups: list[Group] = []
        # More than the number of steps in flight, and a power of two, because step numbers wrap
        # around at one.
        self._num_batches = 2 ** config.pipeline_parallel_size.bit_length()
        self._uncollected: set[Batch] = set()  # batches whose steps were launched
        self._is_amid_collectives = False  # of a step that was announced to other ranks
        self._timeout = config.distributed_timeout_seconds
        workers_class: Any = Workers
        if config.distributed_executor_backend == "ray":
            from nanoserve.features.parallel.ray_workers import RayWorkers

            workers_class = RayWorkers
            self._stack.callback(workers_class.leave)
        try:
            num_threads = self._share_processor(size, device)
            files = {name: anonymous_file() for name in ("memory", "places")}
            for file in files.values():
                self._stack.callback(os.close, file)
            groups = self._groups
            self._stack.callback(_call_each, groups, Group.close)
            host = LOOPBACK if workers_class is Workers else workers_class.own_address()
            store = serve_store(size, host)
            options = options_of_workers(config)
            job = {"options": options, "path": path, "size": size, "port": store.port}
            job["host"] = host
            job["model"] = (architecture, location)
            job["heads"], job["num_batches"] = HEADS.entries(), self._num_batches
            timeout = config.worker_timeout_seconds
            self._workers = workers_class(size, job, files, num_threads, timeout)
            self._stack.callback(self._workers.close)
            self._workers.wait_for("ready", _START_TIMEOUT)
            meet = partial(join_ranks, config, model_config, 0, store, device, groups, host)
            parallel = self._workers.watch(meet)
            self._workers.call_on_failure(partial(_call_each, groups, Group.abort))
            host_memory = partial(shared_memory, files["places"])
            self.runner = make_runner(replace(parallel, host_memory=host_memory))
            self._stack.callback(self.runner.close)
            self._exchange = WeightExchange(self.runner)
            num_bytes = self._num_batches * self.runner.layout.num_bytes
            self.runner.use_memory(shared_memory(files["memory"], num_bytes))
            self._workers.wait_for("built", _LOAD_TIMEOUT)
        except BaseException as error:
            self._end(error)
            raise
        self.num_kv_blocks = self.runner.num_kv_blocks
        self.max_model_len = self.runner.max_model_len

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of ranks 1, 2, ..."""
        return self._workers.pids

    @property
    def failure(self) -> str | None:
        """The reason why no further step can run, or None while all ranks live. Thread-safe."""
        return None if self._workers is None else self._workers.failure

    def next_batch(self) -> Batch:
        self._workers.check()
        batch = self.runner.next_batch()
        if batch in self._uncollected:  # cancelled: wait until the other ranks have read it
            self._uncollected.discard(batch)
            if not self._workers.are_waiting(self._timeout):
                error = WorkerError("a cancelled step does not end")
                self._end(error)
                raise error
        return batch

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Any:  # a pipeline has another
        self._workers.check()
        with self._recovery():
            # This may raise, so it comes before any other rank starts.
            self.runner.fill_slots(inputs.slot_updates)
            self._is_amid_collectives = True
            self._announce(batch, inputs)
            self._uncollected.add(batch)
            handle = self.runner.forward(batch, replace(inputs, slot_updates=[]))
            self._is_amid_collectives = False
            return handle

    def _announce(self, batch: Batch, inputs: ForwardInputs) -> None:
        """Let the other ranks start a step."""
        if inputs.kv_transfers is not None:
            self._workers.send_order(COPY_BLOCKS, inputs.kv_transfers.to_bytes())
        if inputs.embeds is not None:
            self._workers.send_order(TAKE_EMBEDS, inputs.embeds.to_bytes())
        if inputs.adapters is not None:
            self._workers.send_order(USE_ADAPTERS, inputs.adapters.to_bytes())
        self._workers.announce(batch)

    def sample(self, handle: Any, inputs: SampleInputs) -> None:
        with self._recovery():
            self.runner.sample(handle, inputs)

    def collect(self, handle: Any) -> StepResult:
        with self._recovery():
            result = self.runner.collect(handle)
            # On a GPU the wait for a step ends without an error if its collectives are aborted, and
            # its tokens are invalid. The failure was recorded before the abort.
            self._workers.check()
        self._uncollected.discard(handle.batch)
        return result

    def cancel(self, handles: list[Any]) -> None:
        """Discard steps. `next_batch` waits until the other ranks have read their batches."""

    def check_weights(self, source: Weights) -> None:
        """Check on every rank that the weights in a folder fit; see `TakesWeights`.

        Raises rank 0's error, or `RuntimeError` with those of the other ranks.
        """
        with self._recovery():
            error = self._read_weights(CHECK_WEIGHTS, self._exchange.check_weights, source)
            if error is not None:
                raise error

    def load_weights(self, source: Weights) -> None:
        """Load the weights in a folder beside those in use, on every rank; see `TakesWeights`.

        Raises errors as `check_weights` does.
        """
        with self._recovery():
            error = self._read_weights(LOAD_WEIGHTS, self._exchange.load_weights, source)
            if error is not None:
                self._exchange.drop_weights()
                self._workers.send_order(DROP_WEIGHTS)
                self._workers.wait_for("dropped", _LOAD_TIMEOUT)
                raise error

    def replace_weights(self, source: Weights) -> None:
        """Drop the weights and KV caches of all ranks, and load those in a folder.

        Raises errors as `check_weights` does; then only `close` can follow.
        """
        with self._recovery():
            error = self._read_weights(REPLACE_WEIGHTS, self._exchange.replace_weights, source)
            if error is not None:
                raise error

    def _read_weights(
        self, order: int, read: Callable[[Weights], None], source: Weights
    ) -> Exception | None:
        """Let all ranks follow an order that reads weights; return the error if one of them fails.

        read: what rank 0 does.
        """
        self._workers.send_order(order, os.fsencode(str(source)))
        error: Exception | None = None
        try:
            read(source)
        except Exception as raised:  # the other ranks are reading
            error = raised
        self._workers.wait_for(f"followed {order}", _LOAD_TIMEOUT)
        refusals = sorted(self._workers.refusals.items())
        if error is None and refusals:
            reasons = [f"rank {rank} could not load the weights: {why}" for rank, why in refusals]
            error = RuntimeError("\n".join(reasons))
        return error

    def use_weights(self) -> None:
        """Use the loaded weights on every rank. If one of them cannot, the engine ends."""
        try:
            self._workers.send_order(USE_WEIGHTS)
            self._exchange.use_weights()
            self._workers.wait_for("using", _LOAD_TIMEOUT)
        except BaseException as error:
            self._end(error)
            raise

    def call_function(self, order: bytes, timeout: float | None) -> dict[int, dict[str, Any]]:
        """Call a function on every rank at once; return the answers that came in time, by rank.

        order: as for `nanoserve.worker.worker_functions.call_function`, which returns an answer.
        timeout: seconds to wait for the other ranks, counted from the start of rank 0's call, which
        is not interrupted; None waits without a limit.
        """
        with self._recovery():
            start = time.monotonic()
            self._workers.send_call(order)
            own = call_function(order, self.runner)
            left = None if timeout is None else max(0.0, start + timeout - time.monotonic())
            return {0: own, **self._workers.answers(left)}

    def close(self) -> None:
        """End the workers and release all resources. Idempotent."""
        self._close()

    def _share_processor(self, size: int, device: torch.device) -> int:
        """Return the number of threads of each rank: more threads than cores slow all down."""
        if device.type == "cpu":
            _THREADS.append(torch.get_num_threads())
            torch.set_num_threads(max(1, _THREADS[-1] // size))
            self._stack.callback(_restore_threads)
        return torch.get_num_threads()

    def forget_in_child(self) -> None:
        """Release the engine in a fork of the process that owns it, without ending anything.

        The threads of the process group do not exist in the fork, so destroying the group would
        wait for them forever.
        """
        self._close.detach()
        if self._workers is not None:
            self._workers.forget()
        for group in self._groups:
            group.leak()

    @contextlib.contextmanager
    def _recovery(self) -> Iterator[None]:
        """End the engine on an error, unless only rank 0 failed and the other ranks can go on."""
        try:
            yield
        except BaseException as error:
            try:
                goes_on = self._others_wait()
            except BaseException as interrupt:
                self._end(interrupt)
                raise
            if not goes_on:
                self._end(error)
            raise

    def _others_wait(self) -> bool:
        """Return True if, after an error on rank 0, all other ranks complete the launched work."""
        # If rank 0 is outside collectives, the other ranks are at most busy, and get more time.
        timeout = _LEFT_TIMEOUT if self._is_amid_collectives else self._timeout
        self._is_amid_collectives = False
        return self._workers.are_waiting(timeout)

    def _end(self, error: BaseException) -> None:
        """Close, and raise a worker's failure if it may be the cause of `error`.

        If a Ctrl-C is deferred to the end of the step, `KeyboardInterrupt` is raised instead.
        """
        workers = self._workers
        # If another rank terminates, torch raises a RuntimeError that does not explain it.
        is_effect = isinstance(error, RuntimeError) and not isinstance(error, WorkerError)
        if workers is not None and is_effect:
            workers.explain()
        failure = workers is not None and workers.failure
        is_in_step = workers is not None and workers.are_built
        if is_in_step:  # message of later calls of this engine
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            workers.fail(f"rank 0 failed in a step that other ranks had started: {reason}")
        self._close()
        if is_in_step and DeferredInterrupt.holding:
            raise KeyboardInterrupt("this ends the engine") from WorkerError(workers.failure)
        if is_effect and failure:
            raise WorkerError(failure) from error


# State of the whole process: engines that a fork must release, and torch's thread count from
# before each engine that shares it now.
_ENGINES: "weakref.WeakSet[TensorParallelExecutor]" = weakref.WeakSet()
_THREADS: list[int] = []


def _restore_threads() -> None:
    """Restore the thread count from before the first engine, when the last engine is closed."""
    first, *_ = _THREADS
    _THREADS.pop()
    if not _THREADS:
        torch.set_num_threads(first)


def _call_each(groups: list[Group], method: Callable[[Group], None]) -> None:
    for group in groups:
        method(group)


def _close(stack: contextlib.ExitStack) -> None:
    with DeferredInterrupt():  # an interrupted close would leak resources
        stack.close()


def _forget_in_child() -> None:
    for engine in list(_ENGINES):
        engine.forget_in_child()
    _THREADS.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def options_of_workers(config: EngineConfig) -> dict[str, Any]:
    """Return the options of the other ranks, serializable as JSON.

    Sampling runs on rank 0 only, and so do proposers. But all ranks need the number of draft tokens
    of a row: they capture graphs of such steps, and compute the logits of the largest one.
    """
    drafts = config.speculative_config
    # A draft model affects which blocks sliding windows keep; other methods may exist on rank 0
    # only.
    if drafts is not None and drafts.method != "draft_model":
        drafts = replace(drafts, method="ngram", model=None)
    own = {"logits_processors": (), "scheduler_cls": None, "speculative_config": drafts}
    return asdict(replace(config, **own))


def _model_location(architecture: str) -> str:
    """Return "package.module:Class", from which another process can import a model's class.

    Raises `ValueError` for a class that other processes cannot import.
    """
    model = MODELS.entry(architecture)
    if isinstance(model, str):
        return model
    if model.__module__ == "__main__" or "<" in model.__qualname__:
        raise ValueError(
            f"tensor parallelism: {architecture} is registered as {model.__qualname__} of "
            f"{model.__module__}, which other processes cannot import; define it in a module"
        )
    return f"{model.__module__}:{model.__qualname__}"
