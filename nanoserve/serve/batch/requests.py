"""The input: each line is a request in OpenAI's batch format, with a name of its own.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "..."}}

A file may have a million lines, so nothing here keeps one.
"""

import codecs
import hashlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from nanoserve.utils.checks import is_text, json_object, require, shown

MOST_BYTES = 16 * 2**20  # of a line; a server takes bodies of 8 MiB


class BatchLine(NamedTuple):
    """A line that can be answered, if only with an error: it has a `custom_id`."""

    number: int  # from 1, as editors count
    custom_id: str
    fields: dict[str, Any]
    answer_id: str  # the `id` of its answer


class Todo:
    """Where lines are that have no answer yet: 16 bytes for each."""

    def __init__(self, places: Iterable[tuple[int, int]] = ()) -> None:
        self._numbers, self._offsets = array("Q"), array("Q")  # offsets in bytes
        for number, offset in places:
            self.add(number, offset)

    def add(self, number: int, offset: int) -> None:
        self._numbers.append(number)
        self._offsets.append(offset)

    def __len__(self) -> int:
        return len(self._numbers)

    def places(self, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
        """Numbers and offsets of some of them, in order."""
        return list(zip(self._numbers[start:stop], self._offsets[start:stop], strict=True))

    def lines(self, path: Path, salt: str) -> Iterator[BatchLine]:
        """Read them, one at a time. `ValueError` if the file has changed meanwhile."""
        with path.open("rb") as file:
            for number, offset in zip(self._numbers, self._offsets, strict=True):
                file.seek(offset)
                yield parse(number, file.readline(MOST_BYTES + 1), salt)


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Where each line begins, in bytes, and the line; of one that is too long, its beginning."""
    start = 0
    while content := file.readline(MOST_BYTES + 1):
        end = start + len(content)
        if len(content) > MOST_BYTES:
            piece = content
            while piece and not piece.endswith(b"\n"):
                piece = file.readline(2**16)
                end += len(piece)
        yield start, content
        start = end


def parse(number: int, content: bytes, salt: str) -> BatchLine:
    """A line as it is asked for. `ValueError` for one that nothing could be answered to.

    The `id` of its answer is a digest of the line, so an answer shows which line it answers.
    `salt` stands for what else the answer depends on.
    """
    require(len(content) <= MOST_BYTES, f"the line is longer than {MOST_BYTES} bytes")
    if number == 1:
        content = content.removeprefix(codecs.BOM_UTF8)
    fields = json_object(content, "the line")
    custom_id = fields.get("custom_id")
    require(is_text(custom_id), f"custom_id={shown(custom_id)} must be a text that is not empty")
    digest = hashlib.blake2b(content.strip(), key=_key(salt), digest_size=16).hexdigest()
    return BatchLine(number, custom_id, fields, f"batch_req_{digest}")


def key_of(custom_id: str) -> int:
    """64 bits that stand for a `custom_id`, of which there may be a million in memory."""
    text = custom_id.encode("utf-8", "surrogatepass")  # JSON can write half a pair
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def key_of_answer(answer_id: str) -> int:
    """The same for the `id` of an answer. `ValueError` if it is no such `id`."""
    prefix, digest = answer_id[:10], answer_id[10:]
    require(
        prefix == "batch_req_" and len(digest) == 32, f"id={shown(answer_id)} is not of a batch"
    )
    return int(digest[:16], 16)


def _key(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(), digest_size=32).digest()
