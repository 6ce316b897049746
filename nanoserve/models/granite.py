"""Granite 3 (Granite team 2024): the scales of MiniCPM, with other names in `config.json`.

`ModelConfig` reads them: embeddings are multiplied by `embedding_multiplier`, the outputs of blocks
by `residual_multiplier`, attention scores by `attention_multiplier` in place of 1 / sqrt(head_dim),
and logits, not hidden states as in MiniCPM, are divided by `logits_scaling`.
"""

from torch import Tensor

from nanoserve.models.llama import LlamaForCausalLM
from nanoserve.models.minicpm import MiniCPMAttention, MiniCPMMLP, MiniCPMModel


class GraniteModel(MiniCPMModel):
    def scale_given(self, rows: Tensor) -> Tensor:
        return rows * self.config.embedding_scale


class GraniteForCausalLM(LlamaForCausalLM):
    model_class = GraniteModel
    attention_class, mlp_class = MiniCPMAttention, MiniCPMMLP

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        logits = super().compute_logits(hidden)
        return None if logits is None else logits.mul_(self.config.logits_scale)
