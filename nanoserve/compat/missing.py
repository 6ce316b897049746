"""Names of vLLM's that nanoserve does not have, and what to do instead."""

from typing import NoReturn

_POOLING = "nanoserve generates; for embeddings and scores take sentence-transformers or vLLM"
_PROFILING = "trace='run.jsonl' records every step, and torch.profiler profiles a program"
_WORKERS = (
    "no function of yours runs in the workers. For other weights: llm.sleep(level=2), write them "
    "with save_pretrained() into the folder that the model came from, llm.wake_up(). Do not copy "
    "into the parameters of llm.engine.executor.model: most weights are kept in other forms, which "
    "load_state_dict(strict=False) leaves as they were without an error"
)

_MODEL = (
    "with one process, llm.engine.executor.model is the model, to look at: most weights are kept "
    "in other forms"
)

# Methods of `LLM`.
METHODS = {
    **dict.fromkeys(("embed", "encode", "classify", "score", "reward"), _POOLING),
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILING),
    **dict.fromkeys(("collective_rpc", "apply_model"), _WORKERS),
    **dict.fromkeys(
        ("enqueue", "enqueue_chat", "wait_for_completion"),
        "llm.engine.add_request() queues and llm.engine.step() runs",
    ),
    "set_tokenizer": "give LLM(..., tokenizer=FOLDER)",
    "preprocess_chat": "chat() renders and tokenizes; get_tokenizer().apply_chat_template does too",
    "model_config": "it is llm.engine.model_config",
    "model_executor": _MODEL,
    "vllm_config": "llm.engine.config has all options",
    "abort": "it is llm.engine.abort_request(request_id)",
    "add_request": "it is llm.engine.add_request()",
    "step": "it is llm.engine.step()",
    "is_finished": "it is not llm.engine.has_unfinished_requests()",
}
# Of what vLLM's `ModelConfig` has.
MODEL_CONFIG = {
    "max_model_len": "how long a sequence may be is llm.engine.input_processor.max_model_len",
    **dict.fromkeys(
        ("hf_config", "hf_text_config"),
        "names of config.json are attributes; the file lies in llm.engine.config.model, and "
        "transformers.AutoConfig reads it",
    ),
    "get_vocab_size": "it is vocab_size",
    "get_hidden_size": "it is hidden_size",
    "get_head_size": "it is head_dim",
    "get_num_layers": "it is num_hidden_layers",
    "get_num_attention_heads": "it is num_attention_heads",
    "get_num_kv_heads": "it is num_key_value_heads",
    "model_type": "it is architecture",
    "quantization": "it is llm.engine.config.quantization",
    **dict.fromkeys(
        ("model", "tokenizer", "seed", "enforce_eager", "trust_remote_code", "revision"),
        "llm.engine.config has all options",
    ),
}
# What scripts import.
NAMES = {
    **dict.fromkeys(("PoolingParams", "PoolingRequestOutput", "EmbeddingRequestOutput"), _POOLING),
    "AsyncStream": "iterate over what AsyncLLM.generate() returns",
    "CompilationConfig": "kernels are fused by hand and nothing is compiled by torch",
    "GuidedDecodingParams": "StructuredOutputsParams has the same fields; give it as "
    "SamplingParams(structured_outputs=...)",
    "KVTransferConfig": "K and V stay in one engine",
    "LoRARequest": "merge the adapter into its base (peft: merge_and_unload) and load that",
    "ModelRegistry": "nanoserve.models.registry.register_model(name, class) adds a model",
    "ProfilerConfig": _PROFILING,
    "SchedulerConfig": "options are arguments of LLM(...)",
    "ModelConfig": "nanoserve.checkpoint.model_config.ModelConfig is what a config.json says",
}


# What `nanoserve.compat` exports, and `nanoserve` does not.
IN_DROP_IN = {
    *("AdapterLogitsProcessor", "AsyncLLMEngine", "BatchUpdate", "Counter", "Gauge", "Histogram"),
    *("FlexibleArgumentParser", "LogitsProcessor", "Metric", "MoveDirectionality", "PromptType"),
    *("RequestLogitsProcessor", "Vector", "VllmConfig", "cleanup_dist_env_and_memory"),
    *("init_logger", "process_dict_updates"),
}


def refuse(module: str, name: str) -> NoReturn:
    """Raise `AttributeError` for a name that a module has not, with what there is instead.

    Where that is known it is an `ImportError`: `from ... import` would say nothing of the other.
    """
    told = f"module {module!r} has no attribute {name!r}"
    if name in IN_DROP_IN:
        raise ImportError(f"{told}: from nanoserve.compat import {name}")
    if name in NAMES:
        raise ImportError(f"{told}: {NAMES[name]}")
    raise AttributeError(told)
