"""Tiny models with sliding windows of 9 tokens, and prompts that are far longer."""

from pathlib import Path

from tiny_checkpoints import GEMMA2, GEMMA3, make_checkpoint
from transformers import Gemma2ForCausalLM, Gemma3ForCausalLM, MistralForCausalLM, PreTrainedModel

from nanoserve import SamplingParams

# All layers with a window; every other one; two of three, so that there are three groups of these.
MODELS = {
    "mistral": (MistralForCausalLM, {"num_hidden_layers": 3, "sliding_window": 9}),
    "gemma2": (Gemma2ForCausalLM, GEMMA2),
    "gemma3": (Gemma3ForCausalLM, GEMMA3 | {"num_hidden_layers": 7, "sliding_window_pattern": 3}),
}
# The windows of their groups of layers.
WINDOWS = {"mistral": [9], "gemma2": [None, 9, 9], "gemma3": [None, 9, 9, 9]}
# Some begin alike, so that there are hits of all lengths; some repeat themselves, for draft tokens.
PROMPTS = [
    *([(5 * i * i + i) % 300 for i in range(length)] for length in (150, 149, 60, 33, 17, 9, 2)),
    [7, 8, 9, 10, 11] * 12,
    [(5 * i * i + i) % 300 for i in range(100)] + [7, 8, 9] * 9,
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def make_windowed(name: str, path: Path) -> PreTrainedModel:
    """Write a checkpoint of one of `MODELS` to `path` and return transformers' model of it."""
    architecture, settings = MODELS[name]
    return make_checkpoint(architecture, path, **settings)
