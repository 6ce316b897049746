"""The engine options that the user chooses. `ModelConfig` has the checkpoint's settings."""

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
    check_names,
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
    "worker_timeout_seconds": 4,  # several intervals of nanoserve.features.parallel.heartbeat
    "max_model_len": 2,  # at least one prompt token and one output token
    "priority_aging": 1,
    "num_kv_blocks": 1,
    "num_threads": 1,
    "kv_cache_memory_bytes": 1,
    "prefix_cache_seed": 0,
    "max_loras": 1,
    "max_lora_rank": 1,
    "max_cpu_loras": 1,
}
_CHOICES = {
    "dtype": ("auto", *DTYPES),
    "model_impl": ("auto", "nanoserve", "transformers"),
    "load_format": ("auto", "safetensors", "dummy"),
    "scheduling_policy": ("fcfs", "priority"),
    "device": ("auto", "cpu", "cuda"),
    "quantization_group_size": (32, 64, 128),
    "quantization_activations": ("int8", "none"),
    "generation_config": ("auto", "vllm"),
    "runner": ("auto", "generate", "pooling"),
    "kv_cache_dtype": ("auto", "int8", "fp8", "fp8_e4m3"),
    "logprobs_mode": ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    "distributed_executor_backend": ("mp", "ray"),
}
# Default token budget of a step. nano-vllm's workload takes an H100 8.9 s with 2048 and 7.2 s with
# 8192. A CPU needs seconds for 2048 tokens, during which all decoding sequences wait.
_BUDGETS = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True)
class KernelConfig:
    """Variants of the GPU kernels of an engine (`kernel_config={...}`), for Triton's kernels.

    They have not run on a GPU. In Triton's interpreter they give the same results, and the tests
    compile them for all GPUs.

    dependent_launch: if True, all of nanoserve's kernels but attention over chunks start before the
        previous kernel has finished (programmatic dependent launch), as decode attention always
        does. On GPUs older than Hopper this has no effect.
    merge_in_attention: if True, the decode attention kernel merges the partial results of a row
        itself, instead of a second kernel.
    split_products: if True, products of up to 256 rows with unquantized weights are computed by
        nanoserve's kernel, which splits their inputs over programs and applies SwiGLU or GEGLU to
        the product of the gate and up projections, instead of cuBLAS and a second kernel.
    fused_quantization: if True, norms and activations quantize their results for the linears that
        multiply 8-bit activations (`quantization="fp8"`, or `quantization_activations="int8"`),
        instead of a kernel of its own before each linear.
    adapter_kernels: if True, two kernels for each linear layer add the products of all adapters of
        a step (`enable_lora`), instead of products of torch for each adapter, and steps with
        adapters have CUDA graphs of their own, instead of being launched kernel by kernel.

    Raises `ValueError` for unknown names and values.
    """

    dependent_launch: bool = False
    merge_in_attention: bool = False
    split_products: bool = False
    fused_quantization: bool = False
    adapter_kernels: bool = False

    @classmethod
    def of(cls, options: Any) -> "KernelConfig":
        """Return the value passed to `EngineConfig` as a `KernelConfig`; None is the default."""
        if options is None or isinstance(options, KernelConfig):
            return options or KernelConfig()
        check_names("kernel_config", options, cls, "{'dependent_launch': True}")
        return cls(**options)

    def __post_init__(self) -> None:
        for field in fields(self):
            check_bool(field.name, getattr(self, field.name))


@dataclass
class EngineConfig:
    """The options of one engine, under vLLM's names. Every field is checked on construction.

    None means "not set". `for_device` then chooses the defaults that depend on the device; an
    engine gets its result. The comment above a field is also the help of its command-line flag
    (`nanoserve.cli.engine_flags`): sentences, with other options in backticks, and with
    "Default: ..." at the end if the default is None.

    Raises `ValueError` with the offending value and its limit. Other options of `LLM`, such as
    vLLM's names, are translated first: see `nanoserve.compat.options.engine_config`.
    """

    model: str
    # Folder, GGUF file or name of the tokenizer. Default: the model's tokenizer.
    tokenizer: str | None = None
    # Load no tokenizer: prompts and outputs are token ids.
    skip_tokenizer_init: bool = False
    # File with a Jinja chat template, or the template as a string. Default: the checkpoint's.
    chat_template: str | Path | None = None
    # Branch, tag or commit of a model on the Hub. Default: the newest commit.
    revision: str | None = None
    # Folder for files downloaded from the Hub. Default: the Hub's cache.
    download_dir: str | None = None
    # Allow the tokenizer to run the checkpoint's code. A model's code is never run.
    trust_remote_code: bool = False
    # Data type of weights and activations: "auto" (the checkpoint's), "float32", "bfloat16" or
    # "float16".
    dtype: str = "auto"
    # Code of the model: "nanoserve" (nanoserve's own classes), "transformers" (transformers' class
    # with nanoserve's attention, which is slower), or "auto": transformers' class for architectures
    # that nanoserve does not have.
    model_impl: str = "auto"
    # What the engine computes: "generate" (text), "pooling" (embeddings, classes and scores), or
    # "auto": pooling for base models, classifiers and checkpoints of sentence-transformers.
    runner: str = "auto"
    # How hidden states are pooled, as an object with "pooling_type", "normalize" and
    # "use_activation"; see nanoserve/pooling_params.py. Default: as the checkpoint says.
    pooler_config: dict[str, Any] | None = None
    # Source of the weights: "auto", "safetensors" or "dummy" (random weights, for benchmarks).
    load_format: str = "auto"
    # Quantize unquantized weights as they are loaded: "int8" (one scale per row), "int4" (one scale
    # per group) or, on a GPU, "fp8". A GPU converts a quantized checkpoint to floats, unless this
    # option names the checkpoint's format. Default: the checkpoint's format.
    quantization: str | None = None
    # Number of int4 weights that share a scale: 32, 64 or 128; requires `quantization` "int4".
    # Default: 32.
    quantization_group_size: int | None = None
    # Activations in matrix products with quantized weights: "int8" quantizes them in groups,
    # "none" keeps them in floating point. Default: "int8" on a CPU with numba; on a GPU "none", but
    # e4m3 for "fp8" weights.
    quantization_activations: str | None = None
    # Seed for requests that do not set one.
    seed: int = 0
    # Sampling parameters of requests that set none: "auto" reads generation_config.json of the
    # checkpoint, "vllm" does not.
    generation_config: str = "auto"
    # Sampling parameters, as an object, that override `generation_config`. Default: none.
    override_generation_config: dict[str, Any] | None = None
    # Entries, as an object, that override entries of the checkpoint's config.json. Default: none.
    hf_overrides: dict[str, Any] | None = None

    # Longest sequence in tokens, prompt and output together. Default: the model's limit, or less if
    # the KV cache holds less.
    max_model_len: int | None = None
    # Maximum number of running sequences; a step may compute fewer.
    max_num_seqs: int = 256
    # Token budget of one step. Default: 2048 on a CPU and 8192 on a GPU, or `max_num_seqs` if that
    # is more.
    max_num_batched_tokens: int | None = None
    # Maximum number of tokens of one sequence in a step, draft tokens apart; 0 is no limit.
    long_prefill_token_threshold: int = 0
    # Order in which requests are scheduled: "fcfs" (first come, first served) or "priority" (lower
    # values first).
    scheduling_policy: str = "fcfs"
    # Scheduler to use: a subclass of `Scheduler`, or its "module.Class"; it works with all
    # features. Default: `Scheduler` itself.
    scheduler_cls: Any = None
    # Number of later arrivals that outweigh one level of priority; needs `scheduling_policy`
    # "priority". Default: no number does; a stream of urgent requests can then starve all others.
    priority_aging: int | None = None
    # Schedule and launch a step while the previous one runs. Default: True on a GPU without
    # `trace`, else False: a CPU computes each step in the same process and gains nothing.
    async_scheduling: bool | None = None

    # Number of tokens in a KV block.
    block_size: int = 16
    # Number of KV blocks. Default: on a CPU, up to 4 GiB of them; on a GPU, what weights and
    # activations leave of `gpu_memory_utilization`.
    num_kv_blocks: int | None = None
    # Memory for KV blocks in bytes, instead of `num_kv_blocks`. Default: as for `num_kv_blocks`.
    kv_cache_memory_bytes: int | None = None
    # Memory of the host in GiB, over all ranks, for KV blocks that the prefix cache has evicted; a
    # later prompt with the same prefix gets them back. Default: none, as with 0.
    kv_offloading_size: float | None = None
    # Folder in which KV blocks are stored, so that a restarted engine finds them: the connector
    # "disk" of `kv_transfer_config`. Default: none.
    kv_offloading_path: str | Path | None = None
    # Connector that stores KV blocks outside the engine: an object; see
    # nanoserve/features/kv_transfer/config.py. Default: none.
    kv_transfer_config: Any = None
    # Data type of the KV cache: "auto" (the model's), "int8" or "fp8" (the same as "fp8_e4m3").
    kv_cache_dtype: str = "auto"
    # Reuse the KV blocks of prefixes that earlier requests have computed. A model with recurrent
    # states turns it off.
    enable_prefix_caching: bool = True
    # Keep K and V of all tokens in layers with a sliding window, as in other layers. Default: True
    # on a GPU, where groups of layers have not run yet, and False on a CPU.
    disable_hybrid_kv_cache_manager: bool | None = None
    # Seed of the hashes of cached blocks. Default: a random one, so that hashes differ per engine.
    prefix_cache_seed: int | None = None
    # Report to each request how many tokens of its prompt were cached. This reveals whether others
    # have sent the same prefix.
    enable_prompt_tokens_details: bool = True

    # Speculative decoding: an object such as {"method": "ngram"}; see
    # nanoserve/features/speculative/config.py. Default: none.
    speculative_config: Any = None
    # Accept requests with LoRA adapters (`lora_request`), many of them in one batch.
    enable_lora: bool = False
    # Most adapters in one batch; requests with others wait. Requires `enable_lora`.
    max_loras: int = 1
    # Largest rank of an adapter. Requires `enable_lora`.
    max_lora_rank: int = 16
    # Most adapters in the host's memory. Default: `max_loras`. Requires `enable_lora`.
    max_cpu_loras: int | None = None
    # Options of structured output: an object; see nanoserve/features/structured/config.py. Default:
    # none.
    structured_outputs_config: Any = None
    logits_processors: tuple[Any, ...] = ()  # see nanoserve.sampling.processors
    # Maximum number of log-probabilities that a request may ask for; -1 is the whole vocabulary.
    max_logprobs: int = 20
    # What `logprobs` of an output are: "raw_logprobs" of the model's distribution, or
    # "processed_logprobs" of the distribution that the token is sampled from, after penalties,
    # masks, logits processors, temperature and filters; a filtered token has -inf. "raw_logits" and
    # "processed_logits" are the same before the softmax. `prompt_logprobs` are raw in all modes.
    logprobs_mode: str = "raw_logprobs"
    # Return the experts that computed each token as `CompletionOutput.routed_experts`, so that a
    # trainer can replay them. Requires a mixture of experts, and `pipeline_parallel_size` 1.
    enable_return_routed_experts: bool = False
    # Accept prompts that are embeddings, or have some between their token ids, as `prompt_embeds`
    # and `prompt_embeds_pieces` of a prompt dictionary, and `prompt_embeds` of /v1/completions.
    enable_prompt_embeds: bool = False
    # File for a record of every step, to be read by `nanoserve trace`. Default: none.
    trace: str | Path | None = None
    # Collect no statistics for `LLM.get_metrics`.
    disable_log_stats: bool = True
    # Publish events of the prefix cache: an object; see nanoserve/features/kv_events/config.py.
    # Default: none.
    kv_events_config: Any = None
    # URL of an OpenTelemetry collector that receives a span of each request over OTLP:
    # http://HOST:4318/v1/traces or grpc://HOST:4317. Needs nanoserve[otel]. Default: none.
    otlp_traces_endpoint: str | None = None

    # Number of CPU threads. Default: as many as torch chooses, or 1 for a model with
    # less than 64 MiB of weights.
    num_threads: int | None = None
    # Device: "auto" (an NVIDIA GPU if there is one), "cpu" or "cuda".
    device: str = "auto"
    # Attention kernels: "torch" or "numba" on a CPU, "triton" or "flash_attn" on a GPU; "auto"
    # selects numba if it is installed, else torch, and triton on a GPU. With "flash_attn" on Hopper
    # and FlashAttention-3 installed, decode rows stay triton's.
    attention_backend: str = "auto"
    # Guarantee that a request's tokens and log-probabilities depend on no other request, and on no
    # chunk, prefix-cache hit, preemption or draft token, to the bit. Requires a CPU with numba or,
    # with attention_backend "triton", a GPU, where it is slower and has not been run: weights must
    # not be quantized there, the vocabulary needs a multiple of 4 tokens, and more than two ranks
    # are rejected. The number of ranks, and the processor, may still change bits. Without this
    # option the same holds on a CPU with numba unless the startup summary shows that oneDNN
    # computes the matrix products, because it is faster on this processor, or that there are more
    # than two ranks.
    batch_invariant: bool = False
    # Disable CUDA graphs. GPU options are accepted and checked on a CPU, too, so that scripts stay
    # portable.
    enforce_eager: bool = False
    # Include the LM head and sampling of plain decode steps in CUDA graphs. An H100 gains nothing.
    # Requires `tensor_parallel_size` 1: with more ranks, only the first knows which steps a graph
    # can sample, but all compute the logits.
    capture_sampling: bool = False
    # Run steps that compute prompts in CUDA graphs, at padded numbers of tokens. Default: True
    # where this has been tested (one GPU, attention in Triton, neither draft tokens nor quantized
    # weights), else False.
    capture_mixed_steps: bool | None = None
    # Variants of GPU kernels that have not run on a GPU yet: an object; see `KernelConfig` in
    # nanoserve/config.py. Default: none.
    kernel_config: Any = None
    # Fraction of the GPU's memory for weights, activations and KV cache.
    gpu_memory_utilization: float = 0.9
    # Number of ranks that share each layer: GPUs, or processes on a CPU.
    tensor_parallel_size: int = 1
    # Number of pipeline stages, each with some of the layers and `tensor_parallel_size` ranks. On a
    # GPU, stages run without CUDA graphs.
    pipeline_parallel_size: int = 1
    # Launcher of the ranks: "mp" (processes on this machine) or "ray" (a Ray cluster). Default:
    # "mp".
    distributed_executor_backend: str | None = None
    # Seconds that a rank waits for another rank within a step.
    distributed_timeout_seconds: int = 300
    # Seconds after which a worker process without a heartbeat is taken for dead; a busy worker
    # does send heartbeats.
    worker_timeout_seconds: int = 8

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

            structured = StructuredOutputsConfig.of(self.structured_outputs_config)
            self.structured_outputs_config = structured
        if self.kv_events_config is not None:
            from nanoserve.features.kv_events.config import KVEventsConfig

            self.kv_events_config = KVEventsConfig.of(self.kv_events_config)
        if self.kv_offloading_size is not None:
            size = check_number("kv_offloading_size", self.kv_offloading_size, 0)
            self.kv_offloading_size = size or None
        if self.kv_transfer_config is not None:
            from nanoserve.features.kv_transfer.config import KVTransferConfig

            self.kv_transfer_config = KVTransferConfig.of(self.kv_transfer_config)
        if self.kernel_config is not None:
            self.kernel_config = KernelConfig.of(self.kernel_config)
        self._check_names()
        self._check_pairs()

    def _check_names(self) -> None:
        """Check options that are dictionaries, folders, a revision or files."""
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
        if self.pooler_config is not None:
            from nanoserve.pooling_params import check_pooler_config

            check_pooler_config(self.pooler_config)
        is_revision = self.revision is None or is_text(self.revision)
        require(is_revision, f"revision={self.revision!r} must be a branch, a tag or a commit")
        if self.trace is not None:
            _check_trace(self.trace, self.async_scheduling)

    def _check_pairs(self) -> None:
        """Check that the options agree with each other."""
        budget = self.max_num_batched_tokens
        require(
            budget is None or budget >= self.max_num_seqs,
            f"max_num_batched_tokens={budget} is less than "
            f"max_num_seqs={self.max_num_seqs}: a decode step needs one token per sequence",
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
            f"kv_cache_memory_bytes={self.kv_cache_memory_bytes} both set the size of the block "
            f"pool: set only one of them",
        )
        require(
            self.enable_prefix_caching or not self._publishes_kv_events,
            "kv_events_config with enable_kv_cache_events=True needs enable_prefix_caching=True: "
            "the events report changes of the prefix cache",
        )
        require(
            self.pooler_config is None or self.runner != "generate",
            f"pooler_config={shown(self.pooler_config)} needs runner='pooling'",
        )
        for name in ("max_loras", "max_lora_rank", "max_cpu_loras"):
            value = getattr(self, name)
            is_set = value != EngineConfig.__dataclass_fields__[name].default
            require(self.enable_lora or not is_set, f"{name}={value} needs enable_lora=True")
        require(
            (self.max_cpu_loras or self.max_loras) >= self.max_loras,
            f"max_cpu_loras={self.max_cpu_loras} must be at least max_loras={self.max_loras}: the "
            f"adapters of a batch are in the host's memory, too",
        )
        require(
            self.kv_offloading_path is None or self.kv_transfer_config is None,
            f"kv_offloading_path={shown(self.kv_offloading_path)} is short for kv_transfer_config "
            f"with the connector 'disk'; pass one of them",
        )
        for name in ("kv_offloading_size", "kv_offloading_path", "kv_transfer_config"):
            require(
                self.enable_prefix_caching or getattr(self, name) is None,
                f"{name} needs enable_prefix_caching=True: blocks are found by their prefixes",
            )
        if self.pipeline_parallel_size > 1 or self.distributed_executor_backend is not None:
            _check_parallel(self)
        require(
            not (self.capture_sampling and (self.enforce_eager or self.tensor_parallel_size > 1)),
            f"capture_sampling=True requires enforce_eager=False and tensor_parallel_size=1 "
            f"(got enforce_eager={self.enforce_eager} and "
            f"tensor_parallel_size={self.tensor_parallel_size})",
        )
        require(
            not (self.capture_mixed_steps and self.enforce_eager),
            "capture_mixed_steps=True captures CUDA graphs, but enforce_eager=True disables them: "
            "remove one of them",
        )

    def for_device(self, kind: str) -> "EngineConfig":
        """Return a copy for "cpu" or "cuda", with the device's defaults for options not set."""
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
    def kv_connector(self) -> Any:
        """Options of the KV connector, a `KVTransferConfig`; None if there is none."""
        if self.kv_offloading_path is None:
            return self.kv_transfer_config
        from nanoserve.features.kv_transfer.config import KVTransferConfig

        return KVTransferConfig.on_disk(self.kv_offloading_path)

    @property
    def num_steps_ahead(self) -> int:
        """Number of steps in flight when another is launched.

        This is the number of pipeline stages minus one, or 1 with async scheduling, or 0.
        """
        return self.pipeline_parallel_size - 1 or int(bool(self.async_scheduling))

    def resolve_max_model_len(
        self, model_limit: int, num_kv_blocks: int, pool_limit: int | None = None
    ) -> int:
        """Return the maximum length of a sequence, limited by the model and the block pool.

        `pool_limit`: the number of tokens of one sequence that the pool holds if layers have
        sliding windows (`nanoserve.engine.sequence_room`); None means the number of KV slots in
        the pool. Without the option `max_model_len`, the limit is lowered to what fits, and
        logged; an explicit value that does not fit raises `ValueError`, because a request near it
        could never finish.
        """
        num_slots = num_kv_blocks * self.block_size
        pool_limit = num_slots if pool_limit is None else pool_limit
        pool = f"{num_kv_blocks} KV blocks of {self.block_size} hold {pool_limit} tokens"
        require(
            pool_limit >= 2 and num_slots < 2**31 - self.block_size,
            f"{pool}; there must be at least 2, and fewer than 2^31 because KV slots are int32",
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
            f"max_model_len={self.max_model_len} does not fit into the block pool: {pool}",
        )
        return self.max_model_len


def _registered_choices(name: str) -> list[str]:
    """Return the values of an option to which users may have registered their own."""
    if name == "quantization":
        from nanoserve.checkpoint.formats.registry import quantization_names

        return quantization_names()
    from nanoserve.attention.registry import backend_choices

    return backend_choices()


def _check_trace(trace: Any, is_ahead: bool | None) -> None:
    """Check that the file `trace` can be created or replaced, without touching it.

    is_ahead: the value of `async_scheduling`, if it was given.
    """
    require(isinstance(trace, (str, Path)), f"trace={shown(trace)} must be the name of a file")
    path, option = Path(trace), f"trace={str(trace)!r}"
    require(path.parent.is_dir(), f"{option}: the folder {path.parent} does not exist")
    require(not path.is_dir(), f"{option} is a folder and must be a file")
    is_writable = os.access(path if path.exists() else path.parent, os.W_OK)
    require(is_writable, f"{option} cannot be written")
    require(not is_ahead, f"{option} needs async_scheduling=False: it records one step at a time")


def _check_parallel(config: EngineConfig) -> None:
    """Raise `ValueError` for options that do not work with a pipeline, or with Ray."""
    stages, speculative = config.pipeline_parallel_size, config.speculative_config
    num_ranks = config.tensor_parallel_size * stages
    require(
        config.distributed_executor_backend != "ray" or num_ranks > 1,
        "distributed_executor_backend='ray' places the ranks of tensor_parallel_size x "
        f"pipeline_parallel_size, which is {num_ranks}: it must be at least 2",
    )
    if stages == 1:
        return
    option = f"pipeline_parallel_size={stages}"
    require(
        not config.async_scheduling,
        f"{option} already has {stages} steps in flight: remove async_scheduling=True",
    )
    require(
        not config.capture_sampling,
        f"{option} does not capture sampling in CUDA graphs: remove capture_sampling=True",
    )
    require(
        not config.capture_mixed_steps,
        f"{option} captures no CUDA graphs: remove capture_mixed_steps=True",
    )
    require(
        not config.enable_return_routed_experts,
        f"{option} splits the layers over processes, and enable_return_routed_experts=True needs "
        "all of them in one: use tensor_parallel_size",
    )
    require(
        speculative is None or speculative.method != "hidden_head",
        f"{option} has no rank with the whole embedding, which method='hidden_head' of "
        "speculative_config needs: use 'ngram', 'suffix' or 'draft_model'",
    )
