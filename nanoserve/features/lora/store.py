"""The adapters in the host's memory: read in threads, found by their files, evicted by age."""

import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from safetensors.torch import save_file

from nanoserve.engine.adapter_rows import AdapterLoad
from nanoserve.features.lora.adapter import Adapter, Limits, Outline, outline_of, read_adapter
from nanoserve.features.lora.adapter_files import AdapterFiles
from nanoserve.lora_request import LoRARequest
from nanoserve.worker.adapters import named_tensors

_NUM_THREADS = 2
_MOST_CHECKED = 1000
_PATIENCE = 16  # steps that an adapter waits for room before another one has to leave


@dataclass(eq=False)
class Entry:
    """An adapter that is wanted, is being read, or is in memory.

    outline: None if it cannot be used. future: None until reading begins. began: when it was given
    to the threads, and then when one of them began to read it. num_users: unfinished sequences that
    need it. num_waits: steps without room for it. path: a file with its matrices, for other ranks.
    """

    outline: Outline | None
    future: "Future[Adapter] | None" = None
    began: float = 0.0
    is_begun: bool = False
    num_users: int = 0
    num_waits: int = 0
    path: str | None = None

    @classmethod
    def failed(cls, error: ValueError) -> "Entry":
        future: Future[Adapter] = Future()
        future.set_exception(error)
        return cls(None, future)

    @property
    def is_done(self) -> bool:
        return self.future is not None and self.future.done()

    @property
    def adapter(self) -> Adapter:
        """The adapter. Raises the error of reading it."""
        return self.future.result(timeout=0)

    def queue(self, future: "Future[Adapter]", now: float) -> None:
        self.future, self.began = future, max(now, self.began)

    def begin(self, now: float) -> None:
        self.began, self.is_begun = now, True

    def add_users(self, change: int) -> None:
        self.num_users += change

    def note_wait(self) -> int:
        self.num_waits += 1
        return self.num_waits

    def note_file(self, path: str) -> None:
        self.path = path

    def load_to(self, place: int) -> AdapterLoad:
        return AdapterLoad(place, self.adapter.weights, self.path)


class AdapterStore:
    """Up to `max_adapters` adapters. `shares_files`: other processes read them, too.

    clock: the engine's.
    """

    def __init__(
        self, limits: Limits, max_adapters: int, shares_files: bool, clock: Callable[[], float]
    ) -> None:
        self._limits, self._max_adapters, self._clock = limits, max_adapters, clock
        self._entries: OrderedDict[AdapterFiles, Entry] = OrderedDict()  # least recently used first
        self._queue: deque[Entry] = deque()  # wanted, and there is no room yet; oldest first
        # In memory for the sequences that have them, and found by no others.
        self._leaving: list[Entry] = []
        self._last_begun = 0.0  # when a thread last began to read
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "nanoserve-lora")
        self._folder = (
            tempfile.TemporaryDirectory(prefix="nanoserve-lora-") if shares_files else None
        )
        self._checked: set[AdapterFiles] = set()  # adapters that `check` has found good
        self._numbers = count()
        self._old_files: list[str] = []  # of adapters that were evicted

    def find(self, path: str) -> Entry:
        """Return the entry of the adapter in a folder, which is read later if it is new.

        An adapter that cannot be used has an entry whose future has the error.
        """
        try:
            files = AdapterFiles.find(path)
            outline = None if files in self._entries else outline_of(files, self._limits)
        except ValueError as error:
            return Entry.failed(error)
        entry = self._entries.get(files)
        if entry is not None and not (entry.is_done and entry.future.exception() is not None):
            self._entries.move_to_end(files)
            return entry
        if entry is not None:
            self._drop(entry)  # an earlier attempt that has failed
        entry = Entry(outline or outline_of(files, self._limits))
        self._entries[files] = entry
        self._queue.append(entry)
        return entry

    def __len__(self) -> int:
        return len(self._entries) + len(self._leaving)

    def begin_loads(self, now: float) -> None:
        """Read wanted adapters, in order, while there is room."""
        self._queue = deque(entry for entry in self._queue if self._is_wanted(entry))
        while self._queue:
            if not self._make_room():
                self._let_leave(self._queue[0])
                return
            entry = self._queue.popleft()
            entry.queue(self._threads.submit(self._read, entry), now)

    def is_late(self, entry: Entry, now: float, limit: float) -> bool:
        """Return True if reading an adapter takes longer than `limit` seconds.

        One that waits for a thread is late if no thread has begun to read for so long.
        """
        if entry.future is None:
            return False
        since = entry.began if entry.is_begun else max(entry.began, self._last_begun)
        return now > since + limit

    def check(self, request: LoRARequest) -> None:
        """Raise `ValueError` for an adapter that can be rejected without reading its tensors.

        It may be called in any thread.
        """
        files = AdapterFiles.find(request.path)
        if files in self._entries or files in self._checked:
            return
        outline_of(files, self._limits)
        if len(self._checked) >= _MOST_CHECKED:
            self._checked.clear()
        self._checked.add(files)

    def remove(self, entry: Entry) -> None:
        """Forget an adapter that could not be read, or not in time."""
        if entry.outline is not None and self._entries.get(entry.outline.files) is entry:
            self._drop(entry)

    def take_old_files(self) -> list[str]:
        """Return the files of evicted adapters, which steps in flight may still read."""
        files, self._old_files = self._old_files, []
        return files

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._entries.clear()
        self._queue.clear()
        self._leaving.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def _is_wanted(self, entry: Entry) -> bool:
        """Return True if a sequence still waits for an entry; otherwise forget it."""
        if entry.num_users:
            return True
        self.remove(entry)
        return False

    def _make_room(self) -> bool:
        """Evict adapters that no unfinished sequence needs until there is room for another."""
        held = [entry for entry in self._entries.values() if entry.future is not None]
        held = [*self._leaving, *held]
        while len(held) >= self._max_adapters:
            victim = next((each for each in held if each.is_done and not each.num_users), None)
            if victim is None:
                return False
            held.remove(victim)
            self._drop(victim)
        return True

    def _let_leave(self, entry: Entry) -> None:
        """Let the adapter with the fewest users leave, if an entry has waited long for room.

        With requests for it one after the other, it would never be without users. So later ones
        get an entry of their own, which is read again when those that wait now have been.
        """
        if entry.note_wait() < _PATIENCE or self._leaving:
            return
        held = [each for each in self._entries.values() if each.is_done]
        if held:
            victim = min(held, key=lambda each: each.num_users)
            del self._entries[victim.outline.files]
            self._leaving.append(victim)

    def _drop(self, entry: Entry) -> None:
        if entry in self._leaving:
            self._leaving.remove(entry)
        else:
            del self._entries[entry.outline.files]
        if entry.path is not None:
            self._old_files.append(entry.path)

    def _read(self, entry: Entry) -> Adapter:
        self._last_begun = now = self._clock()
        entry.begin(now)
        adapter = read_adapter(entry.outline, self._limits)
        if self._folder is not None:
            path = Path(self._folder.name, f"{next(self._numbers)}.safetensors")
            save_file(named_tensors(adapter.weights), path)
            entry.note_file(str(path))
        return adapter
