"""Which sequences run in the next step, and how many tokens of each.

One rule: every step gives each sequence some tokens so that `num_computed_tokens` catches up with
`num_tokens`. Prefill is a large number, decode is one, chunked prefill is a number cut by the
budget, a prefix-cache hit starts above zero, recompute after preemption starts again at zero.

A step goes through three calls: `schedule` plans it, `commit` counts its progress when it is on its
way, and `update` takes its tokens when they are there. A second step may be planned in between.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable

import numpy as np

from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import Sequence, SequenceStatus

SIBLING = "its sibling computes their prompt"  # a reason to be held


class Scheduler:
    """Continuous batching (Yu et al. 2022, Orca) with chunked prefill and preemption by recompute.

    `waiting` is in order of (priority, arrival), `running` in order of admission. Under FCFS all
    priorities count as equal; then whatever runs arrived before all that waits (but for sequences
    that were held back), so a preempted sequence goes back to the head of `waiting`, and the
    victim is the last of `running`. `held` sequences are in neither, so nobody waits behind them.
    """

    def __init__(self, config: EngineConfig, num_kv_blocks: int, max_model_len: int) -> None:
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_tokens_per_seq = config.long_prefill_token_threshold or self.max_num_batched_tokens
        # How many later arrivals one level of priority outweighs; 2^64 will never come.
        by_priority = config.scheduling_policy == "priority"
        self.priority_worth = (config.priority_aging or 2**64) if by_priority else 0
        self.block_manager = BlockManager(
            num_kv_blocks, config.block_size, config.enable_prefix_caching, config.prefix_cache_seed
        )
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.held: set[Sequence] = set()
        # A running sequence keeps its slot, and its row here is extended in place.
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        max_blocks = self.block_manager.blocks_needed(max_model_len)
        self.block_tables = np.zeros((self.max_num_seqs, max_blocks), dtype=np.int32)
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # prompt tokens looked up in the prefix cache
        self.num_hit_tokens = 0

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.held)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Its siblings follow when it has computed the prompt."""
        for sibling in seq.siblings:
            self.hold(sibling, SIBLING)
        self._enqueue(seq)

    def hold(self, seq: Sequence, reason: str) -> None:
        """Keep a sequence out of the queues until `release`, or until it is finished."""
        seq.status, seq.held_for = SequenceStatus.HELD, reason
        self.held.add(seq)

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Queue those of `sequences` that are held: what they waited for is there."""
        for seq in sequences:
            if seq.status is SequenceStatus.HELD:
                self.held.discard(seq)
                seq.held_for = None
                self._enqueue(seq)

    def schedule(self) -> Plan:
        """The next step: running sequences first, then waiting ones.

        It has no rows if all that runs is about to end with a step under way, or is held.
        """
        plan = Plan(self.max_num_batched_tokens)
        self._schedule_running(plan)
        # From here on nothing can be preempted any more, so what is planned will be computed, and a
        # block that this step fills may be shared at once: every layer stores the K and V of the
        # whole batch before it attends.
        size = self.block_manager.block_size
        for seq, start, n, *_ in plan.rows:
            if (start + n) % size < n:  # else it fills no block
                plan.registered_blocks += self.block_manager.cache(seq, start + n)
        if not plan.preempted:
            self._admit_waiting(plan)
        plan.put_single_tokens_first()
        return plan

    def commit(self, plan: Plan) -> None:
        """The step is on its way: from now on its tokens count as computed, and what it will yield
        as pending."""
        size = self.block_manager.block_size
        for seq, start, n, _, num_sampled in plan.rows:
            seq.num_computed_tokens = end = start + n
            seq.num_pending = num_sampled
            if end % size == 0 and seq.status is SequenceStatus.RUNNING:
                # Its last token was pending perhaps when it was planned, and is known by now.
                plan.registered_blocks += self.block_manager.cache(seq, end)
            if start < seq.num_prompt_tokens <= end:
                self.release(seq.siblings)

    def update(self, plan: Plan, token_ids: list[list[int]]) -> list[int]:
        """Give the sequences that caught up their tokens: for each such row, zero or more.

        Returns how many of them joined, by row; -1 for a sequence that had already ended, whose
        tokens are thrown away. Those that now end have given back their blocks and their slot.
        """
        joined: list[int] = []
        any_finished = False
        finished = SequenceStatus.FINISHED  # once a step: to ask an enum takes as long as a row
        for row, new_ids in zip(plan.sampled, token_ids, strict=True):
            seq, num_joined = row.seq, 0
            if seq.status is finished:
                joined.append(-1)
                continue
            # Even if it has been preempted meanwhile: it gets its tokens, and waits with them.
            seq.num_pending = 0
            for token_id in new_ids:
                num_joined += seq.append(token_id)
                if seq.finish_reason is not None:
                    self._leave_queue(seq)
                    self._release(seq, SequenceStatus.FINISHED)
                    any_finished = True
                    break
            joined.append(num_joined)
        if any_finished:
            self._drop_stopped()
        return joined

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End `seq` from outside, whatever its state, and free all that it holds.

        Also while steps of it are under way: what they write late is written before anything that
        is planned from now on, because one device runs its steps in order.
        """
        if seq.finished:
            return
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        self._leave_queue(seq)
        self._release(seq, SequenceStatus.FINISHED)
        self._drop_stopped()

    def _schedule_running(self, plan: Plan) -> None:
        """Give each running sequence its tokens, preempting for blocks."""
        running = SequenceStatus.RUNNING
        for seq in list(self.running):  # a copy: preemption shortens the list
            if seq.status is not running:
                continue  # preempted for one before it
            if seq.num_pending and seq.num_tokens >= seq.max_num_tokens:
                continue  # the step under way yields its last token
            self._plan_row(seq, plan)

    def _plan_row(self, seq: Sequence, plan: Plan) -> None:
        """Let `seq` catch up as far as budget and blocks allow."""
        start, num_tokens = seq.num_computed_tokens, seq.num_tokens
        n = num_tokens - start
        if n > 1 or n > plan.budget:
            n = min(n, plan.budget, self.max_tokens_per_seq)
        has_room = start + n <= len(seq.block_table) * self.block_manager.block_size
        if n == 0 or not (has_room or self._make_room(seq, n, plan)):
            return
        num_sampled = int(start + n == num_tokens)  # the one definition of "caught up"
        is_whole = seq.prompt_head is not None and seq.needs_prompt_outputs
        plan.rows.append(Row(seq, start, n, n if is_whole else num_sampled, num_sampled))
        plan.budget -= n

    def _make_room(self, seq: Sequence, n: int, plan: Plan) -> bool:
        """Blocks for `n` more tokens, preempting until there are enough; False if `seq` itself is
        the one to go."""
        while not self._grow(seq, n):
            victim = max(self.running, key=self._order)
            plan.drop(victim)
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is seq:
                return False
        return True

    def _grow(self, seq: Sequence, n: int) -> bool:
        """Make room in the block table of a running sequence for its next `n` tokens."""
        num_blocks = len(seq.block_table)
        if not self.block_manager.allocate(seq, seq.num_computed_tokens + n):
            return False
        if len(seq.block_table) > num_blocks:
            new_blocks = seq.block_table[num_blocks:]
            self.block_tables[seq.slot, num_blocks : len(seq.block_table)] = new_blocks
        return True

    def _admit_waiting(self, plan: Plan) -> None:
        """Admit from the head of `waiting` while tokens, slots and blocks last."""
        while self.waiting and plan.budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            hits = self.block_manager.lookup(seq)
            # Blocks for all of its tokens, though perhaps not all are computed now: admitted on its
            # first chunk alone, a long prompt would be preempted at the next one, again and again.
            if not self.block_manager.allocate(seq, seq.num_tokens, hits):
                break  # it keeps its place: nobody overtakes the head
            self.waiting.popleft()
            self.running.append(seq)
            plan.admitted.append(seq)
            seq.status = SequenceStatus.RUNNING
            seq.slot = self._free_slots.pop()
            self.block_tables[seq.slot, : len(seq.block_table)] = seq.block_table
            seq.num_computed_tokens = len(hits) * self.block_manager.block_size
            self._count_hits(seq)
            self._plan_row(seq, plan)
            end = seq.num_computed_tokens + plan.rows[-1].n
            plan.registered_blocks += self.block_manager.cache(seq, end)

    def _count_hits(self, seq: Sequence) -> None:
        """Once for a request. What is found again after a preemption is one's own."""
        if seq.index == 0 and seq.metrics.num_preemptions == 0:
            if seq.metrics.num_cached_prompt_tokens is not None:  # else it is not to be told
                seq.metrics.num_cached_prompt_tokens = seq.num_computed_tokens
            if self.block_manager.enable_prefix_caching:
                self.num_queried_tokens += seq.num_prompt_tokens
                self.num_hit_tokens += seq.num_computed_tokens

    def _preempt(self, seq: Sequence) -> None:
        """Take everything from `seq` but its tokens; it will compute them again.

        Its full blocks stay in the prefix cache until reused, so often little is lost.
        """
        self._release(seq, SequenceStatus.WAITING)
        self.running.remove(seq)
        seq.num_computed_tokens = seq.num_pending = 0
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

    def _leave_queue(self, seq: Sequence) -> None:
        """Of what does not run. `running` is cleared of all that stopped at once."""
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        self.held.discard(seq)
        seq.held_for = None

    def _drop_stopped(self) -> None:
        self.running = [seq for seq in self.running if seq.status is SequenceStatus.RUNNING]

    def _enqueue(self, seq: Sequence) -> None:
        """Insert into `waiting` by (priority, arrival); under FCFS nearly always at an end."""
        seq.status = SequenceStatus.WAITING
        if not self.waiting or self._order(seq) > self._order(self.waiting[-1]):
            self.waiting.append(seq)
        elif self._order(seq) < self._order(self.waiting[0]):
            self.waiting.appendleft(seq)
        else:
            insort(self.waiting, seq, key=self._order)

    def _order(self, seq: Sequence) -> tuple[int, int]:
        """Its place in line. With `priority_aging` all who wait age at one pace, a step with each
        arrival, so that no place changes while they wait."""
        return (seq.priority * self.priority_worth + seq.arrival, seq.arrival)
