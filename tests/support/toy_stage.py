"""A stage of the sampler of one's own: tokens that a request forbids by their last digit."""

import torch


class NoDigit:
    def wants(self, update) -> bool:
        return "no_digit" in (update.params.extra_args or {})

    def apply(self, logits: torch.Tensor, rows) -> None:
        with rows.part(logits) as part:
            for row, state in zip(part, rows.states, strict=True):
                row[state.params.extra_args["no_digit"] :: 10] = -torch.inf
