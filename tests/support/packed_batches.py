"""Batches and sequences for tests that pack them by hand."""

import numpy as np

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams


def make_batch(tokens: int = 64, rows: int = 4, blocks: int = 8) -> Batch:
    layout = BatchLayout(tokens, rows, blocks)
    return Batch(layout, np.full(layout.num_bytes, 255, dtype=np.uint8))


def make_sequence(length: int, computed: int, slot: int) -> Sequence:
    seq = Sequence("r", list(range(length)), SamplingParams(), max_model_len=4096)
    seq.num_computed_tokens, seq.slot = computed, slot
    return seq


def make_plan(num_new_tokens: dict[Sequence, int]) -> Plan:
    """So many tokens of each sequence, from where it stands."""
    rows = []
    for seq, n in num_new_tokens.items():
        num_sampled = int(seq.num_computed_tokens + n == seq.num_tokens)
        num_outputs = n if seq.needs_prompt_outputs else num_sampled
        rows.append(Row(seq, seq.num_computed_tokens, n, num_outputs, num_sampled))
    return Plan(budget=0, rows=rows)
