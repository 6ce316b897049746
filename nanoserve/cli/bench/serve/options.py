"""What `nanoserve bench --url` can be asked."""

import os
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from pathlib import Path

from nanoserve.cli.bench.serve.requests import PATHS
from nanoserve.cli.bench.workloads import (
    add_workload,
    count,
    counts,
    parse_with_workload,
    positive,
    rates,
)
from nanoserve.cli.parser import Parser
from nanoserve.utils.checks import require


def parse_args(arguments: list[str]) -> Namespace:
    """Raises `ValueError` for files that cannot be written, before anything is measured."""
    parser = Parser("nanoserve bench", description="Speed of a server, over HTTP.")
    add = parser.add_argument
    add("--url", required=True, help="http://HOST:PORT, with /v1 behind it or without")
    add("--endpoint", choices=PATHS, default="chat", help="%(default)s")
    add("--model", help="by default the first that the server names")
    add("--api-key", help="better given as OPENAI_API_KEY, which others cannot read from here")
    loads = "requests a second that come by themselves, each number a run; inf: all at once (inf)"
    add("--request-rate", type=rates, metavar="R,...", help=loads)
    clients = "so many clients that wait for each answer, each number a run"
    add("--concurrency", type=counts, metavar="N,...", help=clients)
    add_workload(parser)
    ids = "prompts of random ids below N in place of words: exact lengths (completions only)"
    add("--token-ids", type=count, metavar="N", help=ids)
    ignore = "outputs as long as asked for, from servers that know the option (%(default)s)"
    add("--ignore-eos", action=BooleanOptionalAction, default=True, help=ignore)
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals (%(default)s)")
    timeout = "seconds for a request (%(default)g)"
    add("--timeout", type=positive, default=600.0, metavar="S", help=timeout)
    args = parse_with_workload(parser, arguments)
    _check(parser, args)
    args.request_rate = args.request_rate or ([] if args.concurrency else [float("inf")])
    args.concurrency = args.concurrency or []
    args.api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    return args


def _check(parser: ArgumentParser, args: Namespace) -> None:
    if args.token_ids and args.endpoint == "chat":
        parser.error("--token-ids needs --endpoint completions: a chat is of text")
    if args.shared_len < 0:
        parser.error(f"--shared-len {args.shared_len} must not be negative")
    if not 0 <= args.temperature < float("inf"):
        parser.error(f"--temperature {args.temperature} must be a number from 0")
    for file in filter(None, (args.json, args.plot)):
        folder = Path(file).parent
        is_writable = folder.is_dir() and os.access(folder, os.W_OK) and not Path(file).is_dir()
        require(is_writable, f"{file} cannot be written")
