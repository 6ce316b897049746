"""Exercise: a model of your own.

Heron is an invented architecture. It is Llama with three differences:

1. Embeddings are multiplied by the square root of the hidden size.
2. The feed-forward has no gate: down_proj(relu(up_proj(x)) ** 2), without biases. Its tensors are
   called `model.layers.0.mlp.up_proj.weight` and `model.layers.0.mlp.down_proj.weight`.
3. Checkpoints store q, k and v as one tensor, `model.layers.0.self_attn.qkv_proj.weight`: the rows
   of q, then those of k, then those of v.

Complete the three classes, so that an `LLM` with a Heron checkpoint gives the greedy tokens of the
reference in the test, and so that the model can be split over several ranks. The base model is
`nanoserve/models/qwen3.py`; `phi3.py` and `minicpm.py` beside it change it in similar ways.

    pytest -x docs/16-adding-a-model/test_exercise.py
"""

from torch import Tensor, nn

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.llama import LlamaForCausalLM
from nanoserve.models.qwen3 import Qwen3Model


class HeronMLP(nn.Module):
    """Use `ColumnParallelLinear` and `RowParallelLinear`, so that it can be split over ranks."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        raise NotImplementedError


class HeronModel(Qwen3Model):
    def embed(self, input_ids: Tensor) -> Tensor:
        """int32 [num_tokens] -> [num_tokens, hidden_size]."""
        raise NotImplementedError


class HeronForCausalLM(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        """Remove this constructor: class attributes are enough."""
        raise NotImplementedError
