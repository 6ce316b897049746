"""Rejects a prompt without tokenizing it if its tokens certainly do not fit.

A tokenizer needs seconds for a string of a few MB, and Ctrl-C cannot interrupt it.
"""

import json
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from typing import Any

from tokenizers import Tokenizer as TokenizerBackend
from tokenizers.pre_tokenizers import ByteLevel

_ORDINARY = 16  # strings of at most this times max_model_len characters are not checked
# Unicode's normal forms compose at most 4 characters to one (such as alpha with three accents).
_MOST_COMPOSED = 4
_UNICODE_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
_KEEP_ALL = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Prepend", *_UNICODE_FORMS}
_WHITESPACE = [chr(code) for code in range(0x3001) if chr(code).isspace()]
_PIECE = 2**20  # characters that are counted at once


class ContextLengthError(ValueError):
    """The prompt, or the prompt and the requested output, has more tokens than the context.

    LiteLLM, LangChain and coding agents search for this sentence, which is OpenAI's and vLLM's, and
    then shorten the conversation or switch to another model.
    """

    @classmethod
    def of(
        cls,
        max_model_len: int,
        num_prompt_tokens: int,
        max_tokens: int | None,
        reason: str = "",
        is_at_least: bool = False,
    ) -> "ContextLengthError":
        """Return the error for a prompt of `num_prompt_tokens`, or more with `is_at_least`.

        max_tokens: the requested number of output tokens; None counts as 1. reason: a further
        sentence.
        """
        num_output = 1 if max_tokens is None else max_tokens
        num_tokens = f"{'at least ' if is_at_least else ''}{num_prompt_tokens + num_output}"
        return cls(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {num_tokens} tokens ({num_prompt_tokens} in the messages, "
            f"{num_output} in the completion). Please reduce the length of the messages or "
            f"completion.{reason and f' {reason}'}"
        )


def prompt_too_long(
    max_model_len: int, num_tokens: int, max_tokens: int | None
) -> ContextLengthError:
    """Return the error for a prompt that leaves no room for a token of output.

    max_tokens: 0 if no output is wanted, and the prompt itself is too long.
    """
    room = f"leaves room for at most {max_model_len - 1} and one token of output"
    if max_tokens == 0:
        room = "is all that the model takes: truncate_prompt_tokens=-1 keeps the first ones"
    return ContextLengthError.of(
        max_model_len,
        num_tokens,
        max_tokens,
        f"The prompt is too long: it has {num_tokens} tokens; max_model_len={max_model_len} "
        f"{room}.",
    )


class TextLimit:
    """A limit on the length of prompts, for the tokenizer `backend` and `max_model_len`.

    It follows from three facts: a string is split into tokens, no part of it is lost, and no token
    stands for more characters than the longest token. A tokenizer that may lose something (unknown
    characters, white space, accents) has no limit. A prompt must have fewer than `max_model_len`
    tokens.
    """

    def __init__(self, backend: TokenizerBackend, max_model_len: int) -> None:
        self._backend, self._max_model_len = backend, max_model_len

    def check(self, text: str, max_tokens: int | None = None) -> None:
        """Raise `ContextLengthError` if `text` cannot fit; `max_tokens` is of the output."""
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
        """Return the error for a string whose tokens have not been counted."""
        least = self._max_model_len
        return ContextLengthError.of(least, least, max_tokens, reason, is_at_least=True)

    def most_characters(self, is_ascii: bool) -> int | None:
        """Return the maximum number of characters of a string that fits; None without a limit."""
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
        """True if added tokens strip the white space next to them."""
        added = self._backend.get_added_tokens_decoder().values()
        return any(token.lstrip or token.rstrip for token in added)

    @cached_property
    def _longest_token(self) -> int | None:
        """Length of the longest token; None if a token may stand for more than its length."""
        try:
            spec = json.loads(self._backend.to_str())
        except Exception:  # it has parts in Python, which cannot be serialized
            return None
        steps = [*_flat(spec["normalizer"]), *_flat(spec["pre_tokenizer"])]
        model, vocab = spec["model"], self._backend.get_vocab()
        if model["type"] != "BPE" or not all(map(_keeps_all, steps)):
            return None
        # Characters without a token would be dropped, or a run of them become one unknown token.
        if any(step["type"] == "ByteLevel" for step in steps):
            alphabet = ByteLevel.alphabet()
        else:
            alphabet = [f"<0x{byte:02X}>" for byte in range(256)] if model["byte_fallback"] else []
        if not alphabet or not vocab.keys() >= set(alphabet):
            return None
        return max(map(len, vocab))


def _flat(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer."""
    if step is None:
        return iter(())
    inner = step.get("normalizers", step.get("pretokenizers"))
    return iter([step]) if inner is None else chain.from_iterable(map(_flat, inner))


def _keeps_all(step: dict[str, Any]) -> bool:
    """Return True if a step drops no character and, except Unicode forms, shortens no text."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(pattern) <= len(step["content"])
    if step["type"] in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return step["type"] in _KEEP_ALL
