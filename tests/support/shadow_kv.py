"""The shadow-KV oracle: every slot remembers the token prefix that its K and V were computed for.

It plays the device: it reads nothing but the packed batch, "stores" the whole batch, and then looks
at every slot that attention would read. A slot that holds another prefix than the reader's is
silent corruption in a real engine. The vocabulary is tiny (1 to 3 tokens) and so are the blocks:
with a large vocabulary, wrong hits never look right, and the bugs stay invisible.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.prompt_embeds import PromptEmbeds
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.engine.sequence_room import SequenceRoom
from nanoserve.sampling_params import SamplingParams

WEIGHTS = (1, 90, 9)  # of 0, 1 and 2 new tokens for a row


class Corruption(AssertionError):
    """The scheduler broke a promise."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Corruption(what)


class Prefixes:
    """Gives each token prefix a number, so that prefixes compare in O(1).

    Behind another cache key, the same tokens are another prefix.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[Any, int], int] = {}

    def of(self, cache_key: tuple[str, ...], token_ids: list[Any]) -> list[int]:
        """Number of the prefix that ends at each position."""
        parent, ids = cache_key, []
        for token in token_ids:
            parent = self._ids.setdefault((parent, token), len(self._ids) + 1)
            ids.append(parent)
        return ids


class ShadowRun:
    """One random run of the scheduler: arrivals, priorities, aborts, failing steps, tiny pools."""

    options: Mapping[str, Any] = {}  # of the engine, besides those that chance chooses
    max_windows = 3  # how many groups of layers with a sliding window there may be

    def __init__(self, seed: int, scheduler_class: Callable[..., Scheduler] = Scheduler) -> None:
        self.rng = rng = random.Random(seed)
        self.vocab = rng.randint(1, 3)
        max_num_seqs = rng.randint(1, 6)
        self.block_size = rng.randint(1, 4)
        self.max_model_len = rng.randint(2, 24)
        num_spare_blocks = rng.choice([0, 1, 2, 5, 20])
        policy = rng.choice(["fcfs", "priority"])
        config = EngineConfig(
            model="none",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 3, 10, 40]),
            long_prefill_token_threshold=rng.choice([0, 0, 1, 3]),
            scheduling_policy=policy,
            priority_aging=rng.choice([None, 1, 4]) if policy == "priority" else None,
            block_size=self.block_size,
            enable_prefix_caching=rng.random() < 0.9,
            **self.options,
        )
        self.config = config
        self.windows = self._choose_windows(random.Random(f"windows {seed}"))
        self.room = SequenceRoom(self.windows, self.block_size, config.max_num_batched_tokens)
        num_blocks = self.room.num_blocks(self.max_model_len) + num_spare_blocks
        self.scheduler = scheduler_class(
            config, num_blocks, self.max_model_len, windows=self.windows
        )
        layout = BatchLayout(
            config.max_num_batched_tokens,
            max_num_seqs,
            -(-self.max_model_len // self.block_size),
            ("prompt_logprobs",),
            len(self.windows),
        )
        self.batch = Batch(layout, np.empty(layout.num_bytes, dtype=np.uint8))
        # By slot: which group's K and V, and of which prefix.
        self.shadow = [(0, 0)] * ((num_blocks + 1) * self.block_size)
        self.prefixes = Prefixes()
        self.live: list[Sequence] = []
        self.to_arrive = rng.randint(1, 12)
        self.num_arrived = 0
        self.finished: list[Sequence] = []

    def _choose_windows(self, rng: random.Random) -> tuple[int | None, ...]:
        """Choose the groups of layers; every other run has full attention only."""
        if not self.max_windows or rng.random() < 0.5:
            return (None,)
        windows = [rng.randint(1, 12) for _ in range(rng.randint(1, self.max_windows))]
        return tuple([None] * rng.randint(0, 2) + windows)

    def run(self) -> None:
        total_tokens = self.to_arrive * self.max_model_len
        step = 0
        while self.to_arrive or self.scheduler.has_unfinished():
            require(step < 60 + 20 * total_tokens, "livelock: the run does not end")
            self._arrive()
            self._abort()
            if self.scheduler.has_unfinished():
                self._step()
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
            eos_token_ids = frozenset({0}) if self.rng.random() < 0.2 else frozenset()
            priority = self.rng.randint(0, 2)
            cache_key = self.rng.choice([(), (), (), ("cache_salt", "a"), ("cache_salt", "b")])
            siblings, embeds = [], self._embeds_of(prompt)
            for index in range(params.n):
                self.num_arrived += 1
                seq = Sequence(
                    f"request with arrival {self.num_arrived - index}",
                    list(prompt),
                    params,
                    self.max_model_len,
                    eos_token_ids,
                    priority=priority,
                    arrival=self.num_arrived,
                    index=index,
                    cache_key=cache_key,
                    prompt_embeds=embeds,
                )
                siblings.append(seq)
            siblings[0].siblings = siblings[1:]
            self.live += siblings
            self.scheduler.add(siblings[0])

    def _embeds_of(self, prompt: list[int]) -> PromptEmbeds | None:
        """Choose embeddings for some of a prompt's tokens."""
        return None

    def _content(self, seq: Sequence, token_ids: list[int]) -> list[Any]:
        """Return what K and V are computed of, at each position."""
        return token_ids

    def _abort(self) -> None:
        """Abort a request, or end one of its completions as a stop string would."""
        if self.live and self.rng.random() < 0.04:
            seq = self.rng.choice(self.live)
            if seq.num_output_tokens and self.rng.random() < 0.5:
                self.scheduler.finish(seq, "stop", "a stop string")
            else:
                self._end_request(seq, "abort")
            self.scheduler.check()

    def _end_request(self, seq: Sequence, reason: str) -> None:
        for other in self.live:
            if other.request_id == seq.request_id:
                self.scheduler.finish(other, reason)

    def _step(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        self._check_plan(plan)
        self.batch.pack(plan, scheduler.block_tables, self.block_size)
        fails = self.rng.random() < 0.03  # the device does, before it has stored anything
        if not fails:
            self._store_and_attend(plan)
        if not fails or self.rng.random() < 0.5:
            scheduler.commit(plan)
            self._check_progress(plan)
        if fails:
            self._reset()
        else:
            self._update(plan)
        scheduler.check()

    def _reset(self) -> None:
        self.scheduler.reset(self.live)

    def _update(self, plan: Plan) -> None:
        """Mostly one token for each row, sometimes two, or none because its request has failed."""
        new_ids = [
            [self.rng.randrange(self.vocab) for _ in range(self.rng.choices([0, 1, 2], WEIGHTS)[0])]
            for _ in plan.sampled
        ]
        self.scheduler.update(plan, new_ids)
        for row, tokens in zip(plan.sampled, new_ids, strict=True):
            if not tokens:
                self._end_request(row.seq, "error")

    def _check_plan(self, plan: Plan) -> None:
        require(bool(plan.rows), "empty plan although sequences wait")
        counts = [row.n - len(plan.draft_tokens.get(row.seq, ())) for row in plan.rows]
        require(min(counts) >= 1, "a sequence was planned with no token")
        require(plan.num_tokens <= self.config.max_num_batched_tokens, "over the token budget")
        require(len(self.scheduler.running) <= self.config.max_num_seqs, "too many running")
        require(not (plan.preempted and plan.admitted), "admitted in a step that preempted")
        threshold = self.config.long_prefill_token_threshold
        require(not threshold or max(counts) <= threshold, "over long_prefill_token_threshold")
        planned = [row.seq for row in plan.rows]
        require(len(set(planned)) == len(planned), "a sequence was planned twice")
        require(not set(planned) & set(plan.preempted), "a preempted sequence is still planned")
        for seq, start, n, num_outputs, num_sampled in plan.rows:
            require(start == seq.num_computed_tokens, "start")
            num_drafts = len(plan.draft_tokens.get(seq, ()))
            end, expected = start + n - num_drafts, num_drafts + 1
            expected = expected if end == len(seq.token_ids) else 0
            require(num_sampled == expected, "num_sampled")
            require(not num_drafts or n == num_drafts + 1, "draft tokens behind a prompt")
            require(start + n <= seq.max_num_tokens, "draft tokens beyond the end")
            is_whole = seq.params.prompt_logprobs is not None and seq.index == 0
            is_whole = is_whole and len(seq.token_ids) == seq.num_prompt_tokens
            require(num_outputs == (n if is_whole else num_sampled), "num_outputs")

    def _check_progress(self, plan: Plan) -> None:
        for seq in self.scheduler.running:
            held = sum(bool(block) for table in seq.block_tables for block in table)
            require(held <= self.room.num_blocks(seq.max_num_tokens), "over the room of a sequence")
        for seq, start, n, _, num_sampled in plan.rows:
            require(seq.num_computed_tokens == start + n, "num_computed_tokens")
            require(seq.num_tokens == len(seq.token_ids) + num_sampled, "num_tokens")
            if start < seq.num_prompt_tokens <= start + n:
                held = [sibling for sibling in seq.siblings if sibling in self.scheduler.held]
                require(not held, "siblings are held though their prompt is there")

    def _store_and_attend(self, plan: Plan) -> None:
        batch, size = self.batch, self.block_size
        header = batch.header
        require(header.num_rows == len(plan.rows), "num_rows")
        ends = batch.cu_seqlens_q.tolist()
        prefixes = []
        for index, (seq, start, n, *_) in enumerate(plan.rows):
            token_ids = seq.token_ids + plan.draft_tokens.get(seq, [])
            require(ends[index + 1] - ends[index] == n, "cu_seqlens_q")
            require((n == 1) == (index < header.num_decode_rows), "decode rows come first")
            span = slice(ends[index], ends[index + 1])
            positions = list(range(start, start + n))
            require(batch.positions[span].tolist() == positions, "positions")
            require(batch.input_ids[span].tolist() == token_ids[start : start + n], "input_ids")
            require(batch.context_lens[index] == start + n, "context_lens")
            require(batch.row_slots[index] == seq.slot, "row_slots")
            content = self._content(seq, token_ids)
            prefix_ids = self.prefixes.of(seq.cache_key, content[: start + n])
            for group, mapping in enumerate(batch.slot_mapping[:, span].tolist()):
                for slot, position in zip(mapping, positions, strict=True):
                    require(slot >= size, "wrote into the dummy block")
                    self.shadow[slot] = (group, prefix_ids[position])
            prefixes.append(prefix_ids)
        tables = batch.block_tables(header.num_rows, header.table_width).tolist()
        for group, (window, rows) in enumerate(zip(self.windows, tables, strict=True)):
            for row, prefix_ids, table in zip(plan.rows, prefixes, rows, strict=True):
                first = 0 if window is None else max(0, row.start - window + 1)
                for position in range(first, len(prefix_ids)):
                    slot = table[position // size] * size + position % size
                    expected = (group, prefix_ids[position])
                    require(self.shadow[slot] == expected, "attention reads another prefix's KV")
        self._check_outputs(plan.rows, ends)

    def _check_outputs(self, rows: list[Row], ends: list[int]) -> None:
        batch, header = self.batch, self.batch.header
        sampled = [
            (output, row.seq.slot)
            for row, end in zip(rows, ends[1:], strict=False)
            for output in range(end - row.num_sampled, end)
        ]
        of_prompts, next_ids = [], []
        for (seq, start, n, num_outputs, num_sampled), first in zip(rows, ends, strict=False):
            if num_outputs > num_sampled:  # all but the prompt's last token, if that is among them
                tokens = range(start, min(start + n, seq.num_prompt_tokens - 1))
                of_prompts += [(first + token - start, seq.slot) for token in tokens]
                next_ids += [seq.token_ids[token + 1] for token in tokens]
        num, num_sampled = header.num_outputs, header.num_sampled
        outputs = list(zip(batch.output_rows[:num], batch.output_slots[:num], strict=True))
        require(outputs[:num_sampled] == sampled, "sampled outputs")
        require(outputs[num_sampled:] == of_prompts, "outputs of prompts")
        require(batch.next_ids[num_sampled:num].tolist() == next_ids, "next_ids")
        spans = {"prompt_logprobs": slice(num_sampled, num)} if of_prompts else {}
        require(batch.prompt_outputs(header) == spans, "which outputs go to which head")
