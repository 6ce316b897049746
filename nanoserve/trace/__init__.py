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
    """Record the steps of `engine` in `config.trace` until what is returned is closed.

    An earlier file of that name is replaced.
    """
    from nanoserve.trace.recorder import TraceRecorder

    with ExitStack() as closing:  # closes the file if its header cannot be written
        # A request id may hold half a surrogate pair: as an escape, JSON reads it back.
        settings = {"encoding": "utf-8", "errors": "backslashreplace"}
        file = closing.enter_context(open(engine.config.trace, "w", **settings))
        recorder = TraceRecorder(engine, file)
        engine.observers.append(recorder.observe)
        closing.callback(recorder.end)
        return closing.pop_all()
