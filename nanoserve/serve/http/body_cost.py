"""How much a JSON body will cost to read, counted while it arrives, before it is parsed.

A parser holds Python's interpreter lock until it is done, and makes 50 to 150 bytes of an item that
is sent as three: so one body of some megabytes can stop the event loop for seconds and take
gigabytes. Long texts cost next to nothing; what has to be bounded is the number of items.
"""

# Units, which are about 100 ns and 50 bytes each.
_NUMBER = 1  # also true, false and null
_STRING = 2
_NAME = 4  # of a field, itself a string
_CONTAINER = 16  # a list or an object
PIECE = 2**16  # bytes that are counted at once: about a millisecond


class BodyCost:
    """The cost of a body in units, of the pieces that were added so far.

    Only bytes outside of strings count as syntax, and a string may go on in the next piece. Of what
    is not JSON the result means nothing, but it is bounded by `_CONTAINER` times the length.
    """

    def __init__(self) -> None:
        self.total = 0
        self._is_in_string = False
        self._held = b""  # a backslash at the end of a piece, which belongs to the next character

    def add(self, piece: bytes) -> None:
        """Count another piece of the body."""
        for start in range(0, len(piece), PIECE):
            self._count(self._held + piece[start : start + PIECE])

    @classmethod
    def of(cls, text: str) -> int:
        """The cost of JSON that is a text within a body, where it was counted as one string."""
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
        num_strings = (len(parts) - self._is_in_string) // 2  # that begin in this piece
        self._is_in_string ^= len(parts) % 2 == 0
        num_containers = syntax.count(b"[") + syntax.count(b"{")
        self.total += _NUMBER * syntax.count(b",") + _CONTAINER * num_containers
        self.total += (_STRING - _NUMBER) * num_strings
        self.total += (_NAME - _STRING) * syntax.count(b":")
