"""`nanoserve serve MODEL`: an OpenAI-compatible server."""

import logging
import os
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from contextlib import ExitStack
from dataclasses import fields
from functools import partial

from nanoserve.cli.engine_flags import add_engine_flags, engine_options
from nanoserve.cli.parser import (
    Parser,
    Words,
    add_model,
    from_json,
    model_of,
    with_config_file,
    with_dashes,
)
from nanoserve.cli.server_flags import add_server_flags, check_server_flags
from nanoserve.serve.http.settings import ServerSettings
from nanoserve.serve.replicas.settings import ReplicaSettings

# vLLM's engine has them, too.
_OURS = (
    *("served_model_name", "reasoning_parser", "enable_reasoning"),
    *("stream_interval", "data_parallel_size", "shutdown_timeout"),
)
_PACKAGES = "FastAPI, uvicorn and prometheus-client"


def main(arguments: list[str]) -> int:
    args = parse_args(arguments)
    model = model_of(args, "tiny-qwen3")
    try:
        from nanoserve.serve.http.app import ApiServer
        from nanoserve.serve.http.run import bind, serve
    except ModuleNotFoundError as error:
        told = f"a server needs {_PACKAGES} ({error}): pip install 'nanoserve[serve]'"
        raise ValueError(told) from error
    from nanoserve.serve.engine_process import LOG_FORMAT

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    names = [field.name for field in fields(ServerSettings) if field.name in args]
    chosen = {name: getattr(args, name) for name in names}
    key = os.environ.get("NANOSERVE_API_KEY")
    settings = ServerSettings(**({"api_key": [key]} if key else {}) | chosen)
    tls = {name: getattr(args, name) for name in ("ssl_keyfile", "ssl_certfile")}
    tls = {name: value for name, value in tls.items() if value is not None}
    if len(tls) == 1:
        raise ValueError(f"{tls} alone is not enough: TLS needs --ssl-keyfile and --ssl-certfile")
    names = [field.name for field in fields(ReplicaSettings) if field.name in args]
    replicas = ReplicaSettings(**{name: getattr(args, name) for name in names})
    options = engine_options(args, _OURS)
    from nanoserve.serve.async_llm import AsyncLLM

    with bind(args.host, args.port) as bound, ExitStack() as ending:
        if replicas.is_fleet:
            from nanoserve.serve.replicas.start import start_server

            start = partial(start_server, model, options, replicas, settings)
            api = ending.enter_context(start(args.stream_interval))
        else:
            llm = AsyncLLM(model, args.engine_process, args.stream_interval, **options)
            ending.callback(llm.shutdown)
            api = ApiServer(llm, settings)
        return serve(api, bound, args.grace_period, args.access_log, **tls)


def parse_args(arguments: list[str]) -> Namespace:
    """Raises `ValueError` for flags of vLLM's that ask for what is not done here."""
    parser = _parser()
    args = parser.parse_args(with_config_file(with_dashes(arguments), parser))
    check_server_flags(args)
    return args


def _parser() -> ArgumentParser:
    parser = Parser(
        prog="nanoserve serve",
        description="Serve a model to OpenAI's clients, with a page to chat and to look on.",
        epilog="Send SIGTERM, or press Ctrl-C, to stop: what runs may end within the grace period.",
    )
    add_model(parser, "folder, file or name, as for LLM() (tiny-qwen3)")
    yaml = "flags in YAML, without their dashes; those given here win"
    parser.add_argument("--config", metavar="FILE", help=yaml)
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="0.0.0.0 for all the world (%(default)s)")
    add("--port", type=int, default=8000, help="0 for any that is free (%(default)s)")
    add("--ssl-keyfile", metavar="FILE", help="for https")
    add("--ssl-certfile", metavar="FILE")
    grace = "to end requests (%(default)s)"
    add("--grace-period", "--shutdown-timeout", type=float, default=30, metavar="S", help=grace)
    # Fields of ServerSettings, which has their defaults.
    add, usual = partial(group.add_argument, default=SUPPRESS), ServerSettings()
    add("--served-model-name", action=Words, metavar="NAME", help="that clients may use")
    key = "that clients must send; several may be right (NANOSERVE_API_KEY)"
    add("--api-key", action=Words, metavar="KEY", help=key)
    add("--allowed-origins", action=Words, metavar="URL", help="other sites' pages (none)")
    kwargs = "what templates get if a request says nothing of it, as '{\"enable_thinking\": false}'"
    add("--default-chat-template-kwargs", type=from_json, metavar="JSON", help=kwargs)
    queue = "sequences that may wait before others get a 429 (all)"
    add("--max-queue", type=int, metavar="N", help=queue)
    tools = "how the model writes calls: hermes, llama3_json, mistral (as its template shows)"
    add("--tool-call-parser", metavar="NAME", help=tools)
    thoughts = "split off what the model thinks before it answers: qwen3, deepseek_r1"
    add("--reasoning-parser", metavar="NAME", help=thoughts)
    for name, told in (
        ("max_n", "completions that a request may ask for"),
        ("max_prompts", "of one request"),
        ("max_body_bytes", "of one request"),
        ("max_connections", "at a time; more get a 503"),
        ("body_timeout", "seconds for a body to arrive"),
        ("heartbeat_interval", "seconds of silence in a stream"),
        ("metrics_prefix", "of names at /metrics"),
    ):
        default, flag = getattr(usual, name), f"--{name.replace('_', '-')}"
        add(flag, type=type(default), metavar="X", help=f"{told} ({default})")
    add = group.add_argument
    always = "as is always so; accepted for scripts made for vLLM"
    add("--enable-auto-tool-choice", action="store_true", help=always)
    add("--enable-reasoning", action="store_true", help=SUPPRESS)  # of older vLLM, beside a parser
    add("--access-log", action="store_true", help="a line for each request")
    process = "run the engine in a process of its own (%(default)s)"
    add("--engine-process", action=BooleanOptionalAction, default=True, help=process)
    flag = "--disable-frontend-multiprocessing"  # vLLM's name of --no-engine-process
    add(flag, dest="engine_process", action="store_false", default=SUPPRESS, help=SUPPRESS)
    interval = "tokens that an event of a stream has at least (%(default)s)"
    add("--stream-interval", type=int, default=1, metavar="N", help=interval)
    _add_replica_flags(parser)
    add_server_flags(parser)
    add_engine_flags(parser)
    return parser


def _add_replica_flags(parser: ArgumentParser) -> None:
    """Fields of `ReplicaSettings`, which has their defaults."""
    group = parser.add_argument_group(
        "replicas", "several engines behind this server, on Ray Serve; needs nanoserve[ray]"
    )
    add, usual = partial(group.add_argument, default=SUPPRESS), ReplicaSettings()
    add("--data-parallel-size", "-dp", type=int, metavar="N", help="engines (one, without Ray)")
    most = "start up to so many while all are busy (never more than N)"
    add("--max-data-parallel-size", type=int, metavar="M", help=most)
    target = f"requests at each that are busy enough ({usual.target_ongoing_requests})"
    add("--target-ongoing-requests", type=float, metavar="X", help=target)
    add("--ray-address", metavar="ADDRESS", help="of a cluster that runs (one is started here)")
    known = "what is known of their prefix caches: approximate, or exact as they tell it"
    add("--router", metavar="KIND", help=f"{known} ({usual.router})")
