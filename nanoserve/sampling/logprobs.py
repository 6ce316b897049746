"""Log-probabilities of sampled and most likely tokens, computed from unmodified logits."""

from typing import NamedTuple

import numpy as np
import torch

from nanoserve.outputs import TokenLogprobs
from nanoserve.sampling.host_copies import to_host
from nanoserve.sampling.rows import tensor_of


class LogprobTensors(NamedTuple):
    """The tensors of a `TokenLogprobs`, which may not have been computed yet."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor

    def to_host(self) -> "LogprobTensors":
        """Start to copy them to the host; they are complete when the step's tokens are."""
        return LogprobTensors(*map(to_host, self))

    def numpy(self) -> TokenLogprobs:
        """Return the copies that `to_host` started, after the step's tokens have arrived."""
        return TokenLogprobs(*(tensor.numpy() for tensor in self))

    def keep(
        self, places: list[tuple[int, int] | None]
    ) -> tuple[TokenLogprobs, list[tuple[int, int]]]:
        """Return the entries that have a place, as `numpy` does, and their places."""
        logprobs = self.numpy()
        kept = [entry for entry, place in enumerate(places) if place is not None]
        if len(kept) < len(places):
            logprobs = logprobs.take(kept)
        return logprobs, [place for place in places if place is not None]


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: np.ndarray | int, most: int | None = None
) -> LogprobTensors:
    """Return log-probabilities for each row of `logits` [num_rows, vocab_size].

    Entry 0 of a row is its token in `token_ids` [num_rows], then come the k most likely tokens. A
    token's rank is 1 plus the number of tokens that are more likely. k: a number, or one for each
    row; each row has `most` entries for them (default: the largest k), the rest without meaning.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.long().unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    k = np.broadcast_to(k, len(logits))
    values, ids = _most_likely(logprobs, k, k.max() if most is None else most)
    return LogprobTensors(
        token_ids=torch.cat([token_ids.unsqueeze(1), ids], dim=1),
        logprobs=torch.cat([chosen, values], dim=1),
        ranks=ranks,
    )


def _most_likely(
    logprobs: torch.Tensor, k: np.ndarray, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's k most likely tokens: log-probabilities and ids, [num_rows, most].

    In 16 bits, logits are often equal, and which of the equal tokens `topk` selects depends on k.
    So that a row does not depend on the others, rows with different k are selected from separately.
    """
    k, most = np.minimum(k, logprobs.shape[1]), min(int(most), logprobs.shape[1])
    if (k == most).all():
        best = logprobs.topk(most, dim=-1)
        return best.values, best.indices
    values = logprobs.new_zeros(len(k), most)
    ids = torch.zeros_like(values, dtype=torch.int64)
    for size in np.unique(k).tolist():
        rows = tensor_of(np.flatnonzero(k == size), logprobs)
        best = logprobs[rows].topk(size, dim=-1)
        values[rows, :size], ids[rows, :size] = best.values, best.indices
    return values, ids


def logprobs_of_rows(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: np.ndarray, k: np.ndarray
) -> LogprobTensors:
    """Return log-probabilities for the `rows` of a step that requested them, copied to the host.

    k: the number of most likely tokens for each of `rows`.

    logits: [num_rows, vocab_size], of the model; token_ids: [num_rows], the sampled tokens. If the
    model's logits are not finite, a row has no log-probabilities. Then it gets no token either,
    although a mask may have left it one: its entry of `token_ids` is set to -1.
    """
    index = tensor_of(rows, logits)
    chosen = token_ids[index]
    gathered = gather_logprobs(logits[index], chosen.clamp(min=0), k)
    token_ids[index] = chosen.masked_fill(gathered.logprobs[:, 0].isnan(), -1)
    return gathered.to_host()
