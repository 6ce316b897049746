"""`nanoserve bench` measures engines on this machine or, with `--url`, a running server."""

from argparse import ArgumentParser
from importlib import import_module


def main(arguments: list[str]) -> int:
    """Run one of the two benchmarks, which have different flags and import different packages."""
    parser = ArgumentParser("nanoserve bench", add_help=False, allow_abbrev=False)
    parser.add_argument("--url")
    is_server = parser.parse_known_args(arguments)[0].url is not None
    chosen = "nanoserve.cli.bench.serve.measure" if is_server else "nanoserve.cli.bench.compare"
    return import_module(chosen).main(arguments)
