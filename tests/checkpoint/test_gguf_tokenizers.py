"""Tokenizers that were written into GGUF files by the package `gguf`, and read back; and those in
llama.cpp's own files, with its test texts."""

import itertools
import random
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf", reason="pip install 'nanoserve[gguf]'")

from gguf_models import BUNDLED, ModelWriter, add_setting, close, write_bundled  # noqa: E402
from real_tokenizers import (  # noqa: E402
    DEEPSEEK_V3,
    READ,
    REFUSED,
    real_file,
    texts_of,
    vocabulary,
)
from tiny_checkpoints import make_qwen3  # noqa: E402
from tokenizers import Regex  # noqa: E402
from tokenizers import Tokenizer as Backend  # noqa: E402
from tokenizers.pre_tokenizers import Split  # noqa: E402
from transformers import AutoTokenizer, Qwen3_5Tokenizer  # noqa: E402
from transformers.convert_slow_tokenizer import TikTokenConverter  # noqa: E402

from nanoserve import LLM, SamplingParams  # noqa: E402
from nanoserve.checkpoint.gguf.cuts import CUTS  # noqa: E402
from nanoserve.text.tokenizer import Tokenizer  # noqa: E402

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
    with pytest.raises(ValueError, match=r"merges do not match its tokens.*tokenizer=FOLDER"):
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


def write_sentencepiece(
    path: Path, arch: str = "llama", **extra: Any
) -> tuple[list[str], list[float]]:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    learned = ["\u2581t", "he", "\u2581the", "in", "\u2581a", "ing", "\u2581c", "ac", "ache"]
    words += [*learned, *"\u2581abcdefghijklmnopqrstuvwxyz"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) - 259)]
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.BYTE] * 256
    types += [kinds.NORMAL] * (len(words) - 259)
    words += ["<|end|>", "\n\n"]
    scores += [0.0, 0.0]
    types += [kinds.CONTROL, kinds.USER_DEFINED]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, value in extra.items():
        add_setting(writer, f"tokenizer.ggml.{name}", value)
    add_setting(writer, f"{arch}.block_count", 1)
    close(writer)
    return words, scores


def test_sentencepiece_joins_the_neighbours_of_the_best_score(tmp_path: Path) -> None:
    """Without the package gguf, and also where a text begins with spaces."""
    words, scores = write_sentencepiece(tmp_path / "model.gguf")
    tokenizer = Tokenizer(tmp_path / "model.gguf")
    for text in [
        *("the caching", "a cache in a thing", "zebra é 中", "tin the  ac", " the", "   the"),
        *(" ", "  ", "\nthe", "t\n the", "\tin", "<s>", "<0x0A>"),
    ]:
        token_ids = by_scores(text, words, scores)
        if text == "<s>":  # a control token, written out
            token_ids = [1]
        assert tokenizer.encode(text, add_special_tokens=False) == token_ids, text
        assert tokenizer.encode(text) == [1, *token_ids]
        assert tokenizer.decode(token_ids, False) == text
    assert tokenizer.eos_token_id == 2
    end, lines = words.index("<|end|>"), words.index("\n\n")
    the = words.index("\u2581the")
    assert tokenizer.encode("the<|end|>the", False) == [the, end, the]
    assert tokenizer.encode("the\n\nthe", False) == [the, lines, the]
    assert tokenizer.decode([the, end, lines]) == "the\n\n"


def test_sentencepiece_without_a_space_in_front(tmp_path: Path) -> None:
    """Gemma's kind. Its decoder removes no space either."""
    words, _ = write_sentencepiece(
        tmp_path / "model.gguf", add_space_prefix=False, add_bos_token=False
    )
    tokenizer = Tokenizer(tmp_path / "model.gguf")
    the = words.index("\u2581the")
    assert tokenizer.encode("the") == [words.index("t"), words.index("he")]
    assert tokenizer.encode(" the") == [the] and tokenizer.decode([the]) == " the"


def test_control_tokens_of_phi_3_swallow_the_spaces_behind_them(tmp_path: Path) -> None:
    for arch, space in (("phi3", 0), ("llama", 1)):
        words, _ = write_sentencepiece(tmp_path / f"{arch}.gguf", arch)
        found = Tokenizer(tmp_path / f"{arch}.gguf").encode("<|end|> the", False)
        assert len(found) == 2 + space and found[0] == words.index("<|end|>")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_thousands_of_control_tokens(kind: str, tmp_path: Path) -> None:
    """Gemma 3 has 6,249, and the id of each of them is its place in the file.

    Added one at a time, which took 12 s there, this many would take more than 20 s.
    """
    unused = [f"<unused{i}>" for i in range(9000)]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *unused, "a", "aa"]
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, *[kinds.CONTROL] * 2, *[kinds.BYTE] * 256, *[kinds.CONTROL] * 9000]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([*types, *[kinds.NORMAL] * 2])
    writer.add_token_merges(["a a"])
    writer.add_add_space_prefix(False)
    close(writer)
    tokenizer = Tokenizer(tmp_path / "model.gguf")
    last = words.index("<unused8999>")
    assert tokenizer.encode("".join(unused), False)[-9000:] == list(range(last - 8999, last + 1))
    assert tokenizer.encode("<unused8999>aa", False)[-2:] == [last, last + 2]
    assert tokenizer.decode([last, last + 2]) == "aa"


def test_as_many_scores_as_words(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "a"])
    writer.add_token_types([2, 1])
    close(writer)
    with pytest.raises(
        ValueError, match=r"tokens \(2\), token types \(2\) and scores \(0\).*tokenizer=FOLDER"
    ):
        Tokenizer(tmp_path / "model.gguf")


@pytest.mark.size("full")
@pytest.mark.parametrize("name", READ)
def test_the_vocabularies_of_llama_cpp_give_its_ids(name: str) -> None:
    """All of the texts that it tests itself with; and back."""
    path = vocabulary(name)
    tokenizer, cases = Tokenizer(path), texts_of(path)
    assert len(cases) >= 46
    for text, token_ids in cases:
        if name == "qwen35" and not unicodedata.is_normalized("NFC", text):
            continue  # llama.cpp does not normalize, the model's tokenizer does
        assert tokenizer.encode(text, add_special_tokens=False) == token_ids, text
        assert tokenizer.decode(token_ids, False) == text


@pytest.mark.size("full")
def test_the_tokenizer_of_deepseek_v3_comes_back(tmp_path: Path) -> None:
    file = real_file(DEEPSEEK_V3)
    theirs = Backend.from_file(str(file))
    ours = Tokenizer(write_bundled(tmp_path / "model.gguf", pre="deepseek-v3", folder=file.parent))
    for text in [*texts(), "漢字かなカナ한글 Ünïcödé", "x=1;y=[22]//333\n\n4444"]:
        token_ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == token_ids, text
        assert ours.decode(token_ids, False) == theirs.decode(token_ids, False)


def test_patterns_are_those_of_transformers() -> None:
    """Of Qwen3.5's tokenizer, and of what it converts GLM-4's (from tiktoken's files) with."""
    step = Qwen3_5Tokenizer().backend_tokenizer.pre_tokenizer[0]
    for text in texts():
        text = unicodedata.normalize("NFC", text)
        assert pieces("qwen35", text) == [piece for piece, _ in step.pre_tokenize_str(text)]
    pattern = TikTokenConverter(vocab_file="unused").pattern
    for name in ("glm4", "dbrx", "llama-bpe", "smaug-bpe"):
        assert CUTS[name].patterns == (pattern,)
    assert CUTS["deepseek-r1-qwen"] == CUTS["qwen2"]


def pieces(pre: str, text: str) -> list[str]:
    (pattern,) = CUTS[pre].patterns
    found = Split(Regex(pattern), "isolated").pre_tokenize_str(text)
    return [piece for piece, _ in found]


def test_words_of_gpt_4o_begin_with_capital_letters() -> None:
    """As in the tokenizer.json of gpt-oss, whose pattern it is."""
    text = "HelloWORLDwide don't 12345 x//\n\nÜberÄ"
    expected = ["Hello", "WORLDwide", " don't", " ", "123", "45", " x", "//\n\n", "Über", "Ä"]
    assert pieces("gpt-4o", text) == expected


@pytest.mark.size("full")
@pytest.mark.parametrize("name", REFUSED)
def test_others_of_llama_cpp_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.(pre|model)=.*tokenizer=FOLDER"):
        Tokenizer(vocabulary(name))


@pytest.mark.parametrize(
    ("extra", "told"),
    [({"pre": "of-my-own"}, "pre='of-my-own' is not supported"), ({"arch": "mamba"}, None)],
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
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model=None is not supported"):
        LLM(tmp_path / "bare.gguf", **options)


def test_the_tokenizer_of_a_file_serves_another_checkpoint(tmp_path: Path) -> None:
    make_qwen3(tmp_path / "model", vocab_size=2048)
    shutil.copy(write_bundled(tmp_path / "words.gguf"), tmp_path / "model" / "words.gguf")
    file = str(tmp_path / "model" / "words.gguf")
    with LLM(tmp_path / "model", tokenizer=file, num_kv_blocks=8, max_num_seqs=4) as llm:
        (output,) = llm.generate("What?", SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.prompt_token_ids == Tokenizer(BUNDLED).encode("What?")
