"""`EngineArgs`: the options of an engine as an object, and as flags of a script."""

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
    """The arguments of `LLM`, checked when it is made.

    `LLM(**dataclasses.asdict(EngineArgs(...)))` takes them, as scripts for vLLM do it. Raises
    `ValueError` as `LLM` does for its options.
    """

    def __init__(
        self, model: str | Path = "tiny-qwen3", **options: "Unpack[EngineOptions]"
    ) -> None:
        vars(self).update(vars(engine_config(model, options)))

    @staticmethod
    def add_cli_args(parser: AnyParser) -> AnyParser:
        """`--model`, and a flag for each option. What is not given is not in the namespace."""
        parser.add_argument(
            "--model", default="tiny-qwen3", help="folder, GGUF file or name (tiny-qwen3)"
        )
        add_engine_flags(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> "Self":
        return cls(args.model, **engine_options(args))

    def options(self) -> "EngineOptions":
        """Return those that differ from their defaults."""
        chosen: Any = self.changed_options()
        return chosen

    def create_engine(self) -> "GuardedEngine":
        """Return what `LLM(...).engine` is."""
        engine = build_engine(EngineConfig(**vars(self)))
        if not self.disable_log_stats:
            start_counting(engine)
        return engine


class AsyncEngineArgs(EngineArgs):
    """The arguments of `AsyncLLM.from_engine_args`."""


class FlexibleArgumentParser(Parser):
    """One that takes `--max_model_len` for `--max-model-len`, as vLLM's does."""
