"""Architecture name in `config.json` -> the class that implements it."""

from importlib import import_module

from torch import nn

_MODELS = {
    "Qwen3ForCausalLM": "nanoserve.models.qwen3",
}


def model_class(architecture: str) -> type[nn.Module]:
    """The class for an architecture; `ValueError` that lists the supported ones."""
    if architecture not in _MODELS:
        raise ValueError(
            f"architecture {architecture!r} is not supported; supported: {sorted(_MODELS)}"
        )
    return getattr(import_module(_MODELS[architecture]), architecture)
