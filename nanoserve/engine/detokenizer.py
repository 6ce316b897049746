"""Tokens to text: at the end of a request at once, or token by token where somebody looks on.

To decode the whole output once costs about a fifth of decoding it token by token, and most requests
need no more. Streams and stop strings have a `TextStream`, which is loaded when the first one asks.
"""

from itertools import groupby
from typing import TYPE_CHECKING

from nanoserve.engine.sequence import Sequence
from nanoserve.engine.tokenizer import Tokenizer
from nanoserve.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from nanoserve.engine.stop_strings import StopStrings
    from nanoserve.engine.text_stream import TextStream

_MOST_STOPS_KEPT = 16  # lists of stop strings; the largest takes some megabytes


class Detokenizer:
    """Text of every sequence's output."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()
        self._specials = {i: token.content for i, token in added.items() if token.special}
        self._streams: dict[Sequence, TextStream] = {}
        self._stops: dict[tuple[str, ...], StopStrings] = {}  # those asked for last

    def advance(self, seq: Sequence) -> str | None:
        """Decode the new tokens of `seq` if it needs its text now; the stop string it ran into."""
        if not _needs_text(seq):
            return None
        if seq not in self._streams:
            self._streams[seq] = self._open_stream(seq)
        return self._streams[seq].advance()

    def restart(self, seq: Sequence) -> None:
        """Decode anew, after an exception, what `seq` has. All of that was handed out before."""
        self._streams.pop(seq, None)
        if _needs_text(seq) and seq.num_output_tokens:
            self._streams[seq] = stream = self._open_stream(seq)
            stream.catch_up()

    def text(self, seq: Sequence) -> str:
        """What belongs in the next output of `seq`: all text so far, or the part that is new.

        The deltas of a sequence concatenate to its final text.
        """
        stream = self._streams.get(seq)
        if seq.finished and not isinstance(seq.stop_reason, str):  # else a stop string has cut it
            # The last bytes may never have become a character; the full decode says how they end.
            full = self._decode(seq)
            if stream is None:
                return full
            stream.text = full
        if seq.finished:
            del self._streams[seq]
        is_delta = seq.params.output_kind is RequestOutputKind.DELTA
        return (stream.delta if is_delta else stream.visible)(is_whole=seq.finished)

    def _open_stream(self, seq: Sequence) -> "TextStream":
        from nanoserve.engine.stop_strings import StopStrings
        from nanoserve.engine.text_stream import TextStream

        strings, stops = tuple(seq.params.stop_strings), None
        if strings:  # most requests have the same as one before, and its siblings always do
            stops = self._stops.pop(strings, None) or StopStrings(strings)
            self._stops[strings] = stops
            if len(self._stops) > _MOST_STOPS_KEPT:
                del self._stops[next(iter(self._stops))]
        return TextStream(seq, self._tokenizer, self._specials, stops)

    def _decode(self, seq: Sequence) -> str:
        """The whole output of `seq` at once."""
        token_ids = seq.output_token_ids
        if not seq.params.sets_special_tokens_apart:
            return self._tokenizer.decode(token_ids, seq.params.skip_special_tokens)
        text = ""
        for is_special, group in groupby(token_ids, key=self._specials.__contains__):
            if is_special:
                text += "".join(self._specials[token_id] for token_id in group)
            else:
                text += self._tokenizer.decode(list(group), False)
        return text


def _needs_text(seq: Sequence) -> bool:
    """Before its end."""
    is_looked_at = seq.params.output_kind is not RequestOutputKind.FINAL_ONLY
    return bool(seq.params.stop) or (is_looked_at and seq.params.detokenize)
