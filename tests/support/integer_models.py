"""What an engine with integer weights computes, in transformers: the same rounding, in its floats.

Weights are the dequantized integers; of the inputs of each linear, 32 at a time are rounded to 255
values. What remains is the order of float32's sums, and where that changes how an input is rounded,
a 254th of the largest of the 32.
"""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from logits_recorder import LogitsRecorder
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanoserve import LLM, SamplingParams

PROMPT = [(7 * i * i + i) % 300 for i in range(40)]
ONE = SamplingParams(temperature=0, max_tokens=1)


def is_linear(name: str) -> bool:
    """By its name in the checkpoint: not a norm, an embedding, a router or a bias."""
    parts = name.split(".")
    named = ("w1", "w2", "w3", "lm_head", "in_proj_qkvz", "in_proj_qkv", "in_proj_z")
    own = parts[-2] in named or parts[-2].endswith("_proj")
    return parts[-1] == "weight" and own


def dequantized(path: Path, to_floats: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors; of a tied one also the LM head, which is no longer tied."""
    tensors = load_file(path / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    return {name: to_floats(t) if is_linear(name) else t for name, t in tensors.items()}


@contextmanager
def rounded_inputs(unrounded: frozenset[int], most: int):
    """Of every linear, but for routers, which are small, and those of so many outputs.

    most: inputs that share a scale; 0 rounds none.
    """
    linear = F.linear

    def rounded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if most and len(weight) > 8 and len(weight) not in unrounded:
            size = next(size for size in range(most, 0, -1) if x.shape[-1] % size == 0)
            groups = x.unflatten(-1, (-1, size))
            largest = groups.abs().amax(dim=-1, keepdim=True)
            rounded = (groups * (127 / largest)).round() * (largest / 127)
            x = torch.where(largest > 0, rounded, 0).flatten(-2)
        return linear(x, weight, bias)

    with patch.object(F, "linear", rounded):
        yield


@torch.inference_mode()
def reference_logits(
    path: Path,
    weights: dict[str, Tensor],
    folder: Path,
    unrounded: frozenset[int] = frozenset(),
    most: int = 32,
) -> Tensor:
    """Of transformers' model with `weights` [tokens, vocabulary]; it is written to `folder`."""
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((path / "config.json").read_text())
    edit_json(folder / "config.json", quantization_config=..., tie_word_embeddings=False)
    options = {"dtype": "float32", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    with rounded_inputs(unrounded, most):
        return model(torch.tensor([PROMPT])).logits[0]


def our_logits(path: Path, **options) -> Tensor:
    """Of a whole engine, its prompt in two chunks."""
    options = {"dtype": "float32", "max_num_batched_tokens": 27, "max_num_seqs": 4} | options
    options |= {"device": "cpu", "attention_backend": "torch", "skip_tokenizer_init": True}
    with LLM(path, **options) as llm:
        recorder = LogitsRecorder(llm)
        llm.generate([PROMPT], ONE, use_tqdm=False)
        (logits,) = recorder.logits.values()
    return torch.stack([logits[position] for position in range(len(PROMPT))])


def distance(found: Tensor, expected: Tensor) -> float:
    """As a part of the expected."""
    return ((found - expected).norm() / (expected - expected.mean()).norm()).item()
