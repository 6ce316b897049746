"""Flags of vLLM and other servers that `nanoserve serve` does not have.

As with engine options, a value that matches the behaviour here is accepted, and any other value is
rejected with what to use instead.
"""

from collections.abc import Callable
from typing import Any

from nanoserve.compat.option_table import Foreign


def _known(
    names: str, instead: str, accepts: Callable[[Any], bool] = lambda value: False
) -> dict[str, Foreign]:
    return {name: Foreign(accepts, instead) for name in names.split()}


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == one and type(value) is type(one) for one in values)


def _anything(value: Any) -> bool:
    return True


_off, _on = _one_of(False), _one_of(True)
_LORA = "use --enable-lora --lora-modules NAME=PATH"
_PROXY = "put a proxy such as nginx or Caddy in front of the server"
_LOGGED = "neither prompts nor answers are logged"
_ACCESS = "there is no access log unless --access-log is given"
_ONE_PROCESS = "one process serves HTTP, and --data-parallel-size N starts several engines"
_PARSERS = "the formats are those of --tool-call-parser"
_GRPC = "the server speaks HTTP"
_H11 = "--max-body-bytes, --max-connections and --body-timeout limit what clients send"
_NO_DOCS = "/docs and /openapi.json are served only with --enable-offline-docs"
_NO_EFFORT = "thinking of type disabled turns reasoning off in the chat template"
_OTHER_PROTOCOLS = "the server has the APIs of OpenAI and of Anthropic, and no other protocol"

# All flags of `vllm serve` (0.32) that are neither flags here nor options of vLLM's engine.
FLAGS: dict[str, Foreign] = {
    # Prompts.
    **_known("trust_request_mm_kwargs", "nanoserve runs text models only", _anything),
    **_known("response_role", "the role of answers is always assistant", _one_of("assistant")),
    **_known("cohere_is_reasoning_model cohere_format", _OTHER_PROTOCOLS, _anything),
    **_known("anthropic_disabled_thinking_effort", _NO_EFFORT, _anything),
    # Tools.
    **_known("exclude_tools_when_tool_choice_none", "omit `tools` in such a request", _off),
    **_known("tool_parser_plugin", _PARSERS, _one_of("")),
    **_known("tool_strict_level", "calls of a tool with strict: true follow its schema",
             _one_of("auto")),
    **_known("tool_server", "clients call the tools"),
    # Answers.
    **_known("enable_per_request_metrics", "/metrics has latencies of all requests", _off),
    **_known("enable_request_id_headers", "each response has an x-request-id, which is the "
             "client's if it has sent one", _anything),
    **_known("sse_keep_alive_interval", "use --heartbeat-interval S"),
    **_known("fingerprint_mode", "system_fingerprint is null", _one_of("none")),
    **_known("fingerprint_value", "system_fingerprint is null"),
    # Endpoints.
    **_known("enable_tokenizer_info_endpoint", "/tokenize and /detokenize are served", _off),
    **_known("enable_scale_out", _OTHER_PROTOCOLS, _off),
    **_known("disable_fastapi_docs", _NO_DOCS, _anything),
    **_known("enable_flash_late_interaction", "nanoserve generates text, not scores", _anything),
    # Logs.
    **_known("max_log_len", _LOGGED, _anything),
    **_known("enable_log_outputs log_error_stack", _LOGGED, _off),
    **_known("enable_log_deltas", _LOGGED, _anything),
    **_known("disable_uvicorn_access_log", _ACCESS, _anything),
    # Sockets and processes.
    **_known("h11_max_incomplete_event_size h11_max_header_count", _H11),
    **_known("headless", _ONE_PROCESS, _off),
    **_known("api_server_count", _ONE_PROCESS, _one_of(1)),
    **_known("grpc", _GRPC, _off),
    **_known("grpc_port", _GRPC),
    **_known("data_parallel_supervisor_port dp_supervisor_probe_interval_s "
             "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold",
             "with --data-parallel-size N, Ray supervises the engines", _anything),
}  # fmt: skip
_TEMPLATES = "templates are always Jinja templates; remove it"
_ON_GPU = "all layers are on one device: --device cuda or --device cpu"
# Flags of llama.cpp, SGLang, TGI and older versions, and what to use here.
ELSEWHERE = {
    **dict.fromkeys(("-c", "--ctx-size", "--context-length", "--max-total-tokens", "--max-seq-len"),
                    "use --max-model-len N"),
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--gpu-layers"), _ON_GPU),
    **dict.fromkeys(("--jinja", "--no-jinja"), _TEMPLATES),
    **dict.fromkeys(("-a", "--alias"), "use --served-model-name NAME"),
    **dict.fromkeys(("-np", "--parallel", "--max-running-requests", "--max-concurrent-requests"),
                    "use --max-num-seqs N"),
    **dict.fromkeys(("-m", "--model-path", "--model-id", "--model-tag", "-hf", "-hfr", "--hf-repo"),
                    "the model is the first argument: nanoserve serve MODEL"),
    **dict.fromkeys(("-t", "--threads"), "use --num-threads N"),
    **dict.fromkeys(("-b", "--batch-size", "--max-batch-prefill-tokens", "--chunked-prefill-size"),
                    "use --max-num-batched-tokens N"),
    **dict.fromkeys(("-fa", "--flash-attn"), "use --attention-backend NAME"),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"), "use --kv-cache-dtype"),
    **dict.fromkeys(("-md", "--model-draft"), "use --speculative-config '{\"method\": "
                    "\"draft_model\", \"model\": ...}'"),
    **dict.fromkeys(("--n-predict", "--predict", "--temp", "--temperature", "--top-k", "--top-p",
                     "--min-p", "--max-tokens"),
                    "send it with each request, or set --override-generation-config"),
    **dict.fromkeys(("--tp", "--tp-size", "--num-shard", "-sm"), "use --tensor-parallel-size N"),
    **dict.fromkeys(("--pp", "--pp-size"), "use --pipeline-parallel-size N"),
    **dict.fromkeys(("--dp", "--dp-size"), "use --data-parallel-size N"),
    **dict.fromkeys(("--mem-fraction-static", "--cuda-memory-fraction"),
                    "use --gpu-memory-utilization X"),
    **dict.fromkeys(("--cont-batching", "-cb", "--mlock", "--no-mmap", "--no-webui", "-ub"),
                    "remove it"),
    **dict.fromkeys(("--reasoning-format",), "use --reasoning-parser NAME"),
    **dict.fromkeys(("--timeout",), "use --body-timeout S, or the client's own"),
    **dict.fromkeys(("--embedding", "--embeddings", "--is-embedding", "--rerank", "--reranking"),
                    "use --runner pooling"),
    **dict.fromkeys(("--mmproj", "-mm"), "nanoserve runs text models only"),
    **dict.fromkeys(("--lora", "--lora-scaled"), _LORA),
    **dict.fromkeys(("--disable-radix-cache",), "use --no-enable-prefix-caching"),
    **dict.fromkeys(("--disable-cuda-graph",), "use --enforce-eager"),
    **dict.fromkeys(("--schedule-policy",), "use --scheduling-policy NAME"),
    **dict.fromkeys(("--api-key-file",), "set NANOSERVE_API_KEY"),
    **dict.fromkeys(("--quantize",), "use --quantization NAME"),
}  # fmt: skip
