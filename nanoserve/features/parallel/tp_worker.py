"""Every rank but the first: `python -m nanoserve.features.parallel.tp_worker JOB`, with JOB in JSON.

It builds its part of the model, then waits for steps. It decides nothing: no scheduler, no
sampler, no random number. It ends when rank 0 closes the pipe of steps, and at once, whatever it
does, when the process of rank 0 is gone.
"""

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from nanoserve.checkpoint.checkpoint import Checkpoint
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import ForwardInputs
from nanoserve.features.parallel.heartbeat import beat_for_ever
from nanoserve.features.parallel.process_group import LOOPBACK, find_store
from nanoserve.features.parallel.ranks import join_ranks
from nanoserve.features.parallel.shared_memory import map_memory
from nanoserve.features.parallel.worker_processes import PING
from nanoserve.models.registry import register_model, supported_architectures
from nanoserve.worker.build_executor import choose_device, make_runner
from nanoserve.worker.heads import register_head


def main() -> None:
    job = json.loads(sys.argv[1])
    fds = job["fds"]
    report = Reporter(partial(os.write, fds["status"]))
    threading.Thread(target=_end_with, args=(fds["life"],), daemon=True).start()
    os._exit(run(job, SharedSteps(fds, job["num_batches"]), report))


class Reporter:
    """Writes lines to rank 0. A long one is not written at once, and no beat may fall into it."""

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
    """What rank 0 says."""

    def next(self) -> int | None:
        """Wait for the number of the next step, or `PING`; None if there are no more."""

    def fetch(self, step: int, own: Batch) -> Batch:
        """`own`, with what `step` has packed."""


class SharedSteps:
    """Steps by pipe, and batches in the memory that rank 0 packs them in."""

    def __init__(self, fds: dict[str, int], num_batches: int) -> None:
        self._steps, self._memory, self._num_batches = fds["steps"], fds["memory"], num_batches
        self._shared: list[Batch] = []

    def next(self) -> int | None:
        told = os.read(self._steps, 4)
        return int.from_bytes(told, "little") if told else None

    def fetch(self, step: int, own: Batch) -> Batch:
        """Rank 0 may pack the shared one anew when it has the logits of this step.

        If it has begun to before, the number in the header shows it.
        """
        if not self._shared:  # rank 0 has given the memory its size by now
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
    """Serve to the end; the exit status. Threads of libraries may still wait for other ranks."""
    threading.Thread(target=beat_for_ever, args=(report.beat,), daemon=True).start()
    logging.disable(logging.WARNING)  # rank 0 has said it
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
        torch.cuda.set_device(device)  # this process has no other; what forgets to say so means it
    store = find_store(job["port"], size, job["host"])
    report(state="ready")
    own_host = job.get("own_host", LOOPBACK)
    place = join_ranks(config, model_config, job["rank"], store, device, [], own_host)
    runner = make_runner(config, model_config, path, place)
    report(state="built")
    while (step := steps.next()) is not None:
        if step == PING:
            runner.device.finish()
            report(state="waiting")
            continue
        # What rank 0 does in this step, up to the logits, which go to rank 0.
        batch = steps.fetch(step, runner.next_batch())
        began = time.perf_counter()
        runner.forward(batch, ForwardInputs())
        if config.trace is not None and place.pp.num_stages > 1 and place.tp.rank == 0:
            pp = place.pp  # a stage works from when it has received until it sends
            report(step=step, span=[began if pp.is_first else pp.received_at, pp.sent_at])


def _end_with(life: int) -> None:
    """The pipe ends when rank 0's process does, however it does."""
    os.read(life, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
