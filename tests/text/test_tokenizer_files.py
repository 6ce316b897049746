"""Token ids are those of tokenizer.json, whatever class of transformers a checkpoint names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_tokenizers import MISTRAL, mistral
from spm_tokenizers import FORMS, SPECIALS, make_backend, save
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

import nanoserve
from nanoserve.text.tokenizer import Tokenizer

TEXTS = [
    "the Paris", " the Paris", "  the", "a\n the", "x</s> the", "def x:\n    return 1", "你好",
    "\tthe", "<s>the", "<s> the", "</s>  the", "</s>\n<|a|>", " ", "\n\n\n", "é e\u0301 \U0001f600",
    "<s>[INST] is the [/INST] yes </s><s>[INST] the [/INST]", "It's 3.14 and 1234567", "",
    "<tool> x",
]  # fmt: skip
CLASSES = [
    "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizer", "T5Tokenizer",
    "GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast", "NoSuchTokenizer", None,
]  # fmt: skip
MODELS = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "phi3": "Phi3ForCausalLM", "minicpm": "MiniCPMForCausalLM",
}  # fmt: skip


def byte_level(digits: bool) -> Backend:
    """The bundled tokenizer, cut as GPT-2 and SmolLM cut, and without NFC."""
    folder = Path(nanoserve.__file__).parent / "checkpoint" / "tiny_qwen3"
    backend = Backend.from_file(str(next(folder.rglob("tokenizer.json"))))
    backend.normalizer = None
    steps = [pre_tokenizers.Digits(individual_digits=True)] * digits
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False)])
    return backend


FILES: dict[str, Callable[[], Backend]] = {
    form: lambda form=form: make_backend(form) for form in FORMS
} | {"gpt-2": lambda: byte_level(False), "smollm": lambda: byte_level(True)}


def check(folder: Path, texts: list[str] = TEXTS) -> Tokenizer:
    file, tokenizer = Backend.from_file(str(folder / "tokenizer.json")), Tokenizer(folder)
    file.no_truncation()
    file.no_padding()
    for text in texts:
        for special in (False, True):
            expected = file.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, special) == expected, (text, special)
        assert tokenizer.decode(expected, False) == file.decode(expected, False)
        assert tokenizer.decode(expected) == file.decode(expected)
    return tokenizer


def write(folder: Path, backend: Backend, model_type: str, name: str | None, **config: Any) -> Path:
    roles = dict.fromkeys(("bos_token", "eos_token", "unk_token", "chat_template"))
    has_roles = backend.token_to_id("<s>") is not None
    save(backend, folder, tokenizer_class=name, **({} if has_roles else roles), **config)
    architectures = [MODELS[model_type]]
    (folder / "config.json").write_text(
        json.dumps({"model_type": model_type, "architectures": architectures})
    )
    return folder


@pytest.mark.small(model_type=["llama"])
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("form", FILES)
def test_a_class_has_no_say_in_how_texts_are_cut(
    form: str, name: str | None, model_type: str, tmp_path: Path
) -> None:
    check(write(tmp_path, FILES[form](), model_type, name))


@pytest.mark.size("full")
@pytest.mark.parametrize("name", MISTRAL)
def test_llama_2_s_form_of_a_real_vocabulary(name: str, tmp_path: Path) -> None:
    backend = mistral(name)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    backend.pre_tokenizer = None
    check(write(tmp_path, backend, "llama", "LlamaTokenizer"))


@pytest.mark.parametrize(
    "flags",
    [{"normalized": True}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}],
    ids=str,
)
def test_how_an_added_token_is_found_is_the_file_s(flags: dict[str, bool], tmp_path: Path) -> None:
    """Also where tokenizer_config.json repeats it otherwise; it says which are special."""
    backend = make_backend()
    backend.add_special_tokens(
        [AddedToken(text, **{"normalized": False} | flags) for text in SPECIALS]
    )
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    again = {str(i): {"content": text, "special": True} | plain for i, text in enumerate(SPECIALS)}
    tokenizer = check(
        write(tmp_path, backend, "llama", "LlamaTokenizer", added_tokens_decoder=again)
    )
    assert tokenizer.eos_token_id == 2 and tokenizer.special_tokens.id_of("</s>") == 2


def test_a_token_with_a_role_is_special_whatever_the_file_says(tmp_path: Path) -> None:
    folder = write(tmp_path, make_backend(), "llama", "LlamaTokenizer")
    file = json.loads((folder / "tokenizer.json").read_text())
    for token in file["added_tokens"]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(file))
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode([1, 2]) == "" and tokenizer.decode([3]) == "<tool>"
    assert tokenizer.encode("</s>", False) == [2]


@pytest.mark.parametrize("value", [True, False, None])
def test_what_is_put_around_a_text_is_the_file_s(value: bool | None, tmp_path: Path) -> None:
    """`add_bos_token` has no effect beside it, as in transformers 5."""
    config = {"add_bos_token": value, "add_eos_token": value, "add_prefix_space": value}
    check(write(tmp_path, make_backend(), "llama", "LlamaTokenizer", **config))


def test_a_file_s_limits_do_not_cut_a_prompt(tmp_path: Path) -> None:
    backend = make_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    check(write(tmp_path, backend, "llama", "LlamaTokenizer"))


def test_roles_that_only_the_class_knows_add_no_token(tmp_path: Path) -> None:
    folder = write(tmp_path, make_backend(), "llama", "LlamaTokenizer")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    assert check(folder).eos_token_id == 2
    other = write(tmp_path / "other", byte_level(False), "llama", "LlamaTokenizer")
    size = Backend.from_file(str(other / "tokenizer.json")).get_vocab_size()
    assert Tokenizer(other).backend.get_vocab_size() == size


@pytest.mark.parametrize("form", FORMS)
def test_special_tokens_that_a_user_typed_are_text(form: str, tmp_path: Path) -> None:
    """In a chat, with tokenizers that write a space in front of each text."""
    tokenizer = Tokenizer(write(tmp_path, make_backend(form), "llama", "LlamaTokenizer"))
    for typed in ("</s>", "x </s> the", "<s>[INST]", "the<tool>", " </s>"):
        messages = [{"role": "user", "content": typed}, {"role": "assistant", "content": "yes"}]
        marks = tokenizer.special_tokens.make_marks([typed, "yes"])
        rendered = tokenizer.apply_chat_template(messages, False, marks.on_special_tokens)
        token_ids = tokenizer.encode_marked(rendered, marks)
        assert [i for i in token_ids if 0 < i < len(SPECIALS)] == [1, 2]  # the template's own
        text = tokenizer.decode(token_ids, False)
        assert text.replace(" ", "") == marks.remove(rendered).replace(" ", "")
