"""The adapters of a rank: where their matrices are, and how a step gets them."""

from functools import partial

import numpy as np
import torch
from safetensors.torch import load_file

from nanoserve.config import EngineConfig
from nanoserve.engine.adapter_rows import AdapterLoad, AdapterRows
from nanoserve.kernels.cpu.memory import map_zeros
from nanoserve.models.layers.low_rank import Adapters, Kernel, Weights


def make_adapters(
    config: EngineConfig, dtype: torch.dtype, device: torch.device, has_numba: bool
) -> Adapters:
    """Return the places of `max_loras` adapters.

    has_numba: numba compiles the kernel. On a GPU, and without numba, torch computes the products.
    """
    kernel: Kernel | None = None
    if has_numba:
        from nanoserve.kernels.cpu.low_rank import add_low_rank, compile_low_rank

        kernel = add_low_rank
        compile_low_rank(dtype)
    zeros = map_zeros if device.type == "cpu" else partial(torch.zeros, device=device)
    matrices = partial(zeros, dtype=dtype)
    return Adapters(config.max_loras, config.max_lora_rank, matrices, device, kernel)


def begin_step(adapters: Adapters, rows: AdapterRows | None, cu_seqlens: np.ndarray) -> None:
    """Load the adapters that are new in a step, and set those of its rows."""
    if rows is None:
        adapters.begin_step(None, cu_seqlens)
        return
    for load in rows.loads:
        adapters.load(load.place, _weights(load))
    adapters.begin_step(rows.places, cu_seqlens)


def named_tensors(weights: Weights) -> dict[str, torch.Tensor]:
    """Return the tensors of a file that other processes load, by name."""
    pairs = [(name, zip("AB", pair, strict=True)) for name, pair in weights.items()]
    return {f"{name}.{kind}": x for name, pair in pairs for kind, x in pair}


def _weights(load: AdapterLoad) -> Weights:
    if load.weights is not None:
        return load.weights
    stored = load_file(load.path)
    names = {name.removesuffix(".A") for name in stored if name.endswith(".A")}
    return {name: (stored[f"{name}.A"], stored[f"{name}.B"]) for name in names}
