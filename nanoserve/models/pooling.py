"""Models that pool: the layers of a decoder, without an LM head.

Any decoder whose class names its parts, as `nanoserve.models.qwen3.Qwen3ForCausalLM` does, can be
one. Instead of logits of the vocabulary there are

    embeddings    the hidden states themselves, after the last norm
    classes       a linear layer, `score.weight` [num_labels, hidden_size]
    label tokens  some rows of the LM head, such as those of "no" and "yes" (Qwen3-Reranker)

in float32, whatever the model's data type: they are few.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.registry import model_class
from nanoserve.utils.checks import require


class HiddenStates(nn.Module):
    """Takes the place of an LM head: the hidden states are the result."""

    method = None  # no matrix product, and so no form of its weight

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.float()


class ClassHead(nn.Module):
    """Scores of classes: [num_rows, hidden_size] -> float32 [num_rows, num_labels]."""

    method = None

    def __init__(self, num_labels: int, hidden_size: int, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(num_labels, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.float() @ self.weight.float().T

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor("score.weight", self.weight, tuple(self.weight.shape))


class TokenRow(nn.Module):
    """The row of one token in the stored LM head, or in the embedding to which it is tied."""

    def __init__(
        self, stored: str, token_id: int, shape: tuple[int, int], context: LayerContext
    ) -> None:
        super().__init__()
        self.stored, self.token_id, self.shape = stored, token_id, shape
        self.weight = context.empty(1, shape[1])

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(self.stored, self.weight, self.shape, 0, self.token_id)


class TokenHead(nn.Module):
    """Logits of some tokens; of two tokens, the second one's minus the first one's.

    The sigmoid of this difference is the probability of the second one of the two.
    """

    method = None

    def __init__(self, rows: Sequence[TokenRow]) -> None:
        super().__init__()
        self.rows = tuple(rows)  # not modules: the model has them, under names of its own

    def forward(self, hidden: Tensor) -> Tensor:
        weight = torch.cat([row.weight for row in self.rows]).float()
        if len(weight) == 2:
            weight = weight[1:] - weight[:1]
        return hidden.float() @ weight.T


class PoolingModel(nn.Module):
    """A decoder whose results are vectors, with the interface of models that generate."""

    samples = False  # `compute_logits` returns no logits of tokens

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        pooling = config.pooling
        decoder: Any = model_class(pooling.decoder)
        require(
            hasattr(decoder, "model_class"),
            f"{pooling.decoder} is a class without model_class, which is the part that pools: see "
            "nanoserve.models.qwen3.Qwen3ForCausalLM",
        )
        self.config, self.is_here = config, context.pp.is_last and context.tp.rank == 0
        untied = replace(config, tie_word_embeddings=False)  # there is no head to be tied to it
        self.model = decoder.model_class(untied, replace(context, parts=decoder))
        self.capturable = getattr(decoder, "capturable", True)
        self.tied_tensors: dict[str, str] = {}
        self.fused_tensors: Mapping[str, tuple[str, ...]] = getattr(decoder, "fused_tensors", {})
        first, count = config.num_hidden_layers, config.num_nextn_predict_layers
        # Read by the loader: beginnings of the names of tensors that the model has no use for.
        self.unused_tensors = tuple(f"model.layers.{first + i}." for i in range(count))
        self.lm_head: nn.Module | None = None
        if context.pp.is_last:
            self.lm_head = self._make_head(context)

    def _make_head(self, context: LayerContext) -> nn.Module:
        config, pooling = self.config, self.config.pooling
        is_tied = config.tie_word_embeddings or not pooling.label_tokens
        if is_tied:
            self.unused_tensors += ("lm_head.",)
        if not pooling.is_classifier:
            return HiddenStates()
        if not pooling.label_tokens:
            return ClassHead(len(pooling.labels), config.hidden_size, context)
        stored = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
        shape, rows = (config.vocab_size, config.hidden_size), []
        for token_id in pooling.label_tokens:
            in_vocabulary = 0 <= token_id < config.vocab_size
            rule = f"is not in [0, {config.vocab_size})"
            require(in_vocabulary, f"classifier_from_token: token id {token_id} {rule}")
            rows.append(TokenRow(stored, token_id, shape, context))
            self.add_module(f"token_{token_id}", rows[-1])
        return TokenHead(rows)

    def forward(
        self, input_ids: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] of int32 input_ids [num_tokens]."""
        return self.model(input_ids, kv_caches, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """Return embeddings or scores, float32 [num_rows, ...], of hidden states.

        The result is None on every rank but rank 0, which delivers it.
        """
        return self.lm_head(hidden) if self.is_here and self.lm_head is not None else None
