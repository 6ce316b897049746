"""What the engine did, step by step: a recorder, a reader, and a page to look at.

    with LLM("tiny-qwen3", trace="run.jsonl") as llm:
        llm.generate(prompts, params)

    python -m nanoserve.trace run.jsonl        writes run.html, which any browser opens

`recorder.py` says what is in the file.
"""

from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoserve.engine.llm_engine import LLMEngine


def start_trace(engine: "LLMEngine") -> ExitStack:
    """Record the steps of `engine` to `config.trace` until what is returned is closed.

    Without that option nothing is recorded, imported or observed.
    """
    closing = ExitStack()
    if engine.config.trace is not None:
        from nanoserve.trace.recorder import TraceRecorder

        recorder = TraceRecorder(engine, engine.config.trace)
        engine.observers.append(recorder.observe)
        closing.callback(recorder.close)
    return closing
