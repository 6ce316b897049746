"""A solution of `exercise.py`."""

import codecs


class TextStream:
    """Stores only text that is held back: text that was shown cannot be part of a stop string."""

    def __init__(self, stops: list[str]) -> None:
        self.stopped_by: str | None = None
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, piece: bytes) -> str:
        if self.stopped_by is not None:
            raise ValueError(f"the text has ended at {self.stopped_by!r}")
        return self._advance(self._decoder.decode(piece))

    def finish(self) -> str:
        if self.stopped_by is not None:
            return ""
        shown = self._advance(self._decoder.decode(b"", final=True))
        return shown if self.stopped_by else shown + self._held

    def _advance(self, new: str) -> str:
        text = self._held + new
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            position, self.stopped_by = min(found)
            return text[:position]
        num_held = max(
            (n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0
        )
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]
