"""Exercise: show text while its bytes arrive, and stop at a stop string.

`TextStream(stops)` receives the bytes of a growing text in arbitrary pieces, like tokens. Write

- `push(piece) -> str`: the text that may be shown now and has not been shown before;
- `finish() -> str`: called after the last bytes; returns the rest of the text, where bytes that
  never became a character are U+FFFD, as in `data.decode("utf-8", "replace")`. After a stop
  string: "";
- `stopped_by`: the stop string that ended the text, else None.

The rules:

1. Text that was shown is never retracted: the returned pieces concatenate to the final text.
2. Bytes are shown when no later byte can change their meaning, so an incomplete character is never
   shown. (Python's incremental decoder knows when that is.)
3. The text ends before the first stop string in it, however it is split into pieces: the one that
   begins first, among those that are complete when the first of them becomes complete. If two begin
   at the same position, either of them. From then on, `push` raises ValueError.
4. The end of the text is held back if it may be the beginning of a stop string, and nothing else
   is: once it can no longer become one, it is shown at once.

Do not decode or search from the beginning again for every piece: the work for a piece may depend on
its length and on the stop strings, not on the previous text.

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
