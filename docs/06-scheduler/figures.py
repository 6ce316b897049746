"""The request in each slot and step, under static and under continuous batching."""

from pathlib import Path
from string import ascii_uppercase

import facts
import svg

worked = facts.load(Path(__file__).with_name("worked.py"))

SLOTS = 3
FIVE, SIX = [10, 50, 100, 40, 30], [50, 100, 200, 50, 80, 150]  # tokens of output


def five_requests() -> str:
    """The chapter's first workload: one long answer, and short ones behind it."""
    return _timelines(FIVE)


def six_requests() -> str:
    """The chapter's second workload."""
    return _timelines(SIX)


def _timelines(output_lens: list[int]) -> str:
    kinds = "static and continuous batching"
    figure = svg.Figure(f"{len(output_lens)} requests in {SLOTS} slots, {kinds}", 340)
    longest = worked.num_steps(output_lens, SLOTS, static=True)
    scale = 600 / longest
    for step in range(0, longest + 1, 50):
        figure.line(90 + scale * step, 44, 90 + scale * step, 304, svg.FAINT, 1, "2 4")
        figure.text(90 + scale * step, 322, step, 14, fill=svg.SOFT)
    figure.text(46, 322, "step", 14, fill=svg.SOFT)
    for index, static in enumerate((True, False)):
        y = 22 + 145 * index
        steps = worked.num_steps(output_lens, SLOTS, static)
        use = worked.slot_use(output_lens, SLOTS, static)
        title = "static" if static else "continuous"
        figure.text(90, y + 12, title, 16, "start", bold=True)
        words = f"{steps} steps, slots in use {use:.0%} of the time"
        figure.text(690, y + 12, words, 15, "end", svg.SOFT)
        _slots(figure, output_lens, static, y + 22, scale)
    return str(figure)


def _slots(
    figure: svg.Figure, output_lens: list[int], static: bool, top: float, scale: float
) -> None:
    """One line per slot: a request takes the first slot that is free when it starts."""
    free_at = [0] * SLOTS
    end = worked.num_steps(output_lens, SLOTS, static)
    for slot in range(SLOTS):
        y = top + 33 * slot
        figure.text(80, y + 20, f"slot {slot}", 14, "end", svg.SOFT)
        figure.rect(90, y, scale * end, 28, "#e2e4ea", svg.FAINT)
    for i, (first, done) in enumerate(worked.spans(output_lens, SLOTS, static)):
        slot = next(slot for slot in range(SLOTS) if free_at[slot] <= first)
        free_at[slot] = done
        x, y, width = 90 + scale * first, top + 33 * slot, scale * (done - first)
        colour = i % len(svg.PALE)
        figure.rect(x, y, width, 28, svg.PALE[colour], svg.COLOURS[colour], 1.5)
        letter = ascii_uppercase[i]
        words = letter if width < 60 else f"{letter}: {output_lens[i]}"
        figure.text(x + width / 2, y + 20, words, 15)
