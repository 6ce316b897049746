"""How busy the stages of a pipeline were, by a trace; and what there was to gain."""

from dataclasses import dataclass

from nanoserve.features.trace.reader import Trace


@dataclass(frozen=True)
class StageUse:
    """Of one stage. `bubble` is the share of the time in which it had nothing to compute.

    ideal: its bubble if the busiest stage had had none between its first and its last step: what
        unequal shares, and filling and emptying the pipeline, cost in any case.
    """

    busy: float  # seconds
    bubble: float
    ideal: float


def stage_uses(trace: Trace) -> list[StageUse]:
    """From the first step on to the last; [] without a pipeline."""
    steps = [step["stages"] for step in trace.steps if all(step.get("stages", [[]]))]
    if not steps:
        return []
    whole = max(step[-1][1] for step in steps) - min(step[0][0] for step in steps)
    busy = [sum(end - begin for begin, end in spans) for spans in zip(*steps, strict=True)]
    # A stage begins when the first step has left those before it, and those behind it end later.
    first, last = ([end - begin for begin, end in step] for step in (steps[0], steps[-1]))
    least = max(
        sum(first[:stage]) + used + sum(last[stage + 1 :]) for stage, used in enumerate(busy)
    )
    return [StageUse(used, 1 - used / whole, 1 - used / least) for used in busy]


def tell_stages(trace: Trace) -> str:
    """A line for each stage."""
    return "".join(
        f"\nstage {index}: busy for {use.busy:.3f} s, bubble {use.bubble:.1%}; "
        f"{use.ideal:.1%} if the busiest stage never waited"
        for index, use in enumerate(stage_uses(trace))
    )
