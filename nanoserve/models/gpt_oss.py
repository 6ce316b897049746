"""gpt-oss (OpenAI 2025, arXiv 2508.10925): Llama with attention sinks and experts with biases.

Every other layer has a sliding window. The gate of an expert is clamped, and the router chooses
experts before it takes the softmax, over the chosen ones only.
"""

from collections.abc import Iterator

from torch import Tensor

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.experts import SparseMoE
from nanoserve.models.layers.rotary import RotaryEmbedding
from nanoserve.models.layers.sinks import AttentionSinks
from nanoserve.models.llama import LlamaForCausalLM
from nanoserve.models.qwen3 import Qwen3Attention


class GptOssAttention(Qwen3Attention):
    def __init__(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: LayerContext
    ) -> None:
        super().__init__(config, index, rotary, context)
        self.sinks = AttentionSinks(config.num_attention_heads, context)
        self.layer = self.sinks.of(self.layer)


class GptOssMoE(SparseMoE):
    has_biases, router_name = True, "router"

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits, ids = self.router_logits(hidden).topk(self.top_k, dim=-1)
        return ids, logits.softmax(dim=-1)

    def stacked_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        """Yield the stacks: matrices as [inputs, outputs]; the outputs of gate and up alternate."""
        experts, first = f"{own_name}.experts", self.first_expert
        count, (num_here, hidden, size) = self.num_experts, self.down.shape
        gate_up = self.gate_up.view(num_here, 2, size, hidden).permute(0, 3, 2, 1)
        gate_up_bias = self.gate_up_bias.view(num_here, 2, size).mT
        for name, own, shape in (
            ("gate_up_proj", gate_up, (count, hidden, 2 * size)),
            ("gate_up_proj_bias", gate_up_bias, (count, 2 * size)),
            ("down_proj", self.down.mT, (count, size, hidden)),
            ("down_proj_bias", self.down_bias, (count, hidden)),
        ):
            yield CheckpointTensor(f"{experts}.{name}", own, shape, 0, first)


class GptOssForCausalLM(LlamaForCausalLM):
    attention_class = GptOssAttention
    mlp_class = GptOssMoE  # type: ignore[assignment]  # it has the same constructor
