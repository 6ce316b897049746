"""What a CPU with numba does before the first request waits for it: compiling, above all."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.kernels_cpu.ops import FEW
from nanoserve.sampling.numba_sampler import NumbaSampler

_PATIENCE = 1.0  # seconds after which it is told


@torch.inference_mode()
def compile_ahead(runner: Any) -> None:
    """Run the model on one token, then on a prompt of many, in the dummy block.

    Many are so many that threads share the small operations, too. Numba keeps what it compiles in
    files beside the source, or in its cache folder: the next start reads them.
    """
    with _told("compiling for this processor, once"):
        many = FEW // runner.model_config.hidden_size + 1
        for num_tokens in (1, min(many, runner.max_model_len)):
            metadata = AttentionMetadata(
                positions=torch.arange(num_tokens, dtype=torch.int32),
                slot_mapping=torch.zeros(num_tokens, dtype=torch.int32),
                cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32),
                context_lens=torch.tensor([num_tokens], dtype=torch.int32),
                block_tables=torch.zeros(
                    1, -(-num_tokens // runner.config.block_size), dtype=torch.int32
                ),
                num_decode_rows=1 if num_tokens == 1 else 0,
                max_query_len=num_tokens,
                max_context_len=num_tokens,
            )
            for _ in range(max(cache.group for cache in runner.kv_caches)):
                metadata.add_group(metadata.slot_mapping, metadata.block_tables)
            input_ids = torch.zeros(num_tokens, dtype=torch.int32)
            hidden = runner.model(input_ids, runner.kv_caches, metadata)
            logits = runner.model.compute_logits(hidden[-1:])
        # Rank 0 has the logits, and chooses.
        if logits is not None and isinstance(runner.sampler, NumbaSampler):
            runner.sampler.warm_up(logits.dtype)
    _shorten_lookups(runner.model)


def _shorten_lookups(model: nn.Module) -> None:
    """Put the parts of modules where Python finds them at once.

    torch keeps them in dictionaries of its own, in which it looks when Python has found nothing:
    a tenth of a small model's decode step.
    """
    for module in model.modules():
        parts = {**module._modules, **module._parameters, **module._buffers}
        vars(module).update({name: part for name, part in parts.items() if part is not None})


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Say on stderr that it takes a while, if it does, and how long it took."""
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
