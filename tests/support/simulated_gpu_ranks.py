"""Ranks whose GPU is a CPU, and adapters whose kernel reads tiles there.

Also the worker process of such a rank, started as `nanoserve.features.parallel.tp_worker` is.
"""

import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from late_cuda import LateCuda
from mixed_attention import MixedTorchAttention

from nanoserve.attention.triton import TritonAttention
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig, KernelConfig
from nanoserve.features.parallel import tp_worker, worker_processes
from nanoserve.models.layers.adapter_tiles import PlaceTiles
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.low_rank import Adapters
from nanoserve.models.layers.ops import TorchOps
from nanoserve.models.layers.triton_ops import TritonOps
from nanoserve.worker.adapters import make_adapters
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.model_runner import ModelRunner

CPU = torch.device("cpu")


class TileKernel:
    """What the GPU's kernels compute, by torch; they would be interpreted.

    cuda: launches it, if that is late.
    """

    def __init__(self, cuda: FakeCuda | None = None) -> None:
        self._cuda, self.num_calls = cuda, 0

    def __call__(self, *args: torch.Tensor) -> None:
        self.num_calls += 1
        if isinstance(self._cuda, LateCuda) and self._cuda.is_late:
            self._cuda.launch(lambda: self._add(*args))
        else:
            self._add(*args)

    def _add(self, x: Any, y: Any, a: Any, b: Any, ends: Any, firsts: Any, *tiles: Any) -> None:
        for tokens, place in zip(tiles[0].long(), tiles[1].tolist(), strict=True):
            rows, own = tokens[tokens >= 0], ends[place].tolist()
            for target, start in enumerate(own[:-1] if place >= 0 else ()):
                end, columns = own[target + 1], slice(*firsts[target : target + 2].tolist())
                narrow = x[rows] @ a[place, :, start:end]
                y[rows, columns] += narrow @ b[place, : end - start, columns]


def tiled_adapters(config: EngineConfig, kernel: TileKernel) -> Adapters:
    """Adapters with a kernel that reads tiles, whose memory has other tiles before each step."""
    tiles = PlaceTiles(config.max_num_batched_tokens, config.max_loras, CPU)
    fill = tiles.fill

    def fill_poisoned(places: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        tiles._memory.fill_(0)  # all tiles have token 0, with the adapter of place 0
        return fill(places)

    tiles.fill = fill_poisoned
    zeros = partial(torch.zeros, dtype=torch.float32)
    return Adapters(config.max_loras, config.max_lora_rank, zeros, CPU, kernel, tiles)


def make_gpu_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    path: Path,
    parallel: ParallelContext,
    cuda: FakeCuda | None = None,
    kernel: TileKernel | None = None,
) -> ModelRunner:
    """Return the runner of a rank.

    kernel: of adapters, with `adapter_kernels`, unless Triton's are interpreted.
    """
    interprets = config.attention_backend == "triton"
    adapters = make_adapters(config, torch.float32, CPU, config.attention_backend)
    if KernelConfig.of(config.kernel_config).adapter_kernels and not interprets:
        adapters = tiled_adapters(config, kernel or TileKernel())
    context = LayerContext(
        parallel=parallel,
        attention=TritonAttention() if interprets else MixedTorchAttention(),
        ops=TritonOps() if interprets else TorchOps(),
        adapters=adapters,
    )
    device = CudaDevice(config, cuda or FakeCuda(), is_capturable=True, captures_mixed_steps=True)
    return ModelRunner.load(config, model_config, path, context, device)


def start_ranks_here(patch: pytest.MonkeyPatch) -> None:
    """Let other ranks start with this module, which gives them a simulated GPU."""

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([command[0], __file__, command[-1]], **options)

    own = SimpleNamespace(**vars(subprocess) | {"Popen": start})
    patch.setattr(worker_processes, "subprocess", own)
    patch.setenv("PYTHONPATH", str(Path(__file__).parent))


if __name__ == "__main__":
    CudaDevice._run_worst_case = lambda device, runner: None
    tp_worker.choose_device = lambda *args: CPU
    tp_worker.make_runner = make_gpu_runner
    tp_worker.main()
