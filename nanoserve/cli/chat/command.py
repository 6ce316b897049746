"""The command `nanoserve chat [MODEL]`: its flags, and the model that they choose."""

import contextlib
import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from typing import Any

from nanoserve.cli.chat.backend import Backend, LocalModel, RemoteModel
from nanoserve.cli.chat.lines import history_file
from nanoserve.cli.chat.session import HELP, Session, converse
from nanoserve.cli.engine_flags import add_engine_flags, engine_options
from nanoserve.cli.parser import Parser, add_model, model_of
from nanoserve.utils.parameter_table import PARAMETERS

_HELP_OF = {
    "temperature": "Sampling temperature; 0 is greedy. Default: as the checkpoint recommends.",
    "top_k": "Sample from the k most likely tokens. Default: as the checkpoint recommends.",
    "top_p": "Sample from the most likely tokens that have probability p together. Default: as the "
    "checkpoint recommends.",
    "seed": "Seed of the answers. Default: the engine's seed, 0.",
    "max_tokens": "Maximum number of tokens in an answer. Default: as many as the context has room "
    "for.",
}
_FLAGS = {name: row.flag for name, row in PARAMETERS.items() if row.flag is not None}


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    args.model = model_of(args)
    given = {name: getattr(args, name) for name in _FLAGS if name in args}
    parameters = {name: PARAMETERS[name].check(name, value) for name, value in given.items()}
    with contextlib.ExitStack() as closing:
        backend = _remote(args) if args.url else _local(args, closing)
        path = None if args.no_history else history_file()
        converse(Session(backend, args.system, parameters), path)
    return 0


def _local(args: Namespace, closing: contextlib.ExitStack) -> Backend:
    from nanoserve.llm import LLM

    options = engine_options(args)
    options.pop("seed", None)  # --seed is the seed of the answers, not the engine's
    name: Any = args.model or "tiny-qwen3"
    return LocalModel(closing.enter_context(LLM(name, **options)), str(name))


def _remote(args: Namespace) -> Backend:
    engine = sorted({*engine_options(args)} - {"seed"})
    if engine:
        raise ValueError(
            f"{engine} are options of a local model, but --url={args.url} is a server; remove "
            "either the options or --url"
        )
    return RemoteModel(args.url, args.model, args.api_key or os.environ.get("OPENAI_API_KEY"))


def _parser() -> ArgumentParser:
    lines = HELP.replace("\n", "; ")
    parser = Parser(prog="nanoserve chat", description="Chat with a model.", epilog=lines)
    add = parser.add_argument
    model = (
        "Folder, file or name of the model, as for LLM(). Default: tiny-qwen3, or the first model "
        "of the server."
    )
    add_model(parser, model)
    url = "Chat with this OpenAI-compatible server. Default: a local model."
    add("--url", help=url)
    key = "API key of the server. Default: the environment variable OPENAI_API_KEY."
    add("--api-key", metavar="KEY", help=key)
    add("--system", metavar="TEXT", help="System prompt. Default: none.")
    no_history = (
        "Neither read nor write the history of questions, for the arrow keys, in "
        "$XDG_STATE_HOME/nanoserve/chat_history."
    )
    add("--no-history", action="store_true", help=no_history)
    for name, kind in _FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=kind, default=SUPPRESS, metavar="X", help=_HELP_OF[name])
    add_engine_flags(parser, but=("seed",))
    return parser
