"""Warms up a CPU with numba: kernels are compiled before the first request arrives."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import numpy as np
from torch import nn

from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import Executor, ForwardInputs
from nanoserve.kernels.cpu.ops import FEW
from nanoserve.sampling.numba_sampler import NumbaSampler
from nanoserve.sampling.sampler import Sampler
from nanoserve.worker.dummy_rows import pack_dummy_step

_COMPILED: "WeakSet[Executor]" = WeakSet()  # executors that have run these steps
_PATIENCE = 1.0  # seconds of compilation after which a message is printed


def compile_ahead(
    executor: Executor, batch: Batch, block_size: int, model: nn.Module, sampler: Sampler
) -> None:
    """Run the model on one token, then on a long prompt, in the dummy block.

    The long prompt is long enough for threads to share the small operations, too, within the token
    capacity of `batch`. Numba saves compiled code next to the source, or in its cache folder, for
    later starts. An executor that has done this does it only once: its later models, after sleep or
    with other weights, use the same kernels.
    """
    if executor not in _COMPILED:
        _run(executor, batch, block_size, model, sampler)
        _COMPILED.add(executor)
    _shorten_lookups(model)


def _run(
    executor: Executor, batch: Batch, block_size: int, model: nn.Module, sampler: Sampler
) -> None:
    with _report_slow("compiling for this processor, once"):
        many = FEW // model.config.hidden_size + 1
        most = min(many, executor.max_model_len, batch.layout.max_num_tokens)
        num_sampled = int(getattr(model, "samples", True))
        for num_tokens in (1, most):
            lengths = np.array([num_tokens], dtype=np.int32)
            pack_dummy_step(batch, lengths, block_size, num_sampled)
            logits = executor.forward(batch, ForwardInputs()).logits
        # Only rank 0 has logits, and samples.
        if logits is not None and isinstance(sampler, NumbaSampler):
            sampler.warm_up(logits.dtype)


def _shorten_lookups(model: nn.Module) -> None:
    """Copy the parts of modules into their `__dict__`, where Python finds them at once.

    torch keeps them in dictionaries of its own, which Python searches only after the normal lookup
    has failed: this takes a tenth of a small model's decode step.
    """
    for module in model.modules():
        parts = {**module._modules, **module._parameters, **module._buffers}
        vars(module).update({name: part for name, part in parts.items() if part is not None})


@contextmanager
def _report_slow(what: str) -> Iterator[None]:
    """Print a message to stderr if the body takes long, and how long it took."""
    start = time.perf_counter()
    timer = threading.Timer(_PATIENCE, print, (f"nanoserve: {what} ...",), {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if (seconds := time.perf_counter() - start) > _PATIENCE:
        print(f"nanoserve: compiled in {seconds:.1f} s", file=sys.stderr)
