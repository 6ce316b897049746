"""What the engine did, step by step: a recorder, a reader, and a page to look at.

    with LLM("tiny-qwen3", trace="run.jsonl") as llm:
        llm.generate(prompts, params)

    nanoserve trace run.jsonl        writes run.html, which any browser opens

`recorder.py` says what is in the file.
"""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from nanoserve.features.trace.recorder import TraceRecorder
from nanoserve.features.trace.whole_lines import WholeLines

if TYPE_CHECKING:
    from nanoserve.engine.guard import GuardedEngine


def start_trace(engine: "GuardedEngine") -> ExitStack:
    """Record the steps of `engine` in `config.trace` until what is returned is closed.

    An earlier file of that name is replaced. Raises `OSError` if it cannot be written. If that
    happens later, as on a full disk, the trace ends there with a warning, and the engine goes on.
    """
    with ExitStack() as closing:  # closes the file if its header cannot be written
        file = closing.enter_context(WholeLines(engine.config.trace))
        recorder = TraceRecorder(engine, file)
        engine.observers.append(recorder.observe)
        engine.scheduler.block_manager.listeners.append(recorder.cache_changes)
        closing.callback(recorder.end)
        return closing.pop_all()
