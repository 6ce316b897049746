"""The worker process of every rank except rank 0.

It is started as `python -m nanoserve.features.parallel.tp_worker JOB`, with JOB in JSON.

It builds its part of the model, then waits for steps. It makes no decisions: it has no scheduler,
no sampler, and no random numbers. It exits when rank 0 closes the pipe of steps, and immediately,
in any state, when the process of rank 0 terminates.
"""

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from nanoserve.checkpoint.checkpoint import Checkpoint
from nanoserve.config import EngineConfig
from nanoserve.engine.adapter_rows import AdapterRows
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import ForwardInputs
from nanoserve.engine.kv_transfers import KVTransfers
from nanoserve.engine.prompt_embeds import StepEmbeds
from nanoserve.features.parallel.heartbeat import beat_for_ever
from nanoserve.features.parallel.process_group import (
    LOOPBACK,
    find_store,
    map_memory,
    shared_memory,
)
from nanoserve.features.parallel.ranks import join_ranks
from nanoserve.features.parallel.worker_processes import (
    CALL_FUNCTION,
    CHECK_WEIGHTS,
    COPY_BLOCKS,
    LOAD_WEIGHTS,
    PING,
    REPLACE_WEIGHTS,
    TAKE_EMBEDS,
    USE_ADAPTERS,
    USE_WEIGHTS,
    WEIGHT_ORDERS,
)
from nanoserve.models.registry import register_model, supported_architectures
from nanoserve.worker.build_executor import choose_device, make_runner
from nanoserve.worker.heads import register_head
from nanoserve.worker.model_runner import ModelRunner
from nanoserve.worker.weight_exchange import WeightExchange
from nanoserve.worker.worker_functions import call_function


def main() -> None:
    job = json.loads(sys.argv[1])
    fds = job["fds"]
    report = Reporter(partial(os.write, fds["status"]))
    threading.Thread(target=_end_with, args=(fds["life"],), daemon=True).start()
    os._exit(run(job, SharedSteps(fds, job["num_batches"]), report))


class Reporter:
    """A writer of lines to rank 0.

    It is locked, because a long line takes several writes, which no heartbeat may interrupt.
    """

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write_some, self._lock = write, threading.Lock()

    def __call__(self, **message: Any) -> None:
        self._write(json.dumps(message).encode())

    def beat(self) -> None:
        self._write(b"")

    def _write(self, line: bytes) -> None:
        with self._lock:
            self._write_some(line + b"\n")


class Steps(Protocol):
    """A source of the steps that rank 0 announces."""

    def next(self) -> int | None:
        """Wait for and return the number of the next step or order, or None at the end."""

    def content(self) -> bytes:
        """Return the content that came with an order."""

    def fetch(self, step: int, own: Batch) -> Batch:
        """Copy the batch of `step` into `own`, and return it."""


class SharedSteps:
    """Reads steps from a pipe, and batches from the shared memory into which rank 0 packs them."""

    def __init__(self, fds: dict[str, int], num_batches: int) -> None:
        self._steps, self._memory, self._num_batches = fds["steps"], fds["memory"], num_batches
        self._shared: list[Batch] = []

    def next(self) -> int | None:
        number = os.read(self._steps, 4)
        return int.from_bytes(number, "little") if number else None

    def content(self) -> bytes:
        size = int.from_bytes(os.read(self._steps, 4), "little")
        content = bytearray()
        while len(content) < size:
            part = os.read(self._steps, size - len(content))
            if not part:
                raise EOFError("rank 0 has closed the pipe in the middle of an order")
            content += part
        return bytes(content)

    def fetch(self, step: int, own: Batch) -> Batch:
        """Copy the batch of `step` from shared memory into `own`, and return it.

        Rank 0 may overwrite the shared batch once it has the logits of this step. Raises
        `RuntimeError` if the step number in the header shows that it was overwritten earlier.
        """
        if not self._shared:  # rank 0 has set the size of the memory by now
            memory = map_memory(self._memory, self._num_batches * own.layout.num_bytes)
            parts = np.split(memory, self._num_batches)
            self._shared = [Batch(own.layout, part) for part in parts]
        shared = self._shared[step % self._num_batches]
        used = shared.num_bytes_used(shared.header)
        own.memory[:used] = shared.memory[:used]
        if not own.header.step == shared.header.step == step:
            raise RuntimeError(f"step {step} was overwritten by {shared.header.step}")
        return own


def run(job: dict[str, Any], steps: Steps, report: Reporter) -> int:
    """Run steps until there are no more, and return the exit status.

    The caller exits with `os._exit`, because threads of libraries may still wait for other ranks.
    """
    threading.Thread(target=beat_for_ever, args=(report.beat,), daemon=True).start()
    logging.disable(logging.WARNING)  # rank 0 has logged it
    try:
        serve(job, steps, report)
        return 0
    except BaseException:
        report(error=traceback.format_exc())
        return 1


def serve(job: dict[str, Any], steps: Steps, report: Reporter) -> None:
    """Build this rank's runner, then run steps until there are no more."""
    config, path, size = EngineConfig(**job["options"]), Path(job["path"]), job["size"]
    architecture, location = job["model"]
    if architecture not in supported_architectures():
        register_model(architecture, location)
    for name, location in job["heads"].items():
        register_head(name, location)
    model_config = Checkpoint.open(path, config).model_config(config, supported_architectures())
    device = choose_device(config, job["rank"], size)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the default of code that names no device
    store = find_store(job["port"], size, job["host"])
    report(state="ready")
    own_host = job.get("own_host", LOOPBACK)
    parallel = join_ranks(config, model_config, job["rank"], store, device, [], own_host)
    if "fds" in job:
        host_memory = partial(shared_memory, job["fds"]["places"])
        parallel = replace(parallel, host_memory=host_memory)
    runner = make_runner(config, model_config, path, parallel)
    report(state="built")
    exchange, inputs = WeightExchange(runner), ForwardInputs()
    while (step := steps.next()) is not None:
        if step == PING:
            runner.device.finish()
            report(state="waiting")
            continue
        if step in WEIGHT_ORDERS:
            exchange_weights(step, steps.content(), exchange, report)
            continue
        if step == CALL_FUNCTION:
            answer_call(steps.content(), runner, report)
            continue
        if step == COPY_BLOCKS:
            inputs = replace(inputs, kv_transfers=KVTransfers.from_bytes(steps.content()))
            continue
        if step == TAKE_EMBEDS:
            inputs = replace(inputs, embeds=StepEmbeds.from_bytes(steps.content()))
            continue
        if step == USE_ADAPTERS:
            inputs = replace(inputs, adapters=AdapterRows.from_bytes(steps.content()))
            continue
        # Rank 0 does the same, up to the logits, which are gathered there.
        batch = steps.fetch(step, runner.next_batch())
        began = time.perf_counter()
        runner.forward(batch, inputs)
        inputs = ForwardInputs()
        if config.trace is not None and parallel.pp.num_stages > 1 and parallel.tp.rank == 0:
            pp = parallel.pp  # a stage works from its receive to its send
            report(step=step, span=[began if pp.is_first else pp.received_at, pp.sent_at])


def exchange_weights(
    order: int, content: bytes, exchange: WeightExchange, report: Reporter
) -> None:
    """Follow an order of rank 0, and report when it is done.

    An error while weights are checked or loaded is reported, and rank 0 decides what follows.
    """
    reads = {
        CHECK_WEIGHTS: exchange.check_weights,
        LOAD_WEIGHTS: exchange.load_weights,
        REPLACE_WEIGHTS: exchange.replace_weights,
    }
    if order in reads:
        try:
            reads[order](Path(os.fsdecode(content)))
        except Exception as error:
            report(refusal=f"{type(error).__name__}: {error}")
        report(state=f"followed {order}")
    elif order == USE_WEIGHTS:
        exchange.use_weights()
        report(state="using")
    else:
        exchange.drop_weights()
        report(state="dropped")


def answer_call(content: bytes, runner: ModelRunner, report: Reporter) -> None:
    """Call a function for rank 0, and report its result or its error."""
    number = int.from_bytes(content[:8], "little")
    report(answer=call_function(content[8:], runner), call=number)
    report(state=f"called {number}")


def _end_with(life: int) -> None:
    """Exit when the pipe is closed, which happens in any case when rank 0's process terminates."""
    os.read(life, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
