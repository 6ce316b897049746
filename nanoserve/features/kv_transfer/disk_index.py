"""The index of the disk connector: which place holds which block, in memory and in a file."""

import json
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from nanoserve.features.kv_transfer.connector import BlockKey, ConnectorContext

logger = logging.getLogger(__name__)

INDEX = "nanoserve.index"
_FORMAT = 1  # of both files: files of another format are emptied
_HEADER_BYTES = 4096
_CHUNK = 4096  # records that are read at once

Name = tuple[bytes, int]  # a block hash and a layer group


class Record(NamedTuple):
    """A record says what a place holds. stamp: counts up with each stored block."""

    key: BlockKey
    place: int
    checksum: int
    stamp: int


class DiskIndex:
    """The index finds the places of blocks. A block is evicted only after its children.

    A chain without its head is useless. So only *leaves* are evicted, blocks of which no child is
    kept: the least recently used one first.
    """

    def __init__(self, num_places: int, records: Iterable[Record]) -> None:
        """`records`: what the file holds. Of two for one block, the later one counts."""
        self._records: dict[Name, Record] = {}
        self._num_children: Counter[Name] = Counter()
        self._leaves: OrderedDict[Name, None] = OrderedDict()  # least recently used first
        self._last_use: dict[Name, int] = {}  # in calls of `_note_use`
        self._num_uses = self._stamp = 0
        for record in sorted(records, key=lambda record: record.stamp):
            self._add(record)
        used = {record.place for record in self._records.values()}
        self._free = [place for place in reversed(range(num_places)) if place not in used]

    def __len__(self) -> int:
        return len(self._records)

    def find(self, key: BlockKey) -> Record | None:
        """Return the record of a block with this key, and with its token ids."""
        record = self._records.get((key.block_hash, key.group))
        return record if record is not None and record.key == key else None

    def take(self, key: BlockKey) -> int | None:
        """Return an empty place for a block, if need be by evicting another one.

        Returns None if the block is there already, or if only its parent could be evicted.
        """
        if self.find(key) is not None:
            return None
        parent = key.parent_hash, key.group
        if not self._free:
            victim = next((name for name in self._leaves if name != parent), None)
            if victim is None:
                return None
            self.remove(self._records[victim].key)
        return self._free.pop()

    def put(self, key: BlockKey, place: int, checksum: int) -> Record:
        """Note that `place`, from `take`, holds a block."""
        record = Record(key, place, checksum, self._stamp + 1)
        self._add(record)
        return record

    def drop(self, place: int) -> None:
        """Note that `place`, from `take`, could not be filled."""
        self._free.append(place)

    def remove(self, key: BlockKey) -> None:
        """Forget a block, if it is known; its place is free."""
        record = self.find(key)
        if record is not None:
            self._forget(record)
            self._free.append(record.place)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Note that these blocks have been used now."""
        for key in keys:
            self._note_use((key.block_hash, key.group))

    def _note_use(self, name: Name) -> None:
        self._num_uses += 1
        self._last_use[name] = self._num_uses
        if name in self._leaves:
            self._leaves.move_to_end(name)

    def _add(self, record: Record) -> None:
        name, parent = _names(record.key)
        if name in self._records:  # a killed process has left an older record of the same block
            self._forget(self._records[name])
        self._records[name] = record
        self._stamp = max(self._stamp, record.stamp)
        self._num_children[parent] += 1
        self._leaves.pop(parent, None)
        if not self._num_children[name]:
            self._leaves[name] = None
        self._note_use(name)

    def _forget(self, record: Record) -> None:
        name, parent = _names(record.key)
        del self._records[name]
        self._leaves.pop(name, None)
        last_use = self._last_use.pop(name)
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            if parent in self._records:
                self._leaves[parent] = None
                # Usually the child was the oldest leaf, and its parent is the next one, unless it
                # is the head of other chains.
                self._leaves.move_to_end(parent, last=self._last_use[parent] > last_use)

    def check(self) -> None:
        """Raise `RuntimeError` unless records, leaves and places agree."""
        parents = Counter(_names(record.key)[1] for record in self._records.values())
        used = [record.place for record in self._records.values()]
        problems = {
            "children are miscounted": parents != self._num_children,
            "leaves are not the blocks without children": self._leaves.keys()
            != {name for name in self._records if not parents[name]},
            "places are used twice": len({*used, *self._free}) != len(used) + len(self._free),
        }
        found = [problem for problem, is_there in problems.items() if is_there]
        if found:
            raise RuntimeError(f"the index of KV blocks is inconsistent: {found}")


def _names(key: BlockKey) -> tuple[Name, Name]:
    """Return the names of a block and of its parent."""
    return (key.block_hash, key.group), (key.parent_hash, key.group)


class IndexFile:
    """A header and the records of all places. A record is valid if its own checksum is right."""

    def __init__(self, folder: Path, context: ConnectorContext) -> None:
        """Open the file; one of another model, layout or format is emptied."""
        self._type = np.dtype(
            [
                *(("block_hash", "S32"), ("parent_hash", "S32"), ("stamp", "<u8")),
                *(("checksum", "<u8"), ("place", "<u8"), ("group", "<u4")),
                *(("token_ids", "<i4", (context.block_size,)), ("own_checksum", "<u8")),
            ]
        )
        self._file = os.open(folder / INDEX, os.O_RDWR | os.O_CREAT, 0o600)
        header = json.dumps(
            {
                "format": _FORMAT,
                "fingerprint": context.fingerprint.hex(),
                "block_bytes": context.block_bytes,
                "block_size": context.block_size,
            }
        )
        expected = header.encode().ljust(_HEADER_BYTES)
        found = os.pread(self._file, _HEADER_BYTES, 0)
        if found != expected:
            if found:
                logger.warning("%s has KV of other weights or options: it is emptied", folder)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, expected, 0)

    def read(self, num_places: int) -> Iterator[Record]:
        """Yield the valid records of the first `num_places` places."""
        for first in range(0, num_places, _CHUNK):
            size = min(_CHUNK, num_places - first) * self._type.itemsize
            content = os.pread(self._file, size, _HEADER_BYTES + first * self._type.itemsize)
            rows = np.frombuffer(content, self._type, len(content) // self._type.itemsize)
            for place, row in enumerate(rows, first):
                if row["own_checksum"] == _checksum(row) and row["place"] == place:
                    yield _record(row)
            if len(content) < size:
                return

    def write(self, record: Record) -> None:
        """Write the record of a place."""
        row = np.zeros((), self._type)
        for name in ("block_hash", "parent_hash", "group", "token_ids"):
            row[name] = getattr(record.key, name)
        row["stamp"], row["checksum"], row["place"] = record.stamp, record.checksum, record.place
        row["own_checksum"] = _checksum(row)
        os.pwrite(self._file, row.tobytes(), _HEADER_BYTES + record.place * self._type.itemsize)

    def close(self) -> None:
        os.close(self._file)


def _checksum(row: Any) -> int:
    return xxhash.xxh3_64_intdigest(row.tobytes()[:-8])


def _record(row: Any) -> Record:
    # numpy strips zero bytes from the end of a string.
    block, parent = (bytes(row[name]).ljust(32, b"\0") for name in ("block_hash", "parent_hash"))
    key = BlockKey(block, parent, tuple(row["token_ids"].tolist()), int(row["group"]))
    return Record(key, int(row["place"]), int(row["checksum"]), int(row["stamp"]))
