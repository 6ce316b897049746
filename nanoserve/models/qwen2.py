"""Qwen2 and Qwen2.5 (Qwen team 2024): Llama with biases on q, k and v; `ModelConfig` adds them."""

from nanoserve.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    pass
