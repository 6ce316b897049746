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
    logits: torch.Tensor, token_ids: torch.Tensor, k: int, is_filtered: bool = False
) -> LogprobTensors:
    """Return log-probabilities for each row of `logits` [num_rows, vocab_size].

    Entry 0 of a row is its token in `token_ids` [num_rows], then come the k most likely tokens. A
    token's rank is 1 plus the number of tokens that are more likely.

    is_filtered: True if many logits are -inf. If a row has fewer than k others, the filtered tokens
    with the lowest ids follow; `topk` alone would order them differently for each k.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.long().unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    order = _with_filtered_in_order(logprobs) if is_filtered else logprobs
    best = order.topk(min(int(k), logits.shape[-1]), dim=-1).indices
    return LogprobTensors(
        token_ids=torch.cat([token_ids.unsqueeze(1), best], dim=1),
        logprobs=torch.cat([chosen, logprobs.gather(1, best)], dim=1),
        ranks=ranks,
    )


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
    most, is_filtered = settings["num_logprobs"].max(), processed is not None
    gathered = gather_logprobs(of_rows, chosen.clamp(min=0), most, is_filtered)
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


def _with_filtered_in_order(logprobs: torch.Tensor) -> torch.Tensor:
    """Replace -inf by finite numbers below all others, which decrease with the token's id."""
    token_ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    # One float32 for each id: from -1e30 to -2e30, neighbours differ by 2^-20 of it or 8 roundings.
    return logprobs.where(logprobs > -torch.inf, -1e30 * (1 + token_ids * 2.0**-20))
