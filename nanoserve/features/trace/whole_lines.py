"""A file that grows by whole lines, and keeps its lines if it cannot grow any further."""

import contextlib
import io
import logging
import os
from pathlib import Path
from types import TracebackType

logger = logging.getLogger(__name__)


class WholeLines:
    """A file whose lines are written at once, so that they survive a crash of the process.

    The first line raises `OSError` if it cannot be written. A failure to write a later line does
    not raise, so that the recorded work is not lost. The file then ends before that line, with a
    warning, and further lines are dropped.
    """

    def __init__(self, path: str | Path) -> None:
        self._path, self._size, self._is_complete = path, 0, True
        self._file = io.FileIO(path, "w")  # unbuffered: closing it writes nothing

    @property
    def is_complete(self) -> bool:
        """Return True if every line so far is in the file."""
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
        """Drop all further lines, and log the reason."""
        self._is_complete = False
        logger.warning("%s cannot be written any further and ends here: %r", self._path, reason)

    def _write(self, line: str) -> None:
        # A request id may contain a lone surrogate; JSON reads it back from its escape.
        left = memoryview(line.encode("utf-8", "backslashreplace") + b"\n")
        size = self._size + len(left)
        try:
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            with contextlib.suppress(OSError):  # a pipe has no size; readers accept half a line
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
        except OSError as late:  # a network file system may fail only now
            self.give_up(late)
