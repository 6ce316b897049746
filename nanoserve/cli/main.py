"""`nanoserve COMMAND ...` in a shell; `python -m nanoserve` is the same."""

import sys
from collections.abc import Callable

from nanoserve.utils.registry import Registry

# Takes the arguments behind the command's name; returns the exit status, and None is 0.
Command = Callable[[list[str]], int | None]

# Only the one that is called is imported.
COMMANDS: Registry[Command] = Registry(
    "command",
    {
        "serve": "nanoserve.cli.serve:main",
        "batch": "nanoserve.cli.batch:main",
        "chat": "nanoserve.cli.chat:main",
        "bench": "nanoserve.cli.bench.command:main",
        "info": "nanoserve.cli.info:main",
        "trace": "nanoserve.cli.trace:main",
    },
)
_PURPOSES = {
    "serve": "answer OpenAI's clients, and a browser",
    "batch": "answer a file of requests, in OpenAI's batch format",
    "chat": "talk to a model in the terminal",
    "bench": "measure engines on this machine, or a server over HTTP",
    "info": "what a model is and takes, and whether it would run here",
    "trace": "look at what LLM(..., trace=...) recorded",
}


def register_command(name: str, location: str, purpose: str) -> None:
    """Add a command of your own, a function as "module:function"; `purpose` is for `--help`."""
    COMMANDS.register(name, location)
    _PURPOSES[name] = purpose


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit status. A wrong call is answered in one line."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        from nanoserve import __version__

        print(f"nanoserve {__version__}")
        return 0
    if name not in COMMANDS.names():
        print(f"nanoserve: there is no command {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return COMMANDS.get(name)(rest) or 0
    except (ValueError, OSError, RecursionError) as error:
        print(f"nanoserve {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # as a shell has it


def _usage() -> str:
    rows = [f"  {name:<8}{purpose}" for name, purpose in _PURPOSES.items()]
    return "\n".join(["usage: nanoserve COMMAND ... (each has a --help)", "", *rows])
