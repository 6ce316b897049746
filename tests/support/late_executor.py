"""A device that does everything as late as it may, and remembers what every K and V was made for.

What is launched lies in a queue until somebody waits for it; the host's buffers are overwritten as
soon as they are handed out again; a token that nobody may read any more is poison. Each slot of the
KV cache holds the *prefix* that its K and V were computed for, and the device reads prefixes from
there and from nowhere else. The next token is a function of that prefix and of the tokens that the
request's own state has seen, so whatever is read too early, too late or from another sequence comes
out as another token. Vocabulary and blocks are tiny: with large ones, wrong hits never look right.

With groups of layers, each group stores the whole batch by its own block table, and reads no more
than its window sees. A slot then says which group's K and V it holds, too.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from nanoserve.config import EngineConfig
from nanoserve.engine.batch import PENDING, Batch
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.executor import (
    ForwardInputs,
    KVTransfers,
    SampleInputs,
    SlotUpdate,
    StepResult,
)
from nanoserve.engine.sequence_room import SequenceRoom

POISON = -7
_MASK = 2**61 - 1


class Corruption(AssertionError):
    """The engine broke a promise."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Corruption(what)


def mix(*numbers: int) -> int:
    """The same in every process, unlike `hash`."""
    h = 0x9E3779B97F4A7C15
    for number in numbers:
        h = (h ^ (number + 0x7F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
        h ^= h >> 29
    return h


def next_token(prefix: int, seed: int, completion: int, seen: list[int], vocab: list[int]) -> int:
    return vocab[mix(prefix, seed, completion, *seen[-3:], len(seen)) % len(vocab)]


def expected_tokens(
    prompt: list[int], seed: int, completion: int, vocab: list[int], longest: int
) -> list[int]:
    """What a request yields, one token after the other, without an engine."""
    prefix, output = 0, []
    for token in prompt:
        prefix = mix(prefix, token)
    while len(output) < longest:
        output.append(next_token(prefix, seed, completion, output, vocab))
        prefix = mix(prefix, output[-1])
    return output


def copy_blocks(shadow: list[Any], places: Any, transfers: KVTransfers, size: int) -> None:
    """Copy what slots remember of their K and V, by block, to places of the host and back."""
    for block, place in transfers.to_host:
        places[place] = shadow[block * size : (block + 1) * size]
    for place, block in transfers.to_device:
        shadow[block * size : (block + 1) * size] = places[place]


@dataclass
class LateHandle:
    batch: Batch
    step: int
    transfers: KVTransfers | None = None
    slots: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    token_ids: list[int] | None = None
    states: list[Any] = field(default_factory=list)
    of_heads: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class State:
    """Of the sequence in a slot: what penalties and processors would know of it."""

    change: SlotUpdate
    seen: list[int]


class LateExecutor:
    """`on_call` is called before each call, with its name, and may raise.

    windows: of the groups of layers, None for full attention. The first group must see the token
        before each one (None, or at least 2): that is where a row's prefix is read from.
    """

    records_by_slot = False  # a planted bug: at `collect`, by whoever has the slot by then
    reads_pending_by_row = False  # another one

    def __init__(
        self,
        config: EngineConfig,
        num_kv_blocks: int,
        vocab: list[int],
        on_call: Callable[[str], None] = lambda name: None,
        windows: AbstractSequence[int | None] = (None,),
    ) -> None:
        self.num_kv_blocks, self.vocab, self.on_call = num_kv_blocks, vocab, on_call
        self.windows = tuple(windows)
        room = SequenceRoom(windows, config.block_size, config.max_num_batched_tokens)
        self.max_model_len = config.resolve_max_model_len(
            512, num_kv_blocks, room.longest(num_kv_blocks)
        )
        self.block_size = config.block_size
        layout = BatchLayout(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            -(-self.max_model_len // config.block_size),
            ("prompt_logprobs",),
            len(self.windows),
        )
        self.batches = [Batch(layout, np.zeros(layout.num_bytes, np.uint8)) for _ in "ab"]
        self.num_batches = 0
        self.queue: list[tuple[int, Callable[[], None]]] = []  # (step, what it does), in order
        # By slot: which group's K and V, and of which prefix.
        self.shadow = [(0, POISON)] * ((num_kv_blocks + 1) * config.block_size)
        self.places: dict[int, list[tuple[int, int]]] = {}  # of the host
        self.parent_of: dict[int, int] = {}
        self.last_token = [POISON] * config.max_num_seqs
        self.states: list[State | None] = [None] * config.max_num_seqs
        self.closed = False

    # ------------------------------------------------------------------ the seam

    def next_batch(self) -> Batch:
        self.on_call("next_batch")
        batch = self.batches[self.num_batches % 2]
        if self.num_batches >= 2:
            self._run_until(self.num_batches - 2)  # its last copy must be over
        batch.memory[:] = 0xAA
        batch.step, self.num_batches = self.num_batches, self.num_batches + 1
        return batch

    def forward(self, batch: Batch, inputs: ForwardInputs) -> LateHandle:
        for change in inputs.slot_updates:
            self.states[change.slot] = State(change, list(change.output_token_ids))
        handle = LateHandle(batch, batch.step, inputs.kv_transfers)
        header = batch.header
        handle.slots = batch.output_slots[: header.num_sampled].tolist()
        self.queue.append((batch.step, lambda: self._compute(handle)))
        self.on_call("forward")
        return handle

    def sample(self, handle: LateHandle, inputs: SampleInputs) -> None:
        self.on_call("sample")
        handle.states = [self.states[slot] for slot in handle.slots]
        # What the host knows now is what takes part in the choice.
        seen = [list(state.seen) for state in handle.states]
        self.queue.append((handle.step, lambda: self._choose(handle, seen)))

    def collect(self, handle: LateHandle) -> StepResult:
        self.on_call("collect")
        self._run_until(handle.step)
        token_ids = handle.token_ids or []
        for slot, state, token in zip(handle.slots, handle.states, token_ids, strict=True):
            (self.states[slot] if self.records_by_slot else state).seen.append(token)
        return StepResult([[token] for token in token_ids], of_heads=handle.of_heads)

    def cancel(self, handles: list[LateHandle]) -> None:
        """What was launched is computed like anything else: one device runs its steps in order."""

    def copy_blocks(self, transfers: KVTransfers) -> None:
        """Copy blocks after all steps that were launched."""
        while self.queue:
            self.queue.pop(0)[1]()
        copy_blocks(self.shadow, self.places, transfers, self.block_size)

    def close(self) -> None:
        self.closed = True

    # ------------------------------------------------------------------ the device

    def _run_until(self, step: int) -> None:
        while self.queue and self.queue[0][0] <= step:
            self.queue.pop(0)[1]()

    def _compute(self, handle: LateHandle) -> None:
        """Store the prefixes of the whole batch, then read those of every row's context."""
        batch = handle.batch
        header = batch.header
        require(header.step == handle.step, "a batch was packed anew before it was read")
        if handle.transfers is not None:
            copy_blocks(self.shadow, self.places, handle.transfers, self.block_size)
        starts = batch.cu_seqlens_q[: header.num_rows + 1].tolist()
        tables = batch.block_tables(header.num_rows, header.table_width).tolist()  # by group
        slots, positions = batch.slot_mapping.tolist(), batch.positions.tolist()
        # A row may build on what another one stores in this very step: every layer stores the whole
        # batch before it attends. So rows go after those that they build on.
        missing = set(slots[0][: header.num_tokens])
        prefixes: list[int] = [POISON] * header.num_tokens
        rows = list(range(header.num_rows))
        while rows:
            ready = [
                row
                for row in rows
                if self._before(tables[0], positions, starts, row) not in missing
            ]
            require(bool(ready), "rows build on each other in a circle")
            for row in ready:
                tokens = range(starts[row], starts[row + 1])
                before = self._read(0, tables[0][row], positions[tokens[0]] - 1)
                for token, prefix in zip(tokens, self._run_row(batch, row, before), strict=True):
                    prefixes[token] = prefix
                    self._store(prefix, [mapping[token] for mapping in slots])
                missing -= {slots[0][token] for token in tokens}
            rows = [row for row in rows if row not in ready]
        for group, of_rows in enumerate(tables):
            for table, (start, end) in zip(of_rows, pairwise(starts), strict=True):
                self._attend(group, table, positions[start:end], prefixes[end - 1])
        outputs = batch.output_rows[: header.num_outputs].tolist()
        of_outputs = [prefixes[output] for output in outputs]
        handle.prefixes = of_outputs[: header.num_sampled]
        for name, span in batch.prompt_outputs(header).items():
            next_ids = batch.next_ids[span].tolist()
            pairs = zip(of_outputs[span], next_ids, strict=True)
            handle.of_heads[name] = [mix(prefix, token) for prefix, token in pairs]

    def _before(
        self, tables: list[list[int]], positions: list[int], starts: list[int], row: int
    ) -> int | None:
        """The slot of the token before the first one of `row`."""
        position = positions[starts[row]] - 1
        return None if position < 0 else self._slot(tables[row], position)

    def _run_row(self, batch: Batch, row: int, prefix: int) -> Iterator[int]:
        """Yield the prefix that ends with each token of a row; `prefix` is the one before."""
        for token in range(batch.cu_seqlens_q[row], batch.cu_seqlens_q[row + 1]):
            input_id = int(batch.input_ids[token])
            if input_id == PENDING:
                slot = row if self.reads_pending_by_row else int(batch.row_slots[row])
                input_id, self.last_token[slot] = self.last_token[slot], POISON
            require(input_id in self.vocab, f"token {input_id} was read, which is not there")
            parent, prefix = prefix, mix(prefix, input_id)
            self.parent_of[prefix] = parent
            yield prefix

    def _store(self, prefix: int, slots: list[int]) -> None:
        """Write K and V of a token for each group."""
        for group, slot in enumerate(slots):
            require(slot >= self.block_size, "wrote into the dummy block")
            self.shadow[slot] = (group, prefix)

    def _attend(self, group: int, table: list[int], positions: list[int], prefix: int) -> None:
        """Read what the tokens of a row see, the last of which ends `prefix`."""
        window = self.windows[group]
        oldest = 0 if window is None else max(0, positions[0] - window + 1)
        for position in range(positions[-1], oldest - 1, -1):
            stored = self._read(group, table, position)
            require(stored == prefix != POISON, "attention reads K and V of another prefix")
            prefix = self.parent_of.get(prefix, POISON)

    def _read(self, group: int, table: list[int], position: int) -> int:
        """Return the prefix that K and V at `position` were computed for; poison if another group
        has written them."""
        if position < 0:
            return 0
        written_by, prefix = self.shadow[self._slot(table, position)]
        return prefix if written_by == group else POISON

    def _slot(self, table: list[int], position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return table[block] * self.block_size + offset

    def _choose(self, handle: LateHandle, seen: list[list[int]]) -> None:
        handle.token_ids = []
        for prefix, state, tokens, slot in zip(
            handle.prefixes, handle.states, seen, handle.slots, strict=True
        ):
            change = state.change
            token = next_token(prefix, change.seed, change.completion, tokens, self.vocab)
            handle.token_ids.append(token)
            self.last_token[slot] = token


class LatePipeline(LateExecutor):
    """Two of the stages: the first computes a step as soon as it is told of it, the last as late as
    it may, which is when the step is collected. Each has K and V of its own."""

    def __init__(self, config: EngineConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self.first = LateExecutor(config, *args)
        layout = self.batches[0].layout
        # As few as can be, and not a power of two: whatever is read too late is overwritten.
        count = config.pipeline_parallel_size + 1
        self.batches = [Batch(layout, np.zeros(layout.num_bytes, np.uint8)) for _ in range(count)]
        self.launched: list[tuple[LateHandle, list[SlotUpdate]]] = []

    def next_batch(self) -> Batch:
        self.on_call("next_batch")
        batch = self.batches[self.num_batches % len(self.batches)]
        batch.memory[:] = 0xAA
        batch.step, self.num_batches = self.num_batches, self.num_batches + 1
        return batch

    def forward(self, batch: Batch, inputs: ForwardInputs) -> LateHandle:
        self.on_call("forward")
        self.first._compute(LateHandle(batch, batch.step, inputs.kv_transfers))
        handle = LateHandle(batch, batch.step, inputs.kv_transfers)
        handle.slots = batch.output_slots[: batch.header.num_sampled].tolist()
        self.launched.append((handle, inputs.slot_updates))
        return handle

    def sample(self, handle: LateHandle, inputs: SampleInputs) -> None:
        """Sampling waits for `collect`."""

    def collect(self, handle: LateHandle) -> StepResult:
        first, changes = self.launched.pop(0)
        require(first is handle, "a step was collected before an older one")
        for change in changes:
            self.states[change.slot] = State(change, list(change.output_token_ids))
        self._compute(handle)
        self.on_call("sample")
        super().sample(handle, SampleInputs())
        return super().collect(handle)

    def cancel(self, handles: list[LateHandle]) -> None:
        """Compute the last stage's part of what the first one has computed."""
        while self.launched:
            self._compute(self.launched.pop(0)[0])
