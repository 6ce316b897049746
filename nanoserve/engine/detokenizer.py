"""Tokens to text, and the stop strings that end it.

A token is not a character: a byte-level tokenizer may spread one Chinese character over three
tokens. A request that streams or has stop strings gets its text through a `DecodeStream`, which
holds back the bytes of an unfinished character and costs about 0.6 us a token; every other request
is decoded once, at its end, for about a fifth of that.
"""

from itertools import groupby
from typing import Protocol

from tokenizers import Tokenizer as TokenizerBackend
from tokenizers.decoders import DecodeStream

from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import RequestOutputKind


class Tokenizer(Protocol):
    """What the engine needs of `nanoserve.tokenizer.Tokenizer`, which it cannot import."""

    backend: TokenizerBackend
    eos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str: ...


_LONGEST_CHARACTER = 4  # bytes in UTF-8, so at most as many tokens
_MOST_HELD = 16  # tokens without text before their bytes are taken for broken


class _Stream:
    __slots__ = (
        "before",
        "decoder",
        "num_decoded",
        "num_held",
        "num_sent",
        "segment",
        "stop_strings",
        "text",
    )

    def __init__(self, seq: Sequence) -> None:
        self.decoder = DecodeStream(skip_special_tokens=seq.params.skip_special_tokens)
        self.before = ""  # text up to the last special token, where those are set apart
        self.segment: list[int] = []  # the tokens since
        self.stop_strings = seq.params.stop_strings
        self.num_decoded = 0  # output tokens fed to the decoder
        self.num_held = 0  # of which the last ones have given no text yet
        self.text = ""
        self.num_sent = 0  # characters already handed out as deltas


class Detokenizer:
    """Text of every sequence's output. Without a tokenizer all text is empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        added = {} if tokenizer is None else tokenizer.backend.get_added_tokens_decoder()
        self._specials = {i: token.content for i, token in added.items() if token.special}
        self._streams: dict[Sequence, _Stream] = {}

    def advance(self, seq: Sequence) -> str | None:
        """Decode the new tokens of `seq` if it needs its text now; the stop string it ran into.

        The text is cut at the earliest stop string in it, which may have begun tokens ago.
        """
        needs_text = seq.params.stop or seq.params.output_kind is not RequestOutputKind.FINAL_ONLY
        if self._tokenizer is None or not needs_text:
            return None
        stream = self._streams.get(seq)
        if stream is None:
            stream = self._streams[seq] = _Stream(seq)
        unsearched = len(stream.text)
        self._feed(stream, seq)
        num_output_tokens = seq.num_tokens - seq.num_prompt_tokens
        if not stream.stop_strings or num_output_tokens <= seq.params.min_tokens:
            return None
        text = stream.text + self._settled(stream, seq)
        return _cut_at_stop(stream, text, unsearched, seq.params.include_stop_str_in_output)

    def text(self, seq: Sequence) -> str:
        """What belongs in the next output of `seq`: all text so far, or the part that is new.

        The deltas of a sequence concatenate to its final text.
        """
        if self._tokenizer is None:
            return ""
        stream = self._streams.get(seq)
        ended_by_string = isinstance(seq.stop_reason, str)
        if seq.finished and not ended_by_string:
            # The last bytes may never have become a character; the full decode says how they end.
            full = self._decode(seq)
            if stream is None:
                return full
            stream.text = full
        visible = len(stream.text) if seq.finished else len(stream.text) - _held_back(stream)
        if seq.finished:
            del self._streams[seq]
        if seq.params.output_kind is not RequestOutputKind.DELTA:
            return stream.text[:visible]
        delta = stream.text[stream.num_sent : visible]
        stream.num_sent = max(stream.num_sent, visible)
        return delta

    def _feed(self, stream: _Stream, seq: Sequence) -> None:
        first_new = seq.num_prompt_tokens + stream.num_decoded
        for token_id in seq.token_ids[first_new:]:
            stream.num_decoded += 1
            if _sets_apart(seq) and token_id in self._specials:
                rest = self._tokenizer.decode(stream.segment, False)
                stream.text = stream.before + rest + self._specials[token_id]
                stream.before, stream.segment, stream.num_held = stream.text, [], 0
                stream.decoder = DecodeStream(skip_special_tokens=False)
            else:
                piece = stream.decoder.step(self._tokenizer.backend, token_id)
                stream.num_held = 0 if piece else stream.num_held + 1
                stream.text += piece or ""
                stream.segment.append(token_id)
                if stream.num_held >= _MOST_HELD:
                    self._give_up_on(stream, seq)

    def _give_up_on(self, stream: _Stream, seq: Sequence) -> None:
        """Hand out bytes that can no longer become characters, as they will be in the final text.

        A decoder that waits for them decodes all that it holds again at every token. The last
        tokens may still begin a character, so they go into a decoder of their own.
        """
        skip = seq.params.skip_special_tokens
        held = stream.segment[-stream.num_held :]
        broken, recent = held[:-_LONGEST_CHARACTER], held[-_LONGEST_CHARACTER:]
        text = self._tokenizer.decode(broken, skip)
        if text + self._tokenizer.decode(recent, skip) != self._tokenizer.decode(held, skip):
            return  # the cut would go through a character: the next one will not
        stream.text += text
        stream.decoder = DecodeStream(skip_special_tokens=skip)
        stream.num_held = 0
        for token_id in recent:
            piece = stream.decoder.step(self._tokenizer.backend, token_id)
            stream.num_held = 0 if piece else stream.num_held + 1
            stream.text += piece or ""

    def _settled(self, stream: _Stream, seq: Sequence) -> str:
        """The whole characters in front of the unfinished one that the decoder holds back."""
        if not stream.num_held:
            return ""
        held = stream.segment[-stream.num_held :]
        return self._tokenizer.decode(held, seq.params.skip_special_tokens).rstrip("\ufffd")

    def _decode(self, seq: Sequence) -> str:
        """The whole output of `seq` at once."""
        token_ids = seq.output_token_ids
        if not _sets_apart(seq):
            return self._tokenizer.decode(token_ids, seq.params.skip_special_tokens)
        text = ""
        for is_special, group in groupby(token_ids, key=self._specials.__contains__):
            if is_special:
                text += "".join(self._specials[token_id] for token_id in group)
            else:
                text += self._tokenizer.decode(list(group), False)
        return text


def _sets_apart(seq: Sequence) -> bool:
    """Special tokens are written as they are, whatever the tokenizer would set around them."""
    params = seq.params
    return not params.skip_special_tokens and not params.spaces_between_special_tokens


def _cut_at_stop(stream: _Stream, text: str, unsearched: int, keep_it: bool) -> str | None:
    """The stop string that appears first, if any; the text is cut before or behind it."""
    # What came before has been searched, or came before min_tokens.
    found = [
        (text.find(stop, max(0, unsearched - len(stop) + 1)), stop) for stop in stream.stop_strings
    ]
    found = [(position, stop) for position, stop in found if position >= 0]
    if not found:
        return None
    position, stop = min(found, key=lambda item: item[0])
    stream.text = text[: position + len(stop) if keep_it else position]
    return stop


def _held_back(stream: _Stream) -> int:
    """Characters at the end of the text that may be the beginning of a stop string."""
    return max(
        (
            length
            for stop in stream.stop_strings
            for length in range(1, len(stop))
            if stream.text.endswith(stop[:length])
        ),
        default=0,
    )
