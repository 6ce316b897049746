"""Utilisation of pipeline stages in a trace: busy times, bubbles, and the least bubbles."""

from dataclasses import dataclass

from nanoserve.features.trace.reader import Trace


@dataclass(frozen=True)
class StageUse:
    """Utilisation of one stage.

    bubble: the fraction of the time in which it computed nothing. ideal: its bubble if the busiest
    stage had none between its first and its last step, which is due to unequal stages and to
    filling and draining the pipeline.
    """

    busy: float  # seconds
    bubble: float
    ideal: float


def stage_uses(trace: Trace) -> list[StageUse]:
    """Return the utilisation of each stage from the first step to the last; [] for one stage."""
    steps = [step["stages"] for step in trace.steps if all(step.get("stages", [[]]))]
    if not steps:
        return []
    whole = max(step[-1][1] for step in steps) - min(step[0][0] for step in steps)
    busy = [sum(end - begin for begin, end in spans) for spans in zip(*steps, strict=True)]
    # A stage starts after the first step has passed the stages before it, and the last step ends
    # after it has passed the stages behind it.
    first, last = ([end - begin for begin, end in step] for step in (steps[0], steps[-1]))
    least = max(
        sum(first[:stage]) + used + sum(last[stage + 1 :]) for stage, used in enumerate(busy)
    )
    return [StageUse(used, 1 - used / whole, 1 - used / least) for used in busy]


def tell_stages(trace: Trace) -> str:
    """Return a line of text for each stage."""
    return "".join(
        f"\nstage {index}: busy for {use.busy:.3f} s, bubble {use.bubble:.1%}; "
        f"{use.ideal:.1%} if the busiest stage never waited"
        for index, use in enumerate(stage_uses(trace))
    )
