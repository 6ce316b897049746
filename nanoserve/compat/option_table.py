"""Current and former engine options of vLLM that nanoserve does not have, by subject.

Each entry has the accepted values, which match the behaviour here, and what to use instead of any
other value.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from nanoserve.utils.checks import is_number


class Foreign(NamedTuple):
    """An option of vLLM that nanoserve does not have."""

    accepts: Callable[[Any], bool]
    instead: str  # of a value that is not accepted: a reason, or what to use


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is one or (type(value) is type(one) and value == one)
                             for one in values)  # fmt: skip


def _anything(value: Any) -> bool:
    return True


def _is_empty(value: Any) -> bool:
    """Return True if a dictionary, list or string is empty, or the value is False."""
    return value in ({}, [], (), "", False)


def _is_size(value: Any) -> bool:
    return is_number(value) and value >= 0


def _known(
    names: str, instead: str, accepts: Callable[[Any], bool] = _is_empty
) -> dict[str, Foreign]:
    return {name: Foreign(accepts, instead) for name in names.split()}


_one, _off, _on = _one_of(1), _one_of(False), _one_of(True)
_TEXT = "nanoserve runs text models only; remove it"
_IMAGES = f"{_TEXT}, and encode images in front of the engine (enable_prompt_embeds)"
_REPLICAS = (
    "one engine is one replica of tensor_parallel_size x pipeline_parallel_size ranks; for "
    "several use `nanoserve serve --data-parallel-size N`, or `nanoserve batch --replicas N`"
)
_RANKS = "the number of ranks is tensor_parallel_size x pipeline_parallel_size"
_EXPERTS = "whole experts are always distributed over the ranks of tensor_parallel_size"
_LORA = "merge such an adapter into its base (peft: merge_and_unload) and load that"
_GRAPHS = "the sizes of CUDA graphs follow from max_num_seqs; enforce_eager=True disables them"
_COMPILED = "kernels are fused by hand and nothing is compiled by torch; remove it"
_STATE = "no supported model has such a state"
_RECURRENT = "recurrent states are in float32, and kept by slot"
_NOT_MOVED = "weights and KV cache stay on their device: use a smaller model, or quantization"
_HOST = "kv_offloading_size and kv_offloading_path keep blocks in host memory and on disk"
_GUIDED = "pass structured_outputs_config={'backend': ...}"
_KERNELS = "device and dtype determine the kernels; only attention_backend can be chosen"
_MACHINES = "distributed_executor_backend='ray' starts the ranks of several machines"
_NUMA = "start the program under numactl"
_FAULTS = "a rank that dies ends the engine; `nanoserve serve --data-parallel-size N` restarts it"
_REASONING = "pass --reasoning-parser NAME to `nanoserve serve`"
_LOGGING = "use Python's logging: logging.getLogger('nanoserve').setLevel('DEBUG')"
_OBSERVED = "trace='run.jsonl' records every step; get_metrics() and /metrics have statistics"

# All options of vLLM that are not in `EngineConfig`, by subject.
FOREIGN: dict[str, Foreign] = {
    # Behaviour that cannot be changed here.
    **_known("enable_chunked_prefill", "prompts are always computed in chunks of at most "
             "max_num_batched_tokens; remove it", _on),
    **_known("use_v2_block_manager", "there is one block manager", _anything),
    **_known("fail_on_environ_validation enable_shm_tensor_arena allow_deprecated_quantization "
             "scheduler_reserve_full_isl renderer_num_workers", "it changes no result", _anything),
    **_known("shutdown_timeout", "use `nanoserve serve --grace-period S`",
             _one_of(0)),
    **_known("sleep_mode_offload_cudagraph enable_cumem_allocator enable_nccl_comm_suspend",
             "sleep() always releases the weights and the KV cache", _off),
    **_known("enable_sleep_mode", "sleep() and wake_up() are always available", _anything),
    **_known("disable_log_requests enable_log_requests", _OBSERVED, _anything),
    **_known("aggregate_engine_logging use_tqdm_on_load", "it changes no result", _anything),
    **_known("swap_space", "a preempted sequence is computed again, not swapped", _is_size),
    **_known("max_seq_len_to_capture max_context_len_to_capture", _GRAPHS, _is_size),
    **_known("disable_async_output_proc", "see async_scheduling", _anything),
    **_known("disable_custom_all_reduce", "NCCL, or gloo on a CPU, does all reductions", _anything),
    **_known("max_parallel_loading_workers", "at most 16 threads load weights", _is_size),
    **_known("safetensors_load_strategy pt_load_map_location", "weights are copied from mapped "
             "files in pieces", _one_of("lazy", "auto", "cpu")),
    **_known("served_model_name", "pass --served-model-name to `nanoserve serve`", _anything),
    **_known("prefix_caching_hash_algo", "a hash only finds a block; its tokens are compared",
             _anything),
    **_known("safetensors_prefetch_num_threads safetensors_prefetch_block_size",
             "weights are copied from mapped files in pieces", _is_size),
    **_known("sleep_preserve_parameter_names", "sleep() releases all weights"),
    # The model and its files.
    **_known("override_pooler_config", "pass pooler_config"),
    **_known("task", "pass runner='pooling', or runner='generate'", _one_of("auto", "generate")),
    **_known("convert", "runner='pooling' takes what the checkpoint has: its hidden states, or the "
             "scores of a ...ForSequenceClassification", _one_of("auto", "none", "embed")),
    **_known("config_format", "config.json is the only format", _one_of("auto", "hf")),
    **_known("tokenizer_mode", "the checkpoint's tokenizer.json is used, by the tokenizers library",
             _one_of("auto", "hf")),
    **_known("model_weights", "pass the folder with config.json and weights as model"),
    **_known("tokens_only", "skip_tokenizer_init=True takes and returns token ids", _off),
    **_known("hf_config_path", "config.json must be in the folder of the weights"),
    **_known("hf_token", "set HF_TOKEN, or log in with `hf auth login`", _on),
    **_known("model_class_overrides", "nanoserve.register_model(name, class) adds a model"),
    **_known("quantization_config", "the checkpoint's config is read; set quantization= otherwise"),
    **_known("weight_transfer_config", "llm.update_weights() replaces weights"),
    **_known("code_revision", "code in a checkpoint is never run for a model"),
    **_known("tokenizer_revision", "pass tokenizer=FOLDER with the version to use"),
    **_known("rope_scaling rope_theta", "pass hf_overrides={'rope_scaling': ...}, as in "
             "config.json"),
    **_known("disable_sliding_window", "the windows of config.json apply; a smaller "
             "max_model_len makes them ineffective", _off),
    **_known("override_attention_dtype", "attention computes in the model's dtype"),
    **_known("model_loader_extra_config ignore_patterns", "only files that are read are downloaded",
             lambda value: _is_empty(value) or value in ("original/**/*", ["original/**/*"])),
    **_known("limit_mm_per_prompt", _IMAGES, _anything),
    **_known("skip_mm_profiling mm_processor_cache_gb mm_processor_cache_type "
             "mm_shm_cache_max_object_size_mb disable_mm_preprocessor_cache mm_encoder_tp_mode "
             "interleave_mm_strings disable_chunked_mm_input media_io_kwargs mm_processor_kwargs "
             "allowed_local_media_path allowed_media_domains language_model_only mm_encoder_only "
             "mm_hasher_algorithm mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
             "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin mm_tensor_ipc "
             "video_pruning_method mm_processor_device mm_ipc_gpu_memory_gb "
             "mm_device_do_normalize enable_mm_processor_stats",
             _TEXT, _anything),
    **_known("enable_mm_embeds", _IMAGES, lambda value: _is_empty(value) or value == 0),
    **_known("mm_encoder_attn_backend video_pruning_rate default_mm_loras "
             "enable_multimodal_encoder_data_parallel", _TEXT,
             lambda value: _is_empty(value) or value == 0),
    **_known("enable_return_last_hidden_states return_sampling_mask",
             "outputs are tokens, text and log-probabilities", _off),
    # Steps and caches.
    **_known("max_num_partial_prefills max_long_partial_prefills",
             "limit the tokens of one sequence with long_prefill_token_threshold", _one),
    **_known("max_num_scheduled_tokens", "use max_num_batched_tokens"),
    **_known("max_num_active_seqs", "use max_num_seqs"),
    **_known("max_num_queued_reqs max_num_queued_tokens",
             "`nanoserve serve --max-queue N` answers 429 when N sequences wait"),
    **_known("long_prefill_token_threshold_adaptive",
             "long_prefill_token_threshold is one number for all steps", _off),
    **_known("watermark", "no block is reserved: without one, sequences are preempted", _is_size),
    **_known("prefill_schedule_interval", "every step may begin with prompts", _one),
    **_known("prefix_match_unit", "cached prefixes are whole blocks of block_size tokens"),
    **_known("prefix_cache_retention_interval", "the blocks used least recently are evicted first"),
    **_known("kv_cache_dtype_skip_layers", "all layers have one kv_cache_dtype"),
    **_known("swa_bounded_replay", "tokens outside a window are never computed again", _off),
    **_known("use_fp64_gumbel", "noise is float32 and the same on every device", _off),
    **_known("num_lookahead_slots", "draft tokens use only free blocks", _one_of(0)),
    **_known("external_parameters additional_config", "nothing here reads it"),
    **_known("cpu_offload_gb", _NOT_MOVED, lambda value: value in (0, None)),
    **_known("offload_group_size", _NOT_MOVED, _one_of(0)),
    **_known("cpu_offload_params offload_params", _NOT_MOVED),
    **_known("offload_num_in_group offload_prefetch_step", _NOT_MOVED, _one),
    **_known("offload_backend", _NOT_MOVED, _one_of("auto")),
    **_known("kv_offloading_backend", _HOST, _one_of("native")),
    **_known("calculate_kv_scales", "scales are per token and head, and always computed", _off),
    **_known("kv_sharing_fast_prefill", _STATE, _off),
    **_known("disable_cascade_attn", "there is no cascade attention", _anything),
    **_known("mamba_cache_dtype mamba_ssm_cache_dtype", _RECURRENT, _one_of("auto")),
    **_known("mamba_block_size", _RECURRENT),
    **_known("mamba_backend mamba_ssu_algorithm mamba_cache_mode mamba_cache_philox_rounds "
             "enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint "
             "use_replayssm replayssm_buffer_len gdn_prefill_backend kda_prefill_backend "
             "kda_decode_backend", _RECURRENT, _anything),
    **_known("diffusion_config engram_config mamba_config", _STATE),
    **_known("stream_interval", "it is an option of AsyncLLM and of `nanoserve serve`", _one),
    # Compilers and graphs.
    **_known("compilation_config optimization_level", _COMPILED,
             lambda value: value in ({}, 0) and value is not False),
    **_known("cuda_graph_sizes cudagraph_capture_sizes max_cudagraph_capture_size", _GRAPHS),
    **_known("attention_config ir_op_priority", _KERNELS),
    **_known("moe_backend linear_backend sparse_indexer_topk_backend", _KERNELS, _one_of("auto")),
    **_known("enable_flashinfer_autotune", _KERNELS, _anything),
    **_known("performance_mode", "max_num_seqs and max_num_batched_tokens trade latency for "
             "throughput", _one_of("balanced")),
    # More than one device, machine or engine.
    **_known("nnodes", _MACHINES, _one),
    **_known("node_rank", _MACHINES, _one_of(0)),
    **_known("master_addr", _MACHINES),
    **_known("master_port", _MACHINES, _is_size),
    **_known("device_ids", "set CUDA_VISIBLE_DEVICES"),
    **_known("numa_bind", _NUMA, _off),
    **_known("numa_bind_nodes numa_bind_cpus", _NUMA),
    **_known("cpu_distributed_timeout_seconds", "use distributed_timeout_seconds"),
    **_known("enable_fault_tolerance", _FAULTS, _off),
    **_known("fault_tolerance_config", _FAULTS),
    **_known("dcp_kv_cache_interleave_size cp_kv_cache_interleave_size", _RANKS, _one),
    **_known("dcp_comm_backend dcp_q_replicate", _RANKS),
    **_known("enable_batch_sharded_sampling", "sampling is not distributed: rank 0 samples", _off),
    **_known("enable_hc_sp", _RANKS, _off),
    **_known("dp_sync_interval", _REPLICAS, _is_size),
    **_known("data_parallel_multi_port_external_lb", _REPLICAS),
    **_known("data_parallel_size data_parallel_size_local", _REPLICAS, _one),
    **_known("decode_context_parallel_size prefill_context_parallel_size", _RANKS, _one),
    **_known("data_parallel_backend", _REPLICAS, _one_of("mp")),
    **_known("data_parallel_rank data_parallel_start_rank data_parallel_address "
             "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb",
             _REPLICAS),
    **_known("ray_workers_use_nsight worker_use_ray engine_use_ray",
             "set distributed_executor_backend='ray'", _off),
    **_known("worker_cls", "workers come from nanoserve.worker", _one_of("auto")),
    **_known("worker_extension_cls", "workers come from nanoserve.worker"),
    **_known("enable_expert_parallel", _EXPERTS, _anything),
    **_known("enable_eplb enable_dbo eplb_log_balancedness "
             "disable_nccl_for_dp_synchronization", _EXPERTS, _off),
    **_known("expert_placement_strategy", _EXPERTS, _one_of("linear")),
    **_known("all2all_backend eplb_config", _EXPERTS),
    **_known("enable_elastic_ep", _EXPERTS, _off),
    **_known("elastic_ep_max_dp_size", _EXPERTS),
    **_known("enable_ep_weight_filter", _EXPERTS, _anything),
    **_known("ubatch_size", _EXPERTS, _one_of(0)),
    **_known("num_redundant_experts", _EXPERTS, _one_of(0)),
    **_known("eplb_window_size eplb_step_interval dbo_decode_token_threshold "
             "dbo_prefill_token_threshold", _EXPERTS, _is_size),
    **_known("ec_transfer_config ec_manager_config",
             "there are no encoders, whose outputs could be transferred"),
    # Adapters.
    **_known("enable_lora_bias enable_prompt_adapter", _LORA, _off),
    **_known("fully_sharded_loras", "each rank has all of A of a column-parallel layer", _off),
    **_known("lora_dtype", "adapters have the model's dtype", _one_of("auto")),
    **_known("lora_extra_vocab_size long_lora_scaling_factors max_lora_cls_labels", _LORA,
             _anything),
    **_known("lora_target_modules", "the tensors of an adapter determine its modules"),
    **_known("enable_tower_connector_lora enable_mixed_moe_lora_format enable_moe_shared_loras",
             _LORA, _off),
    **_known("specialize_active_lora", "CUDA graphs of steps with adapters (`adapter_kernels` of "
             "`kernel_config`) compute any number of them", _off),
    # Structured output and reasoning.
    **_known("reasoning_parser enable_reasoning", _REASONING),
    **_known("reasoning_parser_plugin reasoning_config", "`nanoserve serve --help` has the names "
             "for --reasoning-parser"),
    **_known("watermark_config", "outputs have no watermark"),
    **_known("aux_output_config", "outputs are tokens, text and log-probabilities"),
    **_known("spec_method spec_model spec_tokens", "pass speculative_config={'method': ..., "
             "'model': ..., 'num_speculative_tokens': ...}"),
    **_known("guided_decoding_backend", _GUIDED, _one_of("auto")),
    **_known("guided_decoding_disable_fallback", "there is no fallback", _anything),
    **_known("guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties",
             "use the fields of StructuredOutputsParams", _off),
    **_known("logits_processor_pattern io_processor_plugin", "pass logits_processors in a program"),
    # Observability.
    **_known("show_hidden_metrics_for_version collect_detailed_traces "
             "profiler_config custom_histogram_buckets", _OBSERVED),
    **_known("per_request_spec_decode_metrics", _OBSERVED, _one_of("none", False)),
    **_known("kv_cache_metrics cudagraph_metrics "
             "enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details "
             "enable_trace_replay", _OBSERVED, _off),
    **_known("kv_cache_metrics_sample", _OBSERVED, _is_size),
    **_known("jit_monitor_mode jit_monitor_verbose", "`nanoserve bench` and the log report what is "
             "compiled", _anything),
    **_known("logging_config log_config_file", _LOGGING),
    **_known("log_level", _LOGGING, _one_of("info", "INFO")),
}  # fmt: skip
