"""Record the engine's steps as lines of JSON, with their rows, KV blocks, queues and times.

The recorder is an observer (`LLMEngine.observers`): it is called after each step with its plan, its
batch and its result, and the engine does not depend on it. The first line of a trace is its header,
and the last one has the time at which the engine was closed. A line in between is a step:

    step        number of its batch; a missing number is a step that raised and was undone
    time        seconds from the start of the trace to the start of the step
    times       seconds that it spent in each part of the loop
    arrived     sequences seen for the first time, with their prompts
    aborted     sequences that ended between the previous step and this one
    undone      sequences that lost their blocks to a step that raised, before this one
    preempted   sequences that lost their blocks in this step
    admitted    sequences that started to run, for the first time or again
    batch       the header of the packed batch
    rows        its rows, in order; see `TraceRecorder._row`
    evicted     blocks evicted from the prefix cache since the previous step
    published   blocks cached since then, maybe with other content than before
    finished    sequences that ended with this step
    waiting     the waiting queue after this step, its head first
    running     the running sequences after this step, in order of admission
    to_host     with a host tier or a KV connector: blocks copied to the host before this step's
                model ran
    from_host   likewise: blocks then filled from the host, which count as hits of their rows
    stages      with pipeline parallelism: the start and end of this step in each stage, in
                seconds of its machine's clock from the start of the trace

If several steps are in flight, the steps after this one are already planned. `waiting` and
`running` then reflect their admissions and preemptions, too, without sequences that have not been
recorded yet. Blocks that they evict and cache are among the blocks of this step.

A sequence is identified by its arrival number, which is never reused. Block tables are not
repeated: a row has the blocks that are new in its table, which after an admission are all of them.
"""

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import Any

from nanoserve.engine.batch import Batch
from nanoserve.engine.block_manager import blocks_needed
from nanoserve.engine.executor import ForwardInputs, StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.kv_transfers import KVTransfers
from nanoserve.engine.listeners import BlockListener, CachedBlock
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.engine.stopwatch import StepTimes
from nanoserve.features.trace.reader import FORMAT, VERSION
from nanoserve.features.trace.whole_lines import WholeLines
from nanoserve.text.incremental_decoder import TokenTexts

_OPTIONS = (
    "model",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "scheduling_policy",
    "enable_prefix_caching",
)


class TraceRecorder:
    """An observer that writes a line to `file` for every step of `engine`."""

    def __init__(self, engine: GuardedEngine, file: WholeLines) -> None:
        self._engine, self._scheduler = engine, engine.scheduler
        tokenizer = engine.tokenizer
        self._token_texts = None if tokenizer is None else TokenTexts(tokenizer.backend)
        self._block_size = engine.config.block_size
        self._texts: dict[Sequence, SequenceTexts] = {}  # of all sequences that have not ended
        self._tables: dict[Sequence, list[int]] = {}  # of running sequences
        self.cache_changes = CacheChanges()
        self._host_copies: HostCopies | None = None
        config = engine.config
        if config.kv_offloading_size is not None or config.kv_connector is not None:
            self._host_copies = HostCopies()
            engine.add_extension(self._host_copies)
        self._file = file
        self._start = engine.clock()
        options = {name: getattr(engine.config, name) for name in _OPTIONS}
        self._write(
            {"format": FORMAT, "version": VERSION}
            | {"started": datetime.now().astimezone().isoformat(timespec="seconds")}
            | options
            | {"num_kv_blocks": engine.executor.num_kv_blocks}
            | {"max_model_len": engine.executor.max_model_len}
        )

    def observe(self, plan: Plan, batch: Batch, result: StepResult, times: StepTimes) -> None:
        """Write one step, after which finished sequences have already freed their blocks.

        A failure of the trace must not lose the step's results, so the trace ends if there is no
        memory for its line.
        """
        if not self._file.is_complete:
            return
        try:
            self._write(self._step(plan, batch, result, times))
        except MemoryError as error:
            self._file.give_up(error)

    def _step(
        self, plan: Plan, batch: Batch, result: StepResult, times: StepTimes
    ) -> dict[str, Any]:
        parts = asdict(times)
        start = self._seconds(self._engine.clock() - sum(parts.values()))
        arrived = self._introduce(plan)
        planned = {row.seq: None for row in plan.rows}  # in batch order
        aborted = self._ended(seq for seq in self._texts if seq not in planned)
        undone = self._undone(plan)
        for seq in [*undone, *plan.preempted]:
            self._tables.pop(seq, None)
        header = batch.header
        tables = batch.block_tables(header.num_rows, header.table_width)[0].tolist()
        sampled = (row.seq for row in plan.sampled)
        new_ids = dict(zip(sampled, result.token_ids, strict=True))
        rows = [
            self._row(plan, row, new_ids.get(row.seq, []), table)
            for row, table in zip(plan.rows, tables, strict=True)
        ]
        evicted, cached = self.cache_changes.take()
        return {
            "step": header.step,
            "time": start,
            "times": {part: round(seconds, 7) for part, seconds in parts.items()},
            "arrived": arrived,
            "aborted": aborted,
            "undone": _numbers(undone),
            "preempted": _numbers(plan.preempted),
            "admitted": _numbers(plan.admitted),
            "batch": header._asdict(),
            "rows": rows,
            "evicted": evicted,
            "published": cached,
            "finished": self._ended(planned),
            "waiting": _numbers(filter(self._texts.__contains__, self._scheduler.waiting)),
            "running": _numbers(filter(self._texts.__contains__, self._scheduler.running)),
            **self._copies(plan),
            **self._stages(header.step),
        }

    def _copies(self, plan: Plan) -> dict[str, list[int]]:
        if self._host_copies is None:
            return {}
        to_host, to_device = self._host_copies.take(plan)
        return {
            "to_host": [block for block, _ in to_host],
            "from_host": [block for _, block in to_device],
        }

    def _stages(self, step: int) -> dict[str, Any]:
        if self._engine.config.pipeline_parallel_size == 1:
            return {}
        executor: Any = self._engine.executor  # of a pipeline
        spans = executor.spans(step)
        return {"stages": [[self._seconds(moment) for moment in span] for span in spans]}

    def end(self) -> None:
        """Write the last line after the engine is closed and its sequences are aborted."""
        if not self._file.is_complete:
            return
        now = self._seconds(self._engine.clock())
        self._write({"closed": now, "aborted": self._ended(self._texts)})

    def _write(self, record: dict[str, Any]) -> None:
        self._file.append(json.dumps(record, ensure_ascii=False, separators=(",", ":")))

    def _seconds(self, clock: float) -> float:
        return round(clock - self._start, 6)

    def _introduce(self, plan: Plan) -> list[dict[str, Any]]:
        """Describe the sequences seen for the first time, which may be running or waiting."""
        seen = {*(row.seq for row in plan.rows), *self._scheduler.waiting}
        new = sorted(seen.difference(self._texts), key=lambda seq: seq.arrival)
        return [self._arrival(seq) for seq in new]

    def _arrival(self, seq: Sequence) -> dict[str, Any]:
        """Describe a new sequence; `texts` has the text of each token of its prompt."""
        texts = self._texts[seq] = SequenceTexts(self._token_texts)
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        return {
            "seq": seq.arrival,
            "request": seq.request_id,
            "index": seq.index,  # index among the completions of its prompt
            "priority": int(seq.priority),
            "time": self._seconds(seq.metrics.arrival_time),
            "prompt": prompt,
            "texts": [texts.next(token_id) for token_id in prompt],
        }

    def _ended(self, sequences: Iterable[Sequence]) -> list[dict[str, Any]]:
        """Drop the finished ones of `sequences`, and describe how each of them ended."""
        ended = [seq for seq in sequences if seq.finished]
        for seq in ended:
            del self._texts[seq]
            self._tables.pop(seq, None)
        return [
            {"seq": seq.arrival, "reason": seq.finish_reason, "stop_reason": seq.stop_reason}
            for seq in ended
        ]

    def _undone(self, plan: Plan) -> list[Sequence]:
        """Return the sequences that lost their blocks although no step preempted them.

        They wait, or have been admitted again.
        """
        plans = [plan, *self._engine.plans_under_way]
        preempted = {seq for each in plans for seq in each.preempted}
        return [
            seq
            for seq in self._tables
            if (seq.status is SequenceStatus.WAITING and seq not in preempted)
            or seq in plan.admitted
        ]

    def _row(
        self, plan: Plan, row: Row, new_ids: list[int], packed_table: list[int]
    ) -> dict[str, Any]:
        """Describe the row of a sequence in a step that sampled `new_ids` for it.

        seq: its arrival number.
        kind: "decode" for a single token of the output, else "prefill": a prompt, or tokens that
            are computed again after a preemption.
        computed, new: number of tokens with K and V in the cache before, and computed in this step.
        hits: at an admission, the number of `blocks`, from the first, that were cached or came
            from the host.
        blocks: the new blocks of its block table.
        yields: true if a token was sampled, which is `token` with its `text`; `token` is null if
            sampling failed.
        guesses: the draft tokens with their texts, if there are any. The first `right` of them were
            accepted and appended before `token`.
        """
        seq, computed, n, drafts = row.seq, row.start, row.n, plan.draft_tokens.get(row.seq, [])
        # The table of a sequence may have more blocks than a chunk needs. A freed table has not:
        # a sequence can only finish in a step that computes all of its tokens.
        num_used = blocks_needed(computed + n, self._block_size)
        table = list(seq.block_table) or packed_table[:num_used]
        is_admitted = seq not in self._tables
        num_known = 0 if is_admitted else len(self._tables[seq])
        self._tables[seq] = table
        is_decode = n - len(drafts) == 1 and computed >= seq.num_prompt_tokens
        written: dict[str, Any] = {
            "seq": seq.arrival,
            "kind": "decode" if is_decode else "prefill",
            "computed": computed,
            "new": n,
            "hits": computed // self._block_size if is_admitted else 0,
            "blocks": table[num_known:],
            "yields": bool(row.num_sampled),
        }
        taken = _taken(seq, new_ids, computed + n - len(drafts))
        accepted, token = taken[:-1], taken[-1] if taken else None
        if drafts:
            written |= self._drafts(seq, drafts, accepted)
        if row.num_sampled:
            written["token"] = token
            written["text"] = self._texts[seq].next(token)
        return written

    def _drafts(self, seq: Sequence, drafts: list[int], accepted: list[int]) -> dict[str, Any]:
        texts = self._texts[seq]
        shown = [[token_id, texts.next(token_id)] for token_id in accepted]
        shown += [[token_id, texts.alone(token_id)] for token_id in drafts[len(accepted) :]]
        return {"guesses": shown, "right": len(accepted)}


class SequenceTexts:
    """Texts of a sequence's tokens, one by one; joined, they are the text of the sequence.

    A token that ends within a character has no text: the token that completes the character has it.
    Without a tokenizer, no token has a text.
    """

    def __init__(self, texts: TokenTexts | None) -> None:
        self._texts = texts
        self._decoder = None if texts is None else texts.decoder([], False, False, True)

    def next(self, token_id: int | None) -> str:
        if self._decoder is None or token_id is None:
            return ""
        return self._decoder.feed([token_id])

    def alone(self, token_id: int) -> str:
        """Return the text of a token that was not accepted."""
        return "" if self._texts is None else self._texts.text_of_token(token_id)


def _taken(seq: Sequence, new_ids: list[int], num_tokens: int) -> list[int]:
    """Return the used tokens of `new_ids`, sampled when `seq` had `num_tokens` tokens.

    These are the appended tokens, and a stop token or EOS that ended `seq` without being appended.
    """
    if seq.finish_reason is None:
        return new_ids
    num_joined = len(seq.token_ids) - num_tokens
    is_ended_by_token = seq.finish_reason == "stop" and not isinstance(seq.stop_reason, str)
    return new_ids[: num_joined + is_ended_by_token]


def _numbers(sequences: Iterable[Sequence]) -> list[int]:
    return [seq.arrival for seq in sequences]


class CacheChanges(BlockListener):
    """A listener that collects which blocks were cached and evicted until `take` is called."""

    def __init__(self) -> None:
        self._cached: set[int] = set()  # at the last call of `take`
        self._added: dict[int, None] = {}  # since then and still cached, in order
        self._removed: set[int] = set()  # since then, even if cached again

    def on_cached(self, cached: CachedBlock) -> None:
        self._added[cached.block] = None

    def on_removed(self, block: int, block_hash: bytes, group: int, is_last: bool) -> None:
        self._added.pop(block, None)
        self._removed.add(block)

    def on_cleared(self) -> None:
        self._added.clear()
        self._removed |= self._cached

    def take(self) -> tuple[list[int], list[int]]:
        """Return the blocks (evicted, cached) since the last call.

        A block that was evicted and cached again, with other content, is in both. A block that was
        cached and evicted again is in neither.
        """
        evicted = sorted(self._cached & self._removed)
        added = list(self._added)
        self._cached.difference_update(evicted)
        self._cached.update(added)
        self._added.clear()
        self._removed.clear()
        return evicted, added


class HostCopies(Extension):
    """An extension that changes nothing: it notes which blocks each step copies.

    It has to come after the extension that orders these copies.
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[Plan, KVTransfers]] = deque()

    def forward_inputs(self, plan: Plan, inputs: ForwardInputs) -> None:
        if inputs.kv_transfers is not None:
            self._noted.append((plan, inputs.kv_transfers))

    def take(self, plan: Plan) -> KVTransfers:
        """Return the copies of a step, and forget those of earlier ones, which have failed."""
        if any(noted is plan for noted, _ in self._noted):
            while True:
                noted, transfers = self._noted.popleft()
                if noted is plan:
                    return transfers
        return KVTransfers([], [])
