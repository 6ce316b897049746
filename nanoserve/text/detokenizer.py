"""Tokens to text: at the end of a request at once, or token by token where somebody looks on.

To decode the whole output once costs a fraction of decoding it token by token, and most requests
need no more. Streams and stop strings have a `TextStream`, which is loaded when the first one asks.
Either way it is the same decoder, so the pieces of a stream concatenate to the text.
"""

from typing import TYPE_CHECKING

from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.text.incremental_decoder import IncrementalDecoder, TokenTexts
from nanoserve.text.stop_strings import StopStrings
from nanoserve.text.text_stream import TextStream
from nanoserve.text.tokenizer_protocol import Tokenizer

if TYPE_CHECKING:
    from nanoserve.engine.sequence import Sequence

_MOST_STOPS_KEPT = 16  # lists of stop strings; the largest takes some megabytes


class Detokenizer:
    """Text of every sequence's output."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._texts = TokenTexts(tokenizer.backend)
        self._streams: dict[Sequence, TextStream] = {}
        self._stops: dict[tuple[str, ...], StopStrings] = {}  # those asked for last

    def text_of_token(self, token_id: int) -> str:
        """Return what a token adds to a text, its space included; U+FFFD for half a character."""
        return self._texts.text_of_token(token_id)

    def context(self, prompt_token_ids: list[int], params: SamplingParams) -> list[int]:
        """Return the few tokens at the end of a prompt on which the text of its output depends."""
        num_tokens = len(prompt_token_ids)
        return self._texts.context(prompt_token_ids, num_tokens, params.skip_special_tokens)

    def advance(self, seq: "Sequence") -> str | None:
        """Decode the new tokens of `seq` if it needs its text now; the stop string it ran into."""
        if not _needs_text(seq):
            return None
        if seq not in self._streams:
            self._streams[seq] = self._open_stream(seq)
        return self._streams[seq].advance()

    def restart(self, seq: "Sequence") -> None:
        """Decode anew, after an exception, what `seq` has. All of that was handed out before."""
        self._streams.pop(seq, None)
        if _needs_text(seq) and seq.num_output_tokens:
            self._streams[seq] = stream = self._open_stream(seq)
            stream.catch_up()

    def text(self, seq: "Sequence") -> str:
        """What belongs in the next output of `seq`: all text so far, or the part that is new.

        The deltas of a sequence concatenate to its final text.
        """
        stream = self._streams.get(seq)
        if stream is None:
            decoder = self._decoder(seq)
            return decoder.feed(seq.output_token_ids) + decoder.finish()
        if seq.finished:
            del self._streams[seq]
            if not isinstance(seq.stop_reason, str):  # else a stop string has cut it
                stream.finish()
        is_delta = seq.params.output_kind is RequestOutputKind.DELTA
        return (stream.delta if is_delta else stream.visible)(is_whole=seq.finished)

    def forget(self, seq: "Sequence") -> None:
        """Drop the text of a sequence that has ended, and that cannot be decoded."""
        self._streams.pop(seq, None)

    def _open_stream(self, seq: "Sequence") -> "TextStream":
        strings, stops = tuple(seq.params.stop_strings), None
        if strings:  # most requests have the same as one before, and its siblings always do
            stops = self._stops.pop(strings, None) or StopStrings(strings)
            self._stops[strings] = stops
            if len(self._stops) > _MOST_STOPS_KEPT:
                del self._stops[next(iter(self._stops))]
        return TextStream(seq, self._decoder(seq), stops)

    def _decoder(self, seq: "Sequence") -> IncrementalDecoder:
        """Return a new one, for the output of `seq` from its first token on."""
        params, texts = seq.params, self._texts
        skips = params.skip_special_tokens
        context = texts.context(seq.token_ids, seq.num_prompt_tokens, skips)
        # What obeys a grammar does so with its first space.
        may_begin = params.structured_outputs is None
        return texts.decoder(context, skips, params.sets_special_tokens_apart, may_begin)


def _needs_text(seq: "Sequence") -> bool:
    """Before its end."""
    is_looked_at = seq.params.output_kind is not RequestOutputKind.FINAL_ONLY
    return bool(seq.params.stop) or (is_looked_at and seq.params.detokenize)
