"""Exercise: show text while its bytes arrive, and stop at a stop string.

`TextStream(stops)` gets the bytes of a growing text in pieces, cut anywhere, as tokens are. Write

- `push(piece) -> str`: the text that may be shown now and has not been shown before;
- `finish() -> str`: no more bytes come; the rest of the text, where bytes that never became a
  character are U+FFFD, as in `data.decode("utf-8", "replace")`. After a stop string: "";
- `stopped_by`: the stop string that ended the text, else None.

The rules:

1. What was shown is never taken back: all that is returned, concatenated, is the final text.
2. Bytes are shown when no later byte can change what they stand for, so a character is never shown
   in halves. (Python's incremental decoder knows when that is.)
3. The text ends before the first stop string in it, however it is cut into pieces: the one that
   begins first, among those that are complete when the first of them becomes complete. If two begin
   at the same place, any of the two. From then on, `push` raises ValueError.
4. The end of the text that may be the beginning of a stop string is held back, and nothing else is:
   a stop string that turns out to be none is shown at once.

Do not decode or search from the beginning again for every piece: the work for a piece may depend on
its length and on the stop strings, not on what came before.

Test it with: pytest -x docs/12-output/test_exercise.py
"""


class TextStream:
    def __init__(self, stops: list[str]) -> None:
        self.stopped_by: str | None = None
        raise NotImplementedError

    def push(self, piece: bytes) -> str:
        raise NotImplementedError

    def finish(self) -> str:
        raise NotImplementedError
