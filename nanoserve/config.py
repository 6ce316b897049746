"""What the user chose (`EngineConfig`) and what the checkpoint says (`ModelConfig`).

Neither imports torch or transformers: the brain reads both, and data types travel as names
("bfloat16"). `ModelConfig` is made from `config.json` alone; it and `nanoserve.rope_config` are the
only places that know that transformers 4 and 5 write that file differently.
"""

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from nanoserve.rope_config import RopeConfig

logger = logging.getLogger(__name__)

_BIASED_QKV = ("Qwen2ForCausalLM",)  # always; config.json does not say so
DTYPES = ("float32", "bfloat16", "float16")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass
class EngineConfig:
    """Options of one engine, under vLLM's names. Every field is checked on construction.

    Raises `ValueError` with the offending value and its limit; an unknown option is a `ValueError`
    too when it comes through `EngineConfig.from_options`.
    """

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False  # token ids in, token ids out
    dtype: str = "auto"  # "auto" is the checkpoint's own
    load_format: str = "auto"  # "auto" | "safetensors" | "dummy" (random weights, for benchmarks)
    seed: int = 0  # seeds the requests that bring no seed of their own

    max_model_len: int | None = None  # tokens, prompt and output together
    max_num_seqs: int = 256  # bound of the running set, not of one step
    max_num_batched_tokens: int = 2048  # token budget of one step
    long_prefill_token_threshold: int = 0  # tokens per step for one sequence; 0 is no threshold
    scheduling_policy: str = "fcfs"  # "fcfs" | "priority" (lower value first)

    block_size: int = 16  # tokens per KV block
    num_kv_blocks: int | None = None  # fixes the pool
    kv_cache_memory_bytes: int | None = None  # or: the memory that the pool may take
    enable_prefix_caching: bool = True
    prefix_cache_seed: int | None = None  # None is a random one: hashes then differ per engine

    logits_processors: tuple[Any, ...] = ()  # see nanoserve.sampling.processors
    max_logprobs: int = 20  # most that a request may ask for

    device: str = "auto"  # "auto" (an NVIDIA GPU if there is one) | "cpu" | "cuda"
    attention_backend: str = "auto"  # "auto" | "torch" | "triton" | "flash_attn"
    # Read by GPU executors only; accepted and checked everywhere, so that scripts stay portable.
    enforce_eager: bool = False
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1  # ranks that share the model: GPUs, or processes on a CPU

    @classmethod
    def from_options(cls, model: str | Path, **options: Any) -> "EngineConfig":
        known = {f.name for f in fields(cls)} - {"model"}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(f"unknown option(s) {unknown}; known options are {sorted(known)}")
        return cls(model=str(model), **options)

    def __post_init__(self) -> None:
        for name in (
            *("max_num_seqs", "max_num_batched_tokens", "block_size"),
            "tensor_parallel_size",
        ):
            _check_int(name, getattr(self, name), minimum=1)
        # A sequence is at least a token of prompt and one of output.
        minima = {"max_model_len": 2, "num_kv_blocks": 1, "kv_cache_memory_bytes": 1}
        for name, minimum in minima.items():
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), minimum)
        _require(
            isinstance(self.tokenizer, (str, Path, type(None))),
            f"tokenizer={self.tokenizer!r} must be a folder",
        )
        _check_int("long_prefill_token_threshold", self.long_prefill_token_threshold, minimum=0)
        _check_int("seed", self.seed, minimum=0)
        _check_int("max_logprobs", self.max_logprobs, minimum=0)
        if self.prefix_cache_seed is not None:
            _check_int("prefix_cache_seed", self.prefix_cache_seed, minimum=0)
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
            f"max_num_seqs={self.max_num_seqs}: decoding all of them takes a token each",
        )
        processors = self.logits_processors
        _require(
            isinstance(processors, (list, tuple)) and all(map(callable, processors)),
            f"logits_processors={processors!r} must be a list of callables",
        )
        _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        _check_choice("load_format", self.load_format, ("auto", "safetensors", "dummy"))
        _check_choice("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        _check_choice("device", self.device, ("auto", "cpu", "cuda"))
        backends = ("auto", "torch", "triton", "flash_attn")
        _check_choice("attention_backend", self.attention_backend, backends)
        for name in ("skip_tokenizer_init", "enable_prefix_caching", "enforce_eager"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name}={value!r} must be True or False")
        share = self.gpu_memory_utilization
        _require(
            isinstance(share, (int, float)) and 0 < share <= 1,
            f"gpu_memory_utilization={share!r} must be a number in (0, 1]",
        )
        _require(
            self.num_kv_blocks is None or self.kv_cache_memory_bytes is None,
            f"num_kv_blocks={self.num_kv_blocks} and "
            f"kv_cache_memory_bytes={self.kv_cache_memory_bytes} both fix the pool: give one",
        )

    def resolve_max_model_len(self, model_limit: int, num_kv_blocks: int) -> int:
        """The longest sequence that the model was made for and the pool can hold, in tokens.

        A length that nobody asked for is lowered and logged; an explicit one that does not fit
        raises, because a request near it could never finish.
        """
        pool_limit = num_kv_blocks * self.block_size
        _require(
            2 <= pool_limit < 2**31 - self.block_size,
            f"{num_kv_blocks} KV blocks of {self.block_size} hold {pool_limit} tokens; a pool has "
            f"at least 2, and fewer than 2^31 because slots are numbered in 32 bits",
        )
        if self.max_model_len is None:
            if pool_limit < model_limit:
                logger.warning(
                    "max_model_len lowered from %d to %d, the tokens that %d KV blocks of %d hold",
                    *(model_limit, pool_limit, num_kv_blocks, self.block_size),
                )
            return min(model_limit, pool_limit)
        _require(
            self.max_model_len <= model_limit,
            f"max_model_len={self.max_model_len} exceeds the model's "
            f"max_position_embeddings={model_limit}",
        )
        _require(
            self.max_model_len <= pool_limit,
            f"max_model_len={self.max_model_len} does not fit into the KV pool: {num_kv_blocks} "
            f"blocks of {self.block_size} hold {pool_limit} tokens",
        )
        return self.max_model_len


def _check_int(name: str, value: Any, minimum: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    _require(is_int and value >= minimum, f"{name}={value!r} must be an integer >= {minimum}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    _require(value in choices, f"{name}={value!r} is not one of {list(choices)}")


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
    dtype: str
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
        _require(
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

        def size(name: str, default: str | None = None) -> int:
            if default is not None and raw.get(name) is None:
                name = default
            _require(raw.get(name) is not None, f"config.json has no {name!r}")
            _check_int(name, raw[name], minimum=1)
            return raw[name]

        _refuse_unimplemented(raw)
        has_bias = bool(raw.get("attention_bias", False))
        if dtype == "auto":
            dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
        _check_choice("dtype", dtype, DTYPES)
        head_dim, max_positions = _head_dim(raw, size), size("max_position_embeddings")
        rope = RopeConfig.from_hf(raw, head_dim, max_positions)
        config = cls(
            architecture=_architecture(raw),
            vocab_size=size("vocab_size"),
            hidden_size=size("hidden_size"),
            intermediate_size=size("intermediate_size"),
            num_hidden_layers=size("num_hidden_layers"),
            num_attention_heads=size("num_attention_heads"),
            num_key_value_heads=size("num_key_value_heads", "num_attention_heads"),
            head_dim=head_dim,
            max_position_embeddings=rope.num_positions(max_positions),
            rms_norm_eps=_positive("rms_norm_eps", raw.get("rms_norm_eps")),
            rope=rope,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=has_bias or _architecture(raw) in _BIASED_QKV,
            o_bias=has_bias,
            dtype=dtype,
            eos_token_ids=_eos_token_ids(raw) | _eos_token_ids(generation),
            default_sampling=_default_sampling(generation),
        )
        _require(
            config.num_attention_heads % config.num_key_value_heads == 0,
            f"num_attention_heads={config.num_attention_heads} is no multiple of "
            f"num_key_value_heads={config.num_key_value_heads}",
        )
        _require(config.head_dim % 2 == 0, f"head_dim={config.head_dim} must be even, for rotation")
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


def _head_dim(raw: Mapping[str, Any], size: Callable[[str], int]) -> int:
    """Llama and its like leave it out; Qwen3's default is no quotient, so it must say it."""
    if raw.get("head_dim") is not None or _architecture(raw) == "Qwen3ForCausalLM":
        return size("head_dim")
    return size("hidden_size") // size("num_attention_heads")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    _require(isinstance(content, dict), f"{path} holds no JSON object")
    return content


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or [None]
    return str(names[0] if isinstance(names, list) else names)


def _positive(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _require(
        is_number and 0 < value < math.inf,
        f"config.json: {name}={value!r} must be a positive number",
    )
    return float(value)


def _refuse_unimplemented(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    _require(activation == "silu", f"hidden_act={activation!r} is not implemented, only 'silu'")
    layer_types = raw.get("layer_types") or ()
    _require(not raw.get("mlp_bias"), "mlp_bias=true is not implemented")
    if _architecture(raw) == "MistralForCausalLM":  # it has the window, but not the switch
        raw = {**raw, "use_sliding_window": raw.get("sliding_window") is not None}
    windowed = raw.get("use_sliding_window") or "sliding_attention" in str(layer_types)
    _require(not windowed, f"sliding_window={raw.get('sliding_window')} is not implemented")
    is_full = isinstance(layer_types, (list, tuple)) and set(layer_types) <= {"full_attention"}
    _require(is_full, f"layer_types={layer_types!r} are not implemented, only 'full_attention'")
    _require(
        not raw.get("quantization_config"),
        f"quantization_config={raw.get('quantization_config')} is not implemented",
    )


def _eos_token_ids(raw: Mapping[str, Any]) -> frozenset[int]:
    """The EOS entry of a config is absent, one id or a list of ids."""
    value = raw.get("eos_token_id")
    token_ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in token_ids:
        _check_int("eos_token_id", token_id, minimum=0)
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
