"""Error messages for architectures that are not supported, with the reason and an alternative.

This module is imported only when there is an error to report.
"""

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from nanoserve.checkpoint.config_json import architecture_of
from nanoserve.utils.checks import shown

# Families by the beginning of their classes' names, in lower case.
_ENCODER_DECODERS = (
    "t5 mt5 umt5 longt5 byt5 t5gemma t5gemma2 switchtransformers bart mbart plbart mvp led pegasus "
    "pegasusx bigbirdpegasus blenderbot blenderbotsmall marian m2m100 nllbmoe fsmt prophetnet "
    "xlmprophetnet encoderdecoder visionencoderdecoder speechencoderdecoder rag whisper moonshine "
    "moonshinestreaming speech2text speecht5 seamlessm4t seamlessm4tv2 pop2piano musicgen trocr "
    "florence2 pix2struct udop"
)
_ENCODERS = (
    "bert albert roberta robertaprelayernorm xlmroberta xlmrobertaxl camembert distilbert electra "
    "deberta debertav2 modernbert nomicbert eurobert mobilebert squeezebert convbert megatronbert "
    "rembert rocbert ibert mpnet ernie funnel fnet longformer bigbird luke roformer nystromformer "
    "yoso mra xmod data2vectext layoutlm layoutlmv2 layoutlmv3 esm gte new jinabert"
)
_RECURRENT = (
    "mamba mamba2 falconmamba rwkv rwkv6 rwkv7 recurrentgemma jamba zamba zamba2 bamba falconh1 "
    "nemotronh granitemoehybrid lfm2 lfm2moe xlstm minimax minimaxtext01 minimaxm1 "
    "kimilinear olmohybrid plamo2 phi4flash hymba"
)
_OTHER_MODALITIES = ("vision_config", "audio_config", "mm_vision_tower", "vision_tower")

_DECODERS_ALONE = "it has an encoder and a decoder, and nanoserve runs decoder-only models"
_MULTIMODAL = (
    "it is a multimodal model, of which nanoserve runs the text part if it supports its type"
)
_STATE = (
    "it has recurrent layers, such as state-space models or linear attention, of which nanoserve "
    "runs only the gated delta rule of Qwen3-Next and Qwen3.5"
)
_ENCODER = "it is an encoder, which outputs embeddings, labels or masked words, but no new text"
_NO_ENCODERS = (
    "needs a whole text in one step, and no KV cache; run it with sentence-transformers, vLLM or "
    "text-embeddings-inference"
)
# Settings of decoders that were trained to attend to later tokens, such as EmbeddingGemma and
# gte-Qwen2.
_BIDIRECTIONAL = (
    ("use_bidirectional_attention", True), ("use_bidirectional_attention", "all"),
    ("is_causal", False),
)  # fmt: skip
_NO_TEXT = {
    "ForSequenceClassification": "it is a classifier or a reward model, which outputs scores and "
    "no text: use the ...ForCausalLM it was derived from",
    "ForTokenClassification": "it is a classifier, which outputs labels and no text",
    "Model": "it has no LM head, like an embedding model, and generates no text: use the "
    "...ForCausalLM it was derived from",
}


def describe_unsupported(
    raw: Mapping[str, Any], supported: Collection[str], reason: str | None = None
) -> str:
    """Describe a model whose architecture in `config.json` is not supported.

    reason: why it does not run through transformers, either, if it is a decoder.
    """
    name = architecture_of(raw)
    problem = f"architecture {shown(name)} is not supported"
    if not raw.get("architectures"):
        problem = (
            f"config.json has no 'architectures' (its model_type: {shown(raw.get('model_type'))})"
        )
    kind = kind_of_model(raw)
    if kind is None and reason is not None:
        kind = f"it does not run through transformers: {reason}"
    advice = _nearest(raw, name, supported) if kind is None else [kind]
    own = "to add your own model, see nanoserve.models.registry.register_model"
    return "; ".join([problem, *advice, f"supported: {supported}", own])


def describe_unpooled(
    raw: Mapping[str, Any], decoder: str, supported: Collection[str], model_impl: str
) -> str | None:
    """Return why a model cannot pool; None if it can.

    decoder: the name that it would have with an LM head.
    """
    name = architecture_of(raw)
    family = re.split(r"For[A-Z]|EncoderModel|Model|LMHead", name[:99])[0].lower()
    setting = next(
        (f"{key}={shown(raw[key])}" for key, value in _BIDIRECTIONAL if raw.get(key) == value), None
    )
    if setting is not None:
        return f"{setting} means that its attention is bidirectional, which {_NO_ENCODERS}"
    if raw.get("is_encoder_decoder") or family in _ENCODER_DECODERS.split():
        return _DECODERS_ALONE
    if family in _ENCODERS.split():
        return f"it is a bidirectional encoder, which {_NO_ENCODERS}"
    if model_impl == "transformers":
        return "model_impl='transformers' does not pool: use 'nanoserve' or 'auto'"
    if decoder not in supported:
        return f"only decoders of nanoserve's own, or their base models, pool: {supported}"
    return None


def kind_of_model(raw: Mapping[str, Any]) -> str | None:
    """Return the reason why a model is not a text decoder with attention; None if it may be one."""
    name = architecture_of(raw)
    if not raw.get("architectures"):
        name = re.sub(r"\W|_", "", str(raw.get("model_type"))[:99])
    family = re.split(r"For[A-Z]|MTModel|EncoderModel|Model|LMHead", name[:99])[0].lower()
    if raw.get("is_encoder_decoder") or family in _ENCODER_DECODERS.split():
        return _DECODERS_ALONE
    is_multimodal = any(raw.get(setting) for setting in _OTHER_MODALITIES)
    if is_multimodal or name.endswith("ForConditionalGeneration"):
        text = raw.get("text_config")
        kind = text.get("model_type") if isinstance(text, Mapping) else None
        return f"{_MULTIMODAL}; this one's is {shown(kind)}" if kind else _MULTIMODAL
    if family in _RECURRENT.split():
        return _STATE
    if name.endswith(("ForCausalLM", "HeadModel", "HeadsModel")):
        return None
    if family in _ENCODERS.split() or name.endswith("ForMaskedLM"):
        return _ENCODER
    for ending, reason in _NO_TEXT.items():
        if name.endswith(ending):
            return reason
    purpose = re.search(r"For[A-Z]\w*$", name)
    if purpose:
        return f"it is ...{purpose[0]:.60}, and nanoserve runs only ...ForCausalLM"
    return None


def _nearest(raw: Mapping[str, Any], name: str, supported: Collection[str]) -> list[str]:
    """Suggest the nearest supported name.

    A name that differs only in case is misspelt; any other may well be a different model.
    """
    ending = "forcausallm"
    short = {other.lower().removesuffix(ending): other for other in supported}
    requested = name if raw.get("architectures") else str(raw.get("model_type")).replace("_", "")
    requested = requested[:99].lower().removesuffix(ending)
    near = [short[match] for match in get_close_matches(requested, short, n=1, cutoff=0.75)]
    entry = '"architectures": ["{}"]'
    if requested in short:
        return [f"did you mean {entry.format(other)} in config.json?" for other in near]
    return [
        f"the nearest name is {shown(other)}, a different model unless misspelt" for other in near
    ]
