"""vLLM's names, for scripts that were written for it: change the import, and they run.

    from nanoserve.drop_in import EngineArgs, LLMEngine, SamplingParams

Whichever of vLLM's modules a name comes from: here are those that scripts import, and of others it
is told what to do instead. Names are resolved on first use (PEP 562), and whoever uses none of them
loads nothing of this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve import (
        LLM,
        AsyncEngineArgs,
        AsyncLLM,
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
        CompletionOutput,
        EngineArgs,
        LLMEngine,
        Logprob,
        RequestMetrics,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
        TextPrompt,
        TokensPrompt,
    )
    from nanoserve import AsyncLLM as AsyncLLMEngine
    from nanoserve.config import EngineConfig as VllmConfig
    from nanoserve.drop_in.engine_args import FlexibleArgumentParser
    from nanoserve.drop_in.logits_processors import (
        AdapterLogitsProcessor,
        BatchUpdate,
        LogitsProcessor,
        MoveDirectionality,
        RequestLogitsProcessor,
        process_dict_updates,
    )
    from nanoserve.drop_in.memory import cleanup_dist_env_and_memory
    from nanoserve.drop_in.metrics import Counter, Gauge, Histogram, Metric, Vector
    from nanoserve.inputs import PromptType

__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BatchUpdate",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Counter",
    "EngineArgs",
    "FlexibleArgumentParser",
    "Gauge",
    "Histogram",
    "LLMEngine",
    "LogitsProcessor",
    "Logprob",
    "Metric",
    "MoveDirectionality",
    "PromptType",
    "RequestLogitsProcessor",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
    "VllmConfig",
    "cleanup_dist_env_and_memory",
    "init_logger",
    "process_dict_updates",
]

# Where those live that `nanoserve` itself does not export.
_HOME = {
    **dict.fromkeys(("Counter", "Gauge", "Histogram", "Metric", "Vector"), f"{__name__}.metrics"),
    **dict.fromkeys(
        (
            *("AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"),
            *("RequestLogitsProcessor", "process_dict_updates"),
        ),
        f"{__name__}.logits_processors",
    ),
    "FlexibleArgumentParser": f"{__name__}.engine_args",
    "PromptType": "nanoserve.inputs",
    "cleanup_dist_env_and_memory": f"{__name__}.memory",
}

if not TYPE_CHECKING:  # or every name would be a good one to a type checker

    def __getattr__(name: str) -> Any:
        if name == "VllmConfig":
            return import_module("nanoserve.config").EngineConfig
        if name == "init_logger":
            return import_module("logging").getLogger
        if name == "AsyncLLMEngine":  # as vLLM calls it, too
            name = "AsyncLLM"
        if name not in __all__:
            import_module(f"{__name__}.missing").refuse(__name__, name)
        return getattr(import_module(_HOME.get(name, "nanoserve")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
