"""`nanoserve COMMAND ...` in a shell; `python -m nanoserve` is the same."""

import sys
from importlib import import_module

# Where each command lives: a module whose `main` takes the arguments behind the command's name.
# Only the one that is asked for is imported.
_COMMANDS = {
    "serve": ("nanoserve.commands.serve", "answer OpenAI's clients, and a browser"),
    "batch": ("nanoserve.commands.batch", "answer a file of requests, in OpenAI's batch format"),
    "chat": ("nanoserve.commands.chat", "talk to a model in the terminal"),
    "bench": ("nanoserve.bench.command", "measure engines on this machine, or a server over HTTP"),
    "info": ("nanoserve.commands.info", "what a model is and takes, and whether it would run here"),
    "trace": ("nanoserve.trace.__main__", "look at what LLM(..., trace=...) recorded"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit status. What was asked for wrongly is told in one line."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        from nanoserve import __version__

        print(f"nanoserve {__version__}")
        return 0
    if name not in _COMMANDS:
        print(f"nanoserve: there is no command {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return import_module(_COMMANDS[name][0]).main(rest) or 0
    except (ValueError, OSError, RecursionError) as error:
        print(f"nanoserve {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # as a shell has it


def _usage() -> str:
    rows = [f"  {name:<8}{told}" for name, (_, told) in _COMMANDS.items()]
    return "\n".join(["usage: nanoserve COMMAND ... (each has a --help)", "", *rows])
