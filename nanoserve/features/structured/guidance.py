"""The grammar backend on llguidance, a lazy derivative-based lexer under an Earley parser.

Compiling takes a millisecond, because little is computed in advance. The computation per step is
bounded, so that no grammar delays other requests. If the next bytes are forced, the mask allows
only the token that the tokenizer would use for them, so that a structured output is tokenized as
the model has learned it.
"""

import json
import re
import secrets
from functools import cache
from typing import Any

import llguidance
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerBackend

from nanoserve.features.structured.grammar import Source
from nanoserve.features.structured.regex import portable
from nanoserve.features.structured.schema_numbers import spelled
from nanoserve.features.structured.schemas import COMPACT, json_rule

# Limits of the computation for one token: beyond them it takes more than 10 ms. A request that
# exceeds one fails.
_LIMITS = LLParserLimits(step_lexer_fuel=300_000, step_max_items=25_000)
# Estimated size: a list of choices was measured to take 80 bytes per character, a schema less.
_BYTES_OF_ANY, _BYTES_OF_CHARACTER = 2**16, 100
_MOST_SHOWN = 600  # characters of an error message
_OF_SCHEMA = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: (.*)")
_ABOUT_ONE_OF = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"


class Guidance:
    """A backend for one tokenizer. Creating it takes 1 s for a vocabulary of 150,000 tokens."""

    check_seconds = 3  # a grammar within the limits takes less than 1

    def __init__(self, backend: TokenizerBackend, vocab_size: int) -> None:
        # An end token of its own, which no model has. It stands for all ids that end a request.
        own, end_name = _without_specials(backend), _secret_name()
        own.add_special_tokens([AddedToken(end_name, special=True)])
        end = own.token_to_id(end_name)
        self._tokenizer = LLTokenizer(own.to_str(), max(vocab_size, end + 1), end)

    def compile(self, source: Source) -> "CompiledByGuidance":
        grammar = to_llguidance(source)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        _check(matcher)
        compiled = CompiledByGuidance(matcher, self._tokenizer, len(source.text))
        # Compute the first mask: it may be empty, or exceed the limits.
        try:
            compiled.start().fill(np.empty(compiled.num_words, dtype=np.int32))
        except ValueError as error:
            raise ValueError(f"{source.kind}: no output can begin with it: {error}") from None
        return compiled

    @staticmethod
    def check(source: Source) -> None:
        """Raise `ValueError` for a grammar that cannot be compiled. It needs no tokenizer."""
        matcher = LLMatcher(_bytes(), to_llguidance(source), log_level=0, limits=_LIMITS)
        _check(matcher)
        # As `compile` does, so that a crash happens here. Whether the first mask exceeds the limits
        # depends on the tokens, so `compile` reports that.
        matcher.deep_copy().compute_bitmask()


class CompiledByGuidance:
    """A grammar that llguidance has compiled."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, num_characters: int) -> None:
        self._matcher, self._end = matcher, tokenizer.eos_token
        self.num_words = -(-tokenizer.vocab_size // 32)
        self.num_bytes = _BYTES_OF_ANY + _BYTES_OF_CHARACTER * num_characters

    def start(self) -> "GuidanceGrammar":
        return GuidanceGrammar(self._matcher.deep_copy(), self.num_words, self._end)


class GuidanceGrammar:
    """The state of one output in llguidance."""

    def __init__(self, matcher: LLMatcher, num_words: int, end: int) -> None:
        self._matcher, self._end = matcher, end
        self._mask = np.empty(num_words, dtype=np.uint32)
        self._run: list[int] | None = None  # the forced tokens here; None if not computed yet

    def fill(self, mask: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        _check(self._matcher)
        self._mask[self._end // 32] &= ~np.uint32(1 << self._end % 32)
        mask[:] = self._mask.view(np.int32)[: len(mask)]

    def advance(self, token_id: int) -> bool:
        # Forced text has one tokenization, though other tokens would give the same text.
        run = self._forced()
        if run and run[0] != token_id:
            return False
        if self._matcher.try_consume_tokens([token_id]):
            self._run = run[1:] or None
            return True
        _check(self._matcher)
        return False

    def accept(self, token_ids: list[int]) -> None:
        if token_ids:
            self._run = None
            self._matcher.consume_tokens(token_ids)
            _check(self._matcher)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._run = None
            self._matcher.rollback(num_tokens)
            _check(self._matcher)

    def forced(self, most: int) -> list[int]:
        return self._forced()[:most]

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_stopped()

    def _forced(self) -> list[int]:
        if self._run is None:
            self._run = self._matcher.compute_ff_tokens()
            _check(self._matcher)
        return self._run


def _without_forms(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normalizer without Unicode normalization, which would change bytes.

    Forced tokens, and therefore masks, come from tokenizing the bytes that a grammar requires.
    For an e with a combining accent, a normalizer would give the tokens of \u00e9, which the
    grammar rejects.
    """
    if normalizer is None or normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD"):
        return None
    if normalizer["type"] == "Sequence":
        kept = [one for one in map(_without_forms, normalizer["normalizers"]) if one is not None]
        return normalizer | {"normalizers": kept} if kept else None
    return normalizer


def _without_specials(backend: TokenizerBackend) -> TokenizerBackend:
    """Return the tokenizer with random names for its special tokens.

    So "<|im_end|>" in the grammar of a user is plain text, and becomes the tokens of its letters.
    """
    state = json.loads(backend.to_str())
    specials = [token for token in state["added_tokens"] if token["special"]]
    names = {token["content"]: _secret_name() for token in specials}
    for token in specials:
        token["content"] = names[token["content"]]
    vocab = state["model"]["vocab"]
    if isinstance(vocab, dict):
        state["model"]["vocab"] = {names.get(name, name): i for name, i in vocab.items()}
    else:  # a Unigram model: pairs of text and score
        state["model"]["vocab"] = [[names.get(name, name), score] for name, score in vocab]
    state |= {"truncation": None, "padding": None, "post_processor": None}
    state["normalizer"] = _without_forms(state["normalizer"])
    return TokenizerBackend.from_str(json.dumps(state))


def _secret_name() -> str:
    return f"<|{secrets.token_hex(12)}|>"


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def to_llguidance(source: Source) -> str:
    """Return a grammar in llguidance's own format."""
    kind, text = source.kind, source.text
    if kind == "regex":
        return LLMatcher.grammar_from_regex(portable(text))
    if kind == "choice":
        # As a single lexeme, so that a mask takes no longer for ten thousand choices than for two.
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    if kind == "structural_tag":
        return _from_structural_tag(json.loads(text))
    if kind == "grammar" and text.startswith("%llguidance"):
        return LLMatcher.grammar_from_lark(text)
    if kind == "grammar":
        return llguidance.grammar_from("grammar", text)
    options: Any = dict(COMPACT)
    if source.whitespace:
        options = {"whitespace_pattern": source.whitespace}
    in_its_spelling = spelled(text)
    if in_its_spelling != text:  # grammar_from_json_schema would parse and write the numbers again
        return LLMatcher.grammar_from_lark(f"start: {json_rule(in_its_spelling, options)}")
    return LLMatcher.grammar_from_json_schema(text, overrides=options)


def _from_structural_tag(tag: dict[str, Any]) -> str:
    tags = []
    for structure in tag["structures"]:
        begin, schema, end = structure["begin"], structure["schema"], structure["end"]
        trigger = next(trigger for trigger in tag["triggers"] if begin.startswith(trigger))
        schema = spelled(json.dumps(schema))
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return StructTag.to_grammar(tags, assume_special=False)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise ValueError(_first_lines(matcher.get_error()))


def _first_lines(error: str) -> str:
    """Return an error message without the library's state and backtrace."""
    error = error.partition("\n<state>")[0].partition("<backtrace>")[0]
    if found := _OF_SCHEMA.match(error):  # its line numbers are those of a generated grammar
        error = found[1]
    error = error.replace(_ABOUT_ONE_OF, "use anyOf, or lenient=True")
    return " ".join(error.split())[:_MOST_SHOWN]
