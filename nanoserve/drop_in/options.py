"""vLLM's engine options -> ours. Each is known by name.

Some have another name or other values here. Of the others, a value that asks for what nanoserve
does anyway is accepted, and any other one refused with what to do instead: an option that is
ignored in silence would be worse than none.
"""

import logging
from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple

from nanoserve.checks import is_number, shown

logger = logging.getLogger(__name__)

# vLLM's name, or nano-vllm's, and ours.
RENAMED = {
    "num_gpu_blocks_override": "num_kv_blocks",
    "num_kvcache_blocks": "num_kv_blocks",
    "kvcache_block_size": "block_size",
}
# Values that have another name here.
SPELLINGS: dict[str, dict[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},
    "attention_backend": {
        "FLASH_ATTN": "flash_attn",
        "TRITON_ATTN": "triton",
        "TORCH_SDPA": "torch",
        "CPU_ATTN": "auto",
    },
    "load_format": {"hf": "auto"},
    "distributed_executor_backend": {"uni": "mp"},
}
# What to do about values that are none of ours.
_ADVICE = {
    ("load_format", "pt"): "pickles may run code: save the model anew, as safetensors",
    ("load_format", "gguf"): "give the file itself as model: LLM('folder/model-Q4_K_M.gguf')",
    ("load_format", "sharded_state"): "each rank reads its part of a plain checkpoint",
    ("load_format", "mistral"): "take the repository's files in Hugging Face's form",
    ("load_format", "bitsandbytes"): "bitsandbytes checkpoints are read with load_format='auto'",
    ("attention_backend", "FLASHINFER"): "take 'triton' or 'flash_attn'",
    ("distributed_executor_backend", "external_launcher"): "'mp' starts the ranks, or 'ray'",
    ("kv_cache_dtype", "fp8_e5m2"): "take 'fp8', which is e4m3 with a scale per token and head",
}


# Other engines' names.
_LIKE = {
    "torch_dtype": "dtype",
    "n_ctx": "max_model_len",
    "max_seq_len": "max_model_len",
    "context_length": "max_model_len",
    "n_batch": "max_num_batched_tokens",
    "max_batch_size": "max_num_seqs",
    "max_running_requests": "max_num_seqs",
    "n_threads": "num_threads",
    "n_gpu_layers": "device",
    "device_map": "device",
    "cache_dir": "download_dir",
    "load_in_4bit": "quantization",
    "load_in_8bit": "quantization",
    "attn_implementation": "attention_backend",
    "mem_fraction_static": "gpu_memory_utilization",
    "tp_size": "tensor_parallel_size",
    "tp": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "dp": "data_parallel_size",
    "token": "hf_token",
    "local_files_only": "the environment variable HF_HUB_OFFLINE=1",
}


class Foreign(NamedTuple):
    """An option that is vLLM's and not ours."""

    accepts: Callable[[Any], bool]
    instead: str  # of a value that is not accepted


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is one or (type(value) is type(one) and value == one)
                             for one in values)  # fmt: skip


def _anything(value: Any) -> bool:
    return True


def _is_empty(value: Any) -> bool:
    """Of what is passed in dictionaries, lists and texts."""
    return value in ({}, [], (), "", False)


def _is_size(value: Any) -> bool:
    return is_number(value) and value >= 0


def _known(
    names: str, instead: str, accepts: Callable[[Any], bool] = _is_empty
) -> dict[str, Foreign]:
    return {name: Foreign(accepts, instead) for name in names.split()}


_one, _off, _on = _one_of(1), _one_of(False), _one_of(True)
_TEXT = "nanoserve runs text models only: leave it out"
_REPLICAS = (
    "one engine is one replica, of tensor_parallel_size x pipeline_parallel_size ranks; for "
    "several take `nanoserve serve --data-parallel-size N`, or `nanoserve batch --replicas N`"
)
_RANKS = "ranks are tensor_parallel_size x pipeline_parallel_size"
_EXPERTS = "whole experts are distributed over the ranks of tensor_parallel_size, always"
_LORA = "merge the adapter into its base (peft: merge_and_unload) and load that"
_POOLING = "nanoserve generates; for embeddings and scores take sentence-transformers or vLLM"
_GRAPHS = "which graphs are recorded follows from max_num_seqs; enforce_eager=True records none"
_COMPILED = "kernels are fused by hand and nothing is compiled by torch: leave it out"
_STATE = "no model that nanoserve runs has such a state"
_NOT_MOVED = "weights and K and V stay on their device: take a smaller model, or quantization"
_GUIDED = "give structured_outputs_config={'backend': ...}"
_OBSERVED = "trace='run.jsonl' records every step, and get_metrics() and /metrics count them"

# Everything of vLLM's that is neither in `EngineConfig` nor above. By subject.
FOREIGN: dict[str, Foreign] = {
    # What there is no choice about, because it is always so.
    **_known("enable_chunked_prefill", "prompts are always computed in chunks, of at most "
             "max_num_batched_tokens: leave it out", _on),
    **_known("use_v2_block_manager", "there is one block manager", _anything),
    **_known("enable_sleep_mode", "sleep() and wake_up() always work", _anything),
    **_known("disable_log_requests enable_log_requests", _OBSERVED, _anything),
    **_known("aggregate_engine_logging use_tqdm_on_load", "it changes no result", _anything),
    **_known("swap_space", "a preempted sequence is computed again, not swapped", _is_size),
    **_known("max_seq_len_to_capture max_context_len_to_capture", _GRAPHS, _is_size),
    **_known("disable_async_output_proc", "see async_scheduling", _anything),
    **_known("disable_custom_all_reduce", "NCCL, or gloo on a CPU, reduces", _anything),
    **_known("max_parallel_loading_workers", "16 threads load, at most", _is_size),
    **_known("safetensors_load_strategy pt_load_map_location", "weights are copied from mapped "
             "files in pieces", _one_of("lazy", "auto", "cpu")),
    **_known("served_model_name", "give --served-model-name to `nanoserve serve`", _anything),
    **_known("prefix_caching_hash_algo", "hashes only find a block, and its tokens are compared",
             _anything),
    # The model and its files.
    **_known("task runner convert", _POOLING, _one_of("auto", "generate", "none")),
    **_known("pooler_config override_pooler_config", _POOLING),
    **_known("config_format", "config.json is read", _one_of("auto", "hf")),
    **_known("tokenizer_mode", "the checkpoint's tokenizer.json is used, by the tokenizers library",
             _one_of("auto", "hf")),
    **_known("model_impl", "models are nanoserve's own; see nanoserve.models.registry for yours",
             _one_of("auto", "vllm")),
    **_known("hf_config_path", "config.json lies beside the weights: make a folder of both"),
    **_known("hf_token", "set HF_TOKEN, or log in with `hf auth login`", _on),
    **_known("code_revision", "no code of a checkpoint runs for a model"),
    **_known("tokenizer_revision", "give tokenizer=FOLDER, of the version that you want"),
    **_known("rope_scaling rope_theta", "give hf_overrides={'rope_scaling': ...}, in the words of "
             "config.json"),
    **_known("disable_sliding_window", "the windows of config.json are kept; a shorter "
             "max_model_len switches them off in effect", _off),
    **_known("override_attention_dtype", "attention computes in the model's dtype"),
    **_known("model_loader_extra_config ignore_patterns", "only what is read is fetched",
             lambda value: _is_empty(value) or value in ("original/**/*", ["original/**/*"])),
    **_known("skip_mm_profiling limit_mm_per_prompt mm_processor_cache_gb mm_processor_cache_type "
             "mm_shm_cache_max_object_size_mb disable_mm_preprocessor_cache mm_encoder_tp_mode "
             "interleave_mm_strings disable_chunked_mm_input media_io_kwargs mm_processor_kwargs "
             "allowed_local_media_path allowed_media_domains language_model_only",
             _TEXT, _anything),
    **_known("enable_mm_embeds mm_encoder_attn_backend video_pruning_rate default_mm_loras "
             "enable_multimodal_encoder_data_parallel", _TEXT,
             lambda value: _is_empty(value) or value == 0),
    **_known("enable_return_last_hidden_states enable_return_routed_experts",
             "outputs are tokens, texts and log-probabilities", _off),
    **_known("enable_prompt_embeds", "a prompt is text or token ids", _off),
    # Steps and caches.
    **_known("max_num_partial_prefills max_long_partial_prefills",
             "bound the tokens of one sequence with long_prefill_token_threshold", _one),
    **_known("num_lookahead_slots", "guesses take blocks that are left over", _one_of(0)),
    **_known("scheduler_cls", "to change the policy, see scheduling_policy"),
    **_known("external_parameters additional_config", "there is nothing that would read it"),
    **_known("cpu_offload_gb kv_offloading_size", _NOT_MOVED, lambda value: value in (0, None)),
    **_known("kv_offloading_backend", _NOT_MOVED, _one_of("native")),
    **_known("calculate_kv_scales", "scales are per token and head, and always computed", _off),
    **_known("kv_sharing_fast_prefill", _STATE, _off),
    **_known("disable_hybrid_kv_cache_manager disable_cascade_attn", "there is none", _anything),
    **_known("mamba_cache_dtype mamba_ssm_cache_dtype", _STATE, _one_of("auto")),
    **_known("mamba_block_size", _STATE),
    **_known("logprobs_mode", "log-probabilities are of the model's own distribution",
             _one_of("raw_logprobs")),
    **_known("stream_interval", "it is an option of AsyncLLM and of `nanoserve serve`", _one),
    # Compilers and graphs.
    **_known("compilation_config optimization_level", _COMPILED,
             lambda value: value in ({}, 0) and value is not False),
    **_known("cuda_graph_sizes cudagraph_capture_sizes max_cudagraph_capture_size", _GRAPHS),
    # More than one device, machine or engine.
    **_known("data_parallel_size data_parallel_size_local", _REPLICAS, _one),
    **_known("decode_context_parallel_size prefill_context_parallel_size", _RANKS, _one),
    **_known("data_parallel_backend", _REPLICAS, _one_of("mp")),
    **_known("data_parallel_rank data_parallel_start_rank data_parallel_address "
             "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb",
             _REPLICAS),
    **_known("ray_workers_use_nsight worker_use_ray engine_use_ray",
             "give distributed_executor_backend='ray'", _off),
    **_known("worker_cls", "ranks are nanoserve.worker's", _one_of("auto")),
    **_known("worker_extension_cls", "ranks are nanoserve.worker's"),
    **_known("enable_expert_parallel", _EXPERTS, _anything),
    **_known("enable_eplb enable_dbo eplb_log_balancedness "
             "disable_nccl_for_dp_synchronization", _EXPERTS, _off),
    **_known("expert_placement_strategy", _EXPERTS, _one_of("linear")),
    **_known("all2all_backend eplb_config", _EXPERTS),
    **_known("num_redundant_experts", _EXPERTS, _one_of(0)),
    **_known("eplb_window_size eplb_step_interval dbo_decode_token_threshold "
             "dbo_prefill_token_threshold", _EXPERTS, _is_size),
    **_known("kv_transfer_config kv_events_config ec_transfer_config",
             "K and V stay in one engine"),
    # Adapters.
    **_known("enable_lora enable_lora_bias fully_sharded_loras enable_prompt_adapter", _LORA, _off),
    **_known("max_loras max_lora_rank max_cpu_loras lora_extra_vocab_size lora_dtype "
             "long_lora_scaling_factors", _LORA, _anything),
    # Formats of answers.
    **_known("reasoning_parser", "give --reasoning-parser to `nanoserve serve`"),
    **_known("guided_decoding_backend", _GUIDED, _one_of("auto")),
    **_known("guided_decoding_disable_fallback", "there is no fallback", _anything),
    **_known("guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties",
             "they are fields of StructuredOutputsParams", _off),
    **_known("logits_processor_pattern io_processor_plugin", "programs pass logits_processors"),
    # Watching.
    **_known("show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces "
             "profiler_config", _OBSERVED),
}  # fmt: skip


def translate(
    config_class: type, model: str, given: dict[str, Any], known: Collection[str]
) -> dict[str, Any]:
    """The options `given` to an engine of `model`, as the fields of `EngineConfig`, the `known`.

    Raises `ValueError`: for a name that neither we nor vLLM have, with those that are near it, and
    for a value of one of vLLM's that asks for what is not done here, with what to do instead.
    """
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in FOREIGN:
            _accept(name, value)
            continue
        ours = RENAMED.get(name, name)
        if ours not in known:
            raise ValueError(_unknown(name, known))
        if ours != name and ours in given:
            raise ValueError(f"{name}={shown(value)} is {ours}, which is given as well")
        options[ours] = _spelled(ours, value)
    if options.get("logits_processors"):
        options["logits_processors"] = _processors(partial(config_class, model), options)
    return options


def _accept(name: str, value: Any) -> None:
    accepts, instead = FOREIGN[name]
    told = "..." if name == "hf_token" else shown(value)  # which is a secret
    if not accepts(value):
        raise ValueError(f"{name}={told} is vLLM's and not implemented here: {instead}")
    logger.info("%s=%s changes nothing here: %s", name, told, instead)


def _unknown(name: str, known: Collection[str]) -> str:
    names = {*known, *FOREIGN, *RENAMED}
    if name in _LIKE:
        return f"unknown option {name!r}: did you mean {_LIKE[name]}?"
    near = _of_the_same_words(name, names) or get_close_matches(name, sorted(names), cutoff=0.7)
    if not near:
        return f"unknown option {name!r}; known options are {sorted(known)}"
    return f"unknown option {name!r}: did you mean {' or '.join(near[:3])}?"


def _of_the_same_words(name: str, names: Collection[str]) -> list[str]:
    """As "gpu_mem_utilization" and "gpu_memory_utilization": each word begins as the other's."""
    words = name.lower().replace("-", "_").split("_")
    found = []
    for one in sorted(names):
        others = one.split("_")
        pairs = zip(words, others, strict=False)
        if len(words) == len(others) and all(a.startswith(b[:3]) for a, b in pairs):
            found.append(one)
    return found


def _spelled(name: str, value: Any) -> Any:
    """A value as `EngineConfig` has it; data types may be torch's."""
    if name == "dtype" and type(value).__name__ == "dtype":
        value = str(value).removeprefix("torch.")
    spellings = SPELLINGS.get(name, {})
    if isinstance(value, str):
        instead = _ADVICE.get((name, value))
        if instead is not None:
            raise ValueError(f"{name}={value!r} is vLLM's and not implemented here: {instead}")
        return spellings.get(value, value)
    return value


def _processors(make_config: Callable[..., Any], options: dict[str, Any]) -> Any:
    """vLLM's classes among them, in the form of those that see all rows of a step at once."""
    given = options["logits_processors"]
    if not isinstance(given, (list, tuple)) or all(map(_is_plain, given)):
        return given
    from nanoserve.drop_in.logits_processors import VllmProcessor, load

    if options.get("speculative_config") is not None:
        raise ValueError(
            "logits_processors that are vLLM's classes know nothing of guesses: leave out "
            "speculative_config, or give callables (logits, states), see "
            "nanoserve.sampling.processors"
        )
    others = {name: value for name, value in options.items() if name != "logits_processors"}
    make = partial(VllmProcessor, vllm_config=make_config(**others))
    loaded = map(load, given)
    return tuple(make(entry) if isinstance(entry, type) else entry for entry in loaded)


def _is_plain(processor: Any) -> bool:
    return callable(processor) and not isinstance(processor, type)
