"""The token embedding and the LM head. Both are split over the ranks along the vocabulary."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.linear import UnquantizedLinearMethod

# Size in bytes from which an embedding reads its rows from a tied LM head, if the head's format
# supports that: a second copy would be a quarter of Qwen3-0.6B. Such a look-up takes 20 us more in
# a step, and 15 us for each token: significant for a small model, negligible for one of this size.
SHARED_FROM = 2**26


class VocabParallelEmbedding(nn.Module):
    """Embedding [num_tokens] -> [num_tokens, hidden], split over the ranks along the vocabulary.

    A rank looks up the tokens of its part and contributes zeros for other tokens; the sum over the
    ranks is the embedding. The vocabulary is padded to a multiple of the number of ranks.
    """

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        super().__init__()
        self.tp = context.tp
        self.shape = (vocab_size, hidden_size)
        self.rows = -(-vocab_size // self.tp.size)
        self.start = self.tp.rank * self.rows
        self.num_here = max(0, min(self.rows, vocab_size - self.start))  # fewer on the last rank
        self.weight = context.empty(self.rows, hidden_size)
        self.weight[self.num_here :].zero_()
        self._look_up: Callable[[Tensor], Tensor] | None = None

    def share(self, look_up: Callable[[Tensor], Tensor]) -> None:
        """Drop the weight, and use `look_up`, int [n] -> [n, hidden], of a tied LM head."""
        self._look_up, self.weight = look_up, None
        look_up(torch.zeros(1, dtype=torch.int32))  # compiles now, not in the first step

    def _rows(self, indices: Tensor) -> Tensor:
        if self._look_up is not None:
            return self._look_up(indices)
        return F.embedding(indices, self.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return self._rows(input_ids)
        local = input_ids - self.start
        is_here = (local >= 0) & (local < self.rows)
        x = self._rows(local.clamp(0, self.rows - 1))
        return self.tp.all_reduce(x.masked_fill(~is_here.unsqueeze(-1), 0))

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        rows, start = self.weight[: self.num_here], min(self.start, self.shape[0])
        yield CheckpointTensor(f"{own_name}.weight", rows, self.shape, 0, start)


class ParallelLMHead(VocabParallelEmbedding):
    """LM head: [num_rows, hidden] -> logits [num_rows, vocab_size] on rank 0, which samples."""

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        super().__init__(vocab_size, hidden_size, context)
        plain = UnquantizedLinearMethod(context.ops.linear)
        self.method = context.linear_method or plain
        self._embedding: tuple[VocabParallelEmbedding, ...] = ()  # in a tuple: not a submodule

    def process_after_loading(self) -> None:
        num_bytes = self.weight.nbytes
        self.method.process_after_loading(self)
        form = getattr(self, "form", None)
        if num_bytes >= SHARED_FROM and getattr(form, "keeps_rows", False):
            for embedding in self._embedding:
                embedding.share(form.rows)

    def forward(self, hidden: Tensor) -> Tensor | None:
        logits = self.tp.gather(self.method.apply(self, hidden))
        return None if logits is None else logits[:, : self.shape[0]]

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Share the embedding's weight, for checkpoints with `tie_word_embeddings`."""
        self.weight, self._embedding = embedding.weight, (embedding,)
