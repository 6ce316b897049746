"""The flags of `nanoserve bench --url`."""

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
    """Parse the flags. Raises `ValueError` for an output file that cannot be written."""
    parser = Parser("nanoserve bench", description="Measure a server over HTTP.")
    add = parser.add_argument
    add("--url", required=True, help="Address of the server: http://HOST:PORT, or with /v1.")
    add("--endpoint", choices=PATHS, default="chat", help="Endpoint. Default: %(default)s.")
    add("--model", help="Name of the model. Default: the first that the server lists.")
    key = "API key. Default: the variable OPENAI_API_KEY, which process lists do not show."
    add("--api-key", help=key)
    loads = (
        "Request rates in requests per second, a run for each; inf is all at once. Default: inf."
    )
    add("--request-rate", type=rates, metavar="R,...", help=loads)
    clients = "Numbers of clients that wait for each answer, a run for each. Default: none."
    add("--concurrency", type=counts, metavar="N,...", help=clients)
    add_workload(parser)
    ids = "Prompts of random ids below N, of exact lengths, for completions. Default: words."
    add("--token-ids", type=count, metavar="N", help=ids)
    ignore = "Generate the full output length, on servers with this option. Default: %(default)s."
    add("--ignore-eos", action=BooleanOptionalAction, default=True, help=ignore)
    seed = "Seed of prompts, lengths and arrival times. Default: %(default)s."
    add("--seed", type=int, default=0, help=seed)
    timeout = "Seconds for a request. Default: %(default)g."
    add("--timeout", type=positive, default=600.0, metavar="S", help=timeout)
    args = parse_with_workload(parser, arguments)
    _check(parser, args)
    args.request_rate = args.request_rate or ([] if args.concurrency else [float("inf")])
    args.concurrency = args.concurrency or []
    args.api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    return args


def _check(parser: ArgumentParser, args: Namespace) -> None:
    if args.token_ids and args.endpoint == "chat":
        parser.error("--token-ids needs --endpoint completions, because chat takes only text")
    if args.shared_len < 0:
        parser.error(f"--shared-len {args.shared_len} must not be negative")
    if not 0 <= args.temperature < float("inf"):
        parser.error(f"--temperature {args.temperature} must be a finite number of at least 0")
    for file in filter(None, (args.json, args.plot)):
        folder = Path(file).parent
        is_writable = folder.is_dir() and os.access(folder, os.W_OK) and not Path(file).is_dir()
        require(is_writable, f"{file} cannot be written")
