"""Token embedding and LM head, both split over the ranks along the vocabulary."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.linear import UnquantizedLinearMethod

# Bytes of an embedding from which on it is looked up in the form of a tied LM head, if that gives
# rows back: a second copy would be a quarter of Qwen3-0.6B. A look-up there takes 20 us more in a
# step, and 15 us for each token: much for a small model, nothing for one as large as this.
SHARED_FROM = 2**26


class VocabParallelEmbedding(nn.Module):
    """[num_tokens] -> [num_tokens, hidden]; a rank holds rows of its part of the vocabulary.

    A rank looks up what it has and contributes zeros for the rest; the sum over the ranks is the
    embedding. The vocabulary is padded to a multiple of the ranks.
    """

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        super().__init__()
        self.tp = context.tp
        self.shape = (vocab_size, hidden_size)
        self.rows = -(-vocab_size // self.tp.size)
        self.start = self.tp.rank * self.rows
        self.num_here = max(0, min(self.rows, vocab_size - self.start))  # less on the last rank
        self.weight = context.empty(self.rows, hidden_size)
        self.weight[self.num_here :].zero_()
        self._look_up: Callable[[Tensor], Tensor] | None = None

    def share(self, look_up: Callable[[Tensor], Tensor]) -> None:
        """Keep no weight: `look_up` gives its rows, int [n] -> [n, hidden], from a tied LM head."""
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
    """[num_rows, hidden] -> logits [num_rows, vocab_size] on rank 0, where sampling is done."""

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        super().__init__(vocab_size, hidden_size, context)
        self.method = context.linear_method or UnquantizedLinearMethod()
        self._embedding: tuple[VocabParallelEmbedding, ...] = ()  # a module's modules are its parts

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
