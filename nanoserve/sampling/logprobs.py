"""Log-probabilities of chosen and most likely tokens, from the model's own logits."""

import numpy as np
import torch

from nanoserve.outputs import TokenLogprobs


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> TokenLogprobs:
    """For each row of `logits` [num_rows, vocab_size]: the row's token, then the k most likely.

    token_ids: [num_rows]. A token's rank is 1 plus the number of tokens that are more likely.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.long().unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    best = logprobs.topk(min(k, logits.shape[-1]), dim=-1)
    return TokenLogprobs(
        token_ids=torch.cat([token_ids.unsqueeze(1), best.indices], dim=1).cpu().numpy(),
        logprobs=torch.cat([chosen, best.values], dim=1).cpu().numpy(),
        ranks=ranks.cpu().numpy(),
    )


def concatenate(parts: list[TokenLogprobs]) -> TokenLogprobs:
    """The rows of several slices, one after the other."""
    return TokenLogprobs(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )
