"""The options of `LLM(...)` for type checkers and editors: what each means is in `EngineConfig`.

Nothing imports this while a program runs. A test keeps it in step with `EngineConfig` and with
`nanoserve.drop_in.options`.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from nanoserve.speculative.config import SpeculativeConfig
from nanoserve.structured.config import StructuredOutputsConfig

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float", "half"]


class VllmOptions(TypedDict, total=False):
    """vLLM's, and nano-vllm's, which are accepted where they ask for what is done anyway."""

    kvcache_block_size: int | None
    num_gpu_blocks_override: int | None
    num_kvcache_blocks: int | None
    additional_config: Any
    aggregate_engine_logging: Any
    all2all_backend: Any
    allowed_local_media_path: Any
    allowed_media_domains: Any
    calculate_kv_scales: Any
    code_revision: Any
    collect_detailed_traces: Any
    compilation_config: Any
    config_format: Any
    convert: Any
    cpu_offload_gb: Any
    cuda_graph_sizes: Any
    cudagraph_capture_sizes: Any
    data_parallel_address: Any
    data_parallel_backend: Any
    data_parallel_external_lb: Any
    data_parallel_hybrid_lb: Any
    data_parallel_rank: Any
    data_parallel_rpc_port: Any
    data_parallel_size: Any
    data_parallel_size_local: Any
    data_parallel_start_rank: Any
    dbo_decode_token_threshold: Any
    dbo_prefill_token_threshold: Any
    decode_context_parallel_size: Any
    default_mm_loras: Any
    disable_async_output_proc: Any
    disable_cascade_attn: Any
    disable_chunked_mm_input: Any
    disable_custom_all_reduce: Any
    disable_hybrid_kv_cache_manager: Any
    disable_log_requests: Any
    disable_mm_preprocessor_cache: Any
    disable_nccl_for_dp_synchronization: Any
    disable_sliding_window: Any
    ec_transfer_config: Any
    enable_chunked_prefill: Any
    enable_dbo: Any
    enable_eplb: Any
    enable_expert_parallel: Any
    enable_log_requests: Any
    enable_lora: Any
    enable_lora_bias: Any
    enable_mm_embeds: Any
    enable_multimodal_encoder_data_parallel: Any
    enable_prompt_adapter: Any
    enable_prompt_embeds: Any
    enable_return_last_hidden_states: Any
    enable_return_routed_experts: Any
    enable_sleep_mode: Any
    engine_use_ray: Any
    eplb_config: Any
    eplb_log_balancedness: Any
    eplb_step_interval: Any
    eplb_window_size: Any
    expert_placement_strategy: Any
    external_parameters: Any
    fully_sharded_loras: Any
    guided_decoding_backend: Any
    guided_decoding_disable_additional_properties: Any
    guided_decoding_disable_any_whitespace: Any
    guided_decoding_disable_fallback: Any
    hf_config_path: Any
    hf_token: Any
    ignore_patterns: Any
    interleave_mm_strings: Any
    io_processor_plugin: Any
    kv_events_config: Any
    kv_offloading_backend: Any
    kv_offloading_size: Any
    kv_sharing_fast_prefill: Any
    kv_transfer_config: Any
    language_model_only: Any
    limit_mm_per_prompt: Any
    logits_processor_pattern: Any
    logprobs_mode: Any
    long_lora_scaling_factors: Any
    lora_dtype: Any
    lora_extra_vocab_size: Any
    mamba_block_size: Any
    mamba_cache_dtype: Any
    mamba_ssm_cache_dtype: Any
    max_context_len_to_capture: Any
    max_cpu_loras: Any
    max_cudagraph_capture_size: Any
    max_long_partial_prefills: Any
    max_lora_rank: Any
    max_loras: Any
    max_num_partial_prefills: Any
    max_parallel_loading_workers: Any
    max_seq_len_to_capture: Any
    media_io_kwargs: Any
    mm_encoder_attn_backend: Any
    mm_encoder_tp_mode: Any
    mm_processor_cache_gb: Any
    mm_processor_cache_type: Any
    mm_processor_kwargs: Any
    mm_shm_cache_max_object_size_mb: Any
    model_impl: Any
    model_loader_extra_config: Any
    num_lookahead_slots: Any
    num_redundant_experts: Any
    optimization_level: Any
    otlp_traces_endpoint: Any
    override_attention_dtype: Any
    override_pooler_config: Any
    pooler_config: Any
    prefill_context_parallel_size: Any
    prefix_caching_hash_algo: Any
    profiler_config: Any
    pt_load_map_location: Any
    ray_workers_use_nsight: Any
    reasoning_parser: Any
    rope_scaling: Any
    rope_theta: Any
    runner: Any
    safetensors_load_strategy: Any
    scheduler_cls: Any
    served_model_name: Any
    show_hidden_metrics_for_version: Any
    skip_mm_profiling: Any
    stream_interval: Any
    swap_space: Any
    task: Any
    tokenizer_mode: Any
    tokenizer_revision: Any
    use_tqdm_on_load: Any
    use_v2_block_manager: Any
    video_pruning_rate: Any
    worker_cls: Any
    worker_extension_cls: Any
    worker_use_ray: Any


class EngineOptions(VllmOptions, total=False):
    """Ours. None is "not given"."""

    tokenizer: str | Path | None
    skip_tokenizer_init: bool | None
    revision: str | None
    download_dir: str | Path | None
    trust_remote_code: bool
    dtype: Dtype | torch.dtype | None
    load_format: Literal["auto", "safetensors", "dummy", "hf"] | None
    quantization: str | None
    quantization_group_size: int | None
    seed: int | None
    generation_config: Literal["auto", "vllm"] | None
    override_generation_config: dict[str, Any] | None
    hf_overrides: dict[str, Any] | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    long_prefill_token_threshold: int
    scheduling_policy: Literal["fcfs", "priority"] | None
    priority_aging: int | None
    async_scheduling: bool | None
    block_size: int | None
    num_kv_blocks: int | None
    kv_cache_memory_bytes: int | None
    kv_cache_dtype: Literal["auto", "int8", "fp8", "fp8_e4m3"] | None
    enable_prefix_caching: bool | None
    prefix_cache_seed: int | None
    enable_prompt_tokens_details: bool
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None
    structured_outputs_config: Mapping[str, Any] | StructuredOutputsConfig | None
    logits_processors: AbstractSequence[Callable[..., Any] | str] | None
    max_logprobs: int
    trace: str | Path | None
    disable_log_stats: bool
    num_threads: int | None
    device: Literal["auto", "cpu", "cuda"] | None
    attention_backend: str | None
    enforce_eager: bool
    capture_sampling: bool
    gpu_memory_utilization: float
    tensor_parallel_size: int
    pipeline_parallel_size: int
    distributed_executor_backend: Literal["mp", "ray", "uni"] | None
    distributed_timeout_seconds: int
    worker_timeout_seconds: int
