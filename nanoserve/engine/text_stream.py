"""The text of one sequence while it grows, and the stop strings that end it.

A token is not a character: a byte-level tokenizer may spread one Chinese character over three
tokens. A `DecodeStream` holds back the bytes of an unfinished character.
"""

from tokenizers.decoders import DecodeStream

from nanoserve.engine.sequence import Sequence
from nanoserve.engine.stop_strings import StopStrings
from nanoserve.engine.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes in UTF-8, so at most as many tokens
_MOST_HELD = 16  # tokens without text before their bytes are taken for broken


class TextStream:
    """Costs about 0.6 us a token; stop strings, some 0.1 us for each of its characters."""

    def __init__(
        self,
        seq: Sequence,
        tokenizer: Tokenizer,
        specials: dict[int, str],
        stops: StopStrings | None,
    ) -> None:
        self.text = ""
        self._seq, self._tokenizer, self._specials = seq, tokenizer, specials
        self._skip = seq.params.skip_special_tokens
        self._decoder = DecodeStream(skip_special_tokens=self._skip)
        self._before = ""  # text up to the last special token, where those are set apart
        self._segment: list[int] = []  # the tokens since
        self._stops = stops
        self._stop_state = 0  # of `stops`, after as much of the text as
        self._num_searched = 0  # characters
        self._num_decoded = 0  # output tokens fed to the decoder
        self._num_held = 0  # of which the last ones have given no text yet
        self._num_sent = 0  # characters already handed out as deltas

    def advance(self) -> str | None:
        """Decode the new tokens; the stop string that the text ran into, if any.

        The text is cut at the earliest stop string in it, which may have begun tokens ago.
        """
        self._feed()
        return None if self._stops is None else self._cut_at_stop(self._stops)

    def catch_up(self) -> None:
        """Decode tokens that were searched, and whose text was handed out, by another stream."""
        self._feed()
        if self._stops is not None:
            self._stop_state, _ = self._stops.advance(0, self.text)
            self._num_searched = len(self.text)
        self.delta(is_whole=False)

    def visible(self, is_whole: bool) -> str:
        """The text that may be shown; not all of it is, unless it `is_whole`, while its end may be
        the beginning of a stop string."""
        return self.text if is_whole else self.text[: len(self.text) - self._held_back()]

    def delta(self, is_whole: bool) -> str:
        """What of that has not been handed out yet."""
        end = len(self.text) - (0 if is_whole else self._held_back())
        piece = self.text[self._num_sent : end]
        self._num_sent = max(self._num_sent, end)
        return piece

    def _feed(self) -> None:
        first_new = self._seq.num_prompt_tokens + self._num_decoded
        for token_id in self._seq.token_ids[first_new:]:
            self._num_decoded += 1
            if self._seq.params.sets_special_tokens_apart and token_id in self._specials:
                rest = self._tokenizer.decode(self._segment, False)
                self.text = self._before + rest + self._specials[token_id]
                self._before, self._segment, self._num_held = self.text, [], 0
                self._decoder = DecodeStream(skip_special_tokens=False)
            else:
                self._decode(token_id)
                self._segment.append(token_id)
                if self._num_held >= _MOST_HELD:
                    self._give_up_on_held()

    def _decode(self, token_id: int) -> None:
        piece = self._decoder.step(self._tokenizer.backend, token_id)
        self._num_held = 0 if piece else self._num_held + 1
        self.text += piece or ""

    def _give_up_on_held(self) -> None:
        """Hand out bytes that can no longer become characters, as they will be in the final text.

        A decoder that waits for them decodes all that it holds again at every token. The last
        tokens may still begin a character, so they go into a decoder of their own.
        """
        decode, skip = self._tokenizer.decode, self._skip
        held = self._segment[-self._num_held :]
        broken, recent = held[:-_LONGEST_CHARACTER], held[-_LONGEST_CHARACTER:]
        text = decode(broken, skip)
        if text + decode(recent, skip) != decode(held, skip):
            return  # the cut would go through a character: the next one will not
        self.text += text
        self._decoder, self._num_held = DecodeStream(skip_special_tokens=skip), 0
        for token_id in recent:
            self._decode(token_id)

    def _settled(self) -> str:
        """The whole characters in front of the unfinished one that the decoder holds back."""
        held = self._segment[-self._num_held :]
        return self._tokenizer.decode(held, self._skip).rstrip("\ufffd")

    def _cut_at_stop(self, stops: StopStrings) -> str | None:
        """The stop string that begins first, if any; the text is cut before or behind it."""
        # What came before has been searched, or came before min_tokens.
        before, new = self._num_searched, self.text[self._num_searched :]
        state, self._num_searched = self._stop_state, len(self.text)
        self._stop_state, found = stops.advance(state, new)
        if self._num_held:  # the decoder may hold the end of one
            new += self._settled()
            _, found = stops.advance(state, new)
        params = self._seq.params
        if found is None or self._seq.num_output_tokens <= params.min_tokens:
            return None
        end, stop = before + found[0], stops.strings[found[1]]
        text = self.text[:before] + new
        self.text = text[: end if params.include_stop_str_in_output else end - len(stop)]
        return stop

    def _held_back(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return 0 if self._stops is None else self._stops.num_begun(self._stop_state)
