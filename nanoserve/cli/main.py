"""The command line, `nanoserve COMMAND ...` or `python -m nanoserve COMMAND ...`."""

import sys
from collections.abc import Callable

from nanoserve.utils.registry import Registry

# It takes the arguments after the command's name, and returns the exit status (None means 0).
Command = Callable[[list[str]], int | None]

# A command's module is imported only when the command is called.
COMMANDS: Registry[Command] = Registry(
    "command",
    {
        "serve": "nanoserve.cli.serve:main",
        "batch": "nanoserve.cli.batch:main",
        "chat": "nanoserve.cli.chat.command:main",
        "bench": "nanoserve.cli.bench:main",
        "info": "nanoserve.cli.info:main",
        "trace": "nanoserve.cli.trace:main",
        "simulate": "nanoserve.cli.simulate.command:main",
        "plan": "nanoserve.cli.simulate.plan:main",
        "tune": "nanoserve.cli.simulate.tune:main",
    },
)
_PURPOSES = {
    "serve": "start an OpenAI-compatible server, with a chat page for browsers",
    "batch": "run a file of requests in OpenAI's batch format",
    "chat": "chat with a model in the terminal",
    "bench": "benchmark engines on this machine, or a server over HTTP",
    "info": "describe a model, its memory needs, and whether it runs on this machine",
    "trace": "inspect a file that LLM(..., trace=...) has recorded",
    "simulate": "predict latency and throughput in virtual time, or compute a trace again",
    "tune": "find the best engine options for a workload, and verify them on the real engine",
    "plan": "find how many GPUs, with which options, serve a load within its objectives",
}


def register_command(name: str, location: str, purpose: str) -> None:
    """Register a command ("module:function"). `purpose` is its line in `--help`."""
    COMMANDS.register(name, location)
    _PURPOSES[name] = purpose


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status. Usage errors are printed in one line."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        from nanoserve import __version__

        print(f"nanoserve {__version__}")
        return 0
    if name not in COMMANDS.names():
        print(f"nanoserve: unknown command {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return COMMANDS.get(name)(rest) or 0
    except (ValueError, OSError, RecursionError) as error:
        print(f"nanoserve {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as in shells


def _usage() -> str:
    rows = [f"  {name:<10}{purpose}" for name, purpose in _PURPOSES.items()]
    return "\n".join(["usage: nanoserve COMMAND ... (every command has --help)", "", *rows])
