"""After an exception anywhere in the engine, in the middle of a line if need be.

Tables that depend on each other may be half changed then, and nobody can tell which. So none of
them is mended. What was computed is given up, and every sequence waits to compute its tokens again,
from what is certain: the tokens of steps that have ended, which is to say, whose outputs were
complete. A step that was under way has not happened. What is drawn again comes out the same,
because no token depends on when, or beside whom, it is drawn.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from nanoserve.engine.output_processor import OutputProcessor
from nanoserve.engine.plan import Plan
from nanoserve.engine.request import Completion, Request
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence, SequenceStatus


def recover(engine: Any, error: BaseException, planned: list[Plan]) -> None:
    """Bring an `LLMEngine` back to the end of its last step; `planned` may not have been launched.

    `error` gets `request_ids`, of those that were in a step under way. Ctrl-C must be held back.
    """
    processor = engine.output_processor
    steps = engine._in_flight
    _note_requests(error, [*(step.plan for step in steps), *planned])
    if steps and steps[0].outputs is not None:  # it has ended: each output has its place, once
        for output in steps[0].outputs:
            waiting = engine.mailboxes.get(output.request_id, engine._undelivered)
            if not any(output is earlier for earlier in waiting):
                waiting.append(output)
        processor.forget(steps[0].outputs)
    elif steps:  # no token of a younger one has joined
        _undo_tokens(steps[0].plan, processor)
    steps.clear()
    requests = processor.requests.values()
    for request in requests:
        _undo_end(request, processor)
    restart(engine.scheduler, [seq for request in requests for seq in request.sequences])


def restart(scheduler: Scheduler, sequences: Iterable[Sequence]) -> None:
    """Begin anew with those of `sequences`, of all requests, that have not ended.

    They keep their tokens and lose all else, what the prefix cache has included.
    """
    scheduler.block_manager.clear()
    scheduler.waiting, scheduler.running, scheduler.held = deque(), [], set()
    scheduler._free_slots = list(range(scheduler.max_num_seqs - 1, -1, -1))
    for seq in sequences:
        if seq.finished:
            continue
        if seq.status is SequenceStatus.RUNNING:
            seq.metrics.num_preemptions += 1
            scheduler.num_preemptions += 1
        seq.slot, seq.num_computed_tokens, seq.num_pending = -1, 0, 0
        seq.block_table, seq.num_cached_blocks = [], 0
        seq.finish_reason = seq.stop_reason = None  # of an end that did not come about
        if seq.held_for is None:
            scheduler._enqueue(seq)
        else:
            scheduler.hold(seq, seq.held_for)


def _note_requests(error: BaseException, plans: list[Plan]) -> None:
    error.request_ids = sorted({row.seq.request_id for plan in plans for row in plan.rows})
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"in a step of the requests {error.request_ids}")


def _undo_tokens(plan: Plan, processor: OutputProcessor) -> None:
    """Whatever of a step's tokens has joined, and whatever that has led to."""
    for seq, start, n, _, num_sampled in plan.sampled:
        request = processor.requests.get(seq.request_id)
        if request is None or seq not in request.sequences:
            continue  # aborted, and its id may belong to another one
        if not (seq.finished and seq.num_pending):  # else it had ended before this step's tokens
            num_tokens = start + n - (num_sampled - 1)  # without the guesses
            _set_back(request, request.completions[seq.index], num_tokens, processor)


def _undo_end(request: Request, processor: OutputProcessor) -> None:
    """An abort or a failure of the whole request that did not come as far as its output."""
    for completion in request.completions:
        if completion.seq.finish_reason in ("abort", "error"):
            _set_back(request, completion, completion.seq.num_tokens, processor)
    request.error = None


def _set_back(
    request: Request, completion: Completion, num_tokens: int, processor: OutputProcessor
) -> None:
    """To when it had so many tokens and had not ended."""
    seq = completion.seq
    if seq.finished:
        seq.status = SequenceStatus.WAITING
    seq.finish_reason = seq.stop_reason = None
    del seq.token_ids[num_tokens:]
    seq.block_hashes.clear()
    completion.num_sent = min(completion.num_sent, seq.num_output_tokens)
    if completion.logprobs is not None:
        del completion.logprobs[seq.num_output_tokens :]
        chosen = zip(completion.logprobs, seq.output_token_ids, strict=True)
        completion.cumulative_logprob = sum(entry[token_id].logprob for entry, token_id in chosen)
    if processor._detokenizer is not None:
        processor._detokenizer.restart(seq)
    counts = [seq.num_output_tokens for seq in request.sequences]
    request.sequences[0].metrics.num_output_tokens = sum(counts)
    request.sequences[0].metrics.num_intervals = sum(max(0, count - 1) for count in counts)
