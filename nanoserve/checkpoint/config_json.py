"""`config.json` of a checkpoint, as transformers' class for its architecture reads it.

Here, and in `nanoserve.checkpoint.rope_config`, is all that knows that transformers 4 and 5 write
that file differently. It imports neither torch nor transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.checks import check_choice, check_int, check_number, require

# The settings that transformers reads, with its values for files that leave them out (None: there
# is no such value, or it follows from others). What is not listed for an architecture has no effect
# on it there, and so has none here.
_COMMON: dict[str, Any] = {
    "vocab_size": None, "hidden_size": None, "intermediate_size": None, "head_dim": None,
    "num_hidden_layers": None, "num_attention_heads": None, "num_key_value_heads": None,
    "max_position_embeddings": None, "rms_norm_eps": None, "hidden_act": "silu",
    "tie_word_embeddings": False, "rope_theta": None,
}  # fmt: skip
_QWEN_WINDOWS = {
    "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_GEMMA = {
    "attention_bias": False, "tie_word_embeddings": True, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "layer_types": None, "use_bidirectional_attention": False,
}  # fmt: skip
_SETTINGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": False, "mlp_bias": False, "rope_theta": 10_000.0},
    "MistralForCausalLM": {"sliding_window": 4096},
    "MixtralForCausalLM": {
        "sliding_window": None, "num_experts": 8, "num_local_experts": None,
        "num_experts_per_tok": 2,
    },
    "Qwen2ForCausalLM": _QWEN_WINDOWS,
    "Qwen3ForCausalLM": {"attention_bias": False, "head_dim": 128, **_QWEN_WINDOWS},
    "Qwen3MoeForCausalLM": {
        "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096,
        "num_experts": 128, "num_local_experts": None, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None,
    },
    "Phi3ForCausalLM": {"sliding_window": None},
    "Gemma2ForCausalLM": {
        **_GEMMA,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "rope_theta": 10_000.0,
    },
    # Its files have an attn_logit_softcapping too, which its attention does not read.
    "Gemma3ForCausalLM": {
        **_GEMMA,
        "final_logit_softcapping": None, "sliding_window_pattern": 6,
        "rope_theta": 1e6, "rope_local_base_freq": 10_000.0,
    },
    "MiniCPMForCausalLM": {
        "attention_bias": False, "tie_word_embeddings": True, "rope_theta": 10_000.0,
        "scale_emb": 1, "scale_depth": 1, "dim_model_base": 1, "sparse_config": None,
    },
}  # fmt: skip
# A model of the user's own may read whatever some other model reads, but nothing is implied.
_OWN_MODEL = {n: None for settings in _SETTINGS.values() for n in settings if n not in _COMMON}


class ConfigFile:
    """`config.json` as its architecture reads it: see `_SETTINGS`."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw, self.architecture = raw, architecture_of(raw)
        self.implied = _COMMON | _SETTINGS.get(self.architecture, _OWN_MODEL)

    def get(self, name: str) -> Any:
        """A setting; None if the architecture has no such setting, or the file says null."""
        return self.raw.get(name, self.implied[name]) if name in self.implied else None

    def has(self, name: str) -> bool:
        """Whether there must be a value: the file gives one, or the architecture implies one."""
        return self.get(name) is not None or self.implied.get(name) is not None

    def size(self, name: str, default: str | None = None) -> int:
        if default is not None and self.get(name) is None:
            name = default
        require(self.get(name) is not None, f"config.json has no {name!r}")
        return check_int(name, self.get(name), 1)

    def positive(self, name: str) -> float:
        return float(check_number(f"config.json: {name}", self.get(name), 0, excludes_low=True))

    def head_dim(self) -> int:
        if self.has("head_dim"):
            return self.size("head_dim")
        return self.size("hidden_size") // self.size("num_attention_heads")

    def activation(self) -> str:
        """Gemma calls it by another name, and has the usual one beside it, without effect."""
        name = "hidden_activation" if self.has("hidden_activation") else "hidden_act"
        check_choice(name, self.get(name), ("silu", "gelu_pytorch_tanh"))
        return self.get(name)

    def sliding_windows(self) -> tuple[int | None, ...]:
        """Which layers have a window: what `layer_types` says, or the rule of the architecture."""
        num_layers, window = self.size("num_hidden_layers"), self.get("sliding_window")
        if "use_sliding_window" in self.implied and not self.get("use_sliding_window"):
            window = None
        if window is not None or self.architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"):
            check_int("sliding_window", window, 1)
        types = self.get("layer_types")
        if types is None:
            return tuple(window if self._is_windowed(i) else None for i in range(num_layers))
        known = ("full_attention", "sliding_attention")
        require(
            isinstance(types, list) and set(types) <= set(known),
            f"layer_types={types!r} are not implemented, only {known}",
        )
        require(
            len(types) == num_layers and (window is not None or "sliding_attention" not in types),
            f"layer_types={types!r} do not fit num_hidden_layers={num_layers}, "
            f"sliding_window={self.get('sliding_window')} and "
            f"use_sliding_window={self.get('use_sliding_window')}",
        )
        return tuple(window if name == "sliding_attention" else None for name in types)

    def _is_windowed(self, layer: int) -> bool:
        if self.architecture == "Gemma2ForCausalLM":
            return layer % 2 == 0
        if self.has("sliding_window_pattern"):  # Gemma 3: every sixth layer sees all
            return (layer + 1) % self.size("sliding_window_pattern") != 0
        if self.get("max_window_layers") is not None:
            check_int("max_window_layers", self.get("max_window_layers"), 0)
            return layer >= self.get("max_window_layers")
        return True

    def ropes(self, head_dim: int, max_positions: int) -> tuple[RopeConfig, RopeConfig | None]:
        """Of all layers; in Gemma 3, of those that see everything and of those with a window."""
        if self.has("rope_local_base_freq"):
            return self._ropes_by_type(head_dim, max_positions)
        is_silent = not any(self.raw.get(name) for name in ("rope_parameters", "rope_scaling"))
        raw = {"rope_theta": self.implied["rope_theta"] if is_silent else None} | self.raw
        return RopeConfig.from_hf(raw, head_dim, max_positions), None

    def _ropes_by_type(self, head_dim: int, max_positions: int) -> tuple[RopeConfig, RopeConfig]:
        """Gemma 3's. In transformers 4, layers with a window had no object of their own."""
        by_type, scaling = _object(self.raw, "rope_parameters"), _object(self.raw, "rope_scaling")
        require(
            "type" not in scaling or "rope_type" in scaling,
            f"config.json: rope_scaling={scaling} has effect in transformers 4, but not in 5, "
            f"which wants it to say 'rope_type'",
        )
        full = {"rope_theta": self.get("rope_theta")} | _object(by_type, "full_attention") | scaling
        local = {"rope_theta": self.get("rope_local_base_freq")}
        local |= _object(by_type, "sliding_attention")
        share = self.raw.get("partial_rotary_factor")
        ropes = ({"rope_parameters": s, "partial_rotary_factor": share} for s in (full, local))
        return tuple(RopeConfig.from_hf(rope, head_dim, max_positions) for rope in ropes)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    require(isinstance(content, dict), f"{path} holds no JSON object")
    return content


def architecture_of(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or [None]
    return str(names[0] if isinstance(names, list) else names)


def _object(parent: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = parent.get(name) or {}
    require(isinstance(value, dict), f"config.json: {name}={value!r} must be an object")
    return value
