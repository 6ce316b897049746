"""Worked numbers of the chapter on output: bytes, deltas, stop strings, and what they cost.

Tokens are single bytes here, as in a byte-level tokenizer whose vocabulary has no merge for them.
"""

import codecs
from collections.abc import Sequence
from itertools import accumulate


def utf8_length(text: str) -> int:
    """Bytes of `text` in UTF-8 (RFC 3629): 1 to 4 for each code point."""
    return len(text.encode())


def broken_by_single_tokens(text: str) -> int:
    """Replacement characters that appear if each byte is decoded by itself."""
    alone = "".join(bytes([byte]).decode("utf-8", "replace") for byte in text.encode())
    return alone.count("\ufffd")


def bytes_table(text: str) -> str:
    """Byte by byte: decoded alone, decoded with all before it, and what a stream may show."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    data, rows = text.encode(), []
    for end in range(1, len(data) + 1):
        last = data[end - 1 : end]
        alone, whole = (part.decode("utf-8", "replace") for part in (last, data[:end]))
        new = decoder.decode(last)
        rows.append([f"`{last.hex()}`", alone, whole, new or "(nothing yet)"])
    return _table(["byte", "alone", "whole buffer", "stream shows"], rows)


def tokens_decoded(num_tokens: int) -> int:
    """By decoding the whole output again after every token: 1 + 2 + ... + n."""
    return num_tokens * (num_tokens + 1) // 2


def characters_sent(num_tokens: int, characters_per_token: int, cumulative: bool) -> int:
    """By a request that hands out an output after every token."""
    factor = tokens_decoded(num_tokens) if cumulative else num_tokens
    return factor * characters_per_token


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that could grow into a stop string."""
    return max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
    )


def stop_table(pieces: Sequence[str], stops: Sequence[str]) -> str:
    """Pieces of text one by one: what is shown and what waits, until a stop string is complete."""
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
    return _table(["new text", "shown", "held back", "stopped by"], rows)


def _quoted(text: str) -> str:
    """As code; a line break, which no cell of a table can hold, becomes a sign."""
    return f"`{text}`".replace("\n", "⏎") if text else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
