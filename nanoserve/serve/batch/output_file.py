"""The output: a line for each answer, written at once, so that whoever is killed leaves them.

A line is whole when it ends with a line break. What was being written when a run was killed does
not, and is cut off by the next one.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.serve.batch.requests import key_of, key_of_answer
from nanoserve.utils.checks import is_text, json_object, require

_BEGINNING = b'{"id": "batch_req_'  # of every line; see `Answerer`


class Earlier(NamedTuple):
    """What runs before this one have answered."""

    answers: dict[int, int]  # the key of each custom_id, and of its answer's id
    num_refused: int  # answers that are errors


class AnswersFile:
    """Made if it is not there; nobody else writes to it meanwhile.

    Raises `OSError` if it cannot be written, and `ValueError` if another run writes to it.
    """

    def __init__(self, path: Path) -> None:
        require(path.is_file() or not path.exists(), f"{path} is not a file that can be continued")
        self.path = path
        self._file = io.FileIO(path, "a+")  # unbuffered: nothing is left to be written at the end
        try:
            self._lock()
        except BaseException:
            self._file.close()
            raise
        self._size = os.fstat(self._file.fileno()).st_size

    def earlier(self) -> Earlier:
        """Read all that is there. `ValueError` for a line that is no answer of a batch job."""
        answers: dict[int, int] = {}
        num_refused = 0
        for where, fields in self._lines():
            custom_id, answer_id = fields.get("custom_id"), fields.get("id")
            is_ours = is_text(custom_id) and is_text(answer_id)
            require(is_ours, f"{where} is not an answer of a batch job: name another file")
            key = key_of(custom_id)
            require(key not in answers, f"{where} answers custom_id={custom_id!r} once more")
            try:
                answers[key] = key_of_answer(answer_id)
            except ValueError as error:
                raise ValueError(f"{where} was not written by this command: {error}") from error
            num_refused += (fields.get("response") or {}).get("status_code") != 200
        return Earlier(answers, num_refused)

    def custom_id_of(self, key: int) -> str:
        """Which one it is that `key` stands for."""
        return next(f["custom_id"] for _, f in self._lines() if key_of(f["custom_id"]) == key)

    def cut_torn_line(self) -> None:
        """Only after everything else was checked: until then nothing has changed."""
        os.ftruncate(self._file.fileno(), self._size)

    def append(self, line: bytes) -> None:
        """Write a line, all of it or nothing. Raises `OSError`: the disk may be full."""
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
        """It ends with the process, however that ends."""
        with contextlib.suppress(ImportError):  # Windows has no such module
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                told = f"{self.path}: another run writes to it; wait for its end, or end it"
                raise ValueError(told) from None

    def _lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Where each whole line is, for a message, and what it says; `_size` is theirs after it."""
        size = 0
        with self.path.open("rb") as file:
            for number, content in enumerate(file, 1):
                where = f"{self.path}:{number}"
                if not content.endswith(b"\n"):
                    is_ours = content.startswith(_BEGINNING[: len(content)])
                    require(is_ours, f"{where} is not an answer of a batch job: name another file")
                    break
                yield where, json_object(content, where)
                size += len(content)
        self._size = size
