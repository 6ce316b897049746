"""The scheduler decides which sequences run in the next step, and how many tokens of each.

It has one rule: every step gives each sequence some tokens so that `num_computed_tokens` catches up
with `num_tokens`. Prefill is a large number of tokens, decode is one, chunked prefill is a number
cut by the budget, a prefix-cache hit starts above zero, and recomputation after a preemption starts
again at zero.

A step goes through three calls: `schedule` plans it, `commit` counts its progress when it has been
launched, and `update` appends its tokens when they have been sampled. With async scheduling the
next step is planned in between.

A custom scheduling policy is a subclass that is passed to the engine as `scheduler_cls`. Most
policies only override `order`. A feature is an `Extension`, and works with every policy.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from itertools import pairwise

from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.extension import Extension
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.engine.slot_table import SlotTable

SIBLING = "its sibling computes their prompt"  # reason for which a sequence is held


class Scheduler:
    """Continuous batching (Yu et al. 2022, Orca), chunked prefill and preemption by recomputation.

    `waiting` is sorted by `order`, `running` is in order of admission. The sequence that is
    preempted is the running one with the largest `order`. Under FCFS that is the last one that
    arrived, so it returns to the head of `waiting` (except for sequences that were held). `held`
    sequences are in neither queue, so they block no other sequence.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_kv_blocks: int,
        max_model_len: int,
        extensions: AbstractSequence[Extension] = (),
        windows: AbstractSequence[int | None] = (None,),
    ) -> None:
        """Create the queues, the block manager and the slots.

        `extensions` is the engine's list, which may grow; `windows` are the sliding windows of the
        layer groups (`nanoserve.engine.kv_groups`), None for full attention.
        """
        self.config, self.extensions = config, extensions
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_tokens_per_seq = config.long_prefill_token_threshold or self.max_num_batched_tokens
        # Number of later arrivals that one priority level outweighs; there are never 2^64.
        by_priority = config.scheduling_policy == "priority"
        self.priority_worth = (config.priority_aging or 2**64) if by_priority else 0
        self.block_manager = BlockManager.for_config(config, num_kv_blocks, windows)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.held: set[Sequence] = set()
        max_blocks = self.block_manager.blocks_needed(max_model_len)
        self._slots = SlotTable(self.max_num_seqs, max_blocks, len(windows))
        self.block_tables = self._slots.block_tables  # by group and slot
        self.num_preemptions = 0
        # Prompt tokens that were looked up in the prefix cache, and those that were found.
        self.num_queried_tokens = self.num_hit_tokens = 0

    def order(self, seq: Sequence) -> tuple[int, ...]:
        """Return the sort key of a sequence: the lowest is admitted first and preempted last.

        It must not change while the sequence waits, and all keys must differ. With `priority_aging`
        all waiting sequences age at the same rate, one unit with each arrival, so their order does
        not change.
        """
        return (seq.priority * self.priority_worth + seq.arrival, seq.arrival)

    # ------------------------------------------------------------------ adding and ending sequences

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.held)

    def add(self, seq: Sequence, held_for: Iterable[str] = ()) -> None:
        """Queue a sequence, or hold it. Its siblings are held until it has computed the prompt."""
        for sibling in seq.siblings:
            self.hold(sibling, SIBLING)
        for reason in held_for:
            self.hold(seq, reason)
        if not seq.held_for:
            self._enqueue(seq)

    def hold(self, seq: Sequence, reason: str) -> None:
        """Keep a waiting sequence out of `waiting` until `release`, or until it ends.

        It may be held for several reasons; each of them has to be released. Raises `ValueError` if
        the sequence is running or has finished.
        """
        if seq.status in (SequenceStatus.RUNNING, SequenceStatus.FINISHED):
            raise ValueError(f"{seq!r} cannot be held: only a waiting sequence can be held")
        if seq.status is SequenceStatus.WAITING and seq in self.waiting:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.HELD
        seq.held_for.add(reason)
        self.held.add(seq)

    def release(self, sequences: Iterable[Sequence], reason: str) -> None:
        """Release `reason`, and queue the sequences that are held for no other reason."""
        for seq in sequences:
            seq.held_for.discard(reason)
            if seq.status is SequenceStatus.HELD and not seq.held_for:
                self.held.discard(seq)
                self._enqueue(seq)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End `seq` from outside the loop, in any state, and free its blocks and its slot.

        This is safe while steps that contain it are in flight: one device runs its steps in order,
        so what these steps still write is written before any later step can reuse the blocks.
        """
        if seq.finished:
            return
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        self._end(seq)
        self._drop_stopped()

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Start again with all given sequences that have not finished.

        `sequences` belong to all requests. They keep their tokens and lose their slots and
        blocks, and the prefix cache is emptied. So the state of the queues and tables before the
        call does not matter.
        """
        self.block_manager.clear()
        self.waiting, self.running, self.held = deque(), [], set()
        self._slots.clear()
        for seq in sequences:
            if seq.finished:
                continue
            if seq.status is SequenceStatus.RUNNING:
                seq.metrics.num_preemptions += 1
                self.num_preemptions += 1
            seq.slot, seq.num_computed_tokens, seq.num_pending = -1, 0, 0
            seq.block_tables, seq.num_cached_blocks, seq.num_allocated_tokens = [], 0, 0
            seq.finish_reason = seq.stop_reason = None  # set by an end that was interrupted
            if seq.held_for:
                seq.status = SequenceStatus.HELD
                self.held.add(seq)
            else:
                self._enqueue(seq)

    # ------------------------------------------------------------------ a step

    def schedule(self) -> Plan:
        """Plan the next step: running sequences first, then waiting ones, then draft tokens.

        The plan has no rows if every running sequence is held or is about to end with a step in
        flight.
        """
        budget = self.max_num_batched_tokens
        for extension in self.extensions:
            extension.on_step_start()
            budget = min(budget, extension.token_budget(budget))
        plan = Plan(budget)
        self._schedule_running(plan)
        # From here on no sequence can be preempted, so all planned rows will be computed, and a
        # block that this step fills may be shared at once: every layer stores the K and V of the
        # whole batch before it computes attention.
        size = self.block_manager.block_size
        for seq, start, n, _, _ in plan.rows:
            if (start + n) % size < n:  # otherwise the row fills no block
                self.block_manager.cache(seq, start + n)
        if not plan.preempted:
            self._admit_waiting(plan)
        for extension in self.extensions:
            extension.extend_plan(plan)
        plan.put_single_tokens_first()
        return plan

    def commit(self, plan: Plan) -> None:
        """Count a launched step: its tokens are computed, the tokens that it will yield pending."""
        size = self.block_manager.block_size
        for seq, start, n, _, num_sampled in plan.rows:
            seq.num_computed_tokens = end = start + n
            seq.num_pending = num_sampled
            if end % size == 0 and seq.status is SequenceStatus.RUNNING:
                # The row's last token may have been pending at planning time; it is known by now.
                self.block_manager.cache(seq, end)
            if start < seq.num_prompt_tokens <= end:
                self.release(seq.siblings, SIBLING)

    def update(self, plan: Plan, token_ids: list[list[int]]) -> list[int]:
        """Append the new tokens to the sequences of `plan.sampled`: zero or more per row.

        Returns by row how many tokens were appended; -1 for a sequence that had already ended,
        whose tokens are discarded. Sequences that end here have freed their blocks and their slot.
        """
        joined: list[int] = []
        any_finished = False
        finished = SequenceStatus.FINISHED  # read once: an enum lookup takes as long as a row
        for row, new_ids in zip(plan.sampled, token_ids, strict=True):
            seq, num_joined = row.seq, 0
            if seq.status is finished:
                joined.append(-1)
                continue
            # A sequence preempted in the meantime gets its tokens, too, and waits with them.
            seq.num_pending = 0
            for token_id in new_ids:
                num_joined += seq.append(token_id)
                if seq.finish_reason is not None:
                    self._end(seq)
                    any_finished = True
                    break
            joined.append(num_joined)
            if seq in plan.draft_tokens:
                self._drop_rejected(row, num_joined)
        if any_finished:
            self._drop_stopped()
        return joined

    # ------------------------------------------------------------------ rows and blocks

    def grow(self, seq: Sequence, n: int) -> bool:
        """Allocate blocks for the next `n` tokens of a running sequence; False if it cannot."""
        num_blocks = [len(table) for table in seq.block_tables]
        if not self.block_manager.allocate(seq, seq.num_computed_tokens + n):
            return False
        self._slots.extend(seq, num_blocks)
        return True

    def trim(self, seq: Sequence) -> None:
        """Free blocks that none of the sequence's tokens needs."""
        manager = self.block_manager
        manager.free(seq, keep=manager.blocks_needed(seq.num_tokens))

    def _drop_rejected(self, row: Row, num_joined: int) -> None:
        """Subtract rejected draft tokens from the computed tokens, and free their blocks."""
        seq = row.seq
        # False if the sequence has ended, or was preempted while the step was in flight.
        is_here = seq.num_computed_tokens == row.start + row.n
        if seq.status is SequenceStatus.RUNNING and is_here:
            num_drafts = row.num_sampled - 1
            seq.num_computed_tokens = row.start + row.n - num_drafts + max(0, num_joined - 1)
            self.block_manager.cache(seq, seq.num_computed_tokens)
            self.trim(seq)

    def _schedule_running(self, plan: Plan) -> None:
        """Plan a row for each running sequence, and preempt sequences if blocks run out."""
        for seq in list(self.running):  # a copy: preemption shortens the list
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted for a sequence earlier in the list
            if seq.num_pending and (seq.num_pending > 1 or seq.num_tokens >= seq.max_num_tokens):
                continue  # its draft tokens are not verified yet, or it is about to end
            self._plan_row(seq, plan)

    def _plan_row(self, seq: Sequence, plan: Plan) -> None:
        """Plan as many tokens of `seq` as budget and blocks allow."""
        start, num_tokens = seq.num_computed_tokens, seq.num_tokens
        n = num_tokens - start
        if n > 1 or n > plan.budget:
            n = min(n, plan.budget, self.max_tokens_per_seq)
        for extension in self.extensions:
            n = max(0, min(n, extension.limit_tokens(seq, n, plan)))
        has_room = start + n <= seq.num_allocated_tokens
        if n == 0 or not (has_room or self._make_room(seq, n, plan)):
            return
        is_caught_up = start + n == num_tokens  # the one definition of "caught up"
        num_sampled = int(is_caught_up and num_tokens < seq.max_num_tokens)
        is_whole = seq.prompt_head is not None and seq.needs_prompt_outputs
        plan.rows.append(Row(seq, start, n, n if is_whole else int(is_caught_up), num_sampled))
        plan.budget -= n

    def _make_room(self, seq: Sequence, n: int, plan: Plan) -> bool:
        """Allocate blocks for `n` more tokens, and preempt sequences until there are enough.

        Returns False if `seq` itself was preempted.
        """
        while not self.grow(seq, n):
            victim = max(self.running, key=self.order)
            plan.drop(victim)
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is seq:
                return False
        return True

    def _admit_waiting(self, plan: Plan) -> None:
        """Admit from the head of `waiting` while tokens, slots and blocks last.

        `schedule` does not call it in a step that has preempted a sequence.
        """
        index = 0
        while index < len(self.waiting) and plan.budget > 0:
            if len(self.running) >= self.max_num_seqs:
                break
            seq = self.waiting[index]
            if not all(extension.may_admit(seq, plan) for extension in self.extensions):
                index += 1  # it keeps its position, and sequences after it may be admitted
                continue
            hits = self.block_manager.lookup(seq)
            # Allocate blocks for all of its tokens, even if only a chunk of them is computed now.
            # With blocks for its first chunk only, a long prompt could be preempted at each chunk.
            if not self.block_manager.allocate(seq, seq.num_tokens, hits):
                break  # sequences after it must not take the blocks that it waits for
            del self.waiting[index]
            self._admit(seq, len(hits) * self.block_manager.block_size, plan)

    def _admit(self, seq: Sequence, num_cached_tokens: int, plan: Plan) -> None:
        """Start to run a sequence that has its blocks, the first of them by a prefix-cache hit."""
        self.running.append(seq)
        plan.admitted.append(seq)
        seq.status = SequenceStatus.RUNNING
        self._slots.take(seq)
        seq.num_computed_tokens = num_cached_tokens
        for extension in self.extensions:
            seq.num_computed_tokens += extension.on_admit(seq)
        self._count_hits(seq)
        num_rows = len(plan.rows)
        self._plan_row(seq, plan)
        for row in plan.rows[num_rows:]:
            self.block_manager.cache(seq, row.start + row.n)

    def _count_hits(self, seq: Sequence) -> None:
        """Count a prefix-cache lookup, once per request.

        A preempted sequence is not counted again: it would hit blocks that it has computed itself.
        """
        if seq.index == 0 and seq.metrics.num_preemptions == 0:
            if seq.metrics.num_cached_prompt_tokens is not None:  # None: it must not be reported
                seq.metrics.num_cached_prompt_tokens = seq.num_computed_tokens
            if self.block_manager.enable_prefix_caching:
                self.num_queried_tokens += seq.num_prompt_tokens
                self.num_hit_tokens += seq.num_computed_tokens

    def _preempt(self, seq: Sequence) -> None:
        """Return a running sequence to `waiting`; it keeps its tokens and recomputes their KV.

        Its full blocks stay in the prefix cache until they are reused, so it often recomputes
        little.
        """
        self.running.remove(seq)
        seq.num_computed_tokens = seq.num_pending = 0
        seq.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(seq)
        self._free(seq)

    def _end(self, seq: Sequence) -> None:
        """Remove a sequence that has a finish reason from its queue, and free its blocks and slot.

        `_drop_stopped` removes it from `running` later, with all others that have ended.
        """
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        self.held.discard(seq)
        seq.held_for.clear()
        seq.status = SequenceStatus.FINISHED
        self._free(seq)

    def _free(self, seq: Sequence) -> None:
        """Free the blocks and the slot of a sequence."""
        self.block_manager.free(seq)
        self._slots.give_back(seq)
        for extension in self.extensions:
            extension.on_release(seq)

    def _drop_stopped(self) -> None:
        self.running = [seq for seq in self.running if seq.status is SequenceStatus.RUNNING]

    def _enqueue(self, seq: Sequence) -> None:
        """Insert into `waiting` by `order`; under FCFS nearly always at one of its ends."""
        seq.status = SequenceStatus.WAITING
        if not self.waiting or self.order(seq) > self.order(self.waiting[-1]):
            self.waiting.append(seq)
        elif self.order(seq) < self.order(self.waiting[0]):
            self.waiting.appendleft(seq)
        else:
            insort(self.waiting, seq, key=self.order)

    def check(self) -> None:
        """Raise `RuntimeError` unless queues, slots and pool are consistent. O(pool + tables)."""
        queued = [*self.running, *self.waiting]
        self.block_manager.check(queued)
        order = [self.order(seq) for seq in self.waiting]
        found = self._slots.problems(self.running)
        if not all(a < b for a, b in pairwise(order)):
            found.append("waiting is out of order")
        if len(set(queued)) != len(queued):
            found.append("a sequence is queued twice")
        if any(any(seq.block_tables) for seq in self.waiting):
            found.append("a waiting sequence holds blocks")
        if found:
            raise RuntimeError(f"the scheduler is inconsistent: {found}")
