"""`nanoserve serve MODEL` starts an OpenAI-compatible server."""

import logging
import os
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from typing import Any

from nanoserve.cli.config_file import with_config_file
from nanoserve.cli.engine_flags import add_engine_flags, engine_options
from nanoserve.cli.operation_flags import (
    WithoutPaths,
    add_operation_flags,
    check_sockets,
    configure_logging,
    read_log_config,
    uvicorn_options,
)
from nanoserve.cli.parser import (
    Parser,
    Words,
    add_model,
    from_json,
    model_of,
    with_dashes,
)
from nanoserve.cli.server_flags import add_server_flags, check_server_flags
from nanoserve.serve.http.settings import ServerSettings
from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.parsers import FORMATS
from nanoserve.serve.http.tools.reasoning import STARTS
from nanoserve.serve.replicas.settings import ReplicaSettings
from nanoserve.utils.checks import require

# Flags of this command that share their name with an engine option of vLLM.
_OURS = (
    *("served_model_name", "reasoning_parser", "enable_reasoning"),
    *("stream_interval", "data_parallel_size", "shutdown_timeout", "log_config_file"),
)
_HOST, _PORT = "127.0.0.1", 8000
_PACKAGES = "FastAPI, uvicorn and prometheus-client"


def main(arguments: list[str]) -> int:
    args = parse_args(arguments)
    model = model_of(args, "tiny-qwen3")
    try:
        from nanoserve.serve.http.app import ApiServer
        from nanoserve.serve.http.own_middleware import load_middleware
        from nanoserve.serve.http.run import bind, serve
    except ModuleNotFoundError as error:
        message = f"a server needs {_PACKAGES} ({error}): pip install 'nanoserve[serve]'"
        raise ValueError(message) from error
    from nanoserve.serve.engine_process import LOG_FORMAT

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    log_config = read_log_config(args.log_config_file)
    names = [field.name for field in fields(ServerSettings) if field.name in args]
    chosen = {name: getattr(args, name) for name in names}
    key = os.environ.get("NANOSERVE_API_KEY")
    settings = ServerSettings(**({"api_key": [key]} if key else {}) | chosen)
    hidden = WithoutPaths(args.disable_access_log_for_endpoints or "", settings.root_path)
    logging.getLogger("uvicorn.access").addFilter(hidden)
    for location in settings.middleware:
        load_middleware(location)  # raises before a model is loaded
    options_of_uvicorn = uvicorn_options(args)
    names = [field.name for field in fields(ReplicaSettings) if field.name in args]
    replicas = ReplicaSettings(**{name: getattr(args, name) for name in names})
    options = engine_options(args, _OURS)
    if args.prefill_server is not None:
        options["kv_transfer_config"] = _decode_config(args.prefill_server, options)
    from nanoserve.serve.async_llm import AsyncLLM

    with bind(args.host, args.port, args.uds) as bound, ExitStack() as ending:
        if replicas.is_fleet:
            from nanoserve.serve.replicas.start import start_server

            start = partial(start_server, model, options, replicas, settings)
            api: ApiServer = ending.enter_context(start(args.stream_interval))
        else:
            llm = AsyncLLM(model, args.engine_process, args.stream_interval, **options)
            ending.callback(llm.shutdown)
            api = ApiServer(llm, settings)
        if log_config is not None and not replicas.is_fleet:  # replicas log through Ray
            api.llm.call_soon(partial(configure_logging, log_config))
        return serve(api, bound, args.grace_period, args.access_log, **options_of_uvicorn)


def _decode_config(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the `kv_transfer_config` for which `--prefill-server` is short."""
    for name in ("kv_transfer_config", "kv_offloading_path"):
        require(
            name not in options,
            f"--prefill-server and --{name.replace('_', '-')} both name a KV connector: pass one "
            f"of them; --kv-transfer-config has all options of a decode engine",
        )
    extra = {"prefill_server": url}
    return {
        "kv_connector": "socket",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": extra,
    }


def parse_args(arguments: list[str]) -> Namespace:
    """Parse the flags of `nanoserve serve`, and of the file that `--config` names.

    Raises `ValueError` for a vLLM flag whose value is not supported.
    """
    parser = _parser()
    args = parser.parse_args(with_config_file(with_dashes(arguments), parser))
    check_server_flags(args)
    check_sockets(args, _HOST, _PORT)
    return args


def _parser() -> ArgumentParser:
    parser = Parser(
        prog="nanoserve serve",
        description="Serve a model over an OpenAI-compatible API, with a web page to chat and to "
        "watch the engine.",
        epilog="Stop the server with SIGTERM or Ctrl-C: running requests may end within the grace "
        "period.",
    )
    add_model(parser, "Folder, file or name of the model, as for LLM(). Default: tiny-qwen3.")
    yaml = "YAML file of flags without dashes; the command line overrides it. Default: none."
    parser.add_argument("--config", metavar="FILE", help=yaml)
    group = parser.add_argument_group("server")
    add = group.add_argument
    host = "Address to listen on; 0.0.0.0 is every interface. Default: %(default)s."
    add("--host", default=_HOST, help=host)
    port = "Port to listen on; 0 is any free port. Default: %(default)s."
    add("--port", type=int, default=_PORT, help=port)
    grace = "Seconds for running requests to end after SIGTERM or Ctrl-C. Default: %(default)s."
    add("--grace-period", "--shutdown-timeout", type=float, default=30, metavar="S", help=grace)
    # Fields of ServerSettings, which has their defaults.
    add, usual = partial(group.add_argument, default=SUPPRESS), ServerSettings()
    names = "Model names that clients may use. Default: the model as it is given."
    add("--served-model-name", action=Words, metavar="NAME", help=names)
    key = "API keys; clients must send one. Default: the variable NANOSERVE_API_KEY, or none."
    add("--api-key", action=Words, metavar="KEY", help=key)
    origins = "Origins of other web pages that may call the server (CORS). Default: none."
    add("--allowed-origins", action=Words, metavar="URL", help=origins)
    lora = "LoRA adapters that clients may use as model, as NAME=PATH; needs --enable-lora. "
    add("--lora-modules", action=Words, metavar="NAME=PATH", help=f"{lora}Default: none.")
    root = "Folder of adapters that clients may load at /v1/load_lora_adapter. Default: none."
    add("--lora-root", metavar="FOLDER", help=root)
    kwargs = "Defaults for chat_template_kwargs, as '{\"enable_thinking\": false}'. Default: none."
    add("--default-chat-template-kwargs", type=from_json, metavar="JSON", help=kwargs)
    form = "Content of messages for the template: string, openai (list of parts) or auto. "
    add("--chat-template-content-format", metavar="KIND", help=f"{form}Default: auto.")
    trust = "Let requests bring chat templates, which are programs in a sandbox without a time "
    trust += "limit. Default: such requests get status 400."
    add("--trust-request-chat-template", action=BooleanOptionalAction, help=trust)
    queue = (
        "Maximum number of waiting sequences; further requests get status 429. Default: no limit."
    )
    add("--max-queue", type=int, metavar="N", help=queue)
    tools = f"Format of tool calls: {', '.join(FORMATS)}. Default: from the template."
    add("--tool-call-parser", metavar="NAME", help=tools)
    thoughts = f"Format of reasoning to split off an answer: {', '.join((*STARTS, harmony.NAME))}. "
    thoughts += "Default: none, or the one that the format of calls implies."
    add("--reasoning-parser", metavar="NAME", help=thoughts)
    for name, text in (
        ("max_n", "Maximum number of completions of one request."),
        ("max_prompts", "Maximum number of prompts in one request to /v1/completions."),
        ("max_body_bytes", "Maximum size of a request's body in bytes."),
        ("max_connections", "Maximum number of connections; further connections get status 503."),
        ("max_stored_responses", "Number of responses of /v1/responses kept for later requests."),
        ("max_stored_response_bytes", "Maximum size of these responses together in bytes."),
        ("body_timeout", "Seconds for a request's body to arrive."),
        ("heartbeat_interval", "Seconds of silence in a stream after which a comment is sent."),
        ("metrics_prefix", "Prefix of the names at /metrics."),
    ):
        default, flag = getattr(usual, name), f"--{name.replace('_', '-')}"
        add(flag, type=type(default), metavar="X", help=f"{text} Default: {default}.")
    dev = "Add endpoints that pause the engine, put it to sleep and reset its prefix cache. Any "
    dev += "client may then stop it for all others."
    add("--enable-dev-endpoints", action="store_true", help=dev)
    add = group.add_argument
    always = "Accepted for scripts that start vLLM; tool choice is always automatic."
    add("--enable-auto-tool-choice", action="store_true", help=always)
    add("--enable-reasoning", action="store_true", help=SUPPRESS)  # older vLLM
    add("--access-log", action="store_true", help="Log a line for each request.")
    process = "Run the engine in a separate process. Default: %(default)s."
    add("--engine-process", action=BooleanOptionalAction, default=True, help=process)
    flag = "--disable-frontend-multiprocessing"  # vLLM's name of --no-engine-process
    add(flag, dest="engine_process", action="store_false", default=SUPPRESS, help=SUPPRESS)
    prefill = "URL of a server with the same model that computes long prompts, so that this one "
    prefill += "decodes without interruption; see docs/guides/disaggregated-prefill.md. Default: "
    add("--prefill-server", metavar="URL", help=f"{prefill}none.")
    interval = "Minimum number of tokens in an event of a stream. Default: %(default)s."
    add("--stream-interval", type=int, default=1, metavar="N", help=interval)
    add_operation_flags(group)
    _add_replica_flags(parser)
    add_server_flags(parser)
    add_engine_flags(parser)
    return parser


def _add_replica_flags(parser: ArgumentParser) -> None:
    """Add the flags of `ReplicaSettings`, which has their defaults."""
    group = parser.add_argument_group(
        "replicas", "Several engines behind this server, on Ray Serve; needs nanoserve[ray]."
    )
    add, usual = partial(group.add_argument, default=SUPPRESS), ReplicaSettings()
    number = "Number of engines. Default: 1, which needs no Ray."
    add("--data-parallel-size", "-dp", type=int, metavar="N", help=number)
    most = "Maximum number of engines, started while all others are busy. Default: N."
    add("--max-data-parallel-size", type=int, metavar="M", help=most)
    default = f"Default: {usual.target_ongoing_requests}."
    target = f"Requests per engine above which another engine is started. {default}"
    add("--target-ongoing-requests", type=float, metavar="X", help=target)
    cluster = "Address of a running Ray cluster. Default: a cluster is started on this machine."
    add("--ray-address", metavar="ADDRESS", help=cluster)
    router = "Prefix-cache contents used for routing: approximate, or exact (reported by engines)."
    add("--router", metavar="KIND", help=f"{router} Default: {usual.router}.")
