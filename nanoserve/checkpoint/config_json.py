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

    def is_full_attention(self) -> bool:
        """Whether all layers see everything. False also for a file that leaves it open."""
        if "sliding_window" not in self.implied:
            return True
        is_off = "use_sliding_window" in self.implied and not self.get("use_sliding_window")
        types = ["full_attention"] * self.size("num_hidden_layers")
        has_one_rope = not self.has("rope_local_base_freq")
        return is_off and has_one_rope and self.get("layer_types") == types

    def rope(self, head_dim: int, max_positions: int) -> RopeConfig:
        """The one of all layers."""
        is_silent = not any(self.raw.get(name) for name in ("rope_parameters", "rope_scaling"))
        raw = {"rope_theta": self.implied["rope_theta"] if is_silent else None} | self.raw
        return RopeConfig.from_hf(raw, head_dim, max_positions)


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
