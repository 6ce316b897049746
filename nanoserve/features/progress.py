"""Show the progress bar of `generate` in the terminal."""

import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

from tqdm import tqdm

from nanoserve.engine.guard import GuardedEngine
from nanoserve.outputs import RequestOutput

# True for a progress bar, or a class that creates one, such as `tqdm`.
UseTqdm = bool | Callable[..., Any]

_SECONDS = 0.1  # minimum between two updates during steps


def with_progress(
    engine: GuardedEngine,
    outputs: Iterable[RequestOutput],
    num_requests: int,
    use_tqdm: UseTqdm = True,
) -> Generator[RequestOutput]:
    """Yield the same outputs, with a progress bar of finished requests and tokens per second.

    Tokens are counted as they are computed, including those of unfinished requests.
    """
    if not callable(use_tqdm) and not isinstance(use_tqdm, bool):
        raise ValueError(
            f"use_tqdm={use_tqdm!r} must be True, False or a progress bar class such as tqdm"
        )
    make = use_tqdm if callable(use_tqdm) else tqdm
    start = last = time.perf_counter()
    before = engine.stats

    def show(*step: Any) -> None:
        nonlocal last
        now = time.perf_counter()
        if step and now - last < _SECONDS:
            return
        last, seconds = now, now - start
        running, done = engine.scheduler.running, engine.stats
        num_in = done.num_prompt_tokens - before.num_prompt_tokens
        num_in += sum(min(seq.num_computed_tokens, seq.num_prompt_tokens) for seq in running)
        num_out = done.num_output_tokens - before.num_output_tokens
        num_out += sum(seq.num_output_tokens for seq in running)
        rates = num_in / seconds, num_out / seconds
        shown = "in {:.0f} tok/s, out {:.0f} tok/s".format(*rates)
        bar.set_postfix_str(shown, refresh=bool(step))

    with make(total=num_requests, desc="Requests", dynamic_ncols=True) as bar:
        engine.observers.append(show)
        try:
            for output in outputs:
                show()
                bar.update()
                yield output
        finally:
            engine.observers.remove(show)
