"""What a checkpoint says of its model: `ModelConfig`, made from its `config.json` alone.

It imports neither torch nor transformers: the brain reads it, and data types travel as names
("bfloat16"). This file and `nanoserve.rope_config` are the only places that know that transformers
4 and 5 write `config.json` differently.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.config import DTYPES, check_choice, check_int, require
from nanoserve.rope_config import RopeConfig

# The settings that transformers reads, with its values for files that leave them out (None: there
# is no such value, or it follows from others). What is not listed for an architecture has no effect
# on it there, and so has none here.
_COMMON: dict[str, Any] = {
    **{"vocab_size": None, "hidden_size": None, "intermediate_size": None, "head_dim": None},
    **{"num_hidden_layers": None, "num_attention_heads": None, "num_key_value_heads": None},
    **{"max_position_embeddings": None, "rms_norm_eps": None, "hidden_act": "silu"},
    **{"tie_word_embeddings": False, "rope_theta": None},
}
_QWEN_WINDOWS = {
    **{"use_sliding_window": False, "sliding_window": 4096},
    **{"max_window_layers": 28, "layer_types": None},
}
_GEMMA = {
    **{"attention_bias": False, "tie_word_embeddings": True, "head_dim": 256},
    **{"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256},
    **{"sliding_window": 4096, "layer_types": None, "use_bidirectional_attention": False},
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": False, "mlp_bias": False, "rope_theta": 10_000.0},
    "MistralForCausalLM": {"sliding_window": 4096},
    "MixtralForCausalLM": {
        **{"sliding_window": None, "num_experts": 8, "num_local_experts": None},
        **{"num_experts_per_tok": 2},
    },
    "Qwen2ForCausalLM": _QWEN_WINDOWS,
    "Qwen3ForCausalLM": {"attention_bias": False, "head_dim": 128, **_QWEN_WINDOWS},
    "Qwen3MoeForCausalLM": {
        **{"attention_bias": False, "use_sliding_window": False, "sliding_window": 4096},
        **{"num_experts": 128, "num_local_experts": None, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 768},
        **{"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None},
    },
    "Phi3ForCausalLM": {"sliding_window": None},
    "Gemma2ForCausalLM": {
        **_GEMMA,
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        **{"rope_theta": 10_000.0},
    },
    # Its files have an attn_logit_softcapping too, which its attention does not read.
    "Gemma3ForCausalLM": {
        **_GEMMA,
        **{"final_logit_softcapping": None, "sliding_window_pattern": 6},
        **{"rope_theta": 1e6, "rope_local_base_freq": 10_000.0},
    },
    "MiniCPMForCausalLM": {
        **{"attention_bias": False, "tie_word_embeddings": True, "rope_theta": 10_000.0},
        **{"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1, "sparse_config": None},
    },
}
# A model of the user's own may read whatever some other model reads, but nothing is implied.
_OWN_MODEL = {n: None for settings in _SETTINGS.values() for n in settings if n not in _COMMON}


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in the place of the feed-forward, in all layers but the dense ones."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # whether the weights of the chosen experts sum to one
    dense_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        require(
            self.num_experts_per_tok <= self.num_experts,
            f"num_experts_per_tok={self.num_experts_per_tok} exceeds "
            f"num_experts={self.num_experts}",
        )


@dataclass(frozen=True)
class ModelConfig:
    """What a checkpoint says of its model, in the names of its `config.json`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int  # with what the RoPE type adds to it
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    hidden_act: str  # "silu" or "gelu_pytorch_tanh"
    attention_scale: float  # of attention scores
    sliding_windows: tuple[int | None, ...]  # per layer: tokens that a query sees, with its own
    dtype: str
    local_rope: RopeConfig | None = None  # of layers with a window, where it is another one
    attention_soft_cap: float | None = None  # c: scores become c tanh(score / c)
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a block adds to the residual stream
    logits_scale: float = 1.0
    moe: MoEConfig | None = None
    eos_token_ids: frozenset[int] = frozenset()
    default_sampling: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json

    @classmethod
    def from_checkpoint(
        cls, path: Path, dtype: str = "auto", supported: Collection[str] | None = None
    ) -> "ModelConfig":
        """Read `config.json` and, where there is one, `generation_config.json` of a folder.

        Raises `ValueError` for a folder without a config, for an architecture that is not among
        the `supported` ones, and for every setting that would change the model's output and that
        nanoserve does not implement: refusing is better than being silently wrong.
        """
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} is no checkpoint: it has no config.json")
        raw = _read_json(path / "config.json")
        architecture = _architecture(raw)
        require(
            supported is None or architecture in supported,
            f"architecture {architecture!r} is not supported; supported: {supported}",
        )
        generation_path = path / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.is_file() else {}
        return cls.from_hf(raw, generation, dtype)

    @classmethod
    def from_hf(
        cls, raw: Mapping[str, Any], generation: Mapping[str, Any], dtype: str = "auto"
    ) -> "ModelConfig":
        """`raw` and `generation` are the two JSON files; see `from_checkpoint`."""
        file = _File(raw)
        quantization = raw.get("quantization_config")
        require(not quantization, f"quantization_config={quantization} is not implemented")
        for name in ("sparse_config", "use_bidirectional_attention"):
            require(not file.get(name), f"{name}={file.get(name)!r} is not implemented")
        if dtype == "auto":
            dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
        check_choice("dtype", dtype, DTYPES)
        head_dim, max_positions = _head_dim(file), file.size("max_position_embeddings")
        rope, local_rope = _ropes(file, head_dim, max_positions)
        config = cls(
            architecture=file.architecture,
            vocab_size=file.size("vocab_size"),
            hidden_size=file.size("hidden_size"),
            intermediate_size=file.size("intermediate_size"),
            num_hidden_layers=file.size("num_hidden_layers"),
            num_attention_heads=file.size("num_attention_heads"),
            num_key_value_heads=file.size("num_key_value_heads", "num_attention_heads"),
            head_dim=head_dim,
            max_position_embeddings=rope.num_positions(max_positions),
            rms_norm_eps=file.positive("rms_norm_eps"),
            rope=rope,
            local_rope=local_rope,
            tie_word_embeddings=bool(file.get("tie_word_embeddings")),
            # Always in Qwen2, whose config.json does not say so.
            qkv_bias=bool(file.get("attention_bias")) or file.architecture == "Qwen2ForCausalLM",
            o_bias=bool(file.get("attention_bias")),
            mlp_bias=bool(file.get("mlp_bias")),
            hidden_act=_activation(file),
            sliding_windows=_sliding_windows(file),
            **_scales(file, head_dim),
            moe=_moe(file),
            dtype=dtype,
            eos_token_ids=_eos_token_ids(raw) | _eos_token_ids(generation),
            default_sampling=_default_sampling(generation),
        )
        require(
            config.num_attention_heads % config.num_key_value_heads == 0,
            f"num_attention_heads={config.num_attention_heads} is no multiple of "
            f"num_key_value_heads={config.num_key_value_heads}",
        )
        require(config.head_dim % 2 == 0, f"head_dim={config.head_dim} must be even, for rotation")
        return config

    @property
    def rope_theta(self) -> float:
        return self.rope.theta

    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers: 2 x layers x heads x dim x size.

        LLaMA-2-7B in 16 bits (32 layers, 32 KV heads of 128): 524,288 bytes, half a MiB per token.
        """
        bytes_per_value = 4 if self.dtype == "float32" else 2
        return (
            2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * bytes_per_value
        )


class _File:
    """`config.json` as its architecture reads it: see `_SETTINGS`."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw, self.architecture = raw, _architecture(raw)
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
        check_int(name, self.get(name), minimum=1)
        return self.get(name)

    def positive(self, name: str) -> float:
        value = self.get(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        require(
            is_number and 0 < value < math.inf,
            f"config.json: {name}={value!r} must be a positive number",
        )
        return float(value)


def _head_dim(file: _File) -> int:
    if file.has("head_dim"):
        return file.size("head_dim")
    return file.size("hidden_size") // file.size("num_attention_heads")


def _activation(file: _File) -> str:
    """Gemma calls it by another name, and has the usual one beside it, without effect."""
    name = "hidden_activation" if file.has("hidden_activation") else "hidden_act"
    check_choice(name, file.get(name), ("silu", "gelu_pytorch_tanh"))
    return file.get(name)


def _sliding_windows(file: _File) -> tuple[int | None, ...]:
    """Which layers have a window: what `layer_types` says, or the rule of the architecture."""
    num_layers, window = file.size("num_hidden_layers"), file.get("sliding_window")
    if "use_sliding_window" in file.implied and not file.get("use_sliding_window"):
        window = None
    if window is not None or file.architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"):
        check_int("sliding_window", window, minimum=1)
    types = file.get("layer_types")
    if types is None:
        return tuple(window if _is_windowed(file, i) else None for i in range(num_layers))
    require(
        isinstance(types, list) and set(types) <= {"full_attention", "sliding_attention"},
        f"layer_types={types!r} are not implemented, only 'full_attention', 'sliding_attention'",
    )
    require(
        len(types) == num_layers and (window is not None or "sliding_attention" not in types),
        f"layer_types={types!r} do not fit num_hidden_layers={num_layers}, "
        f"sliding_window={file.get('sliding_window')} and "
        f"use_sliding_window={file.get('use_sliding_window')}",
    )
    return tuple(window if name == "sliding_attention" else None for name in types)


def _is_windowed(file: _File, layer: int) -> bool:
    if file.architecture == "Gemma2ForCausalLM":
        return layer % 2 == 0
    if file.has("sliding_window_pattern"):  # Gemma 3: every sixth layer sees all
        return (layer + 1) % file.size("sliding_window_pattern") != 0
    if file.get("max_window_layers") is not None:
        check_int("max_window_layers", file.get("max_window_layers"), minimum=0)
        return layer >= file.get("max_window_layers")
    return True


def _ropes(file: _File, head_dim: int, max_positions: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Of all layers, or of those that see everything and of those that have a window (Gemma 3)."""
    if file.has("rope_local_base_freq"):
        return _ropes_by_type(file, head_dim, max_positions)
    is_silent = not any(file.raw.get(name) for name in ("rope_parameters", "rope_scaling"))
    raw = {"rope_theta": file.implied["rope_theta"] if is_silent else None} | file.raw
    return RopeConfig.from_hf(raw, head_dim, max_positions), None


def _ropes_by_type(file: _File, head_dim: int, max_positions: int) -> tuple[RopeConfig, RopeConfig]:
    """Of Gemma 3, whose transformers 4 form has no object of its own for layers with a window."""
    by_type, scaling = _object(file.raw, "rope_parameters"), _object(file.raw, "rope_scaling")
    require(
        "type" not in scaling or "rope_type" in scaling,
        f"config.json: rope_scaling={scaling} has effect in transformers 4, but not in 5, which "
        f"wants it to say 'rope_type'",
    )
    full = {"rope_theta": file.get("rope_theta")} | _object(by_type, "full_attention") | scaling
    local = {"rope_theta": file.get("rope_local_base_freq")}
    local |= _object(by_type, "sliding_attention")
    share = file.raw.get("partial_rotary_factor")
    ropes = ({"rope_parameters": s, "partial_rotary_factor": share} for s in (full, local))
    return tuple(RopeConfig.from_hf(rope, head_dim, max_positions) for rope in ropes)


def _object(parent: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = parent.get(name) or {}
    require(isinstance(value, dict), f"config.json: {name}={value!r} must be an object")
    return value


def _scales(file: _File, head_dim: int) -> dict[str, float | None]:
    """The factors and soft caps of Gemma and MiniCPM."""
    scales: dict[str, float | None] = {"attention_scale": head_dim**-0.5}
    if file.has("query_pre_attn_scalar"):
        scales["attention_scale"] = file.positive("query_pre_attn_scalar") ** -0.5
    caps = {"attention_soft_cap": "attn_logit_softcapping"}
    caps |= {"logits_soft_cap": "final_logit_softcapping"}
    for ours, theirs in caps.items():
        scales[ours] = None if file.get(theirs) is None else file.positive(theirs)
    if file.get("scale_emb") is not None:  # MiniCPM (Hu et al. 2024, arXiv 2404.06395)
        layers = file.size("num_hidden_layers")
        scales["embedding_scale"] = file.positive("scale_emb")
        scales["residual_scale"] = file.positive("scale_depth") / math.sqrt(layers)
        scales["logits_scale"] = file.positive("dim_model_base") / file.size("hidden_size")
    return scales


def _moe(file: _File) -> MoEConfig | None:
    """Mixtral knows less than Qwen3-MoE: it has no dense layers, and its weights sum to one."""
    if not file.has("num_experts_per_tok"):
        return None
    norm = file.get("norm_topk_prob") if file.has("norm_topk_prob") else True
    require(isinstance(norm, bool), f"norm_topk_prob={norm!r} must be true or false")
    every = file.size("decoder_sparse_step") if file.has("decoder_sparse_step") else 1
    dense = file.get("mlp_only_layers") or []
    require(
        isinstance(dense, list) and all(type(layer) is int for layer in dense),
        f"mlp_only_layers={dense!r} must be a list of integers",
    )
    layers = range(file.size("num_hidden_layers"))
    return MoEConfig(
        num_experts=_num_experts(file),
        num_experts_per_tok=file.size("num_experts_per_tok"),
        intermediate_size=file.size("moe_intermediate_size", "intermediate_size"),
        norm_topk_prob=norm,
        dense_layers=frozenset(i for i in layers if i in dense or (i + 1) % every),
    )


def _num_experts(file: _File) -> int:
    """transformers 4 wrote "num_experts" for Qwen3-MoE; 5 reads either name for any model."""
    names = [name for name in ("num_experts", "num_local_experts") if name in file.raw]
    counts = {name: file.size(name) for name in names or ["num_experts"]}
    require(len(set(counts.values())) == 1, f"config.json contradicts itself: {counts}")
    return counts.popitem()[1]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    require(isinstance(content, dict), f"{path} holds no JSON object")
    return content


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or [None]
    return str(names[0] if isinstance(names, list) else names)


def _eos_token_ids(raw: Mapping[str, Any]) -> frozenset[int]:
    """The EOS entry of a config is absent, one id or a list of ids."""
    value = raw.get("eos_token_id")
    token_ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in token_ids:
        check_int("eos_token_id", token_id, minimum=0)
    return frozenset(token_ids)


def _default_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SamplingParams` that a model's makers recommend.

    `do_sample: false`, where a file says it outright, means greedy.
    """
    names = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    names |= {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
    chosen = {ours: generation[hf] for hf, ours in names.items() if generation.get(hf) is not None}
    if generation.get("do_sample") is False:
        chosen["temperature"] = 0.0
    return chosen
