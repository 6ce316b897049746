"""The adapters of a rank: where their matrices are, and how a step gets them."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from nanoserve.config import EngineConfig, KernelConfig
from nanoserve.engine.adapter_rows import AdapterLoad, AdapterRows
from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.kernels.cpu.memory import map_zeros
from nanoserve.models.layers.adapter_tiles import PlaceTiles
from nanoserve.models.layers.low_rank import Adapters, Kernel, Weights
from nanoserve.worker.backend_checks import TRITON_OPERATIONS
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.cpu_device import Forward


def make_adapters(
    config: EngineConfig, dtype: torch.dtype, device: torch.device, backend: str
) -> Adapters:
    """Return the places of `max_loras` adapters.

    backend: of attention. With "numba" a kernel adds the products, and with those that launch
    Triton kernels, too, if `kernel_config` has `adapter_kernels`; otherwise torch computes them.
    """
    kernel: Kernel | None = None
    tiles: PlaceTiles | None = None
    kernels = KernelConfig.of(config.kernel_config)
    if backend == "numba":
        from nanoserve.kernels.cpu.low_rank import add_low_rank, compile_low_rank

        kernel = add_low_rank
        compile_low_rank(dtype)
    elif backend in TRITON_OPERATIONS and kernels.adapter_kernels:
        from nanoserve.kernels.triton import low_rank

        kernel = partial(low_rank.add_low_rank, is_dependent=kernels.dependent_launch)
        tiles = PlaceTiles(config.max_num_batched_tokens, config.max_loras, device)
    zeros = map_zeros if device.type == "cpu" else partial(torch.zeros, device=device)
    matrices = partial(zeros, dtype=dtype)
    return Adapters(config.max_loras, config.max_lora_rank, matrices, device, kernel, tiles)


@dataclass(frozen=True, eq=False)
class AdaptedForward:
    """The forward pass of a step with adapters, around `inner`, that of all other steps.

    A graph that has recorded `inner` does not replay it. places: by row, -1 for none. cu_seqlens:
    where the tokens of each row begin, and the end.
    """

    inner: Forward
    adapters: Adapters
    places: np.ndarray
    cu_seqlens: np.ndarray

    def __call__(self, tensors: BatchTensors, header: BatchHeader, tables: Tensor) -> Tensor:
        with self.adapters.using(self.adapters.rows_of(self.places, self.cu_seqlens)):
            return self.inner(tensors, header, tables)


def forward_with_adapters(
    rows: AdapterRows, cu_seqlens: np.ndarray, forward: Forward, adapters: Adapters
) -> AdaptedForward:
    """Return the forward pass of a step whose rows have these adapters; the new ones are loaded."""
    for load in rows.loads:
        adapters.load(load.place, _weights(load))
    return AdaptedForward(forward, adapters, rows.places, cu_seqlens)


def dummy_adapters(config: EngineConfig, num_rows: int) -> AdapterRows | None:
    """Return what lets a dummy step launch the kernels of `adapter_kernels`; None without them.

    Its rows have the adapter of place 0, where none may be yet.
    """
    if not (config.enable_lora and KernelConfig.of(config.kernel_config).adapter_kernels):
        return None
    return AdapterRows([], np.zeros(num_rows, dtype=np.int32))


def named_tensors(weights: Weights) -> dict[str, Tensor]:
    """Return the tensors of a file that other processes load, by name."""
    pairs = [(name, zip("AB", pair, strict=True)) for name, pair in weights.items()]
    return {f"{name}.{kind}": x for name, pair in pairs for kind, x in pair}


def _weights(load: AdapterLoad) -> Weights:
    if load.weights is not None:
        return load.weights
    stored = load_file(load.path)
    names = {name.removesuffix(".A") for name in stored if name.endswith(".A")}
    return {name: (stored[f"{name}.A"], stored[f"{name}.B"]) for name in names}
