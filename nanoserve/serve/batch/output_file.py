"""The output file of a batch job, with one line per answer.

Each line is written at once, so that none is lost when a run is killed.

A line is complete if it ends with a line break. An incomplete line of a killed run is truncated by
the next run.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.serve.batch.requests import key_of, key_of_answer
from nanoserve.utils.checks import is_text, json_object, require

_BEGINNING = b'{"id": "batch_req_'  # prefix of every line; see `Answerer`


class Earlier(NamedTuple):
    """Answers of earlier runs."""

    answers: dict[int, int]  # from the key of each custom_id to the key of its answer's id
    num_refused: int  # answers that are errors


class AnswersFile:
    """An output file, created if it does not exist, and locked against other runs.

    Raises `OSError` if it cannot be written, and `ValueError` if another run writes to it.
    """

    def __init__(self, path: Path) -> None:
        is_valid = path.is_file() or not path.exists()
        require(is_valid, f"{path} is not a regular file; use another path")
        self.path = path
        self._file = io.FileIO(path, "a+")  # unbuffered, so that every answer is written at once
        try:
            self._lock()
        except BaseException:
            self._file.close()
            raise
        self._size = os.fstat(self._file.fileno()).st_size

    def earlier(self) -> Earlier:
        """Read all answers in the file. Raises `ValueError` for a line that is not an answer."""
        answers: dict[int, int] = {}
        num_refused = 0
        for where, fields in self._lines():
            custom_id: Any = fields.get("custom_id")
            answer_id: Any = fields.get("id")
            is_ours = is_text(custom_id) and is_text(answer_id)
            require(is_ours, f"{where} is not an answer of a batch job; use another file")
            key = key_of(custom_id)
            require(key not in answers, f"{where} answers custom_id={custom_id!r} a second time")
            try:
                answers[key] = key_of_answer(answer_id)
            except ValueError as error:
                raise ValueError(f"{where} was not written by this command: {error}") from error
            num_refused += (fields.get("response") or {}).get("status_code") != 200
        return Earlier(answers, num_refused)

    def custom_id_of(self, key: int) -> str:
        """Return the custom_id with the given key."""
        return next(f["custom_id"] for _, f in self._lines() if key_of(f["custom_id"]) == key)

    def cut_torn_line(self) -> None:
        """Truncate an incomplete last line. Call this after all checks: it changes the file."""
        os.ftruncate(self._file.fileno(), self._size)

    def append(self, line: bytes) -> None:
        """Write a line completely or not at all. Raises `OSError`, for example on a full disk."""
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            with contextlib.suppress(OSError):
                self.cut_torn_line()
            raise
        self._size += len(line)

    def close(self) -> None:
        self._file.close()

    def _lock(self) -> None:
        """Lock the file. The system releases the lock when the process ends, for any reason."""
        with contextlib.suppress(ImportError):  # Windows has no such module
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"{self.path}: another run writes to it; wait for its end, or stop it"
                raise ValueError(message) from None

    def _lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each complete line as its location, for messages, and its fields.

        Afterwards `_size` is the number of bytes of all complete lines.
        """
        size = 0
        with self.path.open("rb") as file:
            for number, content in enumerate(file, 1):
                where = f"{self.path}:{number}"
                if not content.endswith(b"\n"):
                    is_ours = content.startswith(_BEGINNING[: len(content)])
                    require(is_ours, f"{where} is not an answer of a batch job; use another file")
                    break
                yield where, json_object(content, where)
                size += len(content)
        self._size = size
