"""RoPE settings of a GGUF file: scalar settings, or a factor for each pair of dimensions.

llama.cpp divides the angle of a pair by its factor. This is the definition of "longrope", so
factors are converted to that type. Phi-3 has one list for short and one for long contexts; Llama
3.1 has one list for all contexts, computed by the converter.
"""

from typing import Any

import numpy as np

from nanoserve.checkpoint.gguf.container import GGUFFile
from nanoserve.checkpoint.gguf.names import ROPE_TENSORS
from nanoserve.checkpoint.gguf.settings import Settings
from nanoserve.utils.checks import check_number, require


def read_rope(
    settings: Settings, file: GGUFFile, context: int, head_dim: int, may_be_partial: bool
) -> dict[str, Any]:
    """Return the entries of `config.json`. Raises `ValueError` for an unsupported type."""
    dims = settings.size("rope.dimension_count", head_dim)
    entry = settings.entry("rope.dimension_count", dims)
    require(
        dims == head_dim or may_be_partial,
        f"{entry} is not supported: it must be {head_dim}, all dimensions of a head",
    )
    raw = {"rope_theta": settings.take("rope.freq_base", 10_000.0)}  # llama.cpp's default
    if may_be_partial:
        raw["partial_rotary_factor"] = dims / head_dim
    scaling = _scaling(settings, file, context)
    return raw | ({"rope_scaling": scaling} if scaling else {})


def _scaling(settings: Settings, file: GGUFFile, context: int) -> dict[str, Any]:
    factor = settings.take("rope.scaling.factor", settings.take("rope.scale_linear")) or 1.0
    original = settings.take("rope.scaling.original_context_length", context)
    kind = settings.take("rope.scaling.type", "linear" if factor != 1 else "none")
    factors = {name: _list(file, name) for name in ROPE_TENSORS if name in file.tensors}
    if factors:
        is_alone = kind in ("none", "longrope") and factor == 1
        entry = f"{settings.entry('rope.scaling.type', kind)}, factor={factor}"
        require(is_alone, f"{entry}, together with {list(factors)}, is not supported")
        every = factors.get("rope_freqs.weight")
        return {
            "rope_type": "longrope",
            "short_factor": factors.get("rope_factors_short.weight", every),
            "long_factor": factors.get("rope_factors_long.weight", every),
            "original_max_position_embeddings": original,
            "attention_factor": settings.take("rope.scaling.attn_factor", 1.0),
        }
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": check_number(f"{file.path}: rope.scaling.factor", factor, 1),
            "original_max_position_embeddings": original,
            "beta_fast": settings.take("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": settings.take("rope.scaling.yarn_beta_slow", 1.0),
        }
    entry = settings.entry("rope.scaling.type", kind)
    require(
        kind in ("none", "linear"),
        f"{entry} is not supported; supported are none, linear, yarn, and lists of factors",
    )
    is_scaled = kind == "linear" and factor != 1
    return {"rope_type": "linear", "factor": factor} if is_scaled else {}


def _list(file: GGUFFile, name: str) -> list[float]:
    tensor = file.tensors[name]
    is_list = tensor.type == "F32" and len(tensor.shape) == 1
    require(
        is_list, f"{file.path}: {name} is {tensor.type} {list(tensor.shape)}, not a list of F32"
    )
    return tensor.data().view(np.float32).tolist()
