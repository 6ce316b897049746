"""The detokenizer turns tokens into text, at the end of a request, or token by token if needed.

Decoding the whole output once costs a fraction of decoding it token by token, and suffices for most
requests. Streams and stop strings use a `TextStream`, which is created with the first of their
tokens. Both use the same decoder, so the pieces of a stream concatenate to the same text.
"""

from typing import TYPE_CHECKING, Protocol

from tokenizers import Tokenizer as TokenizerBackend

from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.text.incremental_decoder import IncrementalDecoder, TokenTexts
from nanoserve.text.stop_strings import StopStrings
from nanoserve.text.text_stream import TextStream

if TYPE_CHECKING:
    from nanoserve.engine.sequence import Sequence

_MOST_STOPS_KEPT = 16  # lists of stop strings; the largest takes a few MB


class Tokenizer(Protocol):
    """The tokenizer of a checkpoint; see `nanoserve.text.tokenizer.Tokenizer`."""

    @property
    def backend(self) -> TokenizerBackend: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Produces the output text of every sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._texts = TokenTexts(tokenizer.backend)
        self._streams: dict[Sequence, TextStream] = {}
        self._stops: dict[tuple[str, ...], StopStrings] = {}  # most recently used last

    def text_of_token(self, token_id: int) -> str:
        """Return the text that a token adds, with its space; U+FFFD for part of a character."""
        return self._texts.text_of_token(token_id)

    def context(self, prompt_token_ids: list[int], params: SamplingParams) -> list[int]:
        """Return the last few prompt tokens, on which the text of the output depends."""
        num_tokens = len(prompt_token_ids)
        return self._texts.context(prompt_token_ids, num_tokens, params.skip_special_tokens)

    def advance(self, seq: "Sequence") -> str | None:
        """Decode the new tokens of `seq` if its text is needed now; returns the stop string found.

        Returns None if none was found, or the text is not needed.
        """
        if not _needs_text(seq):
            return None
        if seq not in self._streams:
            self._streams[seq] = self._open_stream(seq)
        return self._streams[seq].advance()

    def restart(self, seq: "Sequence") -> None:
        """Decode again, after an exception, the tokens of `seq`, whose text was returned before."""
        self._streams.pop(seq, None)
        if _needs_text(seq) and seq.num_output_tokens:
            self._streams[seq] = stream = self._open_stream(seq)
            stream.catch_up()

    def text(self, seq: "Sequence") -> str:
        """Return the text of the next output of `seq`: all text so far, or the new part.

        The deltas of a sequence concatenate to its final text.
        """
        stream = self._streams.get(seq)
        if stream is None:
            decoder = self._decoder(seq)
            return decoder.feed(seq.output_token_ids) + decoder.finish()
        if seq.finished:
            del self._streams[seq]
            if not isinstance(seq.stop_reason, str):  # a stop string has already cut the text
                stream.finish()
        is_delta = seq.params.output_kind is RequestOutputKind.DELTA
        return (stream.delta if is_delta else stream.visible)(is_whole=seq.finished)

    def forget(self, seq: "Sequence") -> None:
        """Drop the text of a sequence that has ended and cannot be decoded."""
        self._streams.pop(seq, None)

    def _open_stream(self, seq: "Sequence") -> "TextStream":
        strings, stops = tuple(seq.params.stop_strings), None
        if strings:  # mostly the same list as in earlier requests, and always as in siblings
            stops = self._stops.pop(strings, None) or StopStrings(strings)
            self._stops[strings] = stops
            if len(self._stops) > _MOST_STOPS_KEPT:
                del self._stops[next(iter(self._stops))]
        return TextStream(seq, self._decoder(seq), stops)

    def _decoder(self, seq: "Sequence") -> IncrementalDecoder:
        """Return a new decoder for the output of `seq`, from its first token on."""
        params, texts = seq.params, self._texts
        skips = params.skip_special_tokens
        context = texts.context(seq.token_ids, seq.num_prompt_tokens, skips)
        # The first space of an output that obeys a grammar must not be stripped.
        may_begin = params.structured_outputs is None
        return texts.decoder(context, skips, params.sets_special_tokens_apart, may_begin)


def _needs_text(seq: "Sequence") -> bool:
    """Return True if the text of `seq` is needed before its end."""
    is_looked_at = seq.params.output_kind is not RequestOutputKind.FINAL_ONLY
    return bool(seq.params.stop) or (is_looked_at and seq.params.detokenize)
