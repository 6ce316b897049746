"""`EngineArgs` has the options of an engine, also as flags of a script, as in vLLM."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanoserve.build import build_engine
from nanoserve.cli.engine_flags import add_engine_flags, engine_options
from nanoserve.cli.parser import Parser
from nanoserve.compat.metrics import start_counting
from nanoserve.compat.options import engine_config
from nanoserve.config import EngineConfig

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from nanoserve.compat.engine_options import EngineOptions
    from nanoserve.engine.guard import GuardedEngine

AnyParser = TypeVar("AnyParser", bound=ArgumentParser)


class EngineArgs(EngineConfig):
    """The arguments of `LLM`, checked on construction.

    Scripts for vLLM call `LLM(**dataclasses.asdict(EngineArgs(...)))`. Raises `ValueError` for
    the same options as `LLM`.
    """

    def __init__(
        self, model: str | Path = "tiny-qwen3", **options: "Unpack[EngineOptions]"
    ) -> None:
        vars(self).update(vars(engine_config(model, options)))

    @staticmethod
    def add_cli_args(parser: AnyParser) -> AnyParser:
        """Add `--model` and a flag per option. Flags not passed are absent from the namespace."""
        text = "Folder, GGUF file or name of the model. Default: %(default)s."
        parser.add_argument("--model", default="tiny-qwen3", help=text)
        add_engine_flags(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> "Self":
        return cls(args.model, **engine_options(args))

    def options(self) -> "EngineOptions":
        """Return the options that differ from their defaults."""
        chosen: Any = self.changed_options()
        return chosen

    def create_engine(self) -> "GuardedEngine":
        """Return a new engine, the same as `LLM(...).engine`."""
        engine = build_engine(EngineConfig(**vars(self)))
        if not self.disable_log_stats:
            start_counting(engine)
        return engine


class AsyncEngineArgs(EngineArgs):
    """The arguments of `AsyncLLM.from_engine_args`."""


class FlexibleArgumentParser(Parser):
    """An argument parser that takes `--max_model_len` for `--max-model-len`, as vLLM's does."""
