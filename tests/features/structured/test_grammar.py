"""A grammar that has been somewhere and back is as one that has not."""

import random
import re
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as TokenizerBackend

pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
from grammars import GRAMMARS
from random_grammars import RandomSchema, random_regex

from nanoserve import StructuredOutputsParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.grammar import Grammar, count_legal
from nanoserve.features.structured.guidance import Guidance
from nanoserve.text.tokenizer import Tokenizer

VOCAB_SIZE = 2048


@pytest.fixture(scope="module")
def backend() -> TokenizerBackend:
    return Tokenizer(bundled_checkpoint("tiny-qwen3")).backend


@pytest.fixture(scope="module")
def guidance(backend: TokenizerBackend) -> Guidance:
    return Guidance(backend, VOCAB_SIZE)


def compiled(guidance: Guidance, **guide: Any) -> Any:
    return guidance.compile(StructuredOutputsParams(**guide).source(StructuredOutputsConfig()))


def allowed(grammar: Grammar) -> list[int]:
    mask = np.full(VOCAB_SIZE // 32, -1, dtype=np.int32)
    grammar.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def state(grammar: Grammar) -> tuple[Any, ...]:
    """All that can be told from outside."""
    ends = grammar.may_end, grammar.is_terminated
    return (*ends, [] if grammar.is_terminated else allowed(grammar), grammar.forced(32))


def test_there_and_back_is_as_if_it_had_not_been(guidance: Guidance, full_size: bool) -> None:
    guides = [
        *GRAMMARS,
        *({"json": RandomSchema(seed).schema} for seed in range(100 if full_size else 10)),
        *({"regex": random_regex(seed)} for seed in range(100 if full_size else 10)),
    ]
    num_rollbacks = 0
    for number, guide in enumerate(guides):
        rng, shared = random.Random(number), compiled(guidance, **guide)
        travelled, token_ids = shared.start(), []
        for _ in range(30):
            going = rng.random() < 0.6 and not travelled.is_terminated
            choices = allowed(travelled) if going else []
            if choices:
                token_ids.append(rng.choice(choices))
                travelled.accept(token_ids[-1:])
            elif token_ids:
                count = rng.randint(1, len(token_ids))
                travelled.rollback(count)
                del token_ids[-count:]
                num_rollbacks += 1
            fresh = shared.start()
            fresh.accept(token_ids)
            assert state(travelled) == state(fresh), (guide, token_ids)
    assert num_rollbacks > 100


def test_what_is_legal_is_what_the_mask_says(guidance: Guidance) -> None:
    for number, guide in enumerate(GRAMMARS):
        rng, grammar = random.Random(number), compiled(guidance, **guide).start()
        for _ in range(40):
            if grammar.is_terminated:
                break
            legal = set(allowed(grammar))
            for token_id in rng.sample(range(VOCAB_SIZE), 20):
                assert count_legal(grammar, [token_id]) == (token_id in legal)
            run = grammar.forced(32)
            assert not run or legal == {run[0]}  # nothing else may come
            assert count_legal(grammar, run) == len(run)
            if not legal:
                break
            grammar.accept([rng.choice(sorted(legal))])


def test_of_several_tokens_those_before_the_first_illegal_one_count(
    guidance: Guidance, backend: TokenizerBackend
) -> None:
    grammar = compiled(guidance, regex="block table!").start()
    right = backend.encode("block table!").ids
    wrong = backend.encode("block tables").ids
    assert count_legal(grammar, right) == len(right)
    assert count_legal(grammar, [*right, 7]) == len(right)
    assert 0 < count_legal(grammar, wrong) < len(wrong)
    assert count_legal(grammar, []) == 0
    grammar.accept(right)
    assert grammar.may_end and grammar.is_terminated


def test_special_tokens_are_no_text(guidance: Guidance, backend: TokenizerBackend) -> None:
    """Though the text of one may be written, letter by letter."""
    special = [i for i, token in backend.get_added_tokens_decoder().items() if token.special]
    assert len(special) >= 3
    for guide in ({"regex": r"(.|\n)*"}, {"json": {"type": "string"}}, {"json_object": True}):
        grammar = compiled(guidance, **guide).start()
        for _ in range(20):
            legal = set(allowed(grammar))
            assert not legal & {*special}
            grammar.accept([min(legal)])
    grammar = compiled(guidance, choice=["<|im_end|>"]).start()
    assert backend.encode("<|im_end|>").ids[0] not in allowed(grammar)
    grammar.accept([backend.token_to_id("<")])


def test_ids_beyond_the_tokenizers_are_never_allowed(backend: TokenizerBackend) -> None:
    """Models have more logits than tokens: for the sake of round numbers."""
    guidance = Guidance(backend, VOCAB_SIZE + 100)
    grammar = compiled(guidance, regex=r"(.|\n)*").start()
    mask = np.full((VOCAB_SIZE + 100 + 31) // 32, -1, dtype=np.int32)
    grammar.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert bits[:VOCAB_SIZE].any() and not bits[VOCAB_SIZE:].any()
    assert count_legal(grammar, [VOCAB_SIZE + 50]) == 0


@pytest.mark.parametrize(
    ("guide", "what"),
    [
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": r"\bword\b"}, "lookarounds|WordUnicode"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "a++b"}, r"\+\+"),
        ({"regex": "[a&&b]"}, "&&"),
        ({"regex": "[[:alpha:]]"}, r"\[:"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"oneOf": [{"type": "integer"}, {"minimum": 3}]}}, "oneOf"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": {"if": {"type": "null"}, "then": {"const": 1}}}, "if"),
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"$ref": "#/$defs/none"}}, "none"),
        ({"json": {"$ref": "http://example.org/schema"}}, "example.org"),
        ({"json": {"type": "colour"}}, "colour"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"grammar": "start: undefined"}, "undefined"),
        ({"grammar": "neither Lark nor GBNF"}, "."),
    ],
)
def test_what_cannot_be_obeyed_is_named(guide: dict[str, Any], what: str) -> None:
    params = StructuredOutputsParams(**guide)
    with pytest.raises(ValueError, match=rf"structured_outputs: \w+: .*{what}"):
        params.check(None, object())


@pytest.mark.parametrize(
    "guide", [{"regex": r"[^\x00-\x{10FFFF}]"}, {"json": {"anyOf": [{"$ref": "#"}]}}]
)
def test_what_nothing_can_begin_with_is_found_before_the_first_step(
    guidance: Guidance, guide: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="no output can begin with it"):
        compiled(guidance, **guide)


def falling_back_to_bytes() -> TokenizerBackend:
    """As SentencePiece's: "\u2581" is a space, and what has no token is written in bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abcdefghijklmnopqrstuvwxyz0123456789{}[]:,.", '"', "\u2581a", "ab", "12"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("\u2581", "a"), ("a", "b"), ("1", "2")]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    backend = TokenizerBackend(model)
    prepend, spaces = normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([prepend, spaces])
    spaces, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    parts = [spaces, decoders.ByteFallback(), decoders.Fuse(), strip]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens([AddedToken(name, special=True) for name in pieces[:3]])
    return backend


@pytest.mark.parametrize(
    ("guide", "right"),
    [
        ({"regex": "(ab|x \u00e9){1,3}"}, r"(ab|x \u00e9){1,3}"),
        ({"choice": ["\u5757", "</s>", "a b"]}, "\u5757|</s>|a b"),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 12999}}, r"\d{2,5}"),
    ],
)
def test_tokenizers_that_fall_back_to_bytes(guide: dict[str, Any], right: str) -> None:
    backend, rng = falling_back_to_bytes(), random.Random(1)
    size = backend.get_vocab_size()
    shared, texts = compiled(Guidance(backend, size), **guide), set()
    for _ in range(30):
        grammar, token_ids = shared.start(), []
        while not grammar.is_terminated and not (grammar.may_end and rng.random() < 0.3):
            mask = np.empty(-(-size // 32), dtype=np.int32)
            grammar.fill(mask)
            legal = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            assert legal[0] > 2  # no special token
            token_ids.append(int(rng.choice(legal)))
            grammar.accept(token_ids[-1:])
        before = backend.token_to_id("b")  # a space at the beginning would be stripped
        texts.add(backend.decode([before, *token_ids])[1:])
    assert len(texts) > 2
    assert all(re.fullmatch(right, text) for text in texts), texts
