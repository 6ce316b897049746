"""Names of vLLM that nanoserve does not have, and what to use instead."""

from typing import NoReturn

_REWARD = (
    "classify() has the scores of a ...ForSequenceClassification, and encode() the hidden states"
)
_PROFILING = "trace='run.jsonl' records every step, and torch.profiler profiles a program"
_WORKERS = (
    "a function of the program cannot be sent to other ranks. Register one of a module with "
    "nanoserve.register_worker_function(), and call it on every rank with llm.collective_rpc(). To "
    "replace weights, call llm.update_weights(state_dict). Do not copy into the parameters of "
    "llm.engine.executor.model: "
    "most weights are kept in other forms, which load_state_dict(strict=False) leaves unchanged "
    "without an error"
)

_MODEL = (
    "with one process, llm.engine.executor.model is the model, for inspection: most weights are "
    "kept in other forms; llm.update_weights() replaces them"
)

# Attributes of `LLM`.
METHODS = {
    "reward": _REWARD,
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILING),
    "apply_model": _WORKERS,
    **dict.fromkeys(
        ("enqueue", "enqueue_chat", "wait_for_completion"),
        "call llm.engine.add_request() to queue and llm.engine.step() to run",
    ),
    "set_tokenizer": "pass LLM(..., tokenizer=FOLDER)",
    "preprocess_chat": "chat() renders and tokenizes; get_tokenizer().apply_chat_template does too",
    "model_config": "use llm.engine.model_config",
    "model_executor": _MODEL,
    "vllm_config": "llm.engine.config has all options",
    "abort": "use llm.engine.abort_request(request_id)",
    "add_request": "use llm.engine.add_request()",
    "step": "use llm.engine.step()",
    "is_finished": "use not llm.engine.has_unfinished_requests()",
}
# Attributes of vLLM's `ModelConfig`.
MODEL_CONFIG = {
    "max_model_len": "use llm.engine.input_processor.max_model_len",
    **dict.fromkeys(
        ("hf_config", "hf_text_config"),
        "entries of config.json are attributes here; the file is in llm.engine.config.model, and "
        "transformers.AutoConfig reads it",
    ),
    "get_vocab_size": "use vocab_size",
    "get_hidden_size": "use hidden_size",
    "get_head_size": "use head_dim",
    "get_num_layers": "use num_hidden_layers",
    "get_num_attention_heads": "use num_attention_heads",
    "get_num_kv_heads": "use num_key_value_heads",
    "model_type": "use architecture",
    "quantization": "use llm.engine.config.quantization",
    **dict.fromkeys(
        ("model", "tokenizer", "seed", "enforce_eager", "trust_remote_code", "revision"),
        "llm.engine.config has all options",
    ),
}
# Names that scripts import.
NAMES = {
    "AsyncStream": "iterate over what AsyncLLM.generate() returns",
    "CompilationConfig": "kernels are fused by hand and nothing is compiled by torch",
    "GuidedDecodingParams": "StructuredOutputsParams has the same fields; pass it as "
    "SamplingParams(structured_outputs=...)",
    "KVTransferConfig": "pass kv_transfer_config as a dictionary, with connectors of nanoserve",
    "ModelRegistry": "nanoserve.models.registry.register_model(name, class) adds a model",
    "ProfilerConfig": _PROFILING,
    "SchedulerConfig": "options are arguments of LLM(...)",
    "ModelConfig": "nanoserve.checkpoint.model_config.ModelConfig has the entries of config.json",
}


# Names that `nanoserve.compat` exports and `nanoserve` does not.
IN_DROP_IN = {
    *("AdapterLogitsProcessor", "AsyncLLMEngine", "BatchUpdate", "Counter", "Gauge", "Histogram"),
    *("FlexibleArgumentParser", "LogitsProcessor", "Metric", "MoveDirectionality", "PromptType"),
    *("RequestLogitsProcessor", "Vector", "VllmConfig", "cleanup_dist_env_and_memory"),
    *("init_logger", "process_dict_updates"),
}


def refuse(module: str, name: str) -> NoReturn:
    """Raise `AttributeError` for a name that a module does not have.

    If a replacement is known, raise `ImportError` instead, because `from ... import` replaces the
    message of an `AttributeError`.
    """
    message = f"module {module!r} has no attribute {name!r}"
    if name in IN_DROP_IN:
        raise ImportError(f"{message}: from nanoserve.compat import {name}")
    if name in NAMES:
        raise ImportError(f"{message}: {NAMES[name]}")
    raise AttributeError(message)
