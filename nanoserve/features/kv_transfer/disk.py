"""The disk connector keeps KV blocks in a file, where a restarted engine finds them.

    FOLDER/nanoserve.blocks   fixed places of `block_bytes` each
    FOLDER/nanoserve.index    a header, and for each place a record of what it holds

A record has the block's key with its token ids, and a checksum of its content. It is written after
the content, so whatever a killed process, a full disk or a damaged file leaves behind, a record and
a content that belong together are found, or nothing. Both files are read and written in calls, and
never mapped: a mapped file that cannot grow ends the process with SIGBUS.
"""

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from nanoserve.features.kv_transfer.config import KVTransferConfig
from nanoserve.features.kv_transfer.connector import BlockKey, ConnectorContext, Prompt
from nanoserve.features.kv_transfer.disk_index import DiskIndex, IndexFile
from nanoserve.utils.checks import check_number, require, shown

logger = logging.getLogger(__name__)

BLOCKS = "nanoserve.blocks"
_GIB = 2**30
_SIZE = 16.0  # GiB


class DiskConnector:
    """A cache of blocks in a folder; the least recently used chains lose their tails first.

    Options in `kv_connector_extra_config`: `path`, the folder, which is created if need be; and
    `size` in GiB (default: 16), of which only what is used is taken.

    Raises `ValueError` for a folder that cannot be written, or that another process uses.
    """

    def __init__(self, context: ConnectorContext) -> None:
        options = context.options
        folder = Path(options["path"]).expanduser()
        self._block_bytes = context.block_bytes
        num_places = int(options.get("size", _SIZE) * _GIB) // context.block_bytes
        self._file = _open(folder)
        self._index_file = IndexFile(folder, context)
        self._index = DiskIndex(num_places, self._index_file.read(num_places))
        os.ftruncate(self._file, min(os.fstat(self._file).st_size, num_places * self._block_bytes))
        self._lock = threading.Lock()  # of the index: never held while blocks are read or written
        self._is_full = False  # the disk has no room

    @staticmethod
    def check(config: KVTransferConfig, block_bytes: int) -> None:
        """Raise `ValueError` for options that cannot be used."""
        options = config.kv_connector_extra_config
        unknown = sorted(options.keys() - {"path", "size"})
        require(not unknown, f"the disk connector has no options {unknown}, only path and size")
        path, size = options.get("path"), options.get("size", _SIZE)
        require(
            isinstance(path, (str, Path)) and bool(str(path)),
            f"the disk connector needs a folder as its option 'path' (got {shown(path)})",
        )
        check_number("size", size, 0, excludes_low=True)
        require(
            size * _GIB >= block_bytes,
            f"size={size} GiB holds no KV block, which takes {block_bytes} bytes",
        )
        os.close(_open(Path(path).expanduser()))

    def find(self, keys: Sequence[BlockKey], prompt: Prompt | None = None) -> int:
        with self._lock:
            for index, key in enumerate(keys):
                if self._index.find(key) is None:
                    return index
        return len(keys)

    def load(
        self,
        keys: Sequence[BlockKey],
        memory: Sequence[np.ndarray],
        prompt: Prompt | None = None,
    ) -> int:
        for index, (key, content) in enumerate(zip(keys, memory, strict=True)):
            with self._lock:
                record = self._index.find(key)
            if record is None:
                return index
            num_read = os.preadv(self._file, [content.data], record.place * self._block_bytes)
            # The content decides: the place may have been given to another block meanwhile, or the
            # file may be damaged.
            if num_read < self._block_bytes or _checksum(content) != record.checksum:
                with self._lock:
                    if self._index.find(key) is record:
                        self._index.remove(key)
                return index
        with self._lock:
            self._index.touch(keys)
        return len(keys)

    def store(self, keys: Sequence[BlockKey], memory: Sequence[np.ndarray]) -> None:
        for key, content in zip(keys, memory, strict=True):
            with self._lock:
                place = None if self._is_full else self._index.take(key)
            if place is None:
                continue  # it is there already, or the disk is full
            try:
                _write(self._file, content.data, place * self._block_bytes)
                with self._lock:
                    record = self._index.put(key, place, _checksum(content))
                self._index_file.write(record)
            except OSError as error:
                self._stop_storing(key, place, error)

    def _stop_storing(self, key: BlockKey, place: int, error: OSError) -> None:
        """Store nothing more, and go on loading."""
        logger.warning("KV blocks are no longer stored on disk: %s", error)
        with self._lock:
            self._is_full = True
            if self._index.find(key) is None:
                self._index.drop(place)

    def close(self) -> None:
        self._index_file.close()
        os.close(self._file)


def _open(folder: Path) -> int:
    """Return the file of the blocks, locked."""
    import fcntl  # not on Windows

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / BLOCKS, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ValueError(
            f"KV blocks cannot be stored in {str(folder)!r}: {error.strerror}"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise ValueError(
            f"KV blocks cannot be stored in {str(folder)!r}: another engine uses this folder; "
            f"each needs one of its own"
        ) from None
    return file


def _write(file: int, content: memoryview, offset: int) -> None:
    """Write all of it: on a disk that is nearly full, one call may write a part."""
    while content:
        num_written = os.pwrite(file, content, offset)
        content, offset = content[num_written:], offset + num_written


def _checksum(content: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(content.data)
