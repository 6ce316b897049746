"""LoRA is an extension of the engine that holds requests until their adapter can be used.

    added     its adapter is read in a thread, and checked; the request is held meanwhile
    waiting   until its adapter has one of `max_loras` places: `nanoserve.features.lora.places`
    running   the step that has its first row copies the adapter to its place, on every rank

The content of the adapter is a part of the sequence's cache key. So requests share cached prefixes
with requests of the same adapter only, whatever its name, and an adapter that was replaced under
its name finds nothing of the old one.
"""

import contextlib
import os
import weakref
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

import numpy as np

from nanoserve.engine.adapter_rows import AdapterLoad, AdapterRows
from nanoserve.engine.executor import ForwardInputs, StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.plan import Plan
from nanoserve.engine.sequence import Sequence
from nanoserve.features.lora.places import Places
from nanoserve.features.lora.store import AdapterStore, Entry

if TYPE_CHECKING:
    from nanoserve.engine.guard import GuardedEngine

LOADING = "its adapter is being loaded"  # the reason for which a request is held
PATIENCE = 16  # steps that a request waits for a place before it claims one
_TIME_LIMIT = 60.0  # seconds for reading an adapter
_WAIT = 0.005  # seconds, if there is nothing else to do
_KIND = "lora"  # of the adapter's content in a cache key


class LoRAAdapters(Extension):
    """Gives the rows of a step their adapters."""

    def __init__(self, engine: "GuardedEngine", store: AdapterStore) -> None:
        self._engine, self._scheduler, self._store = engine, engine.scheduler, store
        num_places = engine.config.max_loras
        self._places = Places(num_places, engine.scheduler.order, PATIENCE)
        self._entries: dict[Sequence, Entry] = {}  # of unfinished sequences
        self._ended: dict[Sequence, Entry] = {}  # of ended ones, until their request is forgotten
        self._loading: dict[Sequence, Entry] = {}  # of held sequences
        # By place: what the executor has there.
        self._loaded: list[str | None] = [None] * num_places
        self._executor = weakref.ref(engine.executor)
        # Steps launched and collected, and files to delete once a number of them is collected.
        self._num_launched = self._num_collected = 0
        self._old_files: list[tuple[int, str]] = []

    @property
    def num_unfinished(self) -> int:
        """Number of sequences whose adapter is kept for them."""
        return len(self._entries) + len(self._ended) + len(self._loading)

    @property
    def num_adapters(self) -> int:
        """Number of adapters in the host's memory, or on their way."""
        return len(self._store)

    # ------------------------------------------------------------------ loading

    def on_add(self, seq: Sequence) -> str | None:
        """Find the adapter of a request; if it is not in memory, hold the request."""
        if seq.lora_request is None:
            return None
        entry = self._store.find(seq.lora_request.path)
        sequences = [seq, *seq.siblings]
        for each in sequences:
            self._entries[each] = entry
            each.set_key(_KIND, "not loaded")  # no block has this key
        entry.add_users(len(sequences))
        if entry.is_done and entry.future.exception() is None:
            self._use(sequences, entry)
            return None
        self._loading[seq] = entry
        return LOADING

    def on_step_start(self) -> None:
        """Release requests whose adapter has been read, and fail those whose adapter cannot be."""
        self._places.begin_step()
        self._forget_ended()
        self._delete_files()
        if not self._loading:
            return
        engine, scheduler = self._engine, self._scheduler
        self._store.begin_loads(engine.clock())
        if not (scheduler.waiting or scheduler.running or engine.plans_under_way):
            futures = [each.future for each in self._loading.values() if each.future is not None]
            wait(futures, _WAIT, FIRST_COMPLETED)
        now = engine.clock()
        for seq, entry in list(self._loading.items()):
            if seq.finished or not self._is_known(seq):
                del self._loading[seq]
            elif entry.is_done:
                del self._loading[seq]
                self._end_loading(seq, entry)
            elif self._store.is_late(entry, now, _TIME_LIMIT):
                del self._loading[seq]
                self._fail(seq, entry, ValueError(f"not read within {_TIME_LIMIT:g} seconds"))

    def _end_loading(self, seq: Sequence, entry: Entry) -> None:
        error = entry.future.exception()
        if error is not None:
            self._fail(seq, entry, error)
            return
        sequences = [each for each in (seq, *seq.siblings) if not each.finished]
        self._use(sequences, entry)
        self._scheduler.release(sequences, LOADING)

    def _fail(self, seq: Sequence, entry: Entry, error: BaseException) -> None:
        self._store.remove(entry)
        self._engine.loop.fail(seq.request_id, ValueError(f"lora_request: {error}"))

    def _use(self, sequences: list[Sequence], entry: Entry) -> None:
        for seq in sequences:
            seq.set_key(_KIND, entry.adapter.content)

    def _is_known(self, seq: Sequence) -> bool:
        """Return True if the request of `seq` was added, and its last output not returned yet."""
        request = self._engine.output_processor.requests.get(seq.request_id)
        return request is not None and seq in request.sequences

    def _forget_ended(self) -> None:
        for seq in [seq for seq in self._ended if not self._is_known(seq)]:
            self._ended.pop(seq).add_users(-1)

    # ------------------------------------------------------------------ running

    def may_admit(self, seq: Sequence, plan: Plan) -> bool:
        entry = self._entries.get(seq)
        return entry is None or self._places.may_run(seq, entry.adapter.content)

    def on_admit(self, seq: Sequence) -> int:
        if seq in self._entries:
            self._places.enter(seq, self._entries[seq].adapter.content)
        return 0

    def forward_inputs(self, plan: Plan, inputs: ForwardInputs) -> None:
        """Add the places of all rows, and the adapters that are new in theirs."""
        self._num_launched += 1
        sequences = [row.seq for row in plan.rows]
        places = [self._places.index_of(seq) for seq in sequences]
        if max(places) < 0:
            return
        if self._engine.executor is not self._executor():  # a new one, after sleep
            self._executor = weakref.ref(self._engine.executor)
            self._loaded = [None] * len(self._loaded)
        loads: list[AdapterLoad] = []
        for seq, place in zip(sequences, places, strict=True):
            if place >= 0 and self._loaded[place] != (entry := self._entries[seq]).adapter.content:
                loads.append(entry.load_to(place))
                self._loaded[place] = entry.adapter.content
        inputs.adapters = AdapterRows(loads, np.array(places, dtype=np.int32))

    def on_result(self, plan: Plan, result: StepResult) -> None:
        self._num_collected += 1

    def on_release(self, seq: Sequence) -> None:
        self._places.leave(seq)
        if seq.finished and seq in self._entries:
            self._ended[seq] = self._entries.pop(seq)

    def on_reset(self) -> None:
        """Load all adapters again, and take back the sequences whose end was undone."""
        self._places.clear()
        self._loaded = [None] * len(self._loaded)
        self._num_collected = self._num_launched
        for seq in [seq for seq in self._ended if not seq.finished]:
            self._entries[seq] = self._ended.pop(seq)
        for seq, entry in self._entries.items():
            if not entry.is_done and seq.index == 0 and self._is_known(seq):
                self._loading[seq] = entry
                self._scheduler.hold(seq, LOADING)

    def close(self) -> None:
        self._store.close()

    def _delete_files(self) -> None:
        """Delete files of evicted adapters that no step in flight can read."""
        self._old_files += ((self._num_launched, path) for path in self._store.take_old_files())
        while self._old_files and self._old_files[0][0] <= self._num_collected:
            with contextlib.suppress(OSError):
                os.unlink(self._old_files.pop(0)[1])
