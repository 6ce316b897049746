"""Outputs that are not sampled: those of the tokens of a prompt that some head asked for."""

import numpy as np

from nanoserve.engine.batch import Batch
from nanoserve.engine.plan import Plan


def pack_prompt_outputs(batch: Batch, plan: Plan) -> None:
    """Write them behind the sampler's: head by head, and within a head in batch order.

    A known token follows each of them, and goes to `next_ids`.
    """
    first = len(plan.sampled())
    for head, name in enumerate(batch.layout.heads):
        for row, (seq, start, _, num_outputs, num_sampled) in enumerate(plan.rows):
            count = num_outputs - num_sampled
            if count and seq.prompt_head == name:
                span = slice(first, first + count)
                batch.output_rows[span] = batch.cu_seqlens_q[row] + np.arange(count)
                batch.output_slots[span] = seq.slot
                batch.next_ids[span] = seq.token_ids[start + 1 : start + count + 1]
                batch.head_counts[head] += count
                first += count
