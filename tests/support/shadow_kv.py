"""The shadow-KV oracle: every slot remembers the token prefix that its K and V were computed for.

It plays the device: it reads nothing but the packed batch, "stores" the whole batch, and then looks
at every slot that attention would read. A slot that holds another prefix than the reader's is
silent corruption in a real engine. The vocabulary is tiny (1 to 3 tokens) and so are the blocks:
with a large vocabulary, wrong hits never look right, and the bugs stay invisible.
"""

import random

import numpy as np

from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch, BatchLayout
from nanoserve.engine.invariants import check_invariants
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams


class Corruption(AssertionError):
    """The brain broke a promise."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Corruption(what)


class Prefixes:
    """Gives each token prefix a number, so that prefixes compare in O(1)."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], int] = {}

    def of(self, token_ids: list[int]) -> list[int]:
        """Number of the prefix that ends at each position."""
        parent, ids = 0, []
        for token in token_ids:
            parent = self._ids.setdefault((parent, token), len(self._ids) + 1)
            ids.append(parent)
        return ids


class ShadowRun:
    """One random run of the brain: arrivals, priorities, aborts, failing steps, tiny pools."""

    def __init__(self, seed: int, scheduler_class: type[Scheduler] = Scheduler) -> None:
        self.rng = rng = random.Random(seed)
        self.vocab = rng.randint(1, 3)
        max_num_seqs = rng.randint(1, 6)
        self.block_size = rng.randint(1, 4)
        self.max_model_len = rng.randint(2, 24)
        fits_alone = -(-self.max_model_len // self.block_size)
        num_blocks = fits_alone + rng.choice([0, 1, 2, 5, 20])
        config = EngineConfig(
            model="none",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 3, 10, 40]),
            long_prefill_token_threshold=rng.choice([0, 0, 1, 3]),
            scheduling_policy=rng.choice(["fcfs", "priority"]),
            block_size=self.block_size,
            enable_prefix_caching=rng.random() < 0.9,
        )
        self.config = config
        self.scheduler = scheduler_class(config, num_blocks, self.max_model_len)
        layout = BatchLayout(config.max_num_batched_tokens, max_num_seqs, fits_alone)
        self.batch = Batch(layout, np.empty(layout.num_bytes, dtype=np.uint8))
        self.shadow = [0] * ((num_blocks + 1) * self.block_size)
        self.prefixes = Prefixes()
        self.live: list[Sequence] = []
        self.to_arrive = rng.randint(1, 12)
        self.num_arrived = 0
        self.finished: list[Sequence] = []

    def run(self) -> None:
        total_tokens = self.to_arrive * self.max_model_len
        step = 0
        while self.to_arrive or self.scheduler.has_unfinished():
            require(step < 60 + 20 * total_tokens, "livelock: the run does not end")
            self._arrive()
            self._abort()
            if self.scheduler.has_unfinished():
                self._step(step)
            step += 1
        manager = self.scheduler.block_manager
        require(manager.num_free_blocks == manager.num_blocks, "blocks leaked")
        require(all(seq.finished for seq in self.live), "a sequence was lost")

    def _arrive(self) -> None:
        while self.to_arrive and self.rng.random() < 0.4:
            self.to_arrive -= 1
            length = self.rng.randint(1, self.max_model_len - 1)
            prompt = [self.rng.randrange(self.vocab) for _ in range(length)]
            if self.live and self.rng.random() < 0.5:  # another turn of an earlier conversation
                earlier = self.rng.choice(self.live).token_ids
                prompt = (earlier + prompt)[: self.rng.randint(1, self.max_model_len - 1)]
            params = SamplingParams(
                n=self.rng.choice([1, 1, 1, 2, 3]),
                max_tokens=self.rng.choice([1, 2, 5, None]),
                prompt_logprobs=self.rng.choice([None, None, None, 0]),
            )
            settings = {
                "max_model_len": self.max_model_len,
                "eos_token_ids": frozenset({0}) if self.rng.random() < 0.2 else frozenset(),
                "priority": self.rng.randint(0, 2),
            }
            siblings = []
            for index in range(params.n):
                self.num_arrived += 1
                seq = Sequence(
                    f"request with arrival {self.num_arrived - index}",
                    list(prompt),
                    params,
                    index=index,
                    arrival=self.num_arrived,
                    **settings,
                )
                siblings.append(seq)
            siblings[0].siblings = siblings[1:]
            self.live += siblings
            self.scheduler.add(siblings[0])

    def _abort(self) -> None:
        """Abort a request, or end one of its completions as a stop string would."""
        if self.live and self.rng.random() < 0.04:
            seq = self.rng.choice(self.live)
            if seq.num_tokens > seq.num_prompt_tokens and self.rng.random() < 0.5:
                self.scheduler.finish(seq, "stop", "a stop string")
            else:
                for other in self.live:
                    if other.request_id == seq.request_id:
                        self.scheduler.finish(other, "abort")
            check_invariants(self.scheduler)

    def _step(self, step: int) -> None:
        scheduler = self.scheduler
        plan = Plan()
        scheduler.schedule(plan)
        self._check_limits(plan)
        self.batch.pack(plan, scheduler.block_tables, self.block_size, step)
        if self.rng.random() < 0.03:  # the device fails before it has stored anything
            scheduler.rollback(plan)
        else:
            self._store_and_attend(plan)
            sampled = [self.rng.randrange(self.vocab) for _ in plan.caught_up()]
            scheduler.update(plan, sampled)
        check_invariants(scheduler)

    def _check_limits(self, plan: Plan) -> None:
        counts = list(plan.num_new_tokens.values())
        require(bool(counts), "empty plan although sequences wait")
        require(min(counts) >= 1, "a sequence was planned with no token")
        require(sum(counts) <= self.config.max_num_batched_tokens, "over the token budget")
        require(len(self.scheduler.running) <= self.config.max_num_seqs, "too many running")
        require(not (plan.preempted and plan.admitted), "admitted in a step that preempted")
        threshold = self.config.long_prefill_token_threshold
        require(not threshold or max(counts) <= threshold, "over long_prefill_token_threshold")
        preempted = [seq for seq in plan.preempted if seq in plan.num_new_tokens]
        require(not preempted, "a preempted sequence is still planned")

    def _store_and_attend(self, plan: Plan) -> None:
        batch, size = self.batch, self.block_size
        header = batch.header_dict()
        require(header["num_rows"] == len(plan.num_new_tokens), "num_rows")
        cu = batch.cu_seqlens_q.tolist()
        tables = batch.block_tables.tolist()
        rows = []
        for row, (seq, n) in enumerate(plan.num_new_tokens.items()):
            computed = seq.num_computed_tokens
            require(cu[row + 1] - cu[row] == n, "cu_seqlens_q")
            require((n == 1) == (row < header["num_decode_rows"]), "decode rows come first")
            span = slice(cu[row], cu[row + 1])
            positions = list(range(computed, computed + n))
            require(batch.positions[span].tolist() == positions, "positions")
            known = seq.token_ids[computed : computed + n]
            require(batch.input_ids[span].tolist() == known, "input_ids")
            require(batch.context_lens[row] == computed + n, "context_lens")
            prefix_ids = self.prefixes.of(seq.token_ids[: computed + n])
            for slot, position in zip(batch.slot_mapping[span].tolist(), positions, strict=True):
                require(slot >= size, "wrote into the dummy block")
                self.shadow[slot] = prefix_ids[position]
            rows.append(prefix_ids)
        for prefix_ids, table in zip(rows, tables, strict=False):
            for position, expected in enumerate(prefix_ids):
                slot = table[position // size] * size + position % size
                require(self.shadow[slot] == expected, "attention reads another prefix's KV")
        self._check_output_rows(plan, cu)

    def _check_output_rows(self, plan: Plan, cu: list[int]) -> None:
        order = {seq: row for row, seq in enumerate(plan.num_new_tokens)}
        caught_up = list(plan.caught_up())
        rows = [cu[order[seq] + 1] - 1 for seq in caught_up]
        slots = [seq.slot for seq in caught_up]
        next_ids: list[int] = []
        for seq, n in plan.num_new_tokens.items():
            if seq.needs_prompt_logits:
                start, end = seq.num_computed_tokens, seq.num_computed_tokens + n
                known = [p for p in range(start, end) if p + 1 < seq.num_prompt_tokens]
                next_ids += [seq.token_ids[p + 1] for p in known]
                rows += [cu[order[seq]] + p - start for p in known]
                slots += [seq.slot] * len(known)
        batch, num, sampled = self.batch, len(rows), len(caught_up)
        require(batch.header.num_outputs == num, "num_output_rows")
        require(batch.header.num_sampled == sampled, "num_sampled_rows")
        # Prompt rows may come in another order than the sequences; with their own they must agree.
        triples = zip(batch.output_rows[:num], batch.slots[:num], [-1] * sampled, strict=False)
        got = [*map(tuple, triples)]
        got += zip(
            batch.output_rows[sampled:num],
            batch.slots[sampled:num],
            batch.next_ids[sampled:num],
            strict=True,
        )
        expected = list(zip(rows, slots, [-1] * sampled + next_ids, strict=True))
        require(got[:sampled] == expected[:sampled], "sampled rows")
        require(sorted(got) == sorted(expected), "prompt rows")
