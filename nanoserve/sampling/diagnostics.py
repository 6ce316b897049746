"""Why a row has got no token: the error that its request ends with.

`best_tokens` chooses none where a row's largest logit is not finite. Argmax would: of NaN, as of
nothing but -inf, it is token 0, and an answer made of that looks like any other.
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

# Whatever may stand between finite logits of the model and a row that is not.
_CHANGES = names_of(*stages_before("temperature"))
_UNCHANGED = SamplingParams(temperature=0)


def errors_of_rows(
    token_ids: list[int],
    logits: torch.Tensor | None,
    sampled: "Sampled",
    config: EngineConfig,
) -> dict[int, Exception]:
    """By row, what its request's own processor raised, or why it has no token.

    token_ids: [num_rows], -1 where nothing could be chosen. logits: [num_rows, vocab_size], as the
    model gave them; None if they were not kept.
    """
    states = dict(sampled.states)
    missing = [row for row, token_id in enumerate(token_ids) if token_id < 0]
    if logits is None:
        return {row: _error_without_logits() for row in missing}
    errors = {row: _error(logits[row].float(), states.get(row), config) for row in missing}
    return errors | sampled.errors


def _error_without_logits() -> Exception:
    """Of rows that take a token of the model's own logits: nothing else may have spoilt them."""
    return FloatingPointError(
        "no token can be chosen: a logit that the model computed is NaN or infinite, or is beyond "
        "float32 when divided by the temperature (which of them, capture_sampling=False tells)"
    )


def _error(logits: torch.Tensor, state: "SlotState | None", config: EngineConfig) -> Exception:
    largest = logits.max().item()
    if not math.isfinite(largest):
        num_bad = int((~logits.isfinite()).sum())
        return FloatingPointError(
            f"no token can be chosen: of the {len(logits)} logits that the model computed, "
            f"{num_bad} are NaN or infinite. Either weights of the checkpoint are, or its numbers "
            f"grow too large for this dtype"
        )
    asked = [] if state is None else _asked(state)
    asked += ["logits_processors of the engine"] if config.logits_processors else []
    if not asked:
        return FloatingPointError(
            f"no token can be chosen: the model's largest logit is {largest:.3g}, and divided by "
            f"the temperature it is beyond float32"
        )
    return ValueError(
        f"no token can be chosen after {', '.join(asked)}: they leave none, or one of them makes "
        f"a logit NaN or infinite"
    )


def _asked(state: "SlotState") -> list[str]:
    params = state.params
    changed = [name for name in _CHANGES if getattr(params, name) != getattr(_UNCHANGED, name)]
    asked = [f"{name}={shown(getattr(params, name))}" for name in changed]
    return asked + [f"the stage {name!r}" for name in state.own_stages]
