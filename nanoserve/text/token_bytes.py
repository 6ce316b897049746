"""Recovers the bytes of tokens, which decoding may lose.

A token may be part of a character: byte-level BPE splits the UTF-8 of a llama emoji into three
tokens, and SentencePiece falls back to tokens of one byte, `<0xF0>`. Decoded alone, each is U+FFFD.
"""

from functools import cached_property

from tokenizers import Tokenizer as TokenizerBackend

from nanoserve.text.incremental_decoder import BYTE_OF_SYMBOL, decoder_steps

_SINGLE_BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
_SPACE = "\u2581"  # SentencePiece's


class TokenBytes:
    """The bytes of the tokens of `backend`, computed according to its decoder.

    For decoders other than byte-level BPE and SentencePiece, a token's bytes are the UTF-8 bytes of
    its string when it is decoded alone.
    """

    def __init__(self, backend: TokenizerBackend) -> None:
        self._backend, self._steps = backend, decoder_steps(backend)
        added = backend.get_added_tokens_decoder()
        self._specials = {token_id for token_id, token in added.items() if token.special}
        self._known: dict[int, bytes] = {}

    def is_special(self, token_id: int) -> bool:
        """Return True if texts leave the token out when special tokens are skipped."""
        return token_id in self._specials

    def is_single(self, token_id: int) -> bool:
        """Return True if the token is a single byte, decoded together with its neighbours."""
        return self.falls_back and self._backend.id_to_token(token_id) in _SINGLE_BYTES

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token inside a text; b"" for an id without a token."""
        if token_id not in self._known:
            self._known[token_id] = self._make(token_id)
        return self._known[token_id]

    def first(self, token_id: int) -> bytes:
        """Return the bytes of a text's first token, whose leading space may be stripped."""
        return self.of(token_id).removeprefix(b" ") if self.strips else self.of(token_id)

    @cached_property
    def falls_back(self) -> bool:
        """True if characters without a token are encoded as tokens of single bytes."""
        return any(step["type"] == "ByteFallback" for step in self._steps)

    @cached_property
    def strips(self) -> bool:
        """True if the space before a text's first word is stripped."""
        for step in self._steps:
            if step["type"] == "Strip" and step["content"] == " " and step["start"]:
                return True
            if step["type"] == "Metaspace" and step.get("prepend_scheme") != "never":
                return True
        return False

    def _make(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        kinds = {step["type"] for step in self._steps}
        if "ByteLevel" in kinds:
            # Like the decoder: a token with any other character is written unchanged.
            try:
                return bytes([BYTE_OF_SYMBOL[character] for character in token])
            except KeyError:
                return token.encode()
        if kinds & {"ByteFallback", "Metaspace"}:
            if self.falls_back and token in _SINGLE_BYTES:
                return bytes([_SINGLE_BYTES[token]])
            for step in self._steps:
                if step["type"] == "Replace" and "String" in step["pattern"]:
                    token = token.replace(step["pattern"]["String"], step["content"])
                elif step["type"] == "Metaspace":
                    token = token.replace(step.get("replacement", _SPACE), " ")
            return token.encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


def name_of(content: bytes) -> str:
    """Return the name of a token with these bytes: the decoded string, if they are valid UTF-8.

    Otherwise, as in OpenAI's API, escaped bytes: `\\xf0\\x9f`.
    """
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in content)


class TextPositions:
    """Computes the positions, in characters, at which the tokens of a growing text begin.

    A token that continues a character begins where that character does.
    """

    def __init__(self, token_bytes: TokenBytes, skips_special_tokens: bool, start: int) -> None:
        self._token_bytes, self._skips, self._start = token_bytes, skips_special_tokens, start
        self._num_characters = 0  # characters before `_open`
        self._open = b""  # bytes of incomplete characters, or of a run that may be invalid
        self._is_single = False  # True if `_open` consists of single-byte tokens
        self._is_first = True

    def content(self, token_id: int) -> bytes:
        """Return the bytes that the next token adds to the text; b"" if it is left out."""
        if self._is_left_out(token_id):
            return b""
        known = self._token_bytes
        return known.first(token_id) if self._is_first else known.of(token_id)

    def advance(self, token_id: int) -> int:
        """Return where the next token begins, and advance past it."""
        content = self.content(token_id)
        if self._is_left_out(token_id):
            return self._start + self._num_characters + _num_whole(self._open)
        is_single = self._token_bytes.is_single(token_id)
        if self._open and self._is_single and not is_single:
            self._close()
        elif self._open and content and not is_single and not _goes_on(self._open, content):
            self._num_characters += len(self._open.decode("utf-8", "replace"))
            self._open = b""
        begin = self._start + self._num_characters + _num_whole(self._open)
        self._is_first, self._is_single = False, is_single
        self._open += content
        if not is_single:
            self._settle()
        return begin

    def _is_left_out(self, token_id: int) -> bool:
        return self._skips and self._token_bytes.is_special(token_id)

    def _settle(self) -> None:
        """Count the complete characters in `_open`, and the bytes that cannot become any."""
        kept = _unfinished(self._open)
        done = self._open[: len(self._open) - len(kept)]
        self._num_characters += len(done.decode("utf-8", "replace"))
        self._open = kept

    def _close(self) -> None:
        """End a run of single bytes: unless it is valid UTF-8, each byte counts as a character."""
        try:
            self._num_characters += len(self._open.decode())
        except UnicodeDecodeError:
            self._num_characters += len(self._open)
        self._open = b""


def _goes_on(begun: bytes, content: bytes) -> bool:
    """Return True if the first byte of `content` continues the incomplete character `begun`."""
    longer = begun + content[:1]
    try:
        longer.decode()
    except UnicodeDecodeError:
        return _unfinished(longer) == longer
    return True


def _num_whole(content: bytes) -> int:
    """Count the characters before an unfinished character."""
    return len(content[: len(content) - len(_unfinished(content))].decode("utf-8", "replace"))


def _unfinished(content: bytes) -> bytes:
    """Return the incomplete character at the end of `content`, or b""."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        if error.end == len(content) and "unexpected end" in error.reason:
            return content[error.start :]
        for length in (3, 2, 1):  # the error is an earlier byte: check the end alone
            end = content[-length:]
            try:
                end.decode()
            except UnicodeDecodeError as inner:
                if inner.start == 0 and "unexpected end" in inner.reason:
                    return end
    return b""
