"""`nanoserve serve MODEL`: an OpenAI-compatible server."""

import logging
import os
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from contextlib import ExitStack
from dataclasses import fields
from functools import partial

from nanoserve.commands.engine_flags import add_engine_flags, engine_options, with_dashes
from nanoserve.replicas.settings import ReplicaSettings
from nanoserve.server.settings import ServerSettings

# vLLM's engine has them, too.
_OURS = ("served_model_name", "reasoning_parser", "stream_interval", "data_parallel_size")
_PACKAGES = "FastAPI, uvicorn and prometheus-client"


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(with_dashes(arguments))
    try:
        from nanoserve.server.app import ApiServer
        from nanoserve.server.run import bind, serve
    except ModuleNotFoundError as error:
        told = f"a server needs {_PACKAGES} ({error}): pip install 'nanoserve[serve]'"
        raise ValueError(told) from error
    from nanoserve.server.engine_process import LOG_FORMAT

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
    from nanoserve.server.async_llm import AsyncLLM

    with bind(args.host, args.port) as bound, ExitStack() as ending:
        if replicas.is_fleet:
            from nanoserve.replicas.start import start_server

            start = partial(start_server, args.model, options, replicas, settings)
            api = ending.enter_context(start(args.stream_interval))
        else:
            llm = AsyncLLM(args.model, args.engine_process, args.stream_interval, **options)
            ending.callback(llm.shutdown)
            api = ApiServer(llm, settings)
        return serve(api, bound, args.grace_period, args.access_log, **tls)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="nanoserve serve",
        description="Serve a model to OpenAI's clients, with a page to chat and to look on.",
        epilog="Send SIGTERM, or press Ctrl-C, to stop: what runs may end within the grace period.",
    )
    model = "folder, file or name, as for LLM() (%(default)s)"
    parser.add_argument("model", nargs="?", default="tiny-qwen3", help=model)
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="0.0.0.0 for all the world (%(default)s)")
    add("--port", type=int, default=8000, help="0 for any that is free (%(default)s)")
    add("--ssl-keyfile", metavar="FILE", help="for https")
    add("--ssl-certfile", metavar="FILE")
    add("--grace-period", type=float, default=30, metavar="S", help="to end requests (%(default)s)")
    # Fields of ServerSettings, which has their defaults.
    add, usual = partial(group.add_argument, default=SUPPRESS), ServerSettings()
    add("--served-model-name", nargs="+", metavar="NAME", help="that clients may use")
    key = "that clients must send; several may be right (NANOSERVE_API_KEY)"
    add("--api-key", nargs="+", metavar="KEY", help=key)
    add("--allowed-origins", nargs="+", metavar="URL", help="other sites' pages (none)")
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
    add("--access-log", action="store_true", help="a line for each request")
    process = "run the engine in a process of its own (%(default)s)"
    add("--engine-process", action=BooleanOptionalAction, default=True, help=process)
    interval = "tokens that an event of a stream has at least (%(default)s)"
    add("--stream-interval", type=int, default=1, metavar="N", help=interval)
    _add_replica_flags(parser)
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
