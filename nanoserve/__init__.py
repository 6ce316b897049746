"""nanoserve: an LLM inference engine whose main path you can read in an evening.

    from nanoserve import LLM, SamplingParams
    question = [{"role": "user", "content": "What is a block table?"}]
    outputs = LLM("tiny-qwen3").chat(question, SamplingParams(max_tokens=64))

Names are resolved on first use (PEP 562), so that `import nanoserve.engine` does not import torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# OpenMP threads spin while they wait for each other. If one of them has no core at that moment, the
# others spin until the system's next tick: 8 ms for a matrix product of 0.1 ms. Threads that sleep
# at once need 60 us to wake up. So they spin for about 120 us, slightly longer than the time
# between two products. This is set before torch is imported, because OpenMP reads it only once.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

if TYPE_CHECKING:
    from nanoserve.cli.engine_args import AsyncEngineArgs, EngineArgs
    from nanoserve.engine.guard import GuardedEngine as LLMEngine
    from nanoserve.features.beam_search import (
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
    )
    from nanoserve.features.structured.params import StructuredOutputsParams
    from nanoserve.llm import LLM
    from nanoserve.lora_request import LoRARequest
    from nanoserve.models.registry import register_model
    from nanoserve.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        ScoringRequestOutput,
    )
    from nanoserve.pooling_params import PoolingParams
    from nanoserve.sampling_params import RequestOutputKind, SamplingParams
    from nanoserve.serve.async_llm import AsyncLLM
    from nanoserve.text.prompt_types import TextPrompt, TokensPrompt
    from nanoserve.worker.worker_functions import register_worker_function

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "register_model",
    "register_worker_function",
]

_HOME = {
    "LLM": "nanoserve.llm",
    "SamplingParams": "nanoserve.sampling_params",
    "RequestOutputKind": "nanoserve.sampling_params",
    "RequestOutput": "nanoserve.outputs",
    "CompletionOutput": "nanoserve.outputs",
    "PoolingParams": "nanoserve.pooling_params",
    "PoolingRequestOutput": "nanoserve.outputs",
    "EmbeddingRequestOutput": "nanoserve.outputs",
    "ClassificationRequestOutput": "nanoserve.outputs",
    "ScoringRequestOutput": "nanoserve.outputs",
    "BeamSearchOutput": "nanoserve.features.beam_search",
    "BeamSearchParams": "nanoserve.features.beam_search",
    "BeamSearchSequence": "nanoserve.features.beam_search",
    "Logprob": "nanoserve.outputs",
    "LoRARequest": "nanoserve.lora_request",
    "RequestMetrics": "nanoserve.outputs",
    "register_model": "nanoserve.models.registry",
    "register_worker_function": "nanoserve.worker.worker_functions",
    "AsyncLLM": "nanoserve.serve.async_llm",
    "LLMEngine": "nanoserve.engine.guard:GuardedEngine",
    "EngineArgs": "nanoserve.cli.engine_args",
    "AsyncEngineArgs": "nanoserve.cli.engine_args",
    "TextPrompt": "nanoserve.text.prompt_types",
    "TokensPrompt": "nanoserve.text.prompt_types",
    "StructuredOutputsParams": "nanoserve.features.structured.params",
}


if not TYPE_CHECKING:  # otherwise a type checker would accept every attribute name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            from nanoserve.compat.missing import refuse

            refuse("nanoserve", name)
        module, _, attribute = _HOME[name].partition(":")
        return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
