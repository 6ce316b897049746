"""Estimate the cost of parsing a JSON body while it arrives.

A JSON parser holds the GIL for the whole parse and allocates 50 to 150 bytes for each three-byte
item, so a body of a few MB could block the event loop for seconds and use gigabytes. Long strings
are cheap; it is the number of items that must be limited.
"""

# Costs in units of about 100 ns and 50 bytes.
_NUMBER = 1  # also true, false and null
_STRING = 2
_NAME = 4  # name of a field, including its string
_CONTAINER = 16  # a list or an object
PIECE = 2**16  # bytes counted at a time: about a millisecond


class BodyCost:
    """The cost of a body, in units, for the pieces added so far.

    Only bytes outside strings count as syntax, and a string may continue in the next piece. For
    input that is not JSON the result has no meaning, but is at most `_CONTAINER` times the length.
    """

    def __init__(self) -> None:
        self.total = 0
        self._is_in_string = False
        self._held = b""  # a backslash at the end of a piece, which escapes the next character

    def add(self, piece: bytes) -> None:
        """Count another piece of the body."""
        for start in range(0, len(piece), PIECE):
            self._count(self._held + piece[start : start + PIECE])

    @classmethod
    def of(cls, text: str) -> int:
        """Return the cost of JSON inside a string, which counts only as a string in its body."""
        cost = cls()
        cost.add(text.encode("utf-8", "surrogatepass"))
        return cost.total

    def _count(self, piece: bytes) -> None:
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._held = piece[-1:] if num_backslashes % 2 else b""
        piece = piece[: len(piece) - len(self._held)]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        syntax = b"".join(parts[self._is_in_string :: 2])
        num_strings = (len(parts) - self._is_in_string) // 2  # strings that begin in this piece
        self._is_in_string ^= len(parts) % 2 == 0
        num_containers = syntax.count(b"[") + syntax.count(b"{")
        self.total += _NUMBER * syntax.count(b",") + _CONTAINER * num_containers
        self.total += (_STRING - _NUMBER) * num_strings
        self.total += (_NAME - _STRING) * syntax.count(b":")
