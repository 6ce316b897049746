"""The text model in the checkpoint of a multimodal model.

The `config.json` of such a checkpoint has the settings of the text model in `text_config`. The
names of its tensors have a prefix. The other tensors belong to encoders, for images or sound, and
are not read.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanoserve.utils.checks import is_int, require, shown

# The `model_type` in `text_config`, and the architecture that computes it. Positions of images have
# three coordinates in the Qwen-VL models; those of text are three times the same.
_ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# Files of multimodal models often have only the settings that differ from transformers' defaults.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta",
)  # fmt: skip
_DEFAULTS: dict[str, tuple[float | None, ...]] = {
    "deepseek_v3": (129_280, 7168, 18_432, 61, 128, 128, 4096, 1e-6, 10_000.0),
    "gemma2": (256_000, 2304, 9216, 26, 8, 4, 8192, 1e-6, 10_000.0),
    "gemma3_text": (262_208, 2304, 9216, 26, 8, 4, 131_072, 1e-6, None),
    "glm": (151_552, 4096, 13_696, 40, 32, 2, 131_072, 1.5625e-7, 10_000.0),
    "glm4": (151_552, 4096, 13_696, 40, 32, 2, 131_072, 1.5625e-7, 10_000.0),
    "glm4v_text": (151_552, 4096, 13_696, 40, 32, 2, 32_768, 1e-5, 10_000.0),
    "llama": (32_000, 4096, 11_008, 32, 32, None, 2048, 1e-6, 10_000.0),
    "mistral": (32_000, 4096, 14_336, 32, 32, 8, 131_072, 1e-6, 10_000.0),
    "mixtral": (32_000, 4096, 14_336, 32, 32, 8, 131_072, 1e-5, 1e6),
    "olmo2": (50_304, 4096, 11_008, 32, 32, None, 2048, 1e-5, 10_000.0),
    "phi3": (32_064, 3072, 8192, 32, 32, None, 4096, 1e-5, 10_000.0),
    "qwen2": (151_936, 4096, 22_016, 32, 32, 32, 32_768, 1e-6, 10_000.0),
    "qwen2_vl_text": (152_064, 8192, 29_568, 80, 64, 8, 32_768, 1e-5, 1e6),
    "qwen2_5_vl_text": (152_064, 8192, 29_568, 80, 64, 8, 32_768, 1e-5, 1e6),
    "qwen2_moe": (151_936, 2048, 5632, 24, 16, 16, 32_768, 1e-6, 10_000.0),
    "qwen3": (151_936, 4096, 22_016, 32, 32, 32, 32_768, 1e-6, 10_000.0),
    "qwen3_5_moe_text": (248_320, 2048, 5632, 40, 16, 2, 32_768, 1e-6, 10_000.0),
    "qwen3_5_text": (248_320, 4096, 12_288, 32, 16, 4, 32_768, 1e-6, 10_000.0),
    "qwen3_moe": (151_936, 2048, 6144, 24, 32, 4, 32_768, 1e-6, 10_000.0),
    "qwen3_vl_text": (151_936, 4096, 22_016, 32, 32, 32, 128_000, 1e-6, 500_000.0),
    "smollm3": (128_256, 2048, 11_008, 36, 16, 4, 32_768, 1e-6, 2e6),
}
# Files of transformers 4 have the text model's settings beside `vision_config`.
_FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
# Read from the whole model's settings. `tie_word_embeddings` of the text part has no effect there.
_OF_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")

# Of tensors: where a checkpoint has what a text model has as "model." and "lm_head.".
_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")
_HEADS = ("lm_head.", "language_model.lm_head.")
_OTHERS = re.compile(r"model\.(visual|vision|audio|image|multi_modal|mm_|connector|embed_vision)")


def text_config(
    raw: Mapping[str, Any], architectures: Mapping[str, str] = _ARCHITECTURES
) -> dict[str, Any] | None:
    """Return the `config.json` that the text part of a multimodal model would have.

    architectures: by `model_type`. Returns None for other models, and if the text part is not of
    one of these types.
    """
    text = raw.get("text_config")
    if text is None and raw.get("vision_config") and raw.get("model_type") in _FLAT:
        text = {**raw, "model_type": _FLAT[raw["model_type"]]}
    if not isinstance(text, Mapping) or raw.get("is_encoder_decoder"):
        return None
    model_type = str(text.get("model_type"))
    if model_type not in architectures:
        return None
    defaults = zip(_SIZES, _DEFAULTS.get(model_type, (None,) * len(_SIZES)), strict=True)
    own: dict[str, Any] = {name: value for name, value in defaults if value is not None}
    own |= {name: value for name, value in text.items() if name != "quantization_config"}
    own |= {name: raw[name] for name in _OF_WHOLE if raw.get(name) is not None}
    if text["model_type"] == "glm4v_text":
        own |= _glm4v_settings(own)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(own.get(name), Mapping):
            own[name] = _without_coordinates(own[name])
    return own | {"architectures": [architectures[model_type]]}


def _glm4v_settings(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a text part of GLM-4.1V has in common, and a GLM-4 does not."""
    settings: dict[str, Any] = {"attention_bias": True}
    settings["partial_rotary_factor"] = own.get("partial_rotary_factor")  # None: whole heads
    size, heads = own["hidden_size"], own["num_attention_heads"]
    if own.get("head_dim") is None and is_int(size) and is_int(heads) and heads > 0:
        settings["head_dim"] = size // heads
    return settings


def _without_coordinates(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return RoPE settings for positions that are numbers, as those of text are."""
    kept = {name: v for name, v in rope.items() if not name.startswith("mrope_")}
    for name in ("type", "rope_type"):
        if kept.get(name) == "mrope":
            kept[name] = "default"
    return kept


@dataclass(frozen=True)
class TextWeights:
    """The tensors of the text model in a multimodal checkpoint; takes the place of its folder.

    prefix, head: of the names of its tensors in the checkpoint.
    """

    source: Any  # `nanoserve.checkpoint.weight_files.Weights`
    prefix: str
    head: str

    @classmethod
    def of(cls, source: object, names: Iterable[str]) -> "TextWeights":
        """Find the text model among the `names` of all tensors; raises `ValueError` otherwise."""
        embedding = "embed_tokens.weight"
        found = {*names}
        prefix = next((prefix for prefix in _PREFIXES if prefix + embedding in found), None)
        require(
            prefix is not None,
            f"{source} is multimodal, but has no text model: none of "
            f"{shown([prefix + embedding for prefix in _PREFIXES])} is there",
        )
        head = next((head for head in _HEADS if f"{head}weight" in found), _HEADS[0])
        return cls(source, str(prefix), head)

    def __str__(self) -> str:
        return str(self.source)

    def name_of(self, stored: str) -> str | None:
        """Return the text model's name of a tensor; None if it belongs to another part."""
        if stored.startswith(self.head):
            return "lm_head." + stored.removeprefix(self.head)
        if not stored.startswith(self.prefix) or _OTHERS.match(stored):
            return None
        return "model." + stored.removeprefix(self.prefix)


def name_in_model(source: object, stored: str) -> str | None:
    """Return the model's name of a stored tensor; None if the model has no part with it."""
    return source.name_of(stored) if isinstance(source, TextWeights) else stored
