"""Tokenizers of SentencePiece's kind with a handful of words, in the forms that checkpoints have.

A space is "▁", what is no word becomes byte tokens "<0x..>", and, but for Gemma's form, a text gets
a space in front, which the decoder removes again.
"""

import json
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

# Beside their beginnings, which the merges lead through.
WORDS = [
    "▁the", "▁is", "▁Paris", "Paris", "▁yes", "▁no", "▁return", "▁▁▁▁", "▁a", "is", "def", "x",
    "é", "你", "好", "\u200d", "�", "▁(", "[", "1", "2", ",", ".", "+", ":", ">", "<", "/",
]  # fmt: skip
LETTERS = "▁abcdefghijklmnopqrstuvwxyzPRIN"
SPECIALS = ["<unk>", "<s>", "</s>", "<tool>"]
FIRST_BYTE = len(SPECIALS)  # the token of byte b is FIRST_BYTE + b
FORMS = ["llama2", "metaspace", "gemma"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} "
    "[/INST]{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


def make_backend(form: str = "llama2") -> Tokenizer:
    """llama2: a normalizer writes the space in front. metaspace: a pre-tokenizer does. gemma: there
    is none."""
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS]
    merges = []
    for word in WORDS:
        tokens += [*word, *accumulate(word)]
        merges += [(word[:i], word[i]) for i in range(1, len(word))]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    model = models.BPE(
        vocab, list(dict.fromkeys(merges)), unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if form == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always", split=False)
    elif form == "llama2":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    else:
        backend.normalizer = spaces
    strip = [] if form == "gemma" else [decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([*text, *strip])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def as_tokenizer(backend: Tokenizer, eos_token_id: int | None = 2) -> SimpleNamespace:
    """What an engine needs of a tokenizer."""
    return SimpleNamespace(
        backend=backend,
        eos_token_id=eos_token_id,
        encode=lambda text, special=True: backend.encode(text, add_special_tokens=special).ids,
        decode=lambda ids, skip=True: backend.decode(ids, skip_special_tokens=skip),
    )


def save(backend: Tokenizer, folder: Path, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json, as a checkpoint has them."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "LlamaTokenizer", "chat_template": TEMPLATE} | roles | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
