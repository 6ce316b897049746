"""The bytes of tokens, and where tokens stand in a text."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.serve.http.logprobs import offsets_in_prompt
from nanoserve.text.token_bytes import TextPositions, TokenBytes, name_of
from nanoserve.text.tokenizer import Tokenizer as OurTokenizer

WORDS = ["a", "b", "the", "KV", "\u00e9", "\u4e2d", "\u4e2d\u6587", "\n", "."]


def sentencepiece(decoder: str) -> Tokenizer:
    """A tokenizer with single bytes for what it has no token for, as Llama 2's."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [mark + word for word in WORDS for mark in ("", "\u2581")] + ["\u2581"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="a"))
    prepend, replace = normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([prepend, replace])
    replace, fallback = decoders.Replace("\u2581", " "), decoders.ByteFallback()
    steps = [replace, fallback, decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    if decoder == "metaspace":
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return backend


class Likeness:
    """What `offsets_in_prompt` needs of our tokenizer, around any backend."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend, self.token_bytes = backend, TokenBytes(backend)


KINDS = ("byte level", "byte fallback", "metaspace")


def backend_of(kind: str) -> Tokenizer:
    if kind == "byte level":
        return OurTokenizer(bundled_checkpoint("tiny-qwen3")).backend
    return sentencepiece(kind)


def drawn(rng: random.Random, backend: Tokenizer, kind: str) -> list[int]:
    """Tokens at random, many of them parts of characters."""
    texts = ["\N{LLAMA}", "\u4e2d\u6587", "the KV cache", "\u00e9", "<s>"]
    ids: list[int] = []
    for _ in range(rng.randint(1, 8)):
        if rng.random() < 0.6:
            part = backend.encode(rng.choice(texts), add_special_tokens=False).ids
            ids += part[: rng.randint(1, len(part))] if rng.random() < 0.3 else part
        else:
            ids.append(rng.randrange(backend.get_vocab_size()))
    if kind == "metaspace":  # which has no rule for single bytes
        ids = [i for i in ids if i > 255]
    return ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skips", [True, False])
def test_the_bytes_of_all_tokens_are_those_of_the_text(kind: str, skips: bool) -> None:
    backend, rng = backend_of(kind), random.Random(kind)
    known, num_broken = TokenBytes(backend), 0
    for _ in range(400):
        token_ids = drawn(rng, backend, kind)
        text = backend.decode(token_ids, skip_special_tokens=skips)
        positions = TextPositions(known, skips, 7)
        pieces, offsets = [], []
        for token_id in token_ids:
            pieces.append(positions.content(token_id))
            offsets.append(positions.advance(token_id) - 7)
        joined = b"".join(pieces)
        if "\ufffd" in text:
            num_broken += 1
            if kind == "byte level":
                assert joined.decode("utf-8", "replace") == text
                for number, offset in enumerate(offsets):
                    before, rest = b"".join(pieces[:number]), b"".join(pieces[number:])
                    some, others = (part.decode("utf-8", "replace") for part in (before, rest))
                    is_inside = some + others != text  # of a character
                    assert offset == len(some) - is_inside or not pieces[number]
        else:
            assert joined == text.encode()
            for number, offset in enumerate(offsets):  # whole characters before the token
                before = b"".join(pieces[:number])
                assert offset == len(before.decode("utf-8", "ignore"))
        assert offsets == sorted(offsets)
        assert all(offset <= len(text) for offset in offsets), (token_ids, text, offsets)
    assert num_broken > 50 or kind == "metaspace"


def test_tokens_are_written_as_openai_does() -> None:
    known = TokenBytes(sentencepiece("byte fallback"))
    ids = [known._backend.token_to_id(one) for one in ("<0xF0>", "\u2581the", "<s>", "<0x0A>")]
    assert [known.of(one) for one in ids] == [b"\xf0", b" the", b"<s>", b"\n"]
    assert [name_of(known.of(one)) for one in ids] == ["\\xf0", " the", "<s>", "\n"]
    assert [known.is_special(one) for one in ids] == [False, False, True, False]
    assert known.of(10**6) == b""
    other = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert [TokenBytes(other).of(one) for one in (0, 1, 2)] == [b"a", b"b", b""]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_tokens_of_a_prompt_stand_in_its_text(kind: str) -> None:
    backend, rng = backend_of(kind), random.Random(1)
    known = Likeness(backend)
    for _ in range(200):
        text = "".join(
            rng.choices([*WORDS, " ", "\N{LLAMA}", "e\u0301", "  "], k=rng.randint(1, 9))
        )
        token_ids = backend.encode(text, add_special_tokens=False).ids
        offsets = offsets_in_prompt(known, text, token_ids)
        assert len(offsets) == len(token_ids) and offsets == sorted(offsets)
        assert all(0 <= offset <= len(text) for offset in offsets)
        for token_id, offset in zip(token_ids, offsets, strict=True):
            piece = name_of(known.token_bytes.of(token_id))
            if "\\x" in piece or "e\u0301" in text:  # a part of one, or a normalised one
                continue
            is_added = kind != "byte level" and token_id == token_ids[0] and offset == 0
            assert text[offset:].startswith(piece.removeprefix(" ") if is_added else piece)
    bos = backend.token_to_id("<s>") if kind != "byte level" else None
    if bos is not None:
        ids = [bos, *backend.encode("the KV", add_special_tokens=False).ids]
        assert offsets_in_prompt(known, "the KV", ids)[:2] == [0, 0]
