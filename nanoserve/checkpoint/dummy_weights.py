"""Random weights in place of a checkpoint's, for `load_format="dummy"`."""

import torch
from torch import nn


def fill_randomly(model: nn.Module) -> None:
    """Normal weights of a trained model's size, norms of one: no NaN, and no flat logits."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=0.02, generator=generator)
