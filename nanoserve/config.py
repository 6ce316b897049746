"""What the user chose: `EngineConfig`. What the checkpoint says is in `ModelConfig`."""

import logging
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass
class EngineConfig:
    """Options of one engine, under vLLM's names. Every field is checked on construction.

    Raises `ValueError` with the offending value and its limit; an unknown option is a `ValueError`
    too when it comes through `EngineConfig.from_options`.
    """

    model: str
    tokenizer: str | None = None  # a folder or a name, as `model` is
    skip_tokenizer_init: bool = False  # token ids in, token ids out
    revision: str | None = None  # of a model from the hub: branch, tag or commit
    download_dir: str | None = None  # of the hub's files; None is the hub's own cache
    trust_remote_code: bool = False  # a tokenizer may be code of the checkpoint; models never are
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
    trace: str | Path | None = None  # a file that gets a record of every step; see nanoserve.trace

    device: str = "auto"  # "auto" (an NVIDIA GPU if there is one) | "cpu" | "cuda"
    attention_backend: str = "auto"  # "auto" | "torch" | "numba" | "triton" | "flash_attn"
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
            check_int(name, getattr(self, name), minimum=1)
        # A sequence is at least a token of prompt and one of output.
        minima = {"max_model_len": 2, "num_kv_blocks": 1, "kv_cache_memory_bytes": 1}
        for name, minimum in minima.items():
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum)
        for name in ("tokenizer", "download_dir"):
            value = getattr(self, name)
            is_path = isinstance(value, (str, Path, type(None)))
            require(is_path, f"{name}={value!r} must be a folder")
        if self.trace is not None:
            check_output_file("trace", self.trace)
        is_revision = self.revision is None or (isinstance(self.revision, str) and self.revision)
        require(is_revision, f"revision={self.revision!r} must be a branch, a tag or a commit")
        check_int("long_prefill_token_threshold", self.long_prefill_token_threshold, minimum=0)
        check_int("seed", self.seed, minimum=0)
        check_int("max_logprobs", self.max_logprobs, minimum=0)
        if self.prefix_cache_seed is not None:
            check_int("prefix_cache_seed", self.prefix_cache_seed, minimum=0)
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
            f"max_num_seqs={self.max_num_seqs}: decoding all of them takes a token each",
        )
        processors = self.logits_processors
        require(
            isinstance(processors, (list, tuple)) and all(map(callable, processors)),
            f"logits_processors={processors!r} must be a list of callables",
        )
        check_choice("dtype", self.dtype, ("auto", *DTYPES))
        check_choice("load_format", self.load_format, ("auto", "safetensors", "dummy"))
        check_choice("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        backends = ("auto", "torch", "numba", "triton", "flash_attn")
        check_choice("attention_backend", self.attention_backend, backends)
        for name in (
            *("skip_tokenizer_init", "trust_remote_code"),
            *("enable_prefix_caching", "enforce_eager"),
        ):
            value = getattr(self, name)
            require(isinstance(value, bool), f"{name}={value!r} must be True or False")
        share = self.gpu_memory_utilization
        require(
            isinstance(share, (int, float)) and 0 < share <= 1,
            f"gpu_memory_utilization={share!r} must be a number in (0, 1]",
        )
        require(
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
        require(
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
        require(
            self.max_model_len <= model_limit,
            f"max_model_len={self.max_model_len} exceeds the model's "
            f"max_position_embeddings={model_limit}",
        )
        require(
            self.max_model_len <= pool_limit,
            f"max_model_len={self.max_model_len} does not fit into the KV pool: {num_kv_blocks} "
            f"blocks of {self.block_size} hold {pool_limit} tokens",
        )
        return self.max_model_len


def check_output_file(name: str, value: Any) -> None:
    """A file that can be written, or replaced; it is not touched."""
    is_path = isinstance(value, (str, Path))
    require(is_path, f"{name}={value!r} must be the name of a file")
    path = Path(value)
    require(path.parent.is_dir(), f"{name}={str(value)!r}: there is no folder {path.parent}")
    require(not path.is_dir(), f"{name}={str(value)!r} is a folder, not a file")
    is_writable = os.access(path if path.exists() else path.parent, os.W_OK)
    require(is_writable, f"{name}={str(value)!r} cannot be written")


def check_int(name: str, value: Any, minimum: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    require(is_int and value >= minimum, f"{name}={value!r} must be an integer >= {minimum}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    require(value in choices, f"{name}={value!r} is not one of {list(choices)}")
