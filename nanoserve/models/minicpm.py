"""MiniCPM and MiniCPM4 (Hu et al. 2024, arXiv 2404.06395; MiniCPM team 2025, arXiv 2506.07900).

Llama with scaled embeddings, blocks and logits, so that hyperparameters found on a small model suit
a large one (Tensor Programs, Yang et al. 2022). MiniCPM4's sparse attention for long contexts is
not supported: a config.json that enables it is rejected.
"""

from torch import Tensor

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.models.llama import LlamaForCausalLM
from nanoserve.models.qwen3 import Qwen3Attention, Qwen3MLP, Qwen3Model


class MiniCPMAttention(Qwen3Attention):
    def forward(self, hidden: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        return super().forward(hidden, kv_cache, metadata) * self.config.residual_scale


class MiniCPMMLP(Qwen3MLP):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.config.residual_scale


class MiniCPMModel(Qwen3Model):
    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * self.config.embedding_scale


class MiniCPMForCausalLM(LlamaForCausalLM):
    model_class = MiniCPMModel
    attention_class, mlp_class = MiniCPMAttention, MiniCPMMLP

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        return super().compute_logits(hidden * self.config.logits_scale)
