"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Llama with experts."""

from nanoserve.models.layers.experts import SparseMoE
from nanoserve.models.llama import LlamaForCausalLM


class MixtralMoE(SparseMoE):
    stored_as = "block_sparse_moe"
    projections = ("w1", "w3", "w2")
    rounds_weights = False


class MixtralForCausalLM(LlamaForCausalLM):
    mlp_class = MixtralMoE  # type: ignore[assignment]  # it has the same constructor
