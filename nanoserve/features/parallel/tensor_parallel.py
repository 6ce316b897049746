"""Tensor parallelism: several processes, one model, and the batch in memory that all of them read.

Rank 0 lives in the caller's process: it runs the loop, and whatever a request brings along, such
as a logits processor of your own, need not travel. The other ranks do with every batch what it
does, up to the logits (Shoeybi et al. 2019, "Megatron-LM": two all-reduces a layer).

A step is handed over by one small write to each worker: the step's number, through a pipe. The
batch itself lies in shared memory, packed there by rank 0 and read there by every rank. A pipe
orders memory on every processor, and its end tells either side that the other has died.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import ForwardInputs, SampleInputs, StepResult
from nanoserve.engine.interrupts import DeferredInterrupt
from nanoserve.features.parallel.process_group import LOOPBACK, Group, serve_store
from nanoserve.features.parallel.ranks import join_ranks
from nanoserve.features.parallel.shared_memory import anonymous_file, map_memory
from nanoserve.features.parallel.worker_processes import WorkerError, Workers
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.tensor_parallel import TensorParallel
from nanoserve.models.registry import MODELS, model_class
from nanoserve.worker.heads import HEADS
from nanoserve.worker.model_runner import Handle, ModelRunner

_START_TIMEOUT = 120.0  # seconds: importing torch on a busy machine
_LOAD_TIMEOUT = 3600.0  # seconds: reading the weights, compiling and capturing
_LEFT_TIMEOUT = 2.0  # seconds for an answer of ranks that most likely wait for a collective


class TensorParallelExecutor:
    """Rank 0's runner, and the workers that do with every batch what it does."""

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
        # Without memory: raises if so many ranks cannot share it.
        parallel, meta = ParallelContext(TensorParallel(0, tp_size)), torch.device("meta")
        shape_only = LayerContext(device=meta, parallel=parallel, num_positions=1)
        model_class(architecture)(model_config, shape_only)
        location = _model_location(architecture)
        self._stack = contextlib.ExitStack()  # what was opened, to be closed in reverse order
        self._close = weakref.finalize(self, _close, self._stack)  # also when Python ends
        _ENGINES.add(self)
        self._workers: Workers | None = None
        self._groups: list[Group] = []
        # More than are under way, and a power of two: at one, steps are numbered from 0 again.
        self._num_batches = 2 ** config.pipeline_parallel_size.bit_length()
        self._uncollected: set[Batch] = set()  # their steps were launched
        self._is_amid_collectives = False  # of a step that others have been told of
        self._timeout = config.distributed_timeout_seconds
        workers_class = Workers
        if config.distributed_executor_backend == "ray":
            from nanoserve.features.parallel.ray_workers import RayWorkers as workers_class

            self._stack.callback(workers_class.leave)
        try:
            num_threads = self._share_processor(size, device)
            memory = anonymous_file()
            self._stack.callback(os.close, memory)
            groups = self._groups
            self._stack.callback(lambda: [group.close() for group in groups])
            host = LOOPBACK if workers_class is Workers else workers_class.own_address()
            store = serve_store(size, host)
            options = options_of_workers(config)
            job = {"options": options, "path": path, "size": size, "port": store.port}
            job["host"] = host
            job["model"] = (architecture, location)
            job["heads"], job["num_batches"] = HEADS.entries(), self._num_batches
            timeout = config.worker_timeout_seconds
            self._workers = workers_class(size, job, memory, num_threads, timeout)
            self._stack.callback(self._workers.close)
            self._workers.wait_for("ready", _START_TIMEOUT)
            meet = partial(join_ranks, config, model_config, 0, store, device, groups, host)
            place = self._workers.watch(meet)
            self._workers.call_on_failure(lambda: [group.abort() for group in groups])
            self.runner = make_runner(place)
            self._stack.callback(self.runner.close)
            num_bytes = self._num_batches * self.runner.layout.num_bytes
            os.ftruncate(memory, num_bytes)
            self.runner.use_memory(map_memory(memory, num_bytes))
            self._workers.wait_for("built", _LOAD_TIMEOUT)
        except BaseException as error:
            self._end(error)
            raise
        self.num_kv_blocks = self.runner.num_kv_blocks
        self.max_model_len = self.runner.max_model_len

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of ranks 1, 2, ..."""
        return self._workers.pids

    @property
    def failure(self) -> str | None:
        """Why no further step can run; None while all ranks live. Any thread may ask."""
        return None if self._workers is None else self._workers.failure

    def next_batch(self) -> Batch:
        self._workers.check()
        batch = self.runner.next_batch()
        if batch in self._uncollected:  # its step was given up: have the others read it by now?
            self._uncollected.discard(batch)
            if not self._workers.are_waiting(self._timeout):
                error = WorkerError("a step that was given up does not end")
                self._end(error)
                raise error
        return batch

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Handle:
        self._workers.check()
        with self._recovery():
            # Before any other rank starts: this may raise.
            self.runner.fill_slots(inputs.slot_updates)
            self._is_amid_collectives = True
            self._workers.announce(batch)
            self._uncollected.add(batch)
            handle = self.runner.forward(batch, replace(inputs, slot_updates=[]))
            self._is_amid_collectives = False
            return handle

    def sample(self, handle: Handle, inputs: SampleInputs) -> None:
        with self._recovery():
            self.runner.sample(handle, inputs)

    def collect(self, handle: Handle) -> StepResult:
        with self._recovery():
            result = self.runner.collect(handle)
            # On a GPU the wait for a step ends without an error when its collectives are aborted,
            # and its tokens are garbage. Whoever aborts has noted the failure before.
            self._workers.check()
        self._uncollected.discard(handle.batch)
        return result

    def cancel(self, handles: list[Handle]) -> None:
        """Discard steps: `next_batch` waits until the other ranks have read what they need."""

    def close(self) -> None:
        """End the workers and release everything. Idempotent."""
        self._close()

    def _share_processor(self, size: int, device: torch.device) -> int:
        """Threads for each rank. More of them than cores would wait for each other."""
        if device.type == "cpu":
            _THREADS.append(torch.get_num_threads())
            torch.set_num_threads(max(1, _THREADS[-1] // size))
            self._stack.callback(_restore_threads)
        return torch.get_num_threads()

    def forget_in_child(self) -> None:
        """This process is a fork of the one that owns the engine: let go without ending anything.

        The threads of the process group are not here; destroying it would wait for them for ever.
        """
        self._close.detach()
        if self._workers is not None:
            self._workers.forget()
        for group in self._groups:
            group.leak()

    @contextlib.contextmanager
    def _recovery(self) -> Iterator[None]:
        """An error is the end, unless only rank 0 has failed and the others wait for a step."""
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
        """Whether, after an error on rank 0, all others come to the end of what was launched."""
        # Where rank 0 has done its share, the others are busy at most. They have time for it.
        timeout = _LEFT_TIMEOUT if self._is_amid_collectives else self._timeout
        self._is_amid_collectives = False
        return self._workers.are_waiting(timeout)

    def _end(self, error: BaseException) -> None:
        """Close, and raise what a worker has to say if it may be the cause of `error`.

        A Ctrl-C that waits for the end of the step is told instead: this is it.
        """
        workers = self._workers
        # What torch raises when another rank is gone is a RuntimeError, and says little.
        is_effect = isinstance(error, RuntimeError) and not isinstance(error, WorkerError)
        if workers is not None and is_effect:
            workers.explain()
        told = workers is not None and workers.failure
        is_in_step = workers is not None and workers.are_built
        if is_in_step:  # for those who call this engine later
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            workers.fail(f"rank 0 has left a step that the others have not: {reason}")
        self._close()
        if is_in_step and DeferredInterrupt.holding:
            raise KeyboardInterrupt("this ends the engine") from WorkerError(workers.failure)
        if is_effect and told:
            raise WorkerError(told) from error


# What is one for the whole process: engines that a fork must forget, and torch's thread count, as
# it was before each of the engines that share it now.
_ENGINES: "weakref.WeakSet[TensorParallelExecutor]" = weakref.WeakSet()
_THREADS: list[int] = []


def _restore_threads() -> None:
    """The last engine to go restores what the first one found."""
    first, *_ = _THREADS
    _THREADS.pop()
    if not _THREADS:
        torch.set_num_threads(first)


def _close(stack: contextlib.ExitStack) -> None:
    with DeferredInterrupt():  # what is half closed stays behind
        stack.close()


def _forget_in_child() -> None:
    for engine in list(_ENGINES):
        engine.forget_in_child()
    _THREADS.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def options_of_workers(config: EngineConfig) -> dict[str, Any]:
    """Return the options of the other ranks, which JSON can carry.

    Sampling is for rank 0, and so are proposers. But how many draft tokens a row may have is for
    all: they record graphs of such steps, and take part in the logits of the largest.
    """
    drafts = config.speculative_config
    # A draft model decides which blocks windows keep; other methods may be rank 0's alone.
    if drafts is not None and drafts.method != "draft_model":
        drafts = replace(drafts, method="ngram", model=None)
    own = {"logits_processors": (), "scheduler_cls": None, "speculative_config": drafts}
    return asdict(replace(config, **own))


def _model_location(architecture: str) -> str:
    """ "package.module:Class", from which another process can import the class.

    Raises `ValueError` for a class that only this process has.
    """
    model = MODELS.entry(architecture)
    if isinstance(model, str):
        return model
    if model.__module__ == "__main__" or "<" in model.__qualname__:
        raise ValueError(
            f"tensor parallelism: {architecture} is registered as {model.__qualname__} of "
            f"{model.__module__}, which other processes cannot import"
        )
    return f"{model.__module__}:{model.__qualname__}"
