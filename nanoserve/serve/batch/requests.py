"""The input file of a batch job. Each line is a request in OpenAI's batch format, with an id.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "..."}}

A file may have a million lines, so nothing here keeps lines in memory.
"""

import codecs
import hashlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from nanoserve.utils.checks import is_text, json_object, require, shown

MOST_BYTES = 16 * 2**20  # of a line; a server accepts bodies of 8 MiB


class BatchLine(NamedTuple):
    """A line with a `custom_id`, which can be answered, at least with an error."""

    number: int  # from 1, as in editors
    custom_id: str
    fields: dict[str, Any]
    answer_id: str  # the `id` of its answer


class Todo:
    """The positions of the lines that have no answer yet, at 16 bytes per line."""

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
        """Return the (number, offset in bytes) of some of the lines, in order."""
        return list(zip(self._numbers[start:stop], self._offsets[start:stop], strict=True))

    def lines(self, path: Path, salt: str) -> Iterator[BatchLine]:
        """Read the lines one at a time. Raises `ValueError` if the file has changed meanwhile."""
        with path.open("rb") as file:
            for number, offset in zip(self._numbers, self._offsets, strict=True):
                file.seek(offset)
                yield parse(number, file.readline(MOST_BYTES + 1), salt)


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the offset of each line in bytes and the line, truncated if it is too long."""
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
    """Parse a line. Raises `ValueError` for a line that cannot be answered.

    The `id` of its answer is a digest of the line, so that an answer identifies its line. `salt`
    represents everything else on which the answer depends.
    """
    require(len(content) <= MOST_BYTES, f"the line must have at most {MOST_BYTES} bytes")
    if number == 1:
        content = content.removeprefix(codecs.BOM_UTF8)
    fields = json_object(content, "the line")
    custom_id: Any = fields.get("custom_id")
    require(is_text(custom_id), f"custom_id={shown(custom_id)} must be a non-empty string")
    digest = hashlib.blake2b(content.strip(), key=_key(salt), digest_size=16).hexdigest()
    return BatchLine(number, custom_id, fields, f"batch_req_{digest}")


def key_of(custom_id: str) -> int:
    """Return a 64-bit hash of a `custom_id`, so that a million of them fit in memory."""
    text = custom_id.encode("utf-8", "surrogatepass")  # JSON can contain unpaired surrogates
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def key_of_answer(answer_id: str) -> int:
    """Return 64 bits of the digest in an answer's `id`. Raises `ValueError` for any other `id`."""
    prefix, digest = answer_id[:10], answer_id[10:]
    require(
        prefix == "batch_req_" and len(digest) == 32,
        f"id={shown(answer_id)} must be batch_req_ and 32 hexadecimal digits",
    )
    return int(digest[:16], 16)


def _key(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(), digest_size=32).digest()
