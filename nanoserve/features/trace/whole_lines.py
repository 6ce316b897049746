"""A file that grows by whole lines, and keeps those that it has when it cannot grow any more."""

import contextlib
import io
import logging
import os
from pathlib import Path
from types import TracebackType

logger = logging.getLogger(__name__)


class WholeLines:
    """Writes every line at once, so that a crash of the process leaves them.

    The first line raises `OSError` if it cannot be written. A later one must not cost what it
    tells of: the file ends before it, a warning says so, and whatever follows is dropped.
    """

    def __init__(self, path: str | Path) -> None:
        self._path, self._size, self._is_complete = path, 0, True
        self._file = io.FileIO(path, "w")  # unbuffered: nothing is left to be written at the end

    @property
    def is_complete(self) -> bool:
        """Whether every line so far is in the file."""
        return self._is_complete

    def append(self, line: str) -> None:
        """Add `line` and its line break."""
        if not self._is_complete:
            return
        try:
            self._write(line)
        except OSError as error:
            if not self._size:
                raise
            self.give_up(error)

    def give_up(self, reason: Exception) -> None:
        """Take no more lines."""
        self._is_complete = False
        logger.warning("%s cannot be written any more and ends here: %r", self._path, reason)

    def _write(self, line: str) -> None:
        # A request id may hold half a surrogate pair: as an escape, JSON reads it back.
        left = memoryview(line.encode("utf-8", "backslashreplace") + b"\n")
        size = self._size + len(left)
        try:
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            with contextlib.suppress(OSError):  # a pipe has no size; a reader accepts half a line
                os.ftruncate(self._file.fileno(), self._size)
                self._file.seek(self._size)
            raise
        self._size = size

    def __enter__(self) -> "WholeLines":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError as late:  # a network's disk may tell only now
            self.give_up(late)
