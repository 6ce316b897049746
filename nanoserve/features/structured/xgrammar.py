"""The grammar backend on xgrammar, a pushdown automaton with masks computed at compile time."""

import json
from functools import cache
from typing import Any

import numpy as np
import xgrammar
from tokenizers import Tokenizer as TokenizerBackend
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo, VocabType

from nanoserve.features.structured.grammar import Source, count_legal
from nanoserve.features.structured.xgrammar_schemas import known_regex, known_schema

_ANY_WHITESPACE = r"[ \n\r\t]*"  # the one pattern that xgrammar supports
_BYTES_OF_CHARACTER = 100  # approximate size of a list of choices


class XGrammar:
    """A backend for one tokenizer."""

    check_seconds = 6  # 9,000 choices take 5

    def __init__(self, backend: TokenizerBackend, vocab_size: int) -> None:
        self._backend = backend
        self._end = max(vocab_size, backend.get_vocab_size())  # an id that no token has
        kind = _vocab_type(backend)
        info = TokenizerInfo(
            _vocabulary(backend, self._end + 1),
            kind,
            vocab_size=self._end + 1,
            stop_token_ids=[self._end],
        )
        self._compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, source: Source) -> "CompiledByXGrammar":
        try:
            compiled = self._compiler.compile_grammar(_grammar_of(source))
        except RuntimeError as error:
            raise ValueError(_first_line(error)) from None
        made = CompiledByXGrammar(compiled, self._backend, self._end)
        mask = np.empty(-(-(self._end + 1) // 32), dtype=np.int32)
        first = made.start()
        first.fill(mask)
        if not mask.any() and not first.may_end:
            raise ValueError(f"{source.kind}: no output can begin with it")
        return made

    @staticmethod
    def check(source: Source) -> None:
        """Raise `ValueError` for a grammar that cannot be compiled, or would not be enforced."""
        try:
            _compiler_of_letters().compile_grammar(_grammar_of(source))
        except RuntimeError as error:
            raise ValueError(_first_line(error)) from None


class CompiledByXGrammar:
    """A grammar that xgrammar has compiled."""

    def __init__(self, compiled: Any, backend: TokenizerBackend, end: int) -> None:
        self._compiled, self._backend, self._end = compiled, backend, end
        self.num_bytes = compiled.memory_size_bytes

    def start(self) -> "MatchedByXGrammar":
        return MatchedByXGrammar(GrammarMatcher(self._compiled), self._backend, self._end)


class MatchedByXGrammar:
    """The state of one output in xgrammar."""

    def __init__(self, matcher: GrammarMatcher, backend: TokenizerBackend, end: int) -> None:
        self._matcher, self._backend, self._end = matcher, backend, end
        self._mask = np.empty((1, -(-(end + 1) // 32)), dtype=np.int32)

    def fill(self, mask: np.ndarray) -> None:
        self._look()
        mask[:] = self._mask[0, : len(mask)]

    def advance(self, token_id: int) -> bool:
        return token_id != self._end and self._matcher.accept_token(token_id)

    def accept(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            if not self.advance(token_id):
                raise ValueError(f"token {token_id} is not allowed by its grammar here")

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def forced(self, most: int) -> list[int]:
        """Return the tokens of the forced text, without the last token.

        The last token is left out because the tokenizer might merge it with the text after it.
        """
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # byte tokens have begun a character: the rest is not UTF-8
            return []
        token_ids = self._backend.encode(text, add_special_tokens=False).ids[:-1] if text else []
        return token_ids[: min(most, count_legal(self, token_ids))]

    @property
    def may_end(self) -> bool:
        return self._look()

    @property
    def is_terminated(self) -> bool:
        return self._look() and not self._mask.any()

    def _look(self) -> bool:
        """Fill the mask, without the end token, and return True if the end token is allowed."""
        self._mask[:] = -1
        self._matcher.fill_next_token_bitmask(self._mask)
        words = self._mask[0].view(np.uint32)
        bit = np.uint32(1 << self._end % 32)
        may_end = bool(words[self._end // 32] & bit)
        words[self._end // 32] &= ~bit
        return may_end


@cache
def _compiler_of_letters() -> GrammarCompiler:
    """Return a compiler for a vocabulary of six tokens, which is faster than for a real one."""
    info = TokenizerInfo([*"ab01{", ""], VocabType.RAW, vocab_size=6, stop_token_ids=[5])
    return GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _grammar_of(source: Source) -> xgrammar.Grammar:
    kind, text = source.kind, source.text
    if kind == "regex":
        return xgrammar.Grammar.from_regex(known_regex(text))
    if kind == "choice":
        choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
        return xgrammar.Grammar.from_ebnf(f"root ::= {choices}")
    if kind == "grammar":
        if "::=" not in text or text.startswith("%llguidance"):
            raise ValueError(
                "the backend 'xgrammar' supports only GBNF, but this grammar is not GBNF; use the "
                "backend 'guidance' for Lark's syntax"
            )
        return xgrammar.Grammar.from_ebnf(text)
    if kind == "structural_tag":
        raise ValueError(
            "structural_tag is not supported by the backend 'xgrammar'; use the backend 'guidance'"
        )
    if source.whitespace not in ("", _ANY_WHITESPACE):
        raise ValueError(
            f"whitespace_pattern={source.whitespace!r} is not supported by the backend 'xgrammar'; "
            f"use the backend 'guidance'"
        )
    schema = json.loads(text)
    options: dict[str, Any] = {"any_whitespace": True}
    if not source.whitespace:
        options = {"any_whitespace": False, "separators": (", ", ": ")}
    known = json.dumps(known_schema(schema, schema))
    return xgrammar.Grammar.from_json_schema(known, strict_mode=True, **options)


def _vocabulary(backend: TokenizerBackend, size: int) -> list[str]:
    """Return the strings of the tokens by id. Special tokens have empty strings."""
    vocabulary = [""] * size
    for text, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id < size - 1:
            vocabulary[token_id] = text
    for token_id, token in backend.get_added_tokens_decoder().items():
        if token.special and token_id < size:
            vocabulary[token_id] = ""
    return vocabulary


def _vocab_type(backend: TokenizerBackend) -> VocabType:
    """Return the way in which the vocabulary represents bytes."""
    vocabulary = backend.get_vocab()
    if "<0x0A>" in vocabulary:
        return VocabType.BYTE_FALLBACK
    return VocabType.BYTE_LEVEL if "\u0120" in vocabulary else VocabType.RAW


def _first_line(error: Exception) -> str:
    """Return the first line of an error, without the location in xgrammar's source."""
    return str(error).partition("] ")[2].split("\n")[0][:400] or str(error)[:400]
