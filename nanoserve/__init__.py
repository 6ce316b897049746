"""nanoserve: an LLM inference engine that a person can read in an evening.

    from nanoserve import LLM, SamplingParams
    question = [{"role": "user", "content": "What is a block table?"}]
    outputs = LLM("tiny-qwen3").chat(question, SamplingParams(max_tokens=64))

Names are resolved on first use (PEP 562), so that `import nanoserve.engine` stays free of torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Before torch is imported, because OpenMP reads it once. Threads that wait for each other by
# spinning cost a tick of the scheduler, 8 ms, in each product if anything else runs on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from nanoserve.beam_search import BeamSearchParams
    from nanoserve.llm import LLM
    from nanoserve.outputs import CompletionOutput, RequestOutput
    from nanoserve.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]

_HOME = {
    "LLM": "nanoserve.llm",
    "SamplingParams": "nanoserve.sampling_params",
    "RequestOutputKind": "nanoserve.sampling_params",
    "RequestOutput": "nanoserve.outputs",
    "CompletionOutput": "nanoserve.outputs",
    "BeamSearchParams": "nanoserve.beam_search",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nanoserve' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
