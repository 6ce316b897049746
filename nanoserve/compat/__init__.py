"""vLLM's names, which let a script written for vLLM run once its imports are changed.

    from nanoserve.compat import EngineArgs, LLMEngine, SamplingParams

The names that scripts import are here, whichever module of vLLM they come from. The error for any
other name says what to use instead. Names are resolved on first use (PEP 562), so that a program
that uses none of them loads nothing of this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import nanoserve

if TYPE_CHECKING:
    from logging import getLogger as init_logger

    from nanoserve import *  # noqa: F403  (what its __all__ lists)
    from nanoserve import AsyncLLM as AsyncLLMEngine
    from nanoserve.cli.engine_args import FlexibleArgumentParser
    from nanoserve.compat.logits_processors import (
        AdapterLogitsProcessor,
        BatchUpdate,
        LogitsProcessor,
        MoveDirectionality,
        RequestLogitsProcessor,
        process_dict_updates,
    )
    from nanoserve.compat.memory import cleanup_dist_env_and_memory
    from nanoserve.compat.metrics import Counter, Gauge, Histogram, Metric, Vector
    from nanoserve.config import EngineConfig as VllmConfig
    from nanoserve.text.prompt_types import PromptType

# Names in addition to the names of `nanoserve` itself.
__all__ = [
    "AdapterLogitsProcessor",
    "AsyncLLMEngine",
    "BatchUpdate",
    "Counter",
    "FlexibleArgumentParser",
    "Gauge",
    "Histogram",
    "LogitsProcessor",
    "Metric",
    "MoveDirectionality",
    "PromptType",
    "RequestLogitsProcessor",
    "Vector",
    "VllmConfig",
    "cleanup_dist_env_and_memory",
    "init_logger",
    "process_dict_updates",
]
__all__ += nanoserve.__all__

# The module of each name, or "module:name" if the name is different there.
_HOME = {
    **dict.fromkeys(("Counter", "Gauge", "Histogram", "Metric", "Vector"), f"{__name__}.metrics"),
    **dict.fromkeys(
        (
            *("AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"),
            *("RequestLogitsProcessor", "process_dict_updates"),
        ),
        f"{__name__}.logits_processors",
    ),
    "AsyncLLMEngine": "nanoserve:AsyncLLM",
    "FlexibleArgumentParser": "nanoserve.cli.engine_args",
    "PromptType": "nanoserve.text.prompt_types",
    "VllmConfig": "nanoserve.config:EngineConfig",
    "cleanup_dist_env_and_memory": f"{__name__}.memory",
    "init_logger": "logging:getLogger",
}

if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            import_module(f"{__name__}.missing").refuse(__name__, name)
        module, _, own_name = _HOME.get(name, "nanoserve").partition(":")
        return getattr(import_module(module), own_name or name)


def __dir__() -> list[str]:
    return sorted(__all__)
