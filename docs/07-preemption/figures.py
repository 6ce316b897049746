"""A long prompt beside decoding sequences, as a whole and in chunks: the engine's own plans."""

from pathlib import Path

import facts
import svg

worked = facts.load(Path(__file__).with_name("worked.py"))

DECODING, PROMPT, THRESHOLD = 3, 1000, 256  # the chapter's example
MODEL, GPU = "LLaMA-2-7B", "A100"
_LEFT, _SCALE = 100, 11.2  # pixels, pixels per millisecond


def chunks_beside_decodes() -> str:
    """Draw each step as wide as its lower bound in time, with the tokens of each sequence."""
    figure = svg.Figure(
        "A prompt in one step and in chunks, beside three sequences that decode", 400
    )
    for index, threshold in enumerate((0, THRESHOLD)):
        _timeline(figure, 24 + 178 * index, threshold)
    for ms in range(0, 51, 10):
        figure.line(_LEFT + _SCALE * ms, 376, _LEFT + _SCALE * ms, 368, svg.SOFT)
        figure.text(_LEFT + _SCALE * ms, 390, f"{ms} ms", 14, fill=svg.SOFT)
    figure.line(_LEFT, 368, _LEFT + _SCALE * 50, 368, svg.SOFT)
    return str(figure)


def _timeline(figure: svg.Figure, top: float, threshold: int) -> None:
    steps, names = _steps(threshold)
    title = f"chunks of at most {threshold}" if threshold else "the whole prompt in one step"
    figure.text(_LEFT, top + 12, title, 16, "start", bold=True)
    ms = [1000 * worked.step_seconds(sum(step), MODEL, GPU) for step in steps]
    longest = max(t for step, t in zip(steps, ms, strict=True) if step[-1])
    words = f"longest gap between two tokens {longest:.1f} ms"
    figure.text(690, top + 12, words, 15, "end", svg.SOFT)
    x = float(_LEFT)
    for i, name in enumerate(names):
        figure.text(_LEFT - 8, top + 42 + 30 * i, name, 14, "end", svg.COLOURS[i])
    for step, duration in zip(steps, ms, strict=True):
        width = _SCALE * duration
        if x + width > 712:
            break
        for i, n in enumerate(step):
            if n:
                figure.rect(
                    *(x, top + 24 + 30 * i, width - 2, 26, svg.PALE[i]), stroke=svg.COLOURS[i]
                )
                figure.text(x + width / 2 - 1, top + 42 + 30 * i, n, 15)
        x += width


def _steps(threshold: int) -> tuple[list[list[int]], list[str]]:
    """Return tokens by step and sequence: a decode step, the prompt, and decode steps after it."""
    scheduler = worked._scheduler(long_prefill_token_threshold=threshold)
    sequences = worked._add_decoding(scheduler, DECODING)
    planned = [worked._counts(worked._step(scheduler))]
    sequences.append(worked._add(scheduler, PROMPT))
    while sequences[-1].num_tokens < PROMPT + 3:
        planned.append(worked._counts(worked._step(scheduler)))
    names = [f"{seq.request_id} decodes" for seq in sequences[:-1]]
    names.append(f"{sequences[-1].request_id}: {PROMPT}")
    return [[step.get(seq, 0) for seq in sequences] for step in planned], names
