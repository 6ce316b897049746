"""Log-probabilities of sampled and most likely tokens.

The sampler passes the model's logits or, if `logprobs_mode` is "processed_logprobs", the logits of
the distribution that the token is sampled from, in which filtered tokens have -inf.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from nanoserve.outputs import TokenLogprobs
from nanoserve.sampling.host_copies import to_host
from nanoserve.sampling.rows import Rows, rows_of, tensor_of


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

    In 16 bits, logits are often equal, and filtered ones always; which of the equal tokens `topk`
    selects depends on k. So that a row does not depend on the others, rows with different k are
    selected from separately.
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
    logits: torch.Tensor,
    processed: torch.Tensor | None,
    token_ids: torch.Tensor,
    settings: np.ndarray,
    rows: np.ndarray,
    logprobs_mode: str,
) -> LogprobTensors:
    """Return log-probabilities for the `rows` of a step that requested them, copied to the host.

    Each row gets as many as the row that requested most.

    logits: [num_rows, vocab_size], of the model. processed: [len(rows), vocab_size], from
    `processed_logits`; None to use the model's. token_ids: [num_rows], the sampled tokens.
    settings: [num_rows] of `SETTINGS`. logprobs_mode: of the engine; "raw_logits" and
    "processed_logits" return logits instead.

    If the logits are not finite, a row has no log-probabilities. Then it gets no token either,
    although a mask may have left it one: its entry of `token_ids` is set to -1.
    """
    index = tensor_of(rows, logits)
    chosen, of_rows = token_ids[index], logits[index] if processed is None else processed
    gathered = gather_logprobs(of_rows, chosen.clamp(min=0), settings["num_logprobs"][rows])
    token_ids[index] = chosen.masked_fill(gathered.logprobs[:, 0].isnan(), -1)
    if logprobs_mode.endswith("logits"):
        gathered = gathered._replace(logprobs=of_rows.float().gather(1, gathered.token_ids))
    return gathered.to_host()


def processed_logits(
    logits: torch.Tensor,
    rows: Rows,
    filter_rows: Callable[[torch.Tensor, Rows], None],
) -> torch.Tensor:
    """Return the logits of the distributions that rows with log-probabilities are sampled from.

    They are float32 [num_rows_with_logprobs, vocab_size].

    logits: float32 [num_rows, vocab_size], changed by all stages before the temperature; they stay
    as they are. filter_rows: divides the logits of some rows by the temperature and filters them,
    in place. It is not called for greedy rows, as in vLLM.
    """
    wanted = np.flatnonzero(rows.settings["num_logprobs"] >= 0)
    processed, rows = logits[tensor_of(wanted, logits)], rows.take(wanted)
    at_random = np.flatnonzero(rows.settings["draw"])  # not Program.GREEDY, which is 0
    if len(at_random):
        with rows_of(processed, at_random) as part:
            filter_rows(part, rows.take(at_random))
    return processed
