"""An engine on a late GPU: see `late_cuda`, and `gpu_tensors` for one that counts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from late_cuda import LateCuda
from mixed_attention import MixedTorchAttention

import nanoserve.sampling.fused_sampler as fused_sampler
from nanoserve.attention.torch import TorchAttention
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.guard import GuardedEngine
from nanoserve.models.layers.context import LayerContext
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.model_runner import ModelRunner

OPTIONS = {"max_num_seqs": 5, "num_kv_blocks": 9, "max_model_len": 100}
OPTIONS |= {"max_num_batched_tokens": 30}


def make_engine(
    path: Path, cuda: LateCuda, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> GuardedEngine:
    """Late from its first step on. What it packs goes over what lay there."""
    attention = MixedTorchAttention() if options.get("capture_mixed_steps") else TorchAttention()
    attention.attend = cuda.kernel(attention.attend, lambda layer, q, *rest: q)
    for name, dtype in (("choose_tokens", torch.int64), ("filter_borders", torch.float32)):
        kernel = cuda.kernel(
            cuda.interpreted(getattr(fused_sampler, name)),
            lambda logits, *rest, dtype=dtype: torch.empty(len(logits), dtype=dtype),
        )
        monkeypatch.setattr(fused_sampler, name, kernel)
    config = EngineConfig(str(path), **OPTIONS | options)
    model_config = ModelConfig.from_checkpoint(path)
    device = CudaDevice(config, cuda, True, captures_mixed_steps=attention.captures_mixed_steps)
    context = LayerContext(device=cuda.device, attention=attention)
    runner = ModelRunner.load(config, model_config, path, context, device)
    next_batch = runner.next_batch

    def overwritten_batch() -> Batch:
        batch = next_batch()
        step, batch.memory[:] = batch.step, 0x7F
        batch.step = step
        return batch

    runner.next_batch = overwritten_batch
    cuda.is_late = True
    return GuardedEngine(config, model_config, runner, tokenizer=None)
