"""Endpoints of other servers that nanoserve lacks, with a hint on what to use instead."""

from nanoserve.serve.http.errors import ApiError

_CHAT = "use /v1/chat/completions"
_NO_POOLING = (
    "a server of a model that pools (`nanoserve serve MODEL --runner pooling`) has /v1/embeddings, "
    "/pooling, /classify, /score and /rerank"
)
_NO_MODERATION = "nanoserve has no such model; ask one in a chat completion, or classify with one"
_NO_LORA = "start the server with --enable-lora, and with --lora-root or --lora-modules"
_TEXT_ONLY = "nanoserve runs text models only"
_STATELESS = (
    "use /v1/responses with previous_response_id, or /v1/chat/completions with all messages"
)
_BATCH = "`nanoserve batch IN.jsonl OUT.jsonl` answers a file of requests"
_FOR_DEVELOPERS = "start the server with --enable-dev-endpoints, or use the class LLM in a program"
_IN_A_PROGRAM = "the server does not offer it; the class LLM in a program does"
_DOCS = "start the server with --enable-offline-docs, or read docs/reference/server.md"
_LOAD = "start the server with --enable-server-load-tracking, or use /metrics"

# Endpoints of the OpenAI API, and endpoints that gateways forward under the same names, with or
# without /v1. They return 400, because LiteLLM's proxy takes a 404 or 5xx as a sign that the whole
# server is down, and sends it no requests at all for a few seconds.
_FORWARDED = {
    **dict.fromkeys(("embeddings", "embed", "embedding", "pooling"), _NO_POOLING),
    **dict.fromkeys(("rerank", "score", "classify"), _NO_POOLING),
    "moderations": _NO_MODERATION,
    "messages/batches": _BATCH,
    "responses/compact": "shorten the items of input",
    "complete": "use /v1/completions",
    "generate": "use /v1/completions",
    "edits": _CHAT,
    **dict.fromkeys(("load_lora_adapter", "unload_lora_adapter"), _NO_LORA),
    "fine_tuning": "nanoserve trains no models; it serves LoRA adapters, see --lora-modules",
    **dict.fromkeys(("audio", "images", "videos", "realtime", "ocr"), _TEXT_ONLY),
    **dict.fromkeys(("files", "uploads", "batches"), _BATCH),
    **dict.fromkeys(("assistants", "threads", "conversations", "vector_stores"), _STATELESS),
    **dict.fromkeys(("containers", "evals", "search"), _CHAT),
    "engines": "use /v1/models",
    "chat/completions/render": "use /tokenize, which takes the same messages",
    "completions/render": "use /tokenize",
}
# Endpoints of other servers, which clients use to detect the kind of server. They return 404.
_OTHERS = {
    "api/chat": _CHAT,
    "api/generate": "use /v1/completions",
    **dict.fromkeys(("api/tags", "api/show", "api/ps", "get_model_info"), "use /v1/models"),
    **dict.fromkeys(("api/embed", "api/embeddings"), _NO_POOLING),
    "api/version": "use /version",
    **dict.fromkeys(("api/pull", "api/create"), "start the server with the model"),
    "completion": "use /v1/completions",
    "infill": "use /v1/completions, with the prompt in the model's fill-in-the-middle format",
    "generate_stream": "use /v1/completions with stream=true",
    "invocations": _CHAT,
    "apply-template": "use /tokenize, which takes the same messages",
    "count_tokens": "use /tokenize",
    **dict.fromkeys(("props", "info", "model_info"), "use /v1/models, which has max_model_len"),
    **dict.fromkeys(("slots", "get_load"), "use /metrics"),
    "load": _LOAD,
    **dict.fromkeys(("server_info", "get_server_info"), _FOR_DEVELOPERS),
    "tokenizer_info": "use /tokenize",
    "lora-adapters": _NO_LORA,
    **dict.fromkeys(("sleep", "wake_up", "is_sleeping", "reset_prefix_cache"), _FOR_DEVELOPERS),
    **dict.fromkeys(("pause", "resume", "is_paused", "update_weights"), _FOR_DEVELOPERS),
    "collective_rpc": _IN_A_PROGRAM,
    **dict.fromkeys(("start_profile", "stop_profile", "flush_cache"), _IN_A_PROGRAM),
    **dict.fromkeys(("docs", "redoc", "openapi.json", "swagger"), _DOCS),
    **dict.fromkeys(("ready", "live_check", "health_generate"), "use /readyz, or /livez"),
    "stats": "use /metrics",
    "v1beta": _CHAT,
}
# nanoserve's own endpoints, for clients that omit the version or use another version.
_PRESENT = ("chat/completions", "completions", "responses", "models")
_PATHS = ("v1/chat/completions", "v1/completions", "v1/responses", "v1/messages",
          "v1/messages/count_tokens", "v1/models", "tokenize", "detokenize", "health", "ping",
          "version", "metrics")  # fmt: skip
_OF_MESSAGES = ("messages", "messages/count_tokens", "v1/messages", "v1/messages/count_tokens")
_PREFIXES = ("openai/v1/", "api/v1/", "inference/v1/", "v1/", "v2/", "openai/")
_ALL = (
    "there are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, "
    "/tokenize, /detokenize, /health"
)


def missing_endpoint(method: str, path: str) -> ApiError:
    """Return the error for an unknown path, with a hint on what to use instead."""
    named, inner = f"{method} {path!r:.100}", path.strip("/").lower()
    if path.endswith("/") and inner in _PATHS:
        # No redirect: its target would contain the host name that the client has sent.
        return ApiError(404, f"{named} ends with a slash, which no endpoint does", None, _CODE)
    prefix = next((one for one in _PREFIXES if inner.startswith(one)), "")
    inner = inner.removeprefix(prefix)
    for known in _PRESENT:
        if inner == known or (known == "models" and inner.startswith("models/")):
            message = f"{named} does not exist: the base URL must end with /v1"
            return ApiError(404, message, None, _CODE)
    if inner in _OF_MESSAGES:
        message = f"{named} does not exist: Anthropic's clients want the base URL without /v1"
        return ApiError(404, message, None, _CODE)
    advice = _under(inner, _FORWARDED)
    if advice is not None:
        return ApiError(400, f"{named} is not supported: {advice}", None, "unsupported_endpoint")
    advice = _under(prefix + inner, _OTHERS) or _under(inner, _OTHERS) or _ALL
    return ApiError(404, f"{named} does not exist: {advice}", None, _CODE)


def is_refused(path: str) -> bool:
    """Return True for a path that looks like that of an endpoint with a name in it, and is none."""
    return path.strip("/").lower().removeprefix("v1/") in _FORWARDED


_CODE = "unknown_endpoint"


def _under(path: str, table: dict[str, str]) -> str | None:
    """Return the entry of `table` for a path or its nearest parent; None if there is none."""
    while path:
        if path in table:
            return table[path]
        path = path.rpartition("/")[0]
    return None
