"""The configurations of models to simulate: by shape, by name, or from a checkpoint's folder."""

from nanoserve.checkpoint.checkpoint import Checkpoint
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.config import EngineConfig


def model_config_of(name: str, dtype: str = "auto") -> ModelConfig:
    """Return the configuration of a shape of `nanoserve bench`, or of a model as for `LLM`.

    Of a model on the Hub, only the small files are fetched. Raises `ValueError` if there is no such
    model.
    """
    if name in SHAPES:
        return ModelConfig.from_hf(SHAPES[name], {}, "bfloat16" if dtype == "auto" else dtype)
    checkpoint = Checkpoint.open(name, EngineConfig(name))
    return ModelConfig.from_files(checkpoint.config_files, dtype)
