"""What a config.json may lead to: transformers' logits, or a refusal; never other logits."""

from pathlib import Path

import torch
from tiny_checkpoints import prompt_logits
from transformers import PreTrainedModel

from nanoserve.checkpoint.loader import load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.registry import model_class, supported_architectures

TOKEN_IDS = [(7 * i * i + i) % 300 for i in range(45)]


@torch.inference_mode()
def check(reference: PreTrainedModel, path: Path) -> str:
    """ "same" if ours gives the logits of `reference`, "refused" if it says that it cannot."""
    try:
        config = ModelConfig.from_checkpoint(path, supported=supported_architectures())
        model = model_class(config.architecture)(config, LayerContext(getattr(torch, config.dtype)))
        load_weights(model, path)
    except ValueError as error:
        assert str(error)
        return "refused"
    expected = reference(torch.tensor([TOKEN_IDS])).logits[0].float()
    # A norm after the delta rule magnifies the rounding of a token whose query matches no key.
    is_plain = config.linear_attention is None
    share = 0.05 if is_plain else 0.1
    exact = 1e-4 if config.dtype == "float32" else share * float(expected.std())
    ours = prompt_logits(model, TOKEN_IDS).float()
    assert (ours - expected).abs().mean() < exact / 2
    is_plain = config.dtype == "float32" and is_plain
    assert (ours - expected).abs().max() < exact * (1 if is_plain else 10)
    return "same"
