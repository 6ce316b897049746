"""Build the tokenizer of a GGUF file.

For byte-level BPE ("gpt2"), a file has tokens, merges, and the name of a pre-tokenizer, which
splits the input before merges apply: see `nanoserve.checkpoint.gguf.cuts`. An unknown name is
rejected, because a wrong pre-tokenizer silently changes the tokens of about a tenth of all inputs.
For SentencePiece ("llama"), a file has tokens with scores, from which the merges follow. Both give
the same ids as llama.cpp.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nanoserve.checkpoint.gguf.container import GGUFFile
from nanoserve.checkpoint.gguf.cuts import CUTS, Cut
from nanoserve.checkpoint.gguf.settings import list_of
from nanoserve.utils.checks import is_int, require, shown

_ADVICE = "pass tokenizer=FOLDER, or the Hub name, of the model that was converted to GGUF"
# In tokenizer.ggml.token_type; control tokens are special, user-defined ones are never split.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def read_tokenizer(source: Path | GGUFFile) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file.

    Raises `ValueError`, with advice, for an unsupported type or a file without a tokenizer.
    """
    file = GGUFFile.open(source)
    kind = file.settings.get("tokenizer.ggml.model")
    require(
        kind in ("gpt2", "llama"),
        f"{file.path}: tokenizer.ggml.model={shown(kind)} is not supported in GGUF: {_ADVICE}, or "
        f"skip_tokenizer_init=True to use token ids only",
    )
    return _byte_level(file) if kind == "gpt2" else _sentencepiece(file)


def _sentencepiece(file: GGUFFile) -> PreTrainedTokenizerBase:
    """Build SentencePiece's BPE in the form of Llama 2's tokenizer.json."""
    path, settings = file.path, file.settings
    words = list_of(file, "tokenizer.ggml.tokens", str)
    types = list_of(file, "tokenizer.ggml.token_type", int)
    scores = list_of(file, "tokenizer.ggml.scores", float)
    require(
        0 < len(words) == len(types) == len(scores),
        f"{path}: the numbers of tokens ({len(words)}), token types ({len(types)}) and scores "
        f"({len(scores)}) must be equal: {_ADVICE}",
    )
    # llama.cpp's defaults for settings that a file does not have.
    numbers = {"bos": 1, "eos": 2, "unknown": 0}
    defaults = {f"tokenizer.ggml.{name}_token_id": i for name, i in numbers.items()}
    settings = {**defaults, "tokenizer.ggml.add_bos_token": True, **settings}
    unknown = settings["tokenizer.ggml.unknown_token_id"]
    ids = {word: i for i, word in enumerate(words)}
    normal = {w: s for w, s, kind in zip(words, scores, types, strict=True) if kind == _NORMAL}
    has_unknown = is_int(unknown) and 0 <= unknown < len(words)
    model = BPE(
        ids,
        merges_of(normal, ids),
        unk_token=words[unknown] if has_unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    adds_space = settings.get("tokenizer.ggml.add_space_prefix") is not False
    spaces = normalizers.Replace(" ", "\u2581")
    before = [normalizers.Prepend("\u2581")] if adds_space else []
    backend.normalizer = normalizers.Sequence([*before, spaces])
    after = [decoders.Strip(" ", 1, 0)] if adds_space else []
    text = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*text, *after])
    # In one call: each call also rebuilds the matcher of all earlier ones, and Gemma has 6,400.
    backend.add_tokens(
        [
            AddedToken(
                word,
                normalized=False,
                special=kind != _USER_DEFINED,
                rstrip=kind == _CONTROL and _takes_spaces(word, settings),
            )
            for word, kind in zip(words, types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    return _with_marks(backend, words, settings)


def merges_of(scores: dict[str, float], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that form another token, best first.

    SentencePiece joins the adjacent pair whose result has the highest score.
    """
    found = [
        (-score, ids[word[:i]], ids[word[i:]], word[:i], word[i:])
        for word, score in scores.items()
        for i in range(1, len(word))
        if word[:i] in scores and word[i:] in scores
    ]
    found.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in found]


def _takes_spaces(word: str, settings: dict[str, Any]) -> bool:
    """Return True if a control token strips the spaces that follow it, as in Phi-3.

    A file has no setting for it; like llama.cpp, this function checks the name of the model.
    """
    names = (settings.get("general.name"), settings.get("general.architecture"))
    is_phi3 = any("phi3" in str(name).lower().replace("-", "") for name in names)
    return is_phi3 and word not in ("<unk>", "<s>", "<|endoftext|>")


def _byte_level(file: GGUFFile) -> PreTrainedTokenizerBase:
    path, settings = file.path, file.settings
    name = settings.get("tokenizer.ggml.pre")
    cut = CUTS.get(name) if isinstance(name, str) else None
    if cut is None:
        known = ", ".join(CUTS)
        raise ValueError(
            f"{path}: tokenizer.ggml.pre={shown(name)} is not supported, only {known}: {_ADVICE}"
        )
    words = list_of(file, "tokenizer.ggml.tokens", str)
    merges = [tuple(m.split(" ", 1)) for m in list_of(file, "tokenizer.ggml.merges", str)]
    try:
        model = BPE({w: i for i, w in enumerate(words)}, merges, ignore_merges=cut.keeps_words)
        backend = _cutting(Tokenizer(model), cut)
    except Exception as error:  # the library raises plain exceptions
        problem = f"{path}: its merges do not match its tokens ({error!s:.300})"
        raise ValueError(f"{problem}: {_ADVICE}") from error
    types = list_of(file, "tokenizer.ggml.token_type", int)
    backend.add_tokens(
        [
            AddedToken(word, normalized=False, special=kind == _CONTROL)
            for word, kind in zip(words, types, strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return _with_marks(backend, words, {"tokenizer.ggml.add_bos_token": cut.adds_bos, **settings})


def _cutting(backend: Tokenizer, cut: Cut) -> Tokenizer:
    if cut.is_normalized:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if cut.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.is_gpt2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _with_marks(
    backend: Tokenizer, words: list[str], settings: dict[str, Any]
) -> PreTrainedTokenizerBase:
    """Add the tokens with a role (BOS, EOS, ...), and the template that adds them to an input."""
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids: dict[str, Any] = {
        role: settings.get(f"tokenizer.ggml.{name}_token_id") for role, name in roles.items()
    }
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
    chat_template = settings.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=chat_template if isinstance(chat_template, str) else None,
        clean_up_tokenization_spaces=False,
        **named,
    )
