"""`nanoserve serve MODEL`: an OpenAI-compatible server."""

import logging
import os
from argparse import ArgumentParser, BooleanOptionalAction
from dataclasses import fields

from nanoserve.commands.engine_flags import add_engine_flags, engine_options, with_dashes

_PACKAGES = "FastAPI, uvicorn and prometheus-client"


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(with_dashes(arguments))
    try:
        from nanoserve.server.app import ApiServer
        from nanoserve.server.run import bind, serve
        from nanoserve.server.settings import ServerSettings
    except ModuleNotFoundError as error:
        told = f"a server needs {_PACKAGES} ({error}): pip install 'nanoserve[serve]'"
        raise ValueError(told) from error
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    chosen = {field.name: getattr(args, field.name) for field in fields(ServerSettings)}
    key = os.environ.get("NANOSERVE_API_KEY")
    settings = ServerSettings(**chosen | {"api_key": args.api_key or ([key] if key else [])})
    tls = {name: getattr(args, name) for name in ("ssl_keyfile", "ssl_certfile")}
    tls = {name: value for name, value in tls.items() if value is not None}
    if len(tls) == 1:
        raise ValueError(f"{tls} alone is not enough: TLS needs --ssl-keyfile and --ssl-certfile")
    from nanoserve.server.async_llm import AsyncLLM

    with bind(args.host, args.port) as bound:
        llm = AsyncLLM(args.model, args.engine_process, **engine_options(args))
        try:
            return serve(ApiServer(llm, settings), bound, args.grace_period, args.access_log, **tls)
        finally:
            llm.shutdown()


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
    add("--served-model-name", nargs="+", default=[], metavar="NAME", help="that clients may use")
    key = "that clients must send; several may be right (NANOSERVE_API_KEY)"
    add("--api-key", nargs="+", default=[], metavar="KEY", help=key)
    add("--allowed-origins", nargs="+", default=[], metavar="URL", help="other sites' pages (none)")
    add("--ssl-keyfile", metavar="FILE", help="for https")
    add("--ssl-certfile", metavar="FILE")
    queue = "sequences that may wait before others get a 429 (all)"
    add("--max-queue", type=int, metavar="N", help=queue)
    add(
        "--max-n", type=int, default=64, help="completions that a request may ask for (%(default)s)"
    )
    add("--max-prompts", type=int, default=1024, help="of one request (%(default)s)")
    add("--max-body-bytes", type=int, default=8 * 2**20, metavar="N", help="%(default)s")
    add("--max-connections", type=int, default=4096, metavar="N", help="%(default)s")
    add("--body-timeout", type=float, default=30, metavar="S", help="seconds (%(default)s)")
    add("--heartbeat-interval", type=float, default=15, metavar="S", help="of silent streams")
    add("--grace-period", type=float, default=30, metavar="S", help="to end requests (%(default)s)")
    add(
        "--metrics-prefix",
        default="vllm:",
        metavar="TEXT",
        help="of names at /metrics (%(default)s)",
    )
    add("--access-log", action="store_true", help="a line for each request")
    process = "run the engine in a process of its own (%(default)s)"
    add("--engine-process", action=BooleanOptionalAction, default=True, help=process)
    add_engine_flags(parser)
    return parser
