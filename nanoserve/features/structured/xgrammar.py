"""Grammars by xgrammar: a pushdown automaton, with masks computed when a grammar is compiled."""

import json
from functools import cache
from typing import Any

import numpy as np
import xgrammar
from tokenizers import Tokenizer as TokenizerBackend
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo, VocabType

from nanoserve.features.structured.grammar import count_legal
from nanoserve.features.structured.source import Source
from nanoserve.features.structured.xgrammar_schemas import known_regex, known_schema

_ANY_WHITESPACE = r"[ \n\r\t]*"  # the one pattern that it knows
_BYTES_OF_CHARACTER = 100  # of a list of choices, about


class XGrammar:
    """Compiles for one tokenizer."""

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
            raise ValueError(f"{source.kind}: nothing can begin with it")
        return made

    @staticmethod
    def check(source: Source) -> None:
        """Raise `ValueError` for what cannot be compiled, or would not be obeyed."""
        try:
            _compiler_of_letters().compile_grammar(_grammar_of(source))
        except RuntimeError as error:
            raise ValueError(_first_line(error)) from None


class CompiledByXGrammar:
    def __init__(self, compiled: Any, backend: TokenizerBackend, end: int) -> None:
        self._compiled, self._backend, self._end = compiled, backend, end
        self.num_bytes = compiled.memory_size_bytes

    def start(self) -> "MatchedByXGrammar":
        return MatchedByXGrammar(GrammarMatcher(self._compiled), self._backend, self._end)


class MatchedByXGrammar:
    """One output."""

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
                raise ValueError(f"token {token_id} is not what its grammar allows")

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def forced(self, most: int) -> list[int]:
        """The text that must come, as it is cut by itself: its last token may go on behind it."""
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # byte tokens have begun a character: its rest is no text
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
        """Fill the mask; whether the end may come, which is left out of it."""
        self._mask[:] = -1
        self._matcher.fill_next_token_bitmask(self._mask)
        words = self._mask[0].view(np.uint32)
        bit = np.uint32(1 << self._end % 32)
        may_end = bool(words[self._end // 32] & bit)
        words[self._end // 32] &= ~bit
        return may_end


@cache
def _compiler_of_letters() -> GrammarCompiler:
    """A compiler for a vocabulary of a few tokens, which takes a fraction of the time."""
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
                "this grammar is not GBNF: the backend 'guidance' reads Lark's dialect"
            )
        return xgrammar.Grammar.from_ebnf(text)
    if kind == "structural_tag":
        raise ValueError("structural_tag is for the backend 'guidance'")
    if source.whitespace not in ("", _ANY_WHITESPACE):
        raise ValueError(f"whitespace_pattern={source.whitespace!r} is for the backend 'guidance'")
    schema = json.loads(text)
    options: dict[str, Any] = {"any_whitespace": True}
    if not source.whitespace:
        options = {"any_whitespace": False, "separators": (", ", ": ")}
    known = json.dumps(known_schema(schema, schema))
    return xgrammar.Grammar.from_json_schema(known, strict_mode=True, **options)


def _vocabulary(backend: TokenizerBackend, size: int) -> list[str]:
    """By id; special tokens, which are no text, are empty."""
    vocabulary = [""] * size
    for text, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id < size - 1:
            vocabulary[token_id] = text
    for token_id, token in backend.get_added_tokens_decoder().items():
        if token.special and token_id < size:
            vocabulary[token_id] = ""
    return vocabulary


def _vocab_type(backend: TokenizerBackend) -> VocabType:
    """How the vocabulary writes bytes."""
    vocabulary = backend.get_vocab()
    if "<0x0A>" in vocabulary:
        return VocabType.BYTE_FALLBACK
    return VocabType.BYTE_LEVEL if "\u0120" in vocabulary else VocabType.RAW


def _first_line(error: Exception) -> str:
    """Behind the place in the library's source that it names first."""
    return str(error).partition("] ")[2].split("\n")[0][:400] or str(error)[:400]
