"""Outputs of a prompt's tokens, apart from the next one: from the plan to a head, and from it on.

A step that has any is packed with them, head by head, behind the sampler's outputs. What a head
(`nanoserve.worker.heads`) makes of them reaches the collector of the same name.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.request import Request

# Takes what a head made of the outputs of one row: (request, row, all that the head made, index of
# the row's first output in it). Returns an exception if that is to end the request.
Collector = Callable[[Request, Row, Any, int], Exception | None]


def add_prompt_outputs(batch: Any, plan: Plan, first: int) -> None:
    """Pack, from output `first` on, those that are not sampled: a known token follows each of them.

    Head by head, and within a head in batch order.
    """
    batch.head_counts[:] = 0
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


def prompt_outputs(batch: Any, header: BatchHeader) -> dict[str, slice]:
    """Which outputs go to which head, apart from the sampler's, which are the first."""
    if header.num_outputs == header.num_sampled:
        return {}
    ends = header.num_sampled + np.cumsum(batch.head_counts)
    spans = zip(batch.layout.heads, ends - batch.head_counts, ends, strict=True)
    return {name: slice(int(first), int(end)) for name, first, end in spans if first < end}


def collect_from_heads(
    plan: Plan,
    of_heads: dict[str, Any],
    requests: dict[str, Request],
    collectors: dict[str, Collector],
    text_of_token: Callable[[int], str],
) -> dict[Request, Exception]:
    """Hand each collector what its head made, row by row; the requests that end with that."""
    failed: dict[Request, Exception] = {}
    for name, values in of_heads.items():
        if name == "prompt_logprobs" and name not in collectors:
            from nanoserve.engine.logprobs import PromptLogprobsCollector

            collectors[name] = PromptLogprobsCollector(text_of_token)
        first = 0
        for row in plan.rows:
            count = row.num_outputs - row.num_sampled
            if count and row.seq.prompt_head == name:
                request = requests.get(row.seq.request_id)
                # Not if it has ended meanwhile, and its id belongs to another one.
                if request is not None and row.seq in request.sequences:
                    try:
                        error = collectors[name](request, row, values, first)
                    except Exception as raised:  # no other request may end of it
                        error = raised
                    if error is not None:
                        failed[request] = error
                first += count
    return failed
