"""Which sequences run in the next step, and how many tokens of each.

One rule: every step gives each sequence some tokens so that `num_computed_tokens` catches up with
`num_tokens`. Prefill is a large number, decode is one, chunked prefill is a number cut by the
budget, a prefix-cache hit starts above zero, recompute after preemption starts again at zero.
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.sequence import Sequence, SequenceStatus


@dataclass
class Plan:
    """One step. `num_new_tokens` is in batch order: sequences with one token come first."""

    num_new_tokens: dict[Sequence, int] = field(default_factory=dict)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    registered_blocks: list[int] = field(default_factory=list)
    prompt_logprobs: dict[Sequence, int] = field(default_factory=dict)  # those that need them

    def caught_up(self) -> Iterator[Sequence]:
        """The sequences whose last known token this step computes: only they yield a new one."""
        for seq, n in self.num_new_tokens.items():
            if seq.num_computed_tokens + n == seq.num_tokens:
                yield seq


class Scheduler:
    """Continuous batching (Yu et al. 2022, Orca) with chunked prefill and preemption by recompute.

    `waiting` is in order of (priority, arrival), `running` in order of admission. Under FCFS all
    priorities count as equal; then whatever runs arrived before all that waits (but for siblings
    that were held back), so a preempted sequence goes back to the head of `waiting`, and the
    victim is the last of `running`.
    """

    def __init__(self, config: EngineConfig, num_kv_blocks: int, max_model_len: int) -> None:
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_tokens_per_seq = config.long_prefill_token_threshold or self.max_num_batched_tokens
        self.by_priority = config.scheduling_policy == "priority"
        self.block_manager = BlockManager(
            num_kv_blocks, config.block_size, config.enable_prefix_caching, config.prefix_cache_seed
        )
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        # A running sequence keeps its slot, and its row here is extended in place.
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        max_blocks = self.block_manager.blocks_needed(max_model_len)
        self.block_tables = np.zeros((self.max_num_seqs, max_blocks), dtype=np.int32)
        self._needing_prompt_logits: list[Sequence] = []
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # prompt tokens looked up in the prefix cache
        self.num_hit_tokens = 0

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Its siblings follow when it has computed the prompt."""
        for sibling in seq.siblings:
            sibling.status = SequenceStatus.HELD
        if seq.needs_prompt_logits:
            self._needing_prompt_logits.append(seq)
        self._enqueue(seq)

    def schedule(self, plan: Plan) -> None:
        """Fill an empty plan for one step: running sequences first, then waiting ones.

        The plan is the caller's, so that he can roll back even what was planned half.
        """
        budget = self._schedule_running(plan)
        # From here on nothing can be preempted any more, so what is planned will be computed, and
        # a block that this step fills may be shared at once: every layer stores the K and V of
        # the whole batch before it attends.
        for seq, n in plan.num_new_tokens.items():
            plan.registered_blocks += self.block_manager.register(seq, n)
        if not plan.preempted:
            self._admit_waiting(plan, budget)
        if any(n != 1 for n in plan.num_new_tokens.values()):
            in_batch_order = sorted(plan.num_new_tokens.items(), key=lambda item: item[1] != 1)
            plan.num_new_tokens = dict(in_batch_order)
        for seq in self._needing_prompt_logits:
            if seq in plan.num_new_tokens:
                plan.prompt_logprobs[seq] = plan.num_new_tokens[seq]

    def update(self, plan: Plan, token_ids: list[int]) -> list[Sequence]:
        """Account for a step that ran; `token_ids` holds one sampled token per caught-up sequence.

        Returns the sequences that caught up, in batch order. Those that are now finished have
        given back their blocks and their slot.
        """
        now = time.perf_counter()
        advanced = list(plan.caught_up())
        for seq, n in plan.num_new_tokens.items():
            seq.num_computed_tokens += n
        any_finished = False
        for seq, token_id in zip(advanced, token_ids, strict=True):
            if seq.append(token_id):
                seq.metrics.num_output_tokens += 1
                seq.metrics.last_token_time = now
            if seq.metrics.first_token_time is None:
                seq.metrics.first_token_time = now
                self._prompt_computed(seq)
            if seq.finish_reason is not None:
                any_finished = True
                self._finish(seq, now)
        if any_finished:
            self._drop_stopped()
        return advanced

    def finish(self, seq: Sequence, reason: str, stop_reason: str | None = None) -> None:
        """End `seq` from outside, whatever its state, and free all that it holds."""
        if seq.finished:
            return
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        self._finish(seq, time.perf_counter())
        self._drop_stopped()

    def rollback(self, plan: Plan) -> None:
        """Undo a step that raised, planned or half planned: nothing of it is in the cache."""
        for block in plan.registered_blocks:
            self.block_manager.forget(block)
        self._drop_stopped()
        for seq in list(self.running):
            if seq in plan.num_new_tokens:
                self._preempt(seq)

    def _schedule_running(self, plan: Plan) -> int:
        """Give each running sequence its tokens, preempting for blocks; returns the budget left."""
        budget = self.max_num_batched_tokens
        for seq in list(self.running):  # a copy: preemption shortens the list
            if budget == 0:
                break
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted earlier in this loop
            n = seq.num_tokens - seq.num_computed_tokens
            if n > 1:
                n = min(n, budget, self.max_tokens_per_seq)
            while not self._grow(seq, n):
                victim = max(self.running, key=self._order)
                self._preempt(victim)
                plan.preempted.append(victim)
                budget += plan.num_new_tokens.pop(victim, 0)
                if victim is seq:
                    break
            if seq.status is SequenceStatus.RUNNING:
                plan.num_new_tokens[seq] = n
                budget -= n
        return budget

    def _admit_waiting(self, plan: Plan, budget: int) -> None:
        """Admit from the head of `waiting` while tokens, slots and blocks last."""
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            hits = self.block_manager.lookup(seq)
            num_cached = len(hits) * self.block_manager.block_size
            n = min(seq.num_tokens - num_cached, budget, self.max_tokens_per_seq)
            # Blocks for all of its tokens, though only n are computed now: admitted on its first
            # chunk alone, a long prompt would be preempted at the next one, again and again.
            if not self.block_manager.allocate(seq, seq.num_tokens, hits):
                break  # it keeps its place: nobody overtakes the head
            self.waiting.popleft()
            self.running.append(seq)
            seq.status = SequenceStatus.RUNNING
            seq.slot = self._free_slots.pop()
            self.block_tables[seq.slot, : len(seq.block_table)] = seq.block_table
            seq.num_computed_tokens = num_cached
            self._count_admission(seq)
            plan.admitted.append(seq)
            plan.num_new_tokens[seq] = n
            plan.registered_blocks += self.block_manager.register(seq, n)
            budget -= n

    def _count_admission(self, seq: Sequence) -> None:
        metrics = seq.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = time.perf_counter()
            metrics.num_cached_prompt_tokens = seq.num_computed_tokens
            if self.block_manager.enable_prefix_caching:
                self.num_queried_tokens += seq.num_prompt_tokens
                self.num_hit_tokens += seq.num_computed_tokens

    def _grow(self, seq: Sequence, n: int) -> bool:
        """Make room in the block table of a running sequence for its next `n` tokens."""
        num_blocks = len(seq.block_table)
        if not self.block_manager.allocate(seq, seq.num_computed_tokens + n):
            return False
        if len(seq.block_table) > num_blocks:
            new_blocks = seq.block_table[num_blocks:]
            self.block_tables[seq.slot, num_blocks : len(seq.block_table)] = new_blocks
        return True

    def _prompt_computed(self, seq: Sequence) -> None:
        """The first token is there: siblings can share the prompt's blocks from now on."""
        self._forgo_prompt_logits(seq)
        for sibling in reversed(seq.siblings):
            if sibling.status is SequenceStatus.HELD:
                sibling.status = SequenceStatus.WAITING
                self._enqueue(sibling)

    def _finish(self, seq: Sequence, now: float) -> None:
        self._forgo_prompt_logits(seq)
        self._release(seq, SequenceStatus.FINISHED)
        seq.metrics.finished_time = now

    def _forgo_prompt_logits(self, seq: Sequence) -> None:
        if seq.needs_prompt_logits:
            seq.needs_prompt_logits = False
            self._needing_prompt_logits.remove(seq)

    def _preempt(self, seq: Sequence) -> None:
        """Take everything from `seq` but its tokens; it will compute them again.

        Its full blocks stay in the prefix cache until reused, so often little is lost.
        """
        self._release(seq, SequenceStatus.WAITING)
        self.running.remove(seq)
        seq.num_computed_tokens = 0
        seq.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(seq)

    def _release(self, seq: Sequence, status: SequenceStatus) -> None:
        """Free blocks and slot. The caller takes `seq` out of its queue."""
        self.block_manager.free(seq)
        if seq.slot >= 0:
            self._free_slots.append(seq.slot)
            seq.slot = -1
        seq.status = status

    def _drop_stopped(self) -> None:
        self.running = [seq for seq in self.running if seq.status is SequenceStatus.RUNNING]

    def _enqueue(self, seq: Sequence) -> None:
        """Insert into `waiting` by (priority, arrival); under FCFS nearly always at an end."""
        if not self.waiting or self._order(seq) > self._order(self.waiting[-1]):
            self.waiting.append(seq)
        elif self._order(seq) < self._order(self.waiting[0]):
            self.waiting.appendleft(seq)
        else:
            insort(self.waiting, seq, key=self._order)

    def _order(self, seq: Sequence) -> tuple[int, int]:
        return (seq.priority if self.by_priority else 0, seq.arrival)
