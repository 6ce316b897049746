"""Quantized checkpoints as plain models, to compare what they compute."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_checkpoints import edit_json, prompt_logits
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.formats.source import WeightSource, open_quantized
from nanoserve.checkpoint.loader import load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.registry import model_class

PROMPT = [(7 * i * i + i) % 300 for i in range(40)]


def open_checkpoint(path: Path) -> WeightSource:
    """By what its own config.json says."""
    return open_quantized(path, ModelConfig.from_checkpoint(path).quantization_config)


def read_all(source: WeightSource) -> dict[str, Tensor]:
    """Every tensor, dequantized; each has the shape that was told."""
    tensors = {}
    for name, shape in source.shapes().items():
        read = source.read(name)
        tensors[name] = read.dequantize() if isinstance(read, QuantizedMatrix) else read
        assert tuple(tensors[name].shape) == shape
    return tensors


@torch.inference_mode()
def our_logits(path: Path, plain: Path) -> Tensor:
    """Of the checkpoint in `path` [tokens, vocabulary], by way of a plain one in `plain`."""
    plain.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in read_all(open_checkpoint(path)).items()},
        plain / "model.safetensors",
    )
    (plain / "config.json").write_text((path / "config.json").read_text())
    edit_json(plain / "config.json", quantization_config=...)
    config = ModelConfig.from_checkpoint(plain)
    model = model_class(config.architecture)(config, LayerContext())
    load_weights(model, plain)
    return prompt_logits(model, PROMPT)


@torch.inference_mode()
def reference_logits(path: Path, weights: dict[str, Tensor], plain: Path) -> Tensor:
    """Of transformers' model with these weights."""
    plain.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text((path / "config.json").read_text())
    edit_json(plain / "config.json", quantization_config=...)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype="float32")
    return model(torch.tensor([PROMPT])).logits[0]
