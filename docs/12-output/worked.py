"""Worked examples for the chapter on output: bytes, deltas, stop strings, and their costs.

Unless noted otherwise, tokens are single bytes, as in a byte-level tokenizer whose vocabulary has
no merge for them. Where text is tokenized, the bundled model's tokenizer is used.
"""

import codecs
import json
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from tables import table
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CHECKPOINT = Path(__file__).parents[2] / "nanoserve" / "checkpoint" / "tiny_qwen3" / "model"
_FILE = _CHECKPOINT / "tokenizer.json"


def utf8_length(text: str) -> int:
    """Bytes of `text` in UTF-8 (RFC 3629): 1 to 4 for each code point."""
    return len(text.encode())


def broken_by_single_tokens(text: str) -> int:
    """Number of replacement characters if each byte is decoded by itself."""
    alone = "".join(bytes([byte]).decode("utf-8", "replace") for byte in text.encode())
    return alone.count("\ufffd")


def bytes_table(text: str) -> str:
    """Byte by byte: decoded alone, decoded with all previous bytes, and what a stream may show."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    data, rows = text.encode(), []
    for end in range(1, len(data) + 1):
        last = data[end - 1 : end]
        alone, whole = (part.decode("utf-8", "replace") for part in (last, data[:end]))
        new = decoder.decode(last)
        rows.append([f"`{last.hex()}`", alone, whole, new or "(nothing yet)"])
    return table(["byte", "alone", "whole buffer", "stream shows"], rows)


def tokens_decoded(num_tokens: int) -> int:
    """Tokens decoded if the whole output is decoded again after every token: 1 + 2 + ... + n."""
    return num_tokens * (num_tokens + 1) // 2


def characters_sent(num_tokens: int, characters_per_token: int, cumulative: bool) -> int:
    """Characters sent by a request that returns an output after every token."""
    factor = tokens_decoded(num_tokens) if cumulative else num_tokens
    return factor * characters_per_token


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that could grow into a stop string."""
    return max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
    )


def stop_table(pieces: Sequence[str], stops: Sequence[str]) -> str:
    """Pieces of text one by one: the text shown and held back, until a stop string is complete."""
    rows, shown = [], 0
    for piece, text in zip(pieces, accumulate(pieces), strict=True):
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        if found:
            position, stop = min(found)
            rows.append([_quoted(piece), _quoted(text[shown:position]), "", _quoted(stop)])
            break
        visible = len(text) - held_back(text, stops)
        rows.append([_quoted(piece), _quoted(text[shown:visible]), _quoted(text[visible:]), ""])
        shown = visible
    return table(["new text", "shown", "held back", "stopped by"], rows)


def _quoted(text: str) -> str:
    """As code; a line break, which a table cell cannot hold, becomes a symbol."""
    return f"`{text}`".replace("\n", "⏎") if text else ""


def _pieces(text: str) -> list[tuple[int, bytes]]:
    """The tokens of `text` with the bundled tokenizer: the id and the bytes of each."""
    encoding = _tokenizer().encode(text, add_special_tokens=False)
    return [(i, _bytes_of(name)) for i, name in zip(encoding.ids, encoding.tokens, strict=True)]


def tokens_table(texts: Sequence[str]) -> str:
    """How the bundled tokenizer splits texts; spaces are symbols, incomplete characters bytes."""
    rows = []
    for text in texts:
        pieces = _pieces(text)
        cut = " ".join(f"`{_seen(data)}`" for _, data in pieces)
        rows.append([f"`{_seen(text.encode())}`", cut, ", ".join(str(i) for i, _ in pieces)])
    return table(["text", "tokens", "ids"], rows)


def merges_table(word: str) -> str:
    """Byte-pair encoding of one word by the bundled tokenizer's merges (Sennrich et al. 2016).

    Each step merges the adjacent pair that comes first in the list of merges.
    """
    ranks = {tuple(pair): rank for rank, pair in enumerate(_model()["merges"])}
    pieces, rows = [_NAMES[byte] for byte in word.encode()], []
    rows.append([_row(pieces), "", ""])
    while known := [pair for pair in pairwise(pieces) if pair in ranks]:
        left, right = first = min(known, key=ranks.__getitem__)
        merged: list[str] = []
        for piece in pieces:
            if piece == right and merged and merged[-1] == left:
                merged[-1] = left + right
            else:
                merged.append(piece)
        pieces = merged
        rows.append([_row(pieces), _row(first, " + "), f"{ranks[first] + 1:,}"])
    return table(["pieces", "merged", "position in the list"], rows)


def vocabulary() -> int:
    """Number of tokens of the bundled tokenizer, including the special ones."""
    return _tokenizer().get_vocab_size()


def num_merges() -> int:
    """Number of merges of the bundled tokenizer."""
    return len(_model()["merges"])


def held_table(text: str) -> str:
    """Token by token: the text that the decoder returns, and complete characters that it holds."""
    decoder, held, rows = DecodeStream(skip_special_tokens=True), b"", []
    for token_id, data in _pieces(text):
        new = decoder.step(_tokenizer(), token_id)
        held = b"" if new else held + data
        settled = held.decode("utf-8", "replace").rstrip("\ufffd")
        rows.append([f"`{data.hex(' ')}`", _quoted(new or ""), _quoted(settled)])
    return table(["bytes of the token", "decoder returns", "complete, but held"], rows)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(_FILE))


@cache
def _model() -> dict[str, Any]:
    return json.loads(_FILE.read_text(encoding="utf-8"))["model"]


def _names_of_bytes() -> dict[int, str]:
    """A byte-level vocabulary writes each byte as a printable character (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }


_NAMES = _names_of_bytes()
_BYTES = {name: byte for byte, name in _NAMES.items()}


def _bytes_of(name: str) -> bytes:
    return bytes(_BYTES[character] for character in name)


def _seen(data: bytes) -> str:
    """Text with visible spaces; hexadecimal where it is not valid text."""
    try:
        return data.decode().replace(" ", "␣")
    except UnicodeDecodeError:
        return data.hex(" ")


def _row(names: Sequence[str], between: str = " ") -> str:
    return between.join(f"`{_seen(_bytes_of(name))}`" for name in names)
