"""Record traces of the engine's steps, read them, and show them on a web page.

    with LLM("tiny-qwen3", trace="run.jsonl") as llm:
        llm.generate(prompts, params)

    nanoserve trace run.jsonl        writes run.html, to be opened in a browser

`recorder.py` describes the file format.
"""

from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoserve.engine.guard import GuardedEngine


def start_trace(engine: "GuardedEngine") -> ExitStack:
    """Record the steps of `engine` in the file `config.trace` until the returned stack is closed.

    An existing file is replaced. Raises `OSError` if the file cannot be written. If a later write
    fails, as on a full disk, the trace ends there with a warning, and the engine continues.
    """
    # The site of the course reads traces where there is no engine.
    from nanoserve.features.trace.recorder import TraceRecorder
    from nanoserve.features.trace.whole_lines import WholeLines

    with ExitStack() as closing:  # closes the file if its header cannot be written
        file = closing.enter_context(WholeLines(engine.config.trace))
        recorder = TraceRecorder(engine, file)
        engine.observers.append(recorder.observe)
        engine.scheduler.block_manager.listeners.append(recorder.cache_changes)
        closing.callback(recorder.end)
        return closing.pop_all()
