"""How long a text may be before it is certain, without tokenizing it, that its tokens do not fit.

A tokenizer needs seconds for a text of some megabytes, and hears no Ctrl-C meanwhile.
"""

import json
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from typing import Any

from tokenizers import Tokenizer as TokenizerBackend
from tokenizers.pre_tokenizers import ByteLevel

from nanoserve.engine.context_length import ContextLengthError

_ORDINARY = 16  # characters for each token that has room: what is shorter is not looked at
# Unicode's normal forms never make one character of more than 4 (as of alpha with three accents).
_MOST_COMPOSED = 4
_UNICODE_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
_KEEP_ALL = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Prepend", *_UNICODE_FORMS}
_WHITESPACE = [chr(code) for code in range(0x3001) if chr(code).isspace()]
_PIECE = 2**20  # characters that are looked at at once


class TextLimit:
    """Of the tokenizer `backend`, for prompts of fewer than `max_model_len` tokens.

    The argument: text is cut into tokens, nothing of it is lost, and no token stands for more
    characters than the longest one has. A tokenizer that may lose something (unknown characters,
    white space, accents) has no limit.
    """

    def __init__(self, backend: TokenizerBackend, max_model_len: int) -> None:
        self._backend, self._max_model_len = backend, max_model_len

    def check(self, text: str, max_tokens: int | None = None) -> None:
        """Raises `ContextLengthError` if `text` cannot fit. `max_tokens`: of output."""
        if len(text) <= _ORDINARY * self._max_model_len:
            return
        most = self.most_characters(text.isascii())
        if most is not None and self._has_more_than(most, text):
            limit = self._max_model_len
            raise self.error(
                max_tokens,
                f"The prompt is too long: it has {len(text)} characters; max_model_len={limit} "
                f"leaves room for at most {limit - 1} tokens, which stand for no more than {most}.",
            )

    def error(self, max_tokens: int | None, reason: str) -> ContextLengthError:
        """Return the error for a text of which nobody has counted the tokens."""
        least = self._max_model_len
        return ContextLengthError.of(least, least, max_tokens, reason, is_at_least=True)

    def most_characters(self, is_ascii: bool) -> int | None:
        """Of a text that fits; None: no matter how many."""
        if self._longest_token is None:
            return None
        composed = 1 if is_ascii else _MOST_COMPOSED
        return (self._max_model_len - 1) * self._longest_token * composed

    def _has_more_than(self, most: int, text: str) -> bool:
        if len(text) <= most or not self._strips:
            return len(text) > most
        num_characters = 0
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            num_characters += len(piece) - sum(map(piece.count, _WHITESPACE))
            if num_characters > most:
                return True
        return False

    @cached_property
    def _strips(self) -> bool:
        """Whether added tokens swallow the white space beside them."""
        added = self._backend.get_added_tokens_decoder().values()
        return any(token.lstrip or token.rstrip for token in added)

    @cached_property
    def _longest_token(self) -> int | None:
        """Characters of the longest token; None if one may stand for more than it is long."""
        try:
            spec = json.loads(self._backend.to_str())
        except Exception:  # it has parts in Python, which cannot be written out
            return None
        steps = [*_flat(spec["normalizer"]), *_flat(spec["pre_tokenizer"])]
        model, vocab = spec["model"], self._backend.get_vocab()
        if model["type"] != "BPE" or not all(map(_keeps_all, steps)):
            return None
        # What no token stands for would be left out, or a run of it be one unknown token.
        if any(step["type"] == "ByteLevel" for step in steps):
            alphabet = ByteLevel.alphabet()
        else:
            alphabet = [f"<0x{byte:02X}>" for byte in range(256)] if model["byte_fallback"] else []
        if not alphabet or not vocab.keys() >= set(alphabet):
            return None
        return max(map(len, vocab))


def _flat(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A normalizer's or pre-tokenizer's steps."""
    if step is None:
        return iter(())
    inner = step.get("normalizers", step.get("pretokenizers"))
    return iter([step]) if inner is None else chain.from_iterable(map(_flat, inner))


def _keeps_all(step: dict[str, Any]) -> bool:
    """Whether a step leaves out nothing and makes no text shorter, but for Unicode's forms."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(pattern) <= len(step["content"])
    if step["type"] in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return step["type"] in _KEEP_ALL
