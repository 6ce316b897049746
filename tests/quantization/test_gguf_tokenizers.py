"""Tokenizers that were written into GGUF files by the package `gguf`, and read back."""

import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf")

from gguf_models import BUNDLED, ModelWriter, add_setting, close, write_bundled  # noqa: E402
from tiny_checkpoints import make_qwen3  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from nanoserve import LLM, SamplingParams  # noqa: E402
from nanoserve.tokenizer import Tokenizer  # noqa: E402

MESSAGES = [{"role": "user", "content": "What is a KV cache?"}]


def texts() -> list[str]:
    """The course, line by line, and characters at random: digits, spaces, scripts, control."""
    docs = Path(__file__).parents[2] / "docs"
    lines = [line for file in sorted(docs.rglob("*.md"))[:4] for line in file.open()]
    rng = random.Random(0)
    alphabet = "aB'sé \t\n\r0123456789.,!?-_()中文字ñ🙂\u0301\u00a0\u200b<|im_end|>"
    noise = ["".join(rng.choices(alphabet, k=rng.randrange(30))) for _ in range(300)]
    return [*lines, *noise, "<|im_start|>user\nHi<|im_end|>", "I'll DON'T 12345 1,000.5   x"]


def test_the_bundled_tokenizer_comes_back(tmp_path: Path) -> None:
    ours, theirs = Tokenizer(write_bundled(tmp_path / "model.gguf")), Tokenizer(BUNDLED)
    for text in texts():
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, False) == theirs.decode(ids, False)
    assert ours.eos_token_id == theirs.eos_token_id == 2
    assert ours.apply_chat_template(MESSAGES) == theirs.apply_chat_template(MESSAGES)


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2"])
def test_texts_are_cut_as_transformers_cuts_them(pre: str, tmp_path: Path) -> None:
    """Its reader of GGUF knows these names too; what it makes of unknown ones is GPT-2's."""
    path = write_bundled(tmp_path / "model.gguf", "llama", pre)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours, qwen = Tokenizer(path), Tokenizer(BUNDLED)
    cut = ours.backend.pre_tokenizer.pre_tokenize_str
    for text in texts():
        assert cut(text) == theirs.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    found = [ours.encode(text, add_special_tokens=False) for text in texts()]
    assert found == [theirs.encode(text, add_special_tokens=False) for text in texts()]
    assert found != [qwen.encode(text, add_special_tokens=False) for text in texts()]


def test_a_word_that_no_merges_lead_to_is_one_in_llama_3_alone(tmp_path: Path) -> None:
    """`ignore_merges` of its tokenizer.json, and llama.cpp's."""
    for pre, ids in (("llama-bpe", [2048]), ("qwen2", Tokenizer(BUNDLED).encode("zqzq"))):
        path = write_bundled(tmp_path / "model.gguf", pre=pre, more=("zqzq",))
        assert Tokenizer(path).encode("zqzq", add_special_tokens=False) == ids


def test_merges_of_other_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"merges are not of its words.*tokenizer=FOLDER"):
        Tokenizer(write_bundled(tmp_path / "model.gguf", merges=["zq zq"]))


@pytest.mark.parametrize(
    ("pre", "extra", "added"),
    [
        ("qwen2", {"bos_token_id": 1}, ([], [])),
        ("qwen2", {"bos_token_id": 1, "add_bos_token": True}, ([1], [])),
        ("llama-bpe", {"bos_token_id": 1}, ([1], [])),  # llama.cpp's default
        ("llama-bpe", {"bos_token_id": 1, "add_bos_token": False}, ([], [])),
        ("qwen2", {"add_eos_token": True}, ([], [2])),
    ],
)
def test_what_is_put_around_a_text(
    pre: str, extra: dict[str, Any], added: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    tokenizer = Tokenizer(write_bundled(tmp_path / "model.gguf", pre=pre, **extra))
    text = "What is a block table?"
    inside = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == [*added[0], *inside, *added[1]]


def by_scores(text: str, words: list[str], scores: list[float]) -> list[int]:
    """SentencePiece as llama.cpp does it: the best-scored pair of neighbours is merged, and again.

    Characters that are no words become their bytes.
    """
    ids = {word: i for i, word in enumerate(words)}
    pieces = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = [a + b for a, b in itertools.pairwise(pieces)]
        known = [(-scores[ids[p]], i) for i, p in enumerate(pairs) if p in ids]
        if not known:
            break
        _, i = min(known)
        pieces[i : i + 2] = [pairs[i]]
    out: list[int] = []
    for piece in pieces:
        raw = [f"<0x{byte:02X}>" for byte in piece.encode()]
        out += [ids[piece]] if piece in ids else [ids[word] for word in raw]
    return out


def test_sentencepiece_is_read_by_transformers(tmp_path: Path) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    learned = ["\u2581t", "he", "\u2581the", "in", "\u2581a", "ing", "\u2581c", "ac", "ache"]
    words += [*learned, *"\u2581abcdefghijklmnopqrstuvwxyz"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) - 259)]
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.BYTE] * 256
    types += [kinds.NORMAL] * (len(words) - 259)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    add_setting(writer, "llama.block_count", 1)
    close(writer)
    tokenizer = Tokenizer(tmp_path / "model.gguf")
    for text in ["the caching", "a cache in a thing", "zebra é 中", "tin the  ac"]:
        ids = by_scores(text, words, scores)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 2


@pytest.mark.parametrize(
    ("extra", "told"),
    [({"pre": "of-my-own"}, "pre='of-my-own' is not known"), ({"arch": "mamba"}, None)],
)
def test_an_unknown_cut_is_refused(extra: dict[str, str], told: str | None, tmp_path: Path) -> None:
    path = write_bundled(tmp_path / "model.gguf", **extra)
    if told is None:  # the architecture has no say in byte-level BPE
        assert Tokenizer(path).encode("the") == Tokenizer(BUNDLED).encode("the")
        return
    with pytest.raises(ValueError, match=told) as caught:
        Tokenizer(path)
    assert "tokenizer=FOLDER" in str(caught.value)


def test_an_engine_takes_everything_from_one_file(tmp_path: Path) -> None:
    """The bundled model, all of it, in a folder with nothing else; then with tokenizer=."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(BUNDLED).float()
    vocabulary = write_bundled(tmp_path / "vocabulary.gguf")
    fields = gguf.GGUFReader(vocabulary).fields
    writer = ModelWriter(model, "qwen3", "F32")
    writer.write(tmp_path / "bare.gguf")
    extra = {k: f.contents() for k, f in fields.items() if k.startswith("tokenizer.")}
    writer.write(tmp_path / "model.gguf", absolute=extra)
    params = SamplingParams(temperature=0, max_tokens=30)
    options = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 20, "max_num_seqs": 4}
    answers = []
    for name, tokenizer in ((BUNDLED, None), ("model", None), ("bare", BUNDLED)):
        path = name if name == BUNDLED else tmp_path / f"{name}.gguf"
        with LLM(path, tokenizer=tokenizer and str(tokenizer), **options) as llm:
            (output,) = llm.chat(MESSAGES, params, use_tqdm=False)
        answers.append((output.outputs[0].text, output.outputs[0].finish_reason))
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model=None is not read"):
        LLM(tmp_path / "bare.gguf", **options)


def test_the_tokenizer_of_a_file_serves_another_checkpoint(tmp_path: Path) -> None:
    make_qwen3(tmp_path / "model", vocab_size=2048)
    shutil.copy(write_bundled(tmp_path / "words.gguf"), tmp_path / "model" / "words.gguf")
    file = str(tmp_path / "model" / "words.gguf")
    with LLM(tmp_path / "model", tokenizer=file, num_kv_blocks=8, max_num_seqs=4) as llm:
        (output,) = llm.generate("What?", SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.prompt_token_ids == Tokenizer(BUNDLED).encode("What?")
