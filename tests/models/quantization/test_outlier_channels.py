"""A few inputs of a real model's rows are thousands of times larger than the others.

Random weights and a tiny model have none, so a channel is added to the tiny one: its outputs meet
weights of zero, and what the model says is what it said before, whatever the channel's size.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint

pytest.importorskip("numba")

ADDED = 64  # channels of each MLP, of which the first is large
QUESTIONS = ("What is a KV cache?", "What is chunked prefill?", "12 + 30 = ?")


def with_large_channel(folder: Path, size: float) -> Path:
    """The bundled model in `folder`; the channel's weights are `size` times the largest others."""
    source = bundled_checkpoint("tiny-qwen3")
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, weight in tensors.items():
        if "down_proj" in name:
            tensors[name] = torch.cat([weight, weight.new_zeros(len(weight), ADDED)], 1)
        elif "gate_proj" in name or "up_proj" in name:
            added = weight.new_zeros(ADDED, weight.shape[1])
            added[0] = size * weight.abs().max()
            tensors[name] = torch.cat([weight, added])
    save_file(tensors, file, {"format": "pt"})
    num_channels = tensors["model.layers.0.mlp.up_proj.weight"].shape[0]
    edit_json(folder / "config.json", intermediate_size=num_channels)
    return folder


def log_probabilities(folder: Path, quantization: str) -> torch.Tensor:
    """Of the tokens of conversations about what the model knows."""
    options = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 64}
    with LLM(folder, quantization=quantization, **options) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
            for text in QUESTIONS
        ]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return torch.tensor(
        [
            next(iter(entry.values())).logprob
            for output in outputs
            for entry in output.prompt_logprobs[1:]
        ]
    )


@pytest.mark.small(quantization=["int8"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_large_channel_that_nobody_reads_changes_nothing(
    quantization: str, tmp_path: Path
) -> None:
    """With one scale for a row of inputs, int8 moves single log-probabilities by more than 8."""
    before = log_probabilities(with_large_channel(tmp_path / "small", 0), quantization)
    after = log_probabilities(with_large_channel(tmp_path / "large", 10), quantization)
    assert len(before) > 30 and (before - after).abs().max() < 1e-4
