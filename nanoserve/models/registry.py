"""Architecture name in `config.json` -> the class that implements it."""

from importlib import import_module

from torch import nn

_MODELS = {
    "Qwen3ForCausalLM": "nanoserve.models.qwen3",
}


def supported_architectures() -> list[str]:
    return sorted(_MODELS)


def model_class(architecture: str) -> type[nn.Module]:
    """The class for a supported architecture."""
    return getattr(import_module(_MODELS[architecture]), architecture)
