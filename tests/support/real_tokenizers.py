"""Tokenizers of real models that packages ship, for tests that skip without these packages.

    pip install --no-deps mistral-common    Mistral's tokenizer.model, v1 and v3
    pip download --no-deps --no-binary :all: llama-cpp-python
        the source of llama.cpp, with vocabularies of a dozen models and test texts; unpack it, and
        set NANOSERVE_VOCABULARIES to the folder that has models/ggml-vocab-*.gguf
"""

import importlib.util
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from nanoserve.quantization.gguf.tokenizer import merges_of

MISTRAL = {
    "mistral-v1": "tokenizer.model.v1",
    "mistral-v3": "mistral_instruct_tokenizer_240323.model.v3",
}
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3


def vocabulary(name: str) -> Path:
    """The GGUF file of llama.cpp's own tests with this vocabulary; its texts lie beside it."""
    folder = os.environ.get("NANOSERVE_VOCABULARIES")
    path = Path(folder or ".") / f"ggml-vocab-{name}.gguf"
    if not folder or not path.is_file():
        pytest.skip(
            "needs vocabularies of llama.cpp: pip download --no-deps --no-binary :all: "
            "llama-cpp-python, unpack it, and set NANOSERVE_VOCABULARIES to its folder with "
            "ggml-vocab-*.gguf"
        )
    return path


def texts_of(path: Path) -> list[tuple[str, list[int]]]:
    """llama.cpp's test texts for a vocabulary, with the token ids that they are to have."""
    content = Path(f"{path}.inp").read_bytes().decode()
    texts = content.removesuffix("\n__ggml_vocab_test__\n").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().splitlines()
    ids = [[int(number) for number in line.split()] for line in lines]
    return list(zip(texts, ids, strict=True))


def mistral(name: str) -> Tokenizer:
    """Mistral's tokenizer in the form that its checkpoints have in tokenizer.json."""
    if importlib.util.find_spec("mistral_common") is None:
        pytest.skip("needs Mistral's tokenizers: pip install --no-deps mistral_common")
    (root,) = importlib.util.find_spec("mistral_common").submodule_search_locations
    pieces = list(_pieces((Path(root) / "data" / MISTRAL[name]).read_bytes()))
    ids = {piece: index for index, (piece, _, _) in enumerate(pieces)}
    scores = {piece: score for piece, score, kind in pieces if kind == _NORMAL}
    merges = merges_of(scores, ids)
    backend = Tokenizer(BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always", split=False)
    text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)])
    special = [piece for piece, _, kind in pieces if kind in (_UNKNOWN, _CONTROL)]
    backend.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    return backend


def _pieces(content: bytes) -> Iterator[tuple[str, float, int]]:
    """Pieces, scores and kinds of a SentencePiece model, which is a message of Protocol Buffers."""
    for number, value in _fields(content):
        if number == 1:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
            yield piece[1].decode(), score, piece.get(3, _NORMAL)


def _fields(content: bytes) -> Iterator[tuple[int, bytes | int]]:
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = content[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(content):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or number()
            yield key >> 3, content[at : at + size]
            at += size
