"""The tokenizer in a GGUF file.

Of byte-level BPE ("gpt2") a file holds words and merges, and a name for how text is cut before
they apply: the cuts behind the names that are known here are those of the models' own
tokenizer.json. A name that is not known is refused, for a wrong cut gives other tokens to a tenth
of all texts, and nobody would see it. SentencePiece ("llama") is left to transformers, which has to
reconstruct the merges.
"""

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nanoserve.checks import is_int, require, shown
from nanoserve.quantization.gguf.container import GGUFFile
from nanoserve.quantization.gguf.settings import list_of

_ADVICE = "give tokenizer=FOLDER or a name on the hub, of the model that the file was made from"
_CONTROL, _USER_DEFINED = 3, 4  # in tokenizer.ggml.token_type: special, and never cut


class _Cut(NamedTuple):
    """What happens to a text before merges apply. None: GPT-2's pattern, which tokenizers has."""

    pattern: str | None
    is_normalized: bool = False  # to NFC
    keeps_words: bool = False  # a piece that is a word is one, whatever merges say
    splits_digits: bool = False
    adds_bos: bool = False  # unless the file says otherwise


_QWEN2 = _Cut(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    is_normalized=True,
)
_LLAMA3 = _Cut(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    keeps_words=True,
    adds_bos=True,
)
_CUTS = {
    "qwen2": _QWEN2, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "gpt-2": _Cut(None), "smollm": _Cut(None, splits_digits=True),
}  # fmt: skip


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Raises `ValueError`, with what to do, for a kind that is not known, or a file without one."""
    file = GGUFFile.open(path)
    kind = file.settings.get("tokenizer.ggml.model")
    require(
        kind in ("gpt2", "llama"),
        f"{path}: tokenizer.ggml.model={shown(kind)} is not read from GGUF: {_ADVICE}, or "
        f"skip_tokenizer_init=True to work with token ids alone",
    )
    return _byte_level(file) if kind == "gpt2" else _sentencepiece(path)


def _sentencepiece(path: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:  # whatever transformers raises, for one that gguf is not installed
        told = f"transformers cannot read the tokenizer in {path}"
        raise ValueError(f"{told} ({error!s:.300}): {_ADVICE}") from error


def _byte_level(file: GGUFFile) -> PreTrainedTokenizerBase:
    path, settings = file.path, file.settings
    name = settings.get("tokenizer.ggml.pre")
    cut = _CUTS.get(name) if isinstance(name, str) else None
    if cut is None:
        known = ", ".join(_CUTS)
        raise ValueError(
            f"{path}: tokenizer.ggml.pre={shown(name)} is not known, only {known}: {_ADVICE}"
        )
    words = list_of(file, "tokenizer.ggml.tokens", str)
    merges = [tuple(m.split(" ", 1)) for m in list_of(file, "tokenizer.ggml.merges", str)]
    try:
        model = BPE({w: i for i, w in enumerate(words)}, merges, ignore_merges=cut.keeps_words)
        backend = _cutting(Tokenizer(model), cut)
    except Exception as error:  # the library's own are plain ones
        told = f"{path}: its merges are not of its words ({error!s:.300})"
        raise ValueError(f"{told}: {_ADVICE}") from error
    types = list_of(file, "tokenizer.ggml.token_type", int)
    for word, kind in zip(words, types, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            is_special = kind == _CONTROL
            backend.add_tokens([AddedToken(word, normalized=False, special=is_special)])
    return _with_marks(backend, words, {"tokenizer.ggml.add_bos_token": cut.adds_bos} | settings)


def _cutting(backend: Tokenizer, cut: _Cut) -> Tokenizer:
    if cut.is_normalized:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if cut.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _with_marks(
    backend: Tokenizer, words: list[str], settings: dict[str, Any]
) -> PreTrainedTokenizerBase:
    """The tokens with a role, and those that are put around a text."""
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: settings.get(f"tokenizer.ggml.{name}_token_id") for role, name in roles.items()}
    tokens = {role: words[i] for role, i in ids.items() if is_int(i) and 0 <= i < len(words)}
    around = [
        role
        for role in ("bos", "eos")
        if settings.get(f"tokenizer.ggml.add_{role}_token") is True and role in tokens
    ]
    if around:
        before, after = ([tokens[r] for r in around if r == role] for role in ("bos", "eos"))
        special = [(tokens[role], ids[role]) for role in around]
        template = [*before, "$A", *after]
        backend.post_processor = TemplateProcessing(single=template, special_tokens=special)
    named = {f"{role}_token": token for role, token in tokens.items()}
    template = settings.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
        **named,
    )
