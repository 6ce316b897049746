"""Settings of the HTTP server. `EngineConfig` has the settings of the engine."""

import os
import re
from dataclasses import dataclass, field, fields
from typing import Any

from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.parsers import FORMATS, check_parsers
from nanoserve.serve.http.tools.reasoning import STARTS
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

_SMALLEST = {"max_n": 1, "max_prompts": 1, "max_body_bytes": 1024, "max_connections": 1}
_SMALLEST |= {"max_stored_responses": 0, "max_stored_response_bytes": 0}

_LISTS = (
    *("served_model_name", "api_key", "middleware", "lora_modules"),
    *("allowed_origins", "allowed_methods", "allowed_headers"),
)
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
# The server's own paths, which no prefix may hide; all others begin with /v1/.
_OWN_PATHS = {
    *("/v1", "/page", "/tokenize", "/detokenize", "/version", "/metrics", "/load", "/live"),
    *("/health", "/healthz", "/ping", "/readyz", "/livez", "/docs", "/openapi.json"),
    *("/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping", "/server_info"),
    *("/reset_prefix_cache", "/update_weights"),
    *("/pooling", "/classify", "/score", "/rerank", "/v2/rerank"),
}
_METHOD = re.compile(r"\*|[A-Z]+")
_HEADER = re.compile(r"\*|[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s?#]+", re.IGNORECASE)
_NO_KWARGS = {
    *("messages", "tools", "documents", "chat_template", "tokenize", "return_dict", "mark_text"),
    *("add_generation_prompt", "continue_final_message"),
}


@dataclass
class ServerSettings:
    """Settings of a server, validated on construction. A `ValueError` names the wrong value.

    Times are in seconds. A request that exceeds a limit returns 400, 408, 413, 429 or 503.
    """

    served_model_name: list[str] = field(default_factory=list)  # responses contain the first name
    api_key: list[str] = field(default_factory=list)  # accepted keys; empty: no key is needed
    max_n: int = 64  # completions per prompt
    max_prompts: int = 1024  # prompts per request to /v1/completions
    max_body_bytes: int = 8 * 2**20
    max_queue: int | None = None  # sequences that may wait for admission; None: no limit
    max_connections: int = 4096
    max_stored_responses: int = 1000  # of /v1/responses, for requests that continue them
    max_stored_response_bytes: int = 64 * 2**20
    body_timeout: float = 30.0  # for the arrival of a body
    heartbeat_interval: float = 15.0  # proxies close a stream that is silent for a minute
    allowed_origins: list[str] = field(default_factory=list)  # of pages of other sites (CORS)
    metrics_prefix: str = "vllm:"  # so that dashboards made for vLLM work
    enable_dev_endpoints: bool = False  # pause, sleep, reset: `nanoserve.serve.http.dev_endpoints`
    tool_call_parser: str | None = None  # format of tool calls; None: detected from the template
    reasoning_parser: str | None = None  # format of the reasoning before the answer
    # Default variables for chat templates; chat_template_kwargs of a request override them.
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # Whether templates get content as a string or as a list of parts; "auto": what they look into.
    chat_template_content_format: str = "auto"
    trust_request_chat_template: bool = False  # requests may bring templates, which are programs
    enable_force_include_usage: bool = False  # every stream ends with its usage
    return_tokens_as_token_ids: bool = False  # default of the request field of this name
    # Of responses to pages of `allowed_origins`.
    allow_credentials: bool = False
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    root_path: str = ""  # prefix of all paths, which a proxy may keep or remove
    middleware: list[str] = field(default_factory=list)  # "module:name" of each
    enable_server_load_tracking: bool = False  # /load
    enable_offline_docs: bool = False  # /docs and /openapi.json
    lora_modules: list[str] = field(default_factory=list)  # adapters: name=path, or vLLM's JSON
    lora_root: str | None = None  # folder of adapters that clients may load; None: none

    def __post_init__(self) -> None:
        for name, smallest in _SMALLEST.items():
            setattr(self, name, check_int(name, getattr(self, name), smallest))
        if self.max_queue is not None:
            self.max_queue = check_int("max_queue", self.max_queue, 1)
        for each in fields(self):
            if each.type is bool:
                check_bool(each.name, getattr(self, each.name))
        formats = ("auto", "string", "openai")
        check_choice("chat_template_content_format", self.chat_template_content_format, formats)
        for name in ("body_timeout", "heartbeat_interval"):
            check_number(name, getattr(self, name), 0, None, excludes_low=True)
        if self.tool_call_parser is not None:
            check_choice("tool_call_parser", self.tool_call_parser, tuple(FORMATS))
        if self.reasoning_parser is not None:
            check_choice("reasoning_parser", self.reasoning_parser, (*STARTS, harmony.NAME))
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        for name in _LISTS:
            check_list(name, getattr(self, name), lambda text: is_text(text) and text, "strings")
        root = self.lora_root
        is_folder = root is None or (is_text(root) and os.path.isdir(root))
        require(is_folder, f"lora_root={shown(root)} must be a folder")
        self._check_paths()
        for origin in self.allowed_origins:
            rule = "must be '*', or like 'https://example.org:8443', without a path"
            is_origin = _ORIGIN.fullmatch(origin) is not None
            require(is_origin, f"allowed_origins: {origin!r:.200} {rule}")
        kwargs = self.default_chat_template_kwargs
        is_object = isinstance(kwargs, dict) and all(isinstance(name, str) for name in kwargs)
        require(is_object, f"default_chat_template_kwargs={shown(kwargs)} must be an object")
        for name in _NO_KWARGS & kwargs.keys():
            raise ValueError(f"default_chat_template_kwargs: {name!r} is set by the server itself")

    @property
    def response_limits(self) -> tuple[int, int]:
        """The limits of the store of /v1/responses, in responses and bytes."""
        return self.max_stored_responses, self.max_stored_response_bytes

    def _check_paths(self) -> None:
        root, origins = self.root_path, self.allowed_origins
        rule = "must be a path such as '/llm', without a slash at the end"
        is_path = isinstance(root, str) and _ROOT_PATH.fullmatch(root) is not None
        require(is_path, f"root_path={shown(root)} {rule}")
        is_own = root in _OWN_PATHS or root.startswith("/v1/")
        own = "must not be one of the server's own paths, which are served without it, too"
        require(not is_own, f"root_path={shown(root)} {own}")
        for name, value, default in (
            ("allow_credentials", self.allow_credentials, False),
            ("allowed_methods", self.allowed_methods, ["*"]),
            ("allowed_headers", self.allowed_headers, ["*"]),
        ):
            has_effect = bool(origins) or value == default
            require(has_effect, f"{name}={shown(value)} needs allowed_origins, which is empty")
        for name, values, pattern, example in (
            ("allowed_methods", self.allowed_methods, _METHOD, "'GET'"),
            ("allowed_headers", self.allowed_headers, _HEADER, "'authorization'"),
        ):
            for one in values:
                is_name = pattern.fullmatch(one) is not None
                require(is_name, f"{name}={shown(one)} must be '*', or like {example}")
