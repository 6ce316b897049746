"""The run of chapter 28: chapter 7's preemption once more, without the model."""

from pathlib import Path

from nanoserve.cli.simulate.replay import Replay
from nanoserve.features.trace.reader import read_trace

RECORDED = Path(__file__).parents[1] / "07-preemption" / "preemption.jsonl"


def without_a_model(out: Path) -> None:
    """The requests, tokens and times of the recorded run; the scheduler plans them anew."""
    Replay(read_trace(RECORDED), out).run()
