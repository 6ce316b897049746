"""Explains why no token can be sampled for a row; the error ends the row's request.

`best_tokens` returns no token if a row's largest logit is not finite. Argmax would return token 0
for NaN, and also if all logits are -inf, and an output made of these tokens looks like any other.
"""

import math
from typing import TYPE_CHECKING

import torch

from nanoserve.config import EngineConfig
from nanoserve.sampling_params import SamplingParams
from nanoserve.utils.checks import shown
from nanoserve.utils.parameter_table import names_of, stages_before

if TYPE_CHECKING:
    from nanoserve.sampling.sampler import Sampled
    from nanoserve.sampling.slot_state import SlotState

# Parameters that may turn the model's finite logits into a row that is not finite.
_CHANGES = names_of(*stages_before("temperature"))
_UNCHANGED = SamplingParams(temperature=0)


def errors_of_rows(
    token_ids: list[int],
    logits: torch.Tensor | None,
    sampled: "Sampled",
    config: EngineConfig,
) -> dict[int, Exception]:
    """Return errors by row: what a request's own processor raised, or why there is no token.

    token_ids: [num_rows], -1 where no token could be sampled. logits: [num_rows, vocab_size], of
    the model; None if they were not kept.
    """
    states = dict(sampled.states)
    missing = [row for row, token_id in enumerate(token_ids) if token_id < 0]
    if logits is None:
        return {row: _error_without_logits() for row in missing}
    errors = {row: _error(logits[row].float(), states.get(row), config) for row in missing}
    return errors | sampled.errors


def _error_without_logits() -> Exception:
    """Return the error of a row with unmodified logits: nothing else can be the cause."""
    return FloatingPointError(
        "no token can be chosen: a logit that the model computed is NaN or infinite, or is beyond "
        "float32 when divided by the temperature (run with capture_sampling=False to see which)"
    )


def _error(logits: torch.Tensor, state: "SlotState | None", config: EngineConfig) -> Exception:
    largest = logits.max().item()
    if not math.isfinite(largest):
        num_bad = int((~logits.isfinite()).sum())
        return FloatingPointError(
            f"no token can be chosen: of the {len(logits)} logits that the model computed, "
            f"{num_bad} are NaN or infinite. Either the checkpoint has such weights, or "
            f"activations overflow this dtype: try dtype='float32'"
        )
    settings = [] if state is None else _changed_settings(state)
    settings += ["logits_processors of the engine"] if config.logits_processors else []
    if not settings:
        return FloatingPointError(
            f"no token can be chosen: the model's largest logit is {largest:.3g}, and divided by "
            f"the temperature it is beyond float32"
        )
    return ValueError(
        f"no token can be chosen after {', '.join(settings)}: they forbid every token, or one "
        f"of them makes a logit NaN or infinite"
    )


def _changed_settings(state: "SlotState") -> list[str]:
    params = state.params
    changed = [name for name in _CHANGES if getattr(params, name) != getattr(_UNCHANGED, name)]
    settings = [f"{name}={shown(getattr(params, name))}" for name in changed]
    return settings + [f"the stage {name!r}" for name in state.own_stages]
