"""The scheduler decides which sequences run in the next step, and how many tokens of each.

One rule: every step gives each sequence some tokens so that `num_computed_tokens` catches up with
`num_tokens`. Prefill is a large number, decode is one, chunked prefill is a number cut by the
budget, a prefix-cache hit starts above zero, recompute after preemption starts again at zero.

A step goes through three calls: `schedule` plans it, `commit` counts its progress when it is on its
way, and `update` takes its tokens when they are there. A second step may be planned in between.

A scheduling policy of your own is a subclass that is passed to the engine as `scheduler_cls`; most
need no more than another `order`. A feature is an `Extension`, and works with every policy.
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

SIBLING = "its sibling computes their prompt"  # a reason to be held


class Scheduler:
    """Continuous batching (Yu et al. 2022, Orca) with chunked prefill and preemption by recompute.

    `waiting` is in the order of `order`, `running` in order of admission. Under FCFS all priorities
    count as equal; then whatever runs arrived before all that waits (but for sequences that were
    held), so a preempted sequence goes back to the head of `waiting`, and the victim is the last of
    `running`. `held` sequences are in neither, so no other sequence waits behind them.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_kv_blocks: int,
        max_model_len: int,
        extensions: AbstractSequence[Extension] = (),
        windows: AbstractSequence[int | None] = (None,),
    ) -> None:
        """`extensions` is the engine's list, which may grow; `windows` are those of the groups of
        layers (`nanoserve.engine.kv_groups`), None for full attention."""
        self.config, self.extensions = config, extensions
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_tokens_per_seq = config.long_prefill_token_threshold or self.max_num_batched_tokens
        # How many later arrivals one level of priority outweighs; 2^64 will never come.
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
        # Prompt tokens that were looked up in the prefix cache, and that were there.
        self.num_queried_tokens = self.num_hit_tokens = 0

    def order(self, seq: Sequence) -> tuple[int, ...]:
        """Return the place of a sequence in line: the lowest is admitted first and preempted last.

        It must not change while the sequence waits, and no two may be equal. With `priority_aging`
        all that wait age at one pace, a step with each arrival, so that no place changes.
        """
        return (seq.priority * self.priority_worth + seq.arrival, seq.arrival)

    # ------------------------------------------------------------------ sequences come and go

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.held)

    def add(self, seq: Sequence, held_for: Iterable[str] = ()) -> None:
        """Queue a sequence, or hold it. Its siblings follow when it has computed the prompt."""
        for sibling in seq.siblings:
            self.hold(sibling, SIBLING)
        for reason in held_for:
            self.hold(seq, reason)
        if not seq.held_for:
            self._enqueue(seq)

    def hold(self, seq: Sequence, reason: str) -> None:
        """Keep a sequence that is not running out of `waiting` until `release`, or until it ends.

        It may be held for several reasons; each of them has to be released.
        """
        if seq.status in (SequenceStatus.RUNNING, SequenceStatus.FINISHED):
            raise ValueError(f"{seq!r} cannot be held: only a sequence that waits can")
        if seq.status is SequenceStatus.WAITING and seq in self.waiting:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.HELD
        seq.held_for.add(reason)
        self.held.add(seq)

    def release(self, sequences: Iterable[Sequence], reason: str) -> None:
        """Queue those of `sequences` that were held for `reason` and for nothing else."""
        for seq in sequences:
            seq.held_for.discard(reason)
            if seq.status is SequenceStatus.HELD and not seq.held_for:
                self.held.discard(seq)
                self._enqueue(seq)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End `seq` from outside, whatever its state, and free all that it holds.

        Also while steps of it are under way: what they write late is written before anything that
        is planned from now on, because one device runs its steps in order.
        """
        if seq.finished:
            return
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        self._end(seq)
        self._drop_stopped()

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Start anew with those of `sequences`, of all requests, that have not ended.

        They keep their tokens and lose all else: slots, blocks, and what the prefix cache has. So
        it does not matter what state the queues and tables were in.
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
            seq.finish_reason = seq.stop_reason = None  # of an end that did not come about
            if seq.held_for:
                seq.status = SequenceStatus.HELD
                self.held.add(seq)
            else:
                self._enqueue(seq)

    # ------------------------------------------------------------------ a step

    def schedule(self) -> Plan:
        """Plan the next step: running sequences first, then waiting ones, then draft tokens.

        It has no rows if all that runs is about to end with a step under way, or is held.
        """
        budget = self.max_num_batched_tokens
        for extension in self.extensions:
            extension.on_step_start()
            budget = min(budget, extension.token_budget(budget))
        plan = Plan(budget)
        self._schedule_running(plan)
        # From here on nothing can be preempted any more, so what is planned will be computed, and a
        # block that this step fills may be shared at once: every layer stores the K and V of the
        # whole batch before it attends.
        size = self.block_manager.block_size
        for seq, start, n, _, _ in plan.rows:
            if (start + n) % size < n:  # else it fills no block
                self.block_manager.cache(seq, start + n)
        if not plan.preempted:
            self._admit_waiting(plan)
        for extension in self.extensions:
            extension.extend_plan(plan)
        plan.put_single_tokens_first()
        return plan

    def commit(self, plan: Plan) -> None:
        """Count a step that was launched: its tokens as computed, what it yields as pending."""
        size = self.block_manager.block_size
        for seq, start, n, _, num_sampled in plan.rows:
            seq.num_computed_tokens = end = start + n
            seq.num_pending = num_sampled
            if end % size == 0 and seq.status is SequenceStatus.RUNNING:
                # Its last token was pending perhaps when it was planned, and is known by now.
                self.block_manager.cache(seq, end)
            if start < seq.num_prompt_tokens <= end:
                self.release(seq.siblings, SIBLING)

    def update(self, plan: Plan, token_ids: list[list[int]]) -> list[int]:
        """Give the sequences that caught up their tokens: for each such row, zero or more.

        Returns how many of them joined, by row; -1 for a sequence that had already ended, whose
        tokens are thrown away. Those that now end have given back their blocks and their slot.
        """
        joined: list[int] = []
        any_finished = False
        drafts = plan.draft_tokens
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
                    self._end(seq)
                    any_finished = True
                    break
            joined.append(num_joined)
            if drafts and seq in drafts:
                self._drop_rejected(row, num_joined)
        if any_finished:
            self._drop_stopped()
        return joined

    # ------------------------------------------------------------------ rows and blocks

    def grow(self, seq: Sequence, n: int) -> bool:
        """Make room in the block tables of a running sequence for its next `n` tokens."""
        num_blocks = [len(table) for table in seq.block_tables]
        if not self.block_manager.allocate(seq, seq.num_computed_tokens + n):
            return False
        self._slots.extend(seq, num_blocks)
        return True

    def trim(self, seq: Sequence) -> None:
        """Give back blocks that none of its tokens needs."""
        manager = self.block_manager
        manager.free(seq, keep=manager.blocks_needed(seq.num_tokens))

    def _drop_rejected(self, row: Row, num_joined: int) -> None:
        """Count back what was computed for draft tokens that were not accepted."""
        seq = row.seq
        # Else it has ended, or was preempted while the step was under way.
        is_here = seq.num_computed_tokens == row.start + row.n
        if seq.status is SequenceStatus.RUNNING and is_here:
            num_drafts = row.num_sampled - 1
            seq.num_computed_tokens = row.start + row.n - num_drafts + max(0, num_joined - 1)
            self.block_manager.cache(seq, seq.num_computed_tokens)
            self.trim(seq)

    def _schedule_running(self, plan: Plan) -> None:
        """Give each running sequence its tokens, preempting for blocks."""
        running = SequenceStatus.RUNNING
        for seq in list(self.running):  # a copy: preemption shortens the list
            if seq.status is not running:
                continue  # preempted for one before it
            if seq.num_pending and (seq.num_pending > 1 or seq.num_tokens >= seq.max_num_tokens):
                continue  # how many of its draft tokens count is not known, or it is about to end
            self._plan_row(seq, plan)

    def _plan_row(self, seq: Sequence, plan: Plan) -> None:
        """Let `seq` catch up as far as budget and blocks allow."""
        start, num_tokens = seq.num_computed_tokens, seq.num_tokens
        n = num_tokens - start
        if n > 1 or n > plan.budget:
            n = min(n, plan.budget, self.max_tokens_per_seq)
        if self.extensions:
            for extension in self.extensions:
                n = max(0, min(n, extension.limit_tokens(seq, n, plan)))
        has_room = start + n <= seq.num_allocated_tokens
        if n == 0 or not (has_room or self._make_room(seq, n, plan)):
            return
        num_sampled = int(start + n == num_tokens)  # the one definition of "caught up"
        is_whole = seq.prompt_head is not None and seq.needs_prompt_outputs
        plan.rows.append(Row(seq, start, n, n if is_whole else num_sampled, num_sampled))
        plan.budget -= n

    def _make_room(self, seq: Sequence, n: int, plan: Plan) -> bool:
        """Allocate blocks for `n` more tokens, preempting until there are enough; False if `seq`
        itself is the one to go."""
        while not self.grow(seq, n):
            victim = max(self.running, key=self.order)
            plan.drop(victim)
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is seq:
                return False
        return True

    def _admit_waiting(self, plan: Plan) -> None:
        """Admit from the head of `waiting` while tokens, slots and blocks last."""
        index = 0
        while index < len(self.waiting) and plan.budget > 0:
            if len(self.running) >= self.max_num_seqs:
                break
            seq = self.waiting[index]
            if not all(extension.may_admit(seq, plan) for extension in self.extensions):
                index += 1  # it keeps its place; what it waits for need not stop others
                continue
            hits = self.block_manager.lookup(seq)
            # Blocks for all of its tokens, though perhaps not all are computed now: admitted on its
            # first chunk alone, a long prompt would be preempted at the next one, again and again.
            if not self.block_manager.allocate(seq, seq.num_tokens, hits):
                break  # it keeps its place: it is not overtaken for want of blocks
            del self.waiting[index]
            self._admit(seq, len(hits) * self.block_manager.block_size, plan)

    def _admit(self, seq: Sequence, num_cached_tokens: int, plan: Plan) -> None:
        """Begin to run a sequence that has its blocks, the first of them from the prefix cache."""
        self.running.append(seq)
        plan.admitted.append(seq)
        seq.status = SequenceStatus.RUNNING
        self._slots.take(seq)
        seq.num_computed_tokens = num_cached_tokens
        self._count_hits(seq)
        num_rows = len(plan.rows)
        self._plan_row(seq, plan)
        for row in plan.rows[num_rows:]:
            self.block_manager.cache(seq, row.start + row.n)

    def _count_hits(self, seq: Sequence) -> None:
        """Count once for a request: after a preemption a sequence finds its own blocks."""
        if seq.index == 0 and seq.metrics.num_preemptions == 0:
            if seq.metrics.num_cached_prompt_tokens is not None:  # else it is not to be shown
                seq.metrics.num_cached_prompt_tokens = seq.num_computed_tokens
            if self.block_manager.enable_prefix_caching:
                self.num_queried_tokens += seq.num_prompt_tokens
                self.num_hit_tokens += seq.num_computed_tokens

    def _preempt(self, seq: Sequence) -> None:
        """Take everything from `seq` but its tokens; it will compute them again.

        Its full blocks stay in the prefix cache until reused, so often little is lost.
        """
        self.running.remove(seq)
        seq.num_computed_tokens = seq.num_pending = 0
        seq.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(seq)
        self._free(seq)

    def _end(self, seq: Sequence) -> None:
        """Take a sequence with a finish reason out of its queue; `running` is cleared later, of all
        that have ended at once."""
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        self.held.discard(seq)
        seq.held_for.clear()
        seq.status = SequenceStatus.FINISHED
        self._free(seq)

    def _free(self, seq: Sequence) -> None:
        """Free blocks and slot."""
        self.block_manager.free(seq)
        self._slots.give_back(seq)
        for extension in self.extensions:
            extension.on_release(seq)

    def _drop_stopped(self) -> None:
        self.running = [seq for seq in self.running if seq.status is SequenceStatus.RUNNING]

    def _enqueue(self, seq: Sequence) -> None:
        """Insert into `waiting` by `order`; under FCFS nearly always at an end."""
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
