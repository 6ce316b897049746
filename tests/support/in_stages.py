"""Logits through the stages that change them, without a sampler around."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nanoserve.engine.executor import SlotUpdate
from nanoserve.sampling.rows import Rows
from nanoserve.sampling.settings import SETTINGS, settings_of
from nanoserve.sampling.slot_state import SlotState
from nanoserve.sampling.stages import apply_stages, make_stages


def change_logits(
    logits: torch.Tensor,
    updates: list[SlotUpdate],
    states: list[SlotState] | None = None,
    processors: Sequence[Any] = (),
) -> dict[int, Exception]:
    """Change float32 [num_rows, vocab_size] in place, as all stages before the temperature do.

    updates: one for each row. states: of the rows, if they are not those of the updates. Returns
    errors by row.
    """
    stages = make_stages(processors)
    stages = stages[: [stage.name for stage in stages].index("temperature")]
    settings = np.zeros(len(updates), SETTINGS)
    for row, update in enumerate(updates):
        wanted = sum(stage.bit for stage in stages if stage.wants(update))
        settings[row] = settings_of(update, wanted, is_changed=True)
    places = np.arange(len(updates))
    rows = Rows(settings, places, places, tensors=None, errors={})
    rows = rows._replace(states=states or [SlotState(update) for update in updates])
    apply_stages(stages, logits, rows)
    return rows.errors
