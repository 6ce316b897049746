"""Tokens to text.

A token is not a character: a byte-level tokenizer may spread one Chinese character over three
tokens. A request that streams gets its text through a `DecodeStream`, which holds back the bytes
of an unfinished character and costs about 0.6 us a token; every other request is decoded once, at
its end, for about a quarter of that.
"""

from typing import Protocol

from tokenizers import Tokenizer as TokenizerBackend
from tokenizers.decoders import DecodeStream

from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import RequestOutputKind


class Tokenizer(Protocol):
    """What the engine needs of `nanoserve.tokenizer.Tokenizer`, which it cannot import."""

    backend: TokenizerBackend
    eos_token_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str: ...


class _Stream:
    __slots__ = ("decoder", "num_decoded", "num_sent", "text")

    def __init__(self, skip_special_tokens: bool) -> None:
        self.decoder = DecodeStream(skip_special_tokens=skip_special_tokens)
        self.num_decoded = 0  # output tokens fed to the decoder
        self.text = ""
        self.num_sent = 0  # characters already handed out as deltas


class Detokenizer:
    """Text of every sequence's output. Without a tokenizer all text is empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}

    def update(self, seq: Sequence) -> str:
        """The text that belongs in the next `RequestOutput` of `seq`: all so far, or what is new.

        The deltas of a request concatenate to its final text.
        """
        if self._tokenizer is None:
            return ""
        kind, skip = seq.params.output_kind, seq.params.skip_special_tokens
        if kind is RequestOutputKind.FINAL_ONLY:
            return self._tokenizer.decode(seq.output_token_ids, skip)
        stream = self._streams.get(seq.request_id)
        if stream is None:
            stream = self._streams[seq.request_id] = _Stream(skip)
        if seq.finished:
            # The last bytes may never have become a character; the full decode says how they end.
            stream.text = self._tokenizer.decode(seq.output_token_ids, skip)
            del self._streams[seq.request_id]
        else:
            self._feed(stream, seq)
        if kind is RequestOutputKind.CUMULATIVE:
            return stream.text
        delta = stream.text[stream.num_sent :]
        stream.num_sent = len(stream.text)
        return delta

    def _feed(self, stream: _Stream, seq: Sequence) -> None:
        first_new = seq.num_prompt_tokens + stream.num_decoded
        for token_id in seq.token_ids[first_new:]:
            stream.text += stream.decoder.step(self._tokenizer.backend, token_id) or ""
            stream.num_decoded += 1
