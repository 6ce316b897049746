"""What the user chose: `EngineConfig`. What the checkpoint says is in `ModelConfig`."""

import logging
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from nanoserve.utils.checks import (
    check_bool,
    check_choice,
    check_int,
    check_list,
    check_number,
    is_text,
    require,
    shown,
)

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
_SMALLEST = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "long_prefill_token_threshold": 0,
    "block_size": 1,
    "seed": 0,
    "max_logprobs": -1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "distributed_timeout_seconds": 1,
    "worker_timeout_seconds": 4,  # a few beats of nanoserve.features.parallel.heartbeat
    "max_model_len": 2,  # a sequence is at least a token of prompt and one of output
    "priority_aging": 1,
    "num_kv_blocks": 1,
    "num_threads": 1,
    "kv_cache_memory_bytes": 1,
    "prefix_cache_seed": 0,
}
_CHOICES = {
    "dtype": ("auto", *DTYPES),
    "load_format": ("auto", "safetensors", "dummy"),
    "scheduling_policy": ("fcfs", "priority"),
    "device": ("auto", "cpu", "cuda"),
    "quantization_group_size": (32, 64, 128),
    "quantization_activations": ("int8", "none"),
    "generation_config": ("auto", "vllm"),
    "kv_cache_dtype": ("auto", "int8", "fp8", "fp8_e4m3"),
    "distributed_executor_backend": ("mp", "ray"),
}
# Tokens of a step. nano-vllm's workload takes an H100 8.9 s with 2048 and 7.2 s with 8192. A CPU
# computes 2048 for seconds, and whoever decodes waits for their end.
_BUDGETS = {"cpu": 2048, "cuda": 8192}


@dataclass
class EngineConfig:
    """Options of one engine, under vLLM's names. Every field is checked on construction.

    None is "not given". What then depends on the device is chosen by `for_device`; an engine gets
    what that returns.

    Raises `ValueError` with the offending value and its limit. What `LLM` takes besides, such as
    vLLM's names, is translated before: see `nanoserve.compat.options.engine_config`.
    """

    model: str
    tokenizer: str | None = None  # a folder, a GGUF file or a name, as `model` is
    skip_tokenizer_init: bool = False  # token ids in, token ids out
    chat_template: str | Path | None = None  # a file, or the text, in the place of the checkpoint's
    revision: str | None = None  # of a model from the hub: branch, tag or commit
    download_dir: str | None = None  # of the hub's files; None is the hub's own cache
    trust_remote_code: bool = False  # a tokenizer may be code of the checkpoint; models never are
    dtype: str = "auto"  # "auto" is the checkpoint's own
    load_format: str = "auto"  # "auto" | "safetensors" | "dummy" (random weights, for benchmarks)
    # Bits of the weights: None is what the checkpoint has; "int8", "int4" and, on a GPU, "fp8" are
    # made of plain ones. On a GPU a checkpoint's own format, too, has to be asked for.
    quantization: str | None = None
    quantization_group_size: int | None = None  # weights of int4 that share a scale: 32, 64 or 128
    # What quantised weights are multiplied with: "int8" rounds activations to 8 bits in groups,
    # "none" leaves them floats. None: a CPU with numba, "int8"; a GPU, "none", but e4m3 for "fp8".
    quantization_activations: str | None = None
    seed: int = 0  # seeds the requests that bring no seed of their own
    # Sampling parameters of requests that bring none: "auto" takes those of the checkpoint's
    # generation_config.json, "vllm" does not; then come these.
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    hf_overrides: dict[str, Any] | None = None  # entries to take in the place of config.json's

    max_model_len: int | None = None  # tokens, prompt and output together
    max_num_seqs: int = 256  # bound of the running set, not of one step
    # Token budget of one step. None: 2048 on a CPU and 8192 on a GPU, or max_num_seqs if more.
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0  # tokens per step for one sequence; 0 is no threshold
    scheduling_policy: str = "fcfs"  # "fcfs" | "priority" (lower value first)
    # A subclass of `Scheduler`, or its "module.Class"; it stays in force whatever features are on.
    scheduler_cls: Any = None
    # Under "priority": so many later arrivals outweigh one level of it. None: none ever do, and a
    # stream of urgent requests starves all others.
    priority_aging: int | None = None
    # Plan and launch a step while the one before it runs. None: on a GPU, but not with a `trace`.
    # A CPU computes a step in this very process, and gains nothing.
    async_scheduling: bool | None = None

    block_size: int = 16  # tokens per KV block
    num_kv_blocks: int | None = None  # fixes the pool
    kv_cache_memory_bytes: int | None = None  # or: the memory that the pool may take
    kv_cache_dtype: str = "auto"  # "auto" (the model's) | "int8" | "fp8", which is "fp8_e4m3"
    enable_prefix_caching: bool = True
    # True: layers with a sliding window keep the K and V of all tokens, as all other layers do.
    # None: so they do on a GPU, where groups of layers have not run yet.
    disable_hybrid_kv_cache_manager: bool | None = None
    prefix_cache_seed: int | None = None  # None is a random one: hashes then differ per engine
    # Tell each request how much of its prompt was cached, which tells it what others have asked.
    enable_prompt_tokens_details: bool = True

    # Guess tokens and verify several in a step: a dictionary, see nanoserve.features.speculative.config.
    speculative_config: Any = None
    # How grammars of requests are computed: a dictionary, see nanoserve.features.structured.config.
    structured_outputs_config: Any = None
    logits_processors: tuple[Any, ...] = ()  # see nanoserve.sampling.processors
    max_logprobs: int = 20  # most that a request may ask for; -1: the whole vocabulary
    trace: str | Path | None = (
        None  # a file that gets a record of every step; see nanoserve.features.trace
    )
    disable_log_stats: bool = True  # False counts what `LLM.get_metrics` tells
    # Publish what the prefix cache gains and loses: a dictionary, see nanoserve.features.kv_events.config.
    kv_events_config: Any = None

    num_threads: int | None = None  # of a CPU. None: all of torch's, or one for a small model
    device: str = "auto"  # "auto" (an NVIDIA GPU if there is one) | "cpu" | "cuda"
    attention_backend: str = "auto"  # "auto" | "torch" | "numba" | "triton" | "flash_attn"
    # Read by GPU executors only; accepted and checked everywhere, so that scripts stay portable.
    enforce_eager: bool = False
    # LM head and sampling of plain decode steps in graphs too. Off: an H100 gains nothing by it.
    capture_sampling: bool = False
    # Steps in which prompts are computed in graphs too, at padded numbers of tokens. None: where it
    # has run: on one GPU, with Triton's attention, without draft tokens and quantised weights.
    capture_mixed_steps: bool | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1  # ranks that share the model: GPUs, or processes on a CPU
    # Stages of some layers each, of so many ranks each. On a GPU they run without CUDA graphs.
    pipeline_parallel_size: int = 1
    # Who starts the ranks: "mp" this machine, "ray" a Ray cluster. None: "mp".
    distributed_executor_backend: str | None = None
    distributed_timeout_seconds: int = 300  # that a rank waits for another within a step
    worker_timeout_seconds: int = 8  # that a process may show no sign of life: a busy one does

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if name in _SMALLEST:
                setattr(self, name, check_int(name, value, _SMALLEST[name]))
            elif name in _CHOICES:
                check_choice(name, value, _CHOICES[name])
            elif name in ("quantization", "attention_backend"):
                check_choice(name, value, _registered_choices(name))
            elif field.type in (bool, bool | None):
                check_bool(name, value)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, excludes_low=True)
        check_list("logits_processors", self.logits_processors, callable, "callables")
        if self.speculative_config is not None:
            from nanoserve.features.speculative.config import SpeculativeConfig

            self.speculative_config = SpeculativeConfig.of(self.speculative_config, self)
        if self.structured_outputs_config is not None:
            from nanoserve.features.structured.config import StructuredOutputsConfig

            guiding = StructuredOutputsConfig.of(self.structured_outputs_config)
            self.structured_outputs_config = guiding
        if self.kv_events_config is not None:
            from nanoserve.features.kv_events.config import KVEventsConfig

            self.kv_events_config = KVEventsConfig.of(self.kv_events_config)
        self._check_names()
        self._check_pairs()

    def _check_names(self) -> None:
        """Of folders, of a version, of a file."""
        for name in ("override_generation_config", "hf_overrides"):
            value = getattr(self, name)
            is_mapping = value is None or isinstance(value, dict)
            require(is_mapping, f"{name}={shown(value)} must be a dictionary")
        for name in ("tokenizer", "download_dir"):
            value = getattr(self, name)
            require(isinstance(value, str | Path | None), f"{name}={value!r} must be a folder")
        if self.chat_template is not None:
            from nanoserve.text.chat_template import load_chat_template

            self.chat_template = load_chat_template(
                self.chat_template, has_tokenizer=not self.skip_tokenizer_init
            )
        is_revision = self.revision is None or is_text(self.revision)
        require(is_revision, f"revision={self.revision!r} must be a branch, a tag or a commit")
        if self.trace is not None:
            _check_trace(self.trace, self.async_scheduling)

    def _check_pairs(self) -> None:
        """What two options must agree on."""
        budget = self.max_num_batched_tokens
        require(
            budget is None or budget >= self.max_num_seqs,
            f"max_num_batched_tokens={budget} is less than "
            f"max_num_seqs={self.max_num_seqs}: decoding all of them takes a token each",
        )
        require(
            self.priority_aging is None or self.scheduling_policy == "priority",
            f"priority_aging={self.priority_aging} needs scheduling_policy='priority'",
        )
        require(
            self.quantization_group_size is None or self.quantization == "int4",
            f"quantization_group_size={self.quantization_group_size} needs quantization='int4'",
        )
        require(
            self.num_kv_blocks is None or self.kv_cache_memory_bytes is None,
            f"num_kv_blocks={self.num_kv_blocks} and "
            f"kv_cache_memory_bytes={self.kv_cache_memory_bytes} both fix the pool: give one",
        )
        require(
            self.enable_prefix_caching or not self._publishes_kv_events,
            "kv_events_config with enable_kv_cache_events=True needs enable_prefix_caching=True: "
            "the events are those of the prefix cache",
        )
        if self.pipeline_parallel_size > 1 or self.distributed_executor_backend is not None:
            _check_parallel(self)
        require(
            not (self.capture_sampling and (self.enforce_eager or self.tensor_parallel_size > 1)),
            f"capture_sampling=True is for the CUDA graphs of one GPU; enforce_eager="
            f"{self.enforce_eager} records none, and of tensor_parallel_size="
            f"{self.tensor_parallel_size} ranks only the first knows which steps a graph can "
            f"sample, while all take part in its logits",
        )
        require(
            not (self.capture_mixed_steps and self.enforce_eager),
            "capture_mixed_steps=True records CUDA graphs, and enforce_eager=True none: leave one "
            "of them out",
        )

    def for_device(self, kind: str) -> "EngineConfig":
        """For a "cpu" or a "cuda", with what was not given as it is best there."""
        budget = self.max_num_batched_tokens or max(_BUDGETS[kind], self.max_num_seqs)
        ahead_by_itself = kind == "cuda" and self.trace is None
        ahead = ahead_by_itself if self.async_scheduling is None else self.async_scheduling
        ahead = ahead and self.pipeline_parallel_size == 1
        keeps_all, drafts = self.disable_hybrid_kv_cache_manager, self.speculative_config
        config = replace(
            self,
            device=kind,
            max_num_batched_tokens=budget,
            async_scheduling=ahead,
            disable_hybrid_kv_cache_manager=kind == "cuda" if keeps_all is None else keeps_all,
        )
        if drafts is None:
            return config
        return replace(config, speculative_config=drafts.for_device(kind, config))

    def changed_options(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "model" and getattr(self, field.name) != field.default
        }

    @property
    def _publishes_kv_events(self) -> bool:
        return self.kv_events_config is not None and self.kv_events_config.is_active

    @property
    def num_steps_ahead(self) -> int:
        """Steps that are under way when another is launched: each stage of a pipeline has one."""
        return self.pipeline_parallel_size - 1 or int(bool(self.async_scheduling))

    def resolve_max_model_len(
        self, model_limit: int, num_kv_blocks: int, pool_limit: int | None = None
    ) -> int:
        """Return how long a sequence may be, by what the model was made for and the pool can hold.

        `pool_limit`: how many tokens of one sequence the pool holds, where layers have sliding
        windows (`nanoserve.engine.kv_groups.SequenceRoom`); by default, as many as fit into it.
        A length that nobody asked for is lowered and logged; an explicit one that does not fit
        raises, because a request near it could never finish.
        """
        num_slots = num_kv_blocks * self.block_size
        pool_limit = num_slots if pool_limit is None else pool_limit
        pool = f"{num_kv_blocks} KV blocks of {self.block_size} hold {pool_limit} tokens"
        require(
            pool_limit >= 2 and num_slots < 2**31 - self.block_size,
            f"{pool}; it takes at least 2, and fewer than 2^31: slots are numbered in 32 bits",
        )
        if self.max_model_len is None:
            if pool_limit < model_limit:
                logger.warning(f"max_model_len lowered from {model_limit} to {pool_limit}: {pool}")
            return min(model_limit, pool_limit)
        require(
            self.max_model_len <= model_limit,
            f"max_model_len={self.max_model_len} exceeds the model's "
            f"max_position_embeddings={model_limit}",
        )
        require(
            self.max_model_len <= pool_limit,
            f"max_model_len={self.max_model_len} does not fit into the KV pool: {pool}",
        )
        return self.max_model_len


def _registered_choices(name: str) -> list[str]:
    """Return the values of an option, of which users may have registered some."""
    if name == "quantization":
        from nanoserve.checkpoint.formats.registry import quantization_names

        return quantization_names()
    from nanoserve.attention.registry import backend_choices

    return backend_choices()


def _check_trace(trace: Any, is_ahead: bool | None) -> None:
    """Check that the file `trace` can be written, or replaced; it is not touched.

    is_ahead: what was chosen for `async_scheduling`, if anything was.
    """
    require(isinstance(trace, (str, Path)), f"trace={shown(trace)} must be the name of a file")
    path, told = Path(trace), f"trace={str(trace)!r}"
    require(path.parent.is_dir(), f"{told}: there is no folder {path.parent}")
    require(not path.is_dir(), f"{told} is a folder, not a file")
    is_writable = os.access(path if path.exists() else path.parent, os.W_OK)
    require(is_writable, f"{told} cannot be written")
    require(not is_ahead, f"{told} needs async_scheduling=False: it shows one step at a time")


def _check_parallel(config: EngineConfig) -> None:
    """Raise `ValueError` for what a pipeline, or Ray, cannot be combined with."""
    stages, asked = config.pipeline_parallel_size, config.speculative_config
    num_ranks = config.tensor_parallel_size * stages
    require(
        config.distributed_executor_backend != "ray" or num_ranks > 1,
        "distributed_executor_backend='ray' places the ranks of tensor_parallel_size x "
        f"pipeline_parallel_size, of which there is {num_ranks}",
    )
    if stages == 1:
        return
    told = f"pipeline_parallel_size={stages}"
    require(
        not config.async_scheduling,
        f"{told} has {stages} steps under way already: leave out async_scheduling=True",
    )
    require(
        not config.capture_sampling, f"{told} samples behind its last stage: no capture_sampling"
    )
    require(
        not config.capture_mixed_steps, f"{told} records no CUDA graphs: no capture_mixed_steps"
    )
    require(
        asked is None or asked.method != "hidden_head",
        f"{told} has no rank with the whole embedding, which method='hidden_head' needs: take "
        "'ngram', 'suffix' or 'draft_model'",
    )
