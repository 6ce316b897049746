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


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobTensors:
    """Return log-probabilities for each row of `logits` [num_rows, vocab_size].

    Entry 0 of a row is its token in `token_ids` [num_rows], then come the k most likely tokens. A
    token's rank is 1 plus the number of tokens that are more likely.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.long().unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    best = logprobs.topk(min(int(k), logits.shape[-1]), dim=-1)
    return LogprobTensors(
        token_ids=torch.cat([token_ids.unsqueeze(1), best.indices], dim=1),
        logprobs=torch.cat([chosen, best.values], dim=1),
        ranks=ranks,
    )


def logprobs_of_rows(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: np.ndarray, k: int
) -> LogprobTensors:
    """Return log-probabilities for the `rows` of a step that requested them, copied to the host.

    logits: [num_rows, vocab_size], of the model; token_ids: [num_rows], the sampled tokens. If the
    model's logits are not finite, a row has no log-probabilities. Then it gets no token either,
    although a mask may have left it one: its entry of `token_ids` is set to -1.
    """
    index = tensor_of(rows, logits)
    chosen = token_ids[index]
    gathered = gather_logprobs(logits[index], chosen.clamp(min=0), k)
    token_ids[index] = chosen.masked_fill(gathered.logprobs[:, 0].isnan(), -1)
    return gathered.to_host()
