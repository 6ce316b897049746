"""`ModelConfig` is the configuration of a model, read from its `config.json` alone.

This module imports neither torch nor transformers, because the scheduler side uses it; data types
are names ("bfloat16"). `nanoserve.checkpoint.config_json` reads the file.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanoserve.checkpoint.architecture_defaults import WITHOUT_O_BIAS
from nanoserve.checkpoint.config_json import ConfigFile, architecture_of, read_json
from nanoserve.checkpoint.errors import check_folder
from nanoserve.checkpoint.formats.fields import check_quantization_config
from nanoserve.checkpoint.gguf.config import read_settings
from nanoserve.checkpoint.kv_formats import KVHeads, kv_format
from nanoserve.checkpoint.layer_types import layers_without_rope, read_layer_types
from nanoserve.checkpoint.linear_attention import LinearAttentionConfig
from nanoserve.checkpoint.mla_config import MLAConfig
from nanoserve.checkpoint.moe_config import MoEConfig
from nanoserve.checkpoint.pooling_config import PoolingConfig
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.checkpoint.text_part import text_config
from nanoserve.checkpoint.unsupported_architectures import describe_unsupported
from nanoserve.config import DTYPES
from nanoserve.utils.checks import attribute_error, check_choice, check_int, require, shown
from nanoserve.utils.parameter_table import PARAMETERS

if TYPE_CHECKING:
    from nanoserve.checkpoint.gguf.container import GGUFFile

# Files of Gemma, MiniCPM, Granite or a user's own model have some of these.
_SCALES = (
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "scale_emb",
    "attention_multiplier",
)  # fmt: skip

# The architecture of all models that transformers computes, as in vLLM.
THROUGH_TRANSFORMERS = "TransformersForCausalLM"
# The architecture of all models that pool: `pooling` has the name of the decoder.
FOR_POOLING = "PoolingModel"


class ConfigFiles(NamedTuple):
    """The contents of `config.json` and `generation_config.json`, {} if there is no such file.

    multimodal_architecture: of a model whose text part `config` describes; else None.
    """

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    multimodal_architecture: str | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a model. Fields have the same names as in its `config.json`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int  # including the extension by the RoPE type
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    hidden_act: str  # "silu" or "gelu_pytorch_tanh"
    attention_scale: float  # of attention scores
    sliding_windows: tuple[int | None, ...]  # per layer: tokens that a query sees, itself included
    dtype: str
    local_rope: RopeConfig | None = None  # of layers with a window, where it differs
    layers_without_rope: frozenset[int] = frozenset()
    attention_soft_cap: float | None = None  # c: scores become c tanh(score / c)
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of a block's output, before it is added to the residual stream
    logits_scale: float = 1.0
    moe: "MoEConfig | None" = None
    linear_attention: LinearAttentionConfig | None = None
    mla: MLAConfig | None = None  # multi-head latent attention
    num_nextn_predict_layers: int = 0  # of multi-token prediction, behind the others; not read
    eos_token_ids: frozenset[int] = frozenset()
    default_sampling: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json
    quantization_config: Mapping[str, Any] | None = (
        None  # as in the file; None: unquantized weights
    )
    multimodal_architecture: str | None = None  # of the checkpoint, if this is its text part
    # The whole config.json, if transformers computes the model.
    transformers_config: Mapping[str, Any] | None = None
    pooling: PoolingConfig | None = None  # of a model without an LM head

    if not TYPE_CHECKING:  # otherwise a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            from nanoserve.compat.missing import MODEL_CONFIG

            raise attribute_error(self, name, MODEL_CONFIG)

    @classmethod
    def from_checkpoint(
        cls, path: Path, dtype: str = "auto", supported: Collection[str] | None = None
    ) -> "ModelConfig":
        """Read the config files of a folder, or of a GGUF file; see `from_files`.

        Also raises `ValueError` for a folder without a `config.json`.
        """
        return cls.from_files(read_config_files(path), dtype, supported)

    @classmethod
    def from_files(
        cls, files: ConfigFiles, dtype: str = "auto", supported: Collection[str] | None = None
    ) -> "ModelConfig":
        """Return the configuration in the files. supported: names of architectures; None is all.

        Raises `ValueError` for an architecture that is not in `supported`, and for
        every setting that would change the model's output and that nanoserve does not support:
        an error is better than silently wrong output.
        """
        if supported is not None and architecture_of(files.config) not in supported:
            raise ValueError(describe_unsupported(files.config, supported))
        config = cls.from_hf(files.config, files.generation, dtype)
        return replace(config, multimodal_architecture=files.multimodal_architecture)

    @classmethod
    def from_hf(
        cls, raw: Mapping[str, Any], generation: Mapping[str, Any], dtype: str = "auto"
    ) -> "ModelConfig":
        """Return the configuration in `config.json` (`raw`) and `generation_config.json`.

        See `from_files` for the settings that are rejected.
        """
        file = ConfigFile(raw)
        for name in ("sparse_config", "use_bidirectional_attention"):
            require(not file.get(name), f"{name}={shown(file.get(name))} is not supported")
        if dtype == "auto":
            dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
        check_choice("dtype", dtype, DTYPES)
        max_positions = file.size("max_position_embeddings")
        features = _features(file, max_positions)
        config = cls(
            architecture=file.architecture,
            vocab_size=file.size("vocab_size"),
            hidden_size=file.size("hidden_size"),
            intermediate_size=file.size("intermediate_size"),
            num_hidden_layers=file.size("num_hidden_layers"),
            num_attention_heads=file.size("num_attention_heads"),
            num_key_value_heads=file.size("num_key_value_heads", "num_attention_heads"),
            max_position_embeddings=features["rope"].num_positions(max_positions),
            rms_norm_eps=file.positive("rms_norm_eps"),
            tie_word_embeddings=file.flag("tie_word_embeddings"),
            # Qwen2 always has these biases, without an entry in config.json.
            qkv_bias=file.flag("attention_bias")
            or file.flag("qkv_bias")
            or file.architecture == "Qwen2ForCausalLM",
            o_bias=file.flag("attention_bias") and file.architecture not in WITHOUT_O_BIAS,
            mlp_bias=file.flag("mlp_bias"),
            hidden_act=file.activation(),
            dtype=dtype,
            eos_token_ids=eos_token_ids(raw) | eos_token_ids(generation),
            default_sampling=default_sampling(generation),
            **features,
        )
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        rule = f"must be a multiple of num_key_value_heads={kv_heads}"
        require(heads % kv_heads == 0, f"num_attention_heads={heads} {rule}")
        is_even = config.mla is not None or config.head_dim % 2 == 0
        require(is_even, f"head_dim={config.head_dim} must be even, for RoPE")
        return config

    @property
    def recurrent_layers(self) -> frozenset[int]:
        """Layers that have no K and V, but a state of fixed size for each running sequence."""
        return frozenset() if self.linear_attention is None else self.linear_attention.layers

    @property
    def num_kv_layers(self) -> int:
        """Number of layers that have K and V."""
        return self.num_hidden_layers - len(self.recurrent_layers)

    @property
    def checkpoint_architecture(self) -> str:
        """Name of the architecture in `config.json`, or of its text part."""
        if self.pooling is not None:
            return self.pooling.architecture
        if self.transformers_config is None:
            return self.architecture
        return architecture_of(self.transformers_config)

    @property
    def rope_theta(self) -> float:
        return self.rope.theta

    @property
    def kv_heads(self) -> KVHeads:
        """The KV heads that a layer's cache has, over all ranks."""
        if self.mla is not None:
            return self.mla.kv_heads
        return KVHeads(self.num_key_value_heads, self.head_dim)

    def kv_bytes_per_token(self, kv_cache_dtype: str = "auto") -> int:
        """Return the bytes of a token's K and V over all layers: 2 x layers x heads x dim x size.

        Layers with recurrent states have no K and V, and do not count.

        LLaMA-2-7B in 16 bits (32 layers, 32 KV heads of 128): 524,288 bytes, half a MiB per token.
        With a format other than "auto", a value takes one byte, and each head adds a scale of 4
        bytes: 270,336. With latent attention, V is a part of K: DeepSeek-V2-Lite in 16 bits (27
        layers, one KV head of 512 + 64) takes 31,104 bytes.
        """
        kind = kv_format(kv_cache_dtype, self.dtype)
        return self.num_kv_layers * self.kv_heads.token_bytes(kind)


def read_config_files(source: "Path | GGUFFile") -> ConfigFiles:
    """Read the two files of a folder, or their equivalent in a GGUF file (or the path of one)."""
    if not isinstance(source, Path) or source.is_file():
        return ConfigFiles(*read_settings(source))
    if (source / "adapter_config.json").is_file() or not (source / "config.json").is_file():
        check_folder(source)
    other = source / "generation_config.json"
    generation = read_json(other) if other.exists() or other.is_symlink() else {}
    raw = read_json(source / "config.json")
    text = text_config(raw)
    if text is not None:
        return ConfigFiles(text, generation, architecture_of(raw))
    return ConfigFiles(raw, generation)


def _features(file: ConfigFile, max_positions: int) -> dict[str, Any]:
    """Return the fields in which models differ most; uncommon features have their own modules."""
    if file.has("kv_lora_rank"):
        fields = _latent_attention(file, max_positions)
    else:
        fields = _attention(file, file.head_dim(), max_positions)
    if any(file.has(name) for name in _SCALES):
        fields |= _scales(file)
    if file.has("num_experts_per_tok"):
        fields["moe"] = MoEConfig.from_hf(file)
    if file.has("num_nextn_predict_layers"):
        count = file.get("num_nextn_predict_layers") or 0
        fields["num_nextn_predict_layers"] = check_int("num_nextn_predict_layers", count, 0, 2**10)
    if file.has("linear_num_value_heads"):
        fields["linear_attention"] = LinearAttentionConfig.from_hf(file)
    if file.raw.get("quantization_config"):
        fields["quantization_config"] = check_quantization_config(file.raw["quantization_config"])
    return fields


def _attention(file: ConfigFile, head_dim: int, max_positions: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"head_dim": head_dim, "attention_scale": head_dim**-0.5}
    if file.is_full_attention():
        fields["rope"] = file.rope(head_dim, max_positions)
        fields["sliding_windows"] = (None,) * file.size("num_hidden_layers")
    else:
        fields |= read_layer_types(file, head_dim, max_positions)
    if file.has("no_rope_layers") or file.has("no_rope_layer_interval"):
        fields["layers_without_rope"] = layers_without_rope(file)
    return fields


def _latent_attention(file: ConfigFile, max_positions: int) -> dict[str, Any]:
    mla = MLAConfig.from_hf(file)
    fields = _attention(file, mla.qk_rope_head_dim, max_positions)  # what RoPE rotates of a head
    scale = mla.attention_scale(fields["rope"])
    return fields | {"mla": mla, "head_dim": mla.head_dim, "attention_scale": scale}


def _scales(file: ConfigFile) -> dict[str, float | None]:
    """Return the scales and soft caps of Gemma, MiniCPM and Granite that the file sets."""
    scales: dict[str, float | None] = {}
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
    if file.has("attention_multiplier"):  # Granite
        scales["attention_scale"] = file.positive("attention_multiplier")
        scales["embedding_scale"] = file.positive("embedding_multiplier")
        scales["residual_scale"] = file.positive("residual_multiplier")
        scales["logits_scale"] = 1 / file.positive("logits_scaling")
    return scales


def eos_token_ids(raw: Mapping[str, Any]) -> frozenset[int]:
    """Return the EOS token ids of a config: the entry may be absent, one id or a list.

    Ids must fit in 32 bits. Some checkpoints have ids beyond their vocabulary, which are never
    sampled.
    """
    value = raw.get("eos_token_id")
    token_ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in token_ids:
        check_int("eos_token_id", token_id, 0, 2**31 - 1)
    return frozenset(token_ids)


def default_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that the model's authors recommend.

    An explicit `do_sample: false` means greedy sampling.
    """
    chosen = {
        name: generation[parameter.recommended_as]
        for name, parameter in PARAMETERS.items()
        if parameter.recommended_as is not None
        and generation.get(parameter.recommended_as) is not None
    }
    check_choice("do_sample", generation.get("do_sample"), (None, True, False))
    if generation.get("do_sample") is False:
        chosen["temperature"] = 0.0
    return chosen
