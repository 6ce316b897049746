"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Llama with experts."""

from nanoserve.layers.experts import SparseMoE
from nanoserve.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class MixtralMoE(SparseMoE):
    stored_as = "block_sparse_moe"
    projections = ("w1", "w3", "w2")
    rounds_weights = False


class MixtralDecoderLayer(LlamaDecoderLayer):
    mlp_class = MixtralMoE


class MixtralModel(LlamaModel):
    layer_class = MixtralDecoderLayer


class MixtralForCausalLM(LlamaForCausalLM):
    model_class = MixtralModel
