"""Options of `LLM(...)` for type checkers and editors; `EngineConfig` explains them.

This module is never imported at run time. A test keeps it consistent with `EngineConfig` and with
`nanoserve.compat.options`.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from nanoserve.config import KernelConfig
from nanoserve.features.kv_events.config import KVEventsConfig
from nanoserve.features.kv_transfer.config import KVTransferConfig
from nanoserve.features.speculative.config import SpeculativeConfig
from nanoserve.features.structured.config import StructuredOutputsConfig

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float", "half"]


class VllmOptions(TypedDict, total=False):
    """Options of vLLM and nano-vllm, accepted at values that request what nanoserve does anyway."""

    kvcache_block_size: int | None
    num_gpu_blocks_override: int | None
    num_kvcache_blocks: int | None
    device_memory_utilization: float
    additional_config: Any
    aggregate_engine_logging: Any
    all2all_backend: Any
    allow_deprecated_quantization: Any
    allowed_local_media_path: Any
    allowed_media_domains: Any
    attention_config: Any
    aux_output_config: Any
    calculate_kv_scales: Any
    code_revision: Any
    collect_detailed_traces: Any
    compilation_config: Any
    config_format: Any
    convert: Any
    cp_kv_cache_interleave_size: Any
    cpu_distributed_timeout_seconds: Any
    cpu_offload_gb: Any
    cpu_offload_params: Any
    cuda_graph_sizes: Any
    cudagraph_capture_sizes: Any
    cudagraph_metrics: Any
    custom_histogram_buckets: Any
    data_parallel_address: Any
    data_parallel_backend: Any
    data_parallel_external_lb: Any
    data_parallel_hybrid_lb: Any
    data_parallel_multi_port_external_lb: Any
    data_parallel_rank: Any
    data_parallel_rpc_port: Any
    data_parallel_size: Any
    data_parallel_size_local: Any
    data_parallel_start_rank: Any
    dbo_decode_token_threshold: Any
    dbo_prefill_token_threshold: Any
    dcp_comm_backend: Any
    dcp_kv_cache_interleave_size: Any
    dcp_q_replicate: Any
    decode_context_parallel_size: Any
    default_mm_loras: Any
    device_ids: Any
    diffusion_config: Any
    disable_async_output_proc: Any
    disable_cascade_attn: Any
    disable_chunked_mm_input: Any
    disable_custom_all_reduce: Any
    disable_log_requests: Any
    disable_mm_preprocessor_cache: Any
    disable_nccl_for_dp_synchronization: Any
    disable_sliding_window: Any
    dp_sync_interval: Any
    ec_manager_config: Any
    ec_transfer_config: Any
    elastic_ep_max_dp_size: Any
    enable_batch_sharded_sampling: Any
    enable_chunked_prefill: Any
    enable_cumem_allocator: Any
    enable_dbo: Any
    enable_elastic_ep: Any
    enable_ep_weight_filter: Any
    enable_eplb: Any
    enable_expert_parallel: Any
    enable_fault_tolerance: Any
    enable_flashinfer_autotune: Any
    enable_hc_sp: Any
    enable_layerwise_nvtx_tracing: Any
    enable_log_requests: Any
    enable_logging_iteration_details: Any
    enable_lora_bias: Any
    enable_mamba_cache_stochastic_rounding: Any
    enable_mamba_shared_prefix_checkpoint: Any
    enable_mfu_metrics: Any
    enable_mixed_moe_lora_format: Any
    enable_mm_embeds: Any
    enable_mm_processor_stats: Any
    enable_moe_shared_loras: Any
    enable_multimodal_encoder_data_parallel: Any
    enable_nccl_comm_suspend: Any
    enable_prompt_adapter: Any
    enable_reasoning: Any
    enable_return_last_hidden_states: Any
    enable_shm_tensor_arena: Any
    enable_sleep_mode: Any
    enable_tower_connector_lora: Any
    enable_trace_replay: Any
    engine_use_ray: Any
    engram_config: Any
    eplb_config: Any
    eplb_log_balancedness: Any
    eplb_step_interval: Any
    eplb_window_size: Any
    expert_placement_strategy: Any
    external_parameters: Any
    fail_on_environ_validation: Any
    fault_tolerance_config: Any
    fully_sharded_loras: Any
    gdn_prefill_backend: Any
    guided_decoding_backend: Any
    guided_decoding_disable_additional_properties: Any
    guided_decoding_disable_any_whitespace: Any
    guided_decoding_disable_fallback: Any
    hf_config_path: Any
    hf_token: Any
    ignore_patterns: Any
    interleave_mm_strings: Any
    io_processor_plugin: Any
    ir_op_priority: Any
    jit_monitor_mode: Any
    jit_monitor_verbose: Any
    kda_decode_backend: Any
    kda_prefill_backend: Any
    kv_cache_dtype_skip_layers: Any
    kv_cache_metrics: Any
    kv_cache_metrics_sample: Any
    kv_offloading_backend: Any
    kv_sharing_fast_prefill: Any
    language_model_only: Any
    limit_mm_per_prompt: Any
    linear_backend: Any
    log_config_file: Any
    log_level: Any
    logging_config: Any
    logits_processor_pattern: Any
    long_lora_scaling_factors: Any
    long_prefill_token_threshold_adaptive: Any
    lora_dtype: Any
    lora_extra_vocab_size: Any
    lora_target_modules: Any
    mamba_backend: Any
    mamba_block_size: Any
    mamba_cache_dtype: Any
    mamba_cache_mode: Any
    mamba_cache_philox_rounds: Any
    mamba_config: Any
    mamba_ssm_cache_dtype: Any
    mamba_ssu_algorithm: Any
    master_addr: Any
    master_port: Any
    max_context_len_to_capture: Any
    max_cudagraph_capture_size: Any
    max_long_partial_prefills: Any
    max_lora_cls_labels: Any
    max_num_active_seqs: Any
    max_num_partial_prefills: Any
    max_num_queued_reqs: Any
    max_num_queued_tokens: Any
    max_num_scheduled_tokens: Any
    max_parallel_loading_workers: Any
    max_seq_len_to_capture: Any
    media_io_kwargs: Any
    mm_device_do_normalize: Any
    mm_encoder_attn_backend: Any
    mm_encoder_attn_dtype: Any
    mm_encoder_fp8_scale_path: Any
    mm_encoder_fp8_scale_save_margin: Any
    mm_encoder_fp8_scale_save_path: Any
    mm_encoder_only: Any
    mm_encoder_tp_mode: Any
    mm_hasher_algorithm: Any
    mm_ipc_gpu_memory_gb: Any
    mm_processor_cache_gb: Any
    mm_processor_cache_type: Any
    mm_processor_device: Any
    mm_processor_kwargs: Any
    mm_shm_cache_max_object_size_mb: Any
    mm_tensor_ipc: Any
    model_class_overrides: Any
    model_loader_extra_config: Any
    model_weights: Any
    moe_backend: Any
    nnodes: Any
    node_rank: Any
    num_lookahead_slots: Any
    num_redundant_experts: Any
    numa_bind: Any
    numa_bind_cpus: Any
    numa_bind_nodes: Any
    offload_backend: Any
    offload_group_size: Any
    offload_num_in_group: Any
    offload_params: Any
    offload_prefetch_step: Any
    optimization_level: Any
    override_attention_dtype: Any
    override_pooler_config: Any
    per_request_spec_decode_metrics: Any
    performance_mode: Any
    prefill_context_parallel_size: Any
    prefill_schedule_interval: Any
    prefix_cache_retention_interval: Any
    prefix_caching_hash_algo: Any
    prefix_match_unit: Any
    profiler_config: Any
    pt_load_map_location: Any
    quantization_config: Any
    ray_workers_use_nsight: Any
    reasoning_config: Any
    reasoning_parser: Any
    reasoning_parser_plugin: Any
    renderer_num_workers: Any
    replayssm_buffer_len: Any
    return_sampling_mask: Any
    rope_scaling: Any
    rope_theta: Any
    safetensors_load_strategy: Any
    safetensors_prefetch_block_size: Any
    safetensors_prefetch_num_threads: Any
    scheduler_reserve_full_isl: Any
    served_model_name: Any
    show_hidden_metrics_for_version: Any
    shutdown_timeout: Any
    skip_mm_profiling: Any
    sleep_mode_offload_cudagraph: Any
    sleep_preserve_parameter_names: Any
    sparse_indexer_topk_backend: Any
    spec_method: Any
    spec_model: Any
    spec_tokens: Any
    specialize_active_lora: Any
    stream_interval: Any
    swa_bounded_replay: Any
    swap_space: Any
    task: Any
    tokenizer_mode: Any
    tokenizer_revision: Any
    tokens_only: Any
    ubatch_size: Any
    use_fp64_gumbel: Any
    use_replayssm: Any
    use_tqdm_on_load: Any
    use_v2_block_manager: Any
    video_pruning_method: Any
    video_pruning_rate: Any
    watermark: Any
    watermark_config: Any
    weight_transfer_config: Any
    worker_cls: Any
    worker_extension_cls: Any
    worker_use_ray: Any


class EngineOptions(VllmOptions, total=False):
    """Options of nanoserve's `EngineConfig`. None means "not given"."""

    tokenizer: str | Path | None
    skip_tokenizer_init: bool | None
    chat_template: str | Path | None
    revision: str | None
    download_dir: str | Path | None
    trust_remote_code: bool
    dtype: Dtype | torch.dtype | None
    model_impl: Literal["auto", "nanoserve", "transformers", "vllm"] | None
    runner: Literal["auto", "generate", "pooling"] | None
    pooler_config: dict[str, Any] | None
    load_format: Literal["auto", "safetensors", "dummy", "hf"] | None
    quantization: str | None
    quantization_group_size: int | None
    quantization_activations: Literal["int8", "none"] | None
    seed: int | None
    generation_config: Literal["auto", "vllm"] | None
    override_generation_config: dict[str, Any] | None
    hf_overrides: dict[str, Any] | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    long_prefill_token_threshold: int
    scheduling_policy: Literal["fcfs", "priority"] | None
    scheduler_cls: Any
    priority_aging: int | None
    async_scheduling: bool | None
    block_size: int | None
    num_kv_blocks: int | None
    kv_cache_memory_bytes: int | None
    kv_offloading_size: float | None
    kv_offloading_path: str | Path | None
    kv_transfer_config: Mapping[str, Any] | KVTransferConfig | None
    kv_cache_dtype: Literal["auto", "int8", "fp8", "fp8_e4m3"] | None
    enable_prefix_caching: bool | None
    disable_hybrid_kv_cache_manager: bool | None
    prefix_cache_seed: int | None
    enable_prompt_tokens_details: bool
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    structured_outputs_config: Mapping[str, Any] | StructuredOutputsConfig | None
    logits_processors: AbstractSequence[Callable[..., Any] | str] | None
    max_logprobs: int
    logprobs_mode: str
    enable_return_routed_experts: bool
    enable_prompt_embeds: bool
    trace: str | Path | None
    disable_log_stats: bool
    kv_events_config: Mapping[str, Any] | KVEventsConfig | None
    otlp_traces_endpoint: str | None
    num_threads: int | None
    device: Literal["auto", "cpu", "cuda"] | None
    attention_backend: str | None
    batch_invariant: bool
    enforce_eager: bool
    capture_sampling: bool
    capture_mixed_steps: bool | None
    kernel_config: Mapping[str, Any] | KernelConfig | None
    gpu_memory_utilization: float
    tensor_parallel_size: int
    pipeline_parallel_size: int
    distributed_executor_backend: Literal["mp", "ray", "uni"] | None
    distributed_timeout_seconds: int
    worker_timeout_seconds: int
