"""The incremental decoder turns token ids into text, a few at a time. Returned text is final.

The text of an output depends on what precedes it. A tokenizer of the SentencePiece kind writes
"▁Paris" for " Paris", and its decoder removes the first space of a string; but an output continues
its prompt. So a decoder is primed with the prompt's last tokens, and the text of an output is what
`decode(prompt + output)` adds to `decode(prompt)`, as in vLLM.

Where a text is the concatenation of its tokens' strings, this module concatenates them itself, and
holds back the last bytes until they are whole characters. For other decoders of the tokenizers
library it decodes a window of tokens.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from tokenizers import Tokenizer as TokenizerBackend

NUM_CONTEXT_TOKENS = 4  # prompt tokens: a character has at most 4 bytes, so at most 4 tokens
_MAX_HELD_BYTES = 32  # limit on whole characters that a run holds back: see `ByteFallbackDecoder`
_MAX_HELD_TOKENS = 16  # limit on tokens without whole characters that a window holds back
_UNKNOWN = "\ufffd"  # replacement character for invalid UTF-8
_BYTE_TOKEN = re.compile("<0x([0-9a-fA-F]{2})>")
# Byte tokens are represented in texts by lone surrogates, which no token's own text can contain, as
# in PEP 383, but for all 256 values.
_BYTE_0 = 0xDC00
_BYTES = re.compile("([\udc00-\udcff]+)")

T = TypeVar("T", str, bytes)


class IncrementalDecoder(Protocol):
    """Decodes the tokens of one output in order."""

    def feed(self, token_ids: list[int]) -> str:
        """Return the new text that later tokens cannot change."""
        ...

    def pending(self) -> str:
        """Return the whole characters after that text that a later token may still change."""
        ...

    def finish(self) -> str:
        """Return the remaining text: no more tokens follow."""
        ...


class ByteLevelDecoder:
    """Decodes byte-level BPE (GPT-2, Llama 3, Qwen), in which each token is a few UTF-8 bytes."""

    def __init__(self, bytes_of: dict[int, bytes], context: list[int]) -> None:
        self._bytes_of = bytes_of.__getitem__
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begins_cut = False
        self.feed(context)
        # An incomplete character at the end of the prompt was shown there as U+FFFD.
        self._begins_cut = bool(self._utf8.getstate()[0])

    def feed(self, token_ids: list[int]) -> str:
        return self._with_prompt(self._utf8.decode(b"".join(map(self._bytes_of, token_ids))))

    def pending(self) -> str:
        return ""

    def finish(self) -> str:
        return self._with_prompt(self._utf8.decode(b"", True))

    def _with_prompt(self, text: str) -> str:
        if self._begins_cut and text:
            self._begins_cut = False
            return text.removeprefix(_UNKNOWN)
        return text


class ByteFallbackDecoder:
    """Decodes SentencePiece tokens (Llama 2, Mistral, Gemma): pieces of text and single bytes.

    The tokenizers library decodes neighbouring byte tokens, a *run*, together: into characters if
    the whole run is valid UTF-8, otherwise into one U+FFFD per byte, even for whole characters. A
    line feed is such a byte, too, so a stream holds characters back until the run ends: usually for
    one token. Texts that consist of bytes only, as in scripts that are not in the vocabulary, would
    be held back to the end. Here `_MAX_HELD_BYTES` bytes of whole characters are final, whatever
    follows.
    """

    def __init__(self, text_of: dict[int, str], context: list[int], strip: tuple[str, int]) -> None:
        self._text_of = text_of.__getitem__
        self._strip, self._num_to_strip = strip[0], 0
        self._run = b""
        self._is_broken = False  # this run is not valid UTF-8
        self._num_shown = 0  # bytes at the beginning of the run that belong to the prompt
        if context:
            self._take_cut_character("".join(map(self._text_of, context)))
        else:
            self._num_to_strip = strip[1]

    def feed(self, token_ids: list[int]) -> str:
        text = "".join(map(self._text_of, token_ids))
        if self._run or self._is_broken or not text.isascii():
            text = self._decode_bytes(text)
        if self._num_to_strip and text:
            text, self._num_to_strip = self._stripped(text)
        return text

    def pending(self) -> str:
        if not self._run:
            return ""
        return self._stripped(codecs.utf_8_decode(self._run, "strict", False)[0])[0]

    def finish(self) -> str:
        return self._stripped(self._end_run())[0]

    def _take_cut_character(self, prompt: str) -> None:
        """Carry over the bytes of a UTF-8 character that the prompt leaves incomplete."""
        *_, last_run, rest = "", *_BYTES.split(prompt)
        run = _bytes(last_run)[-3:] if not rest else b""
        for begin in range(len(run)):
            try:
                _, num_whole = codecs.utf_8_decode(run[begin:], "strict", False)
            except UnicodeDecodeError:
                continue
            if not num_whole:
                self._run, self._num_shown = run[begin:], len(run) - begin
                return

    def _decode_bytes(self, text: str) -> str:
        decoded = ""
        for index, part in enumerate(_BYTES.split(text)):
            if index % 2:
                decoded += self._add(_bytes(part))
            elif part:
                decoded += self._end_run() + part
        return decoded

    def _add(self, new: bytes) -> str:
        """Add bytes to the run and return the final text; "" while the run may become valid."""
        if self._is_broken:
            return _UNKNOWN * len(new)
        if len(new) > 1 and len(self._run) + len(new) >= _MAX_HELD_BYTES:  # one byte at a time
            return "".join(self._add(new[i : i + 1]) for i in range(len(new)))
        self._run += new
        try:
            text, num_whole = codecs.utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            text = self._unknown()
            self._run, self._is_broken, self._num_shown = b"", True, 0
            return text
        if num_whole < _MAX_HELD_BYTES:
            return ""
        self._run, self._num_shown = self._run[num_whole:], 0
        return text

    def _end_run(self) -> str:
        """End the run and return its text."""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = self._unknown()
        self._run, self._is_broken, self._num_shown = b"", False, 0
        return text

    def _unknown(self) -> str:
        return _UNKNOWN * (len(self._run) - self._num_shown)

    def _stripped(self, text: str) -> tuple[str, int]:
        """Return `text` without the characters stripped from the beginning of a text.

        Also returns how many are left to strip from the text that follows.
        """
        num = 0
        while num < min(self._num_to_strip, len(text)) and text[num] == self._strip:
            num += 1
        return text[num:], self._num_to_strip - num if num == len(text) else 0


class WindowDecoder:
    """Decodes each token with the tokens before it, for any other decoder of the library.

    `apart` are the special tokens that are written without spaces around them.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_visible: Callable[[int], bool],
        context: list[int],
        apart: dict[int, str],
    ) -> None:
        self._decode, self._is_visible, self._apart = decode, is_visible, apart
        self._window, self._num_shown, self._shown = list(context), len(context), decode(context)

    def feed(self, token_ids: list[int]) -> str:
        return "".join(map(self._step, filter(self._is_visible, token_ids)))

    def pending(self) -> str:
        return ""

    def finish(self) -> str:
        return self._decode(self._window)[len(self._shown) :]

    def _step(self, token_id: int) -> str:
        if token_id in self._apart:
            text = self.finish() + self._apart[token_id]
            self._window, self._num_shown, self._shown = [], 0, ""
            return text
        self._window.append(token_id)
        text = self._decode(self._window)
        num_held = len(self._window) - self._num_shown
        if len(text) <= len(self._shown):
            return ""
        if text.endswith(_UNKNOWN) and num_held < _MAX_HELD_TOKENS:
            return ""
        new, self._window = text[len(self._shown) :], self._window[self._num_shown :]
        self._num_shown, self._shown = len(self._window), self._decode(self._window)
        return new


class _Table(dict[int, T], Generic[T]):
    """Dictionary by token id whose values are computed on first use."""

    def __init__(self, value_of: Callable[[int], T]) -> None:
        super().__init__()
        self._value_of: Callable[[int], T] = value_of

    def __missing__(self, token_id: int) -> T:
        value = self[token_id] = self._value_of(token_id)
        return value


class TokenTexts:
    """Creates the decoders of all outputs, from the strings of one tokenizer's tokens."""

    def __init__(self, backend: TokenizerBackend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.specials = {i: token.content for i, token in added.items() if token.special}
        parts = decoder_steps(backend)
        kinds = [part["type"] for part in parts]
        self._is_byte_level = kinds == ["ByteLevel"]
        self._strip = None if self._is_byte_level else _strip_of_sum(parts)
        self._has_byte_tokens = "ByteFallback" in kinds
        # By treatment of special tokens: (skipped, written without spaces around them).
        self._tables: dict[tuple[bool, bool], Any] = {}

    def text_of_token(self, token_id: int) -> str:
        """Return the text that a token adds; U+FFFD for part of a character."""
        table = self._table(False, False)
        if self._is_byte_level:
            return table[token_id].decode("utf-8", "replace")
        text = table[token_id]
        return _bytes(text).decode("utf-8", "replace") if _BYTES.fullmatch(text) else text

    def context(self, prompt: list[int], num_tokens: int, skips_specials: bool) -> list[int]:
        """Return the last visible prompt tokens, on which the text that follows depends.

        These are at most `NUM_CONTEXT_TOKENS` of the first `num_tokens` tokens of `prompt`.
        """
        found: list[int] = []
        for index in range(num_tokens - 1, -1, -1):
            if self._token(prompt[index], skips_specials):
                found.append(prompt[index])
                if len(found) == NUM_CONTEXT_TOKENS:
                    break
        return found[::-1]

    def decoder(
        self, context: list[int], skips_specials: bool, sets_apart: bool, is_beginning: bool
    ) -> IncrementalDecoder:
        """Return a decoder for the tokens after `context`.

        With an empty context it decodes the beginning of a text, unless `is_beginning` is False.
        """
        table = self._table(skips_specials, sets_apart)
        if self._is_byte_level:
            return ByteLevelDecoder(table, context)
        if self._strip is not None:
            strip = self._strip if is_beginning else ("", 0)
            return ByteFallbackDecoder(table, context, strip)

        def decode(token_ids: list[int]) -> str:
            return self._backend.decode(token_ids, skip_special_tokens=False)

        def is_visible(token_id: int) -> bool:
            return bool(self._token(token_id, skips_specials))

        return WindowDecoder(decode, is_visible, context, self.specials if sets_apart else {})

    def _table(self, skips_specials: bool, sets_apart: bool) -> Any:
        key = skips_specials, sets_apart
        if key not in self._tables:
            if self._is_byte_level:
                self._tables[key] = _Table(lambda i: self._bytes_of(i, *key))
            else:
                self._tables[key] = _Table(lambda i: self._text_of(i, *key))
        return self._tables[key]

    def _bytes_of(self, token_id: int, skips_specials: bool, sets_apart: bool) -> bytes:
        token = self._token(token_id, skips_specials)
        if sets_apart and token_id in self.specials:
            return token.encode()
        try:
            return bytes(BYTE_OF_SYMBOL[character] for character in token)
        except KeyError:  # an added token; the library writes it as it is
            return token.encode()

    def _text_of(self, token_id: int, skips_specials: bool, sets_apart: bool) -> str:
        token = self._token(token_id, skips_specials)
        if not token or (sets_apart and token_id in self.specials):
            return token
        byte = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        if byte is not None:
            return chr(_BYTE_0 + int(byte[1], 16))
        if self._strip is None:
            return self._backend.decode([token_id], skip_special_tokens=False)
        return self._backend.decoder.decode(["a", token])[1:]  # not at the beginning of a text

    def _token(self, token_id: int, skips_specials: bool) -> str:
        """Return the token's string; "" if it adds no text, such as an id without a token."""
        if skips_specials and token_id in self.specials:
            return ""
        return self._backend.id_to_token(token_id) or ""


def _bytes(run: str) -> bytes:
    """Return the bytes that the surrogates of a run represent: their low bytes."""
    return run.encode("utf-16-le", "surrogatepass")[::2]


def decoder_steps(backend: TokenizerBackend) -> list[dict[str, Any]]:
    """Return the steps of the decoder, in the format of tokenizer.json.

    Returns one step of type "none" for a tokenizer without a decoder, and for a decoder in Python,
    which cannot be serialized.
    """
    try:
        written = None if backend.decoder is None else backend.decoder.__getstate__()
    except Exception:  # the library raises plain exceptions
        written = None
    if written is None:
        return [{"type": "none"}]

    def steps(decoder: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if decoder["type"] != "Sequence":
            return [decoder]
        return [step for inner in decoder["decoders"] for step in steps(inner)]

    return list(steps(json.loads(written)))


def _strip_of_sum(parts: list[dict[str, Any]]) -> tuple[str, int] | None:
    """Return the character stripped from the beginning of a text, and at most how often.

    Returns None if a text is not the concatenation of its tokens' strings.
    """
    kinds = [part["type"] for part in parts]
    strip = ("", 0)
    if kinds[-1:] == ["Strip"] and "Fuse" in kinds and not parts[-1]["stop"]:
        strip = parts[-1]["content"], parts[-1]["start"]
        kinds.pop()
    if "Fuse" in kinds and kinds.index("Fuse") == len(kinds) - 1:
        kinds.pop()
    if "ByteFallback" in kinds and kinds.index("ByteFallback") == len(kinds) - 1:
        kinds.pop()
    return strip if set(kinds) <= {"Replace"} else None


def _byte_of_symbol() -> dict[str, int]:
    """Return GPT-2's mapping from symbols to bytes; printable characters map to themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


BYTE_OF_SYMBOL = _byte_of_symbol()
