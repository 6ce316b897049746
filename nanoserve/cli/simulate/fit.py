"""Fit the coefficients of `LinearTime` to measured steps.

No size of a step can make it faster, so the coefficients are fitted by *non-negative* least squares
(Lawson and Hanson 1974, chapter 23). An ordinary fit would explain noise by negative coefficients,
and then predict negative times outside the steps that it has seen. The residuals are relative, so
that a decode step of a millisecond counts as much as a prompt of a second.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.simulate.step_time import LinearTime, StepSize, WindowShares
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import StepResult
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.llm_engine import LLMEngine
from nanoserve.engine.plan import Plan
from nanoserve.engine.stopwatch import StepTimes
from nanoserve.features.trace.reader import Trace
from nanoserve.utils.checks import require

_FEWEST = 30  # steps
_ROUNDS = 5  # of fits, each weighted by the times that the one before expects
# Of `LinearTime`, in the order of the sizes in `StepSize`, behind the fixed time.
_COEFFICIENTS = (
    *("fixed", "per_token", "per_row", "per_sampled", "per_admitted", "per_context"),
    "per_pair",
)
# A step that took this many times the median relative residual longer was disturbed, by another
# process or a collection of garbage. It is left out, and counted.
_DISTURBED = 8.0


class MeasuredStep(NamedTuple):
    """The sizes of a step, and the seconds that it took."""

    size: StepSize
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A fitted step time with its residuals, which are relative to the measured times.

    total_error: of the sum over all steps, the disturbed ones included.
    """

    step_time: LinearTime
    num_steps: int
    num_disturbed: int
    median_error: float
    p90_error: float
    total_error: float

    def describe(self) -> str:
        """Return the coefficients and the residuals as text."""
        names = {name: value for name, value in vars(self.step_time).items() if value}
        names.pop("description")
        parts = ", ".join(f"{name} {1e6 * value:.4g} us" for name, value in names.items())
        return (
            f"{self.num_steps} steps: {parts}\n"
            f"error of a step: median {self.median_error:.1%}, p90 {self.p90_error:.1%}; of their "
            f"sum {self.total_error:+.1%}; {self.num_disturbed} disturbed steps were left out"
        )


class StepSizes:
    """An observer that notes the sizes of all steps of an engine, and their seconds.

    gaps: count the time between two steps, too, while sequences are running. It is the time in
    which requests are added and outputs are handed out.
    """

    def __init__(self, engine: LLMEngine | GuardedEngine, gaps: bool = True) -> None:
        self.steps: list[MeasuredStep] = []
        self._engine, self._gaps = engine, gaps
        self._shares = WindowShares(engine.model_config)
        self._last_end: float | None = None

    def observe(self, plan: Plan, batch: Batch, result: StepResult, times: StepTimes) -> None:
        end, inside = self._engine.clock(), sum(vars(times).values())
        seconds = inside
        if self._gaps and self._last_end is not None:
            seconds = max(inside, end - self._last_end)
        size = self._shares.size_of(batch, len(plan.admitted))
        self.steps.append(MeasuredStep(size, seconds))
        self._last_end = end if self._engine.scheduler.has_unfinished() else None


def steps_of_trace(trace: Trace, model_config: ModelConfig) -> list[MeasuredStep]:
    """Return the sizes and times of the steps of a trace of this model."""
    shares, steps = WindowShares(model_config), []
    for step in trace.steps:
        queries = np.array([row["new"] for row in step["rows"]])
        contexts = queries + np.array([row["computed"] for row in step["rows"]])
        batch = step["batch"]
        size = StepSize(
            batch["num_tokens"],
            batch["num_rows"],
            batch["num_sampled"],
            len(step["admitted"]),
            shares.context(queries, contexts),
            shares.pairs(queries, contexts),
        )
        steps.append(MeasuredStep(size, sum(step["times"].values())))
    return steps


def fit_step_time(steps: Iterable[MeasuredStep], source: str = "measured steps") -> Fit:
    """Fit a step time; `source` is named in its description.

    Raises `ValueError` for too few steps, or steps that took no time.
    """
    sizes, seconds = zip(*steps, strict=True) if (steps := [*steps]) else ((), ())
    require(
        len(sizes) >= _FEWEST,
        f"{len(sizes)} steps are too few to fit a step time: record {_FEWEST} or more",
    )
    measured = np.array(seconds)
    require(bool((measured > 0).all()), "a step took no time: it was not measured, but simulated")
    matrix = np.column_stack([np.ones(len(sizes)), np.array(sizes, dtype=np.float64)])
    kept, expected = np.ones(len(sizes), dtype=bool), measured
    for _ in range(_ROUNDS):
        # Relative to what is expected: relative to the measured times, a step that was too fast by
        # chance would count more than one that was too slow.
        relative = matrix[kept] / expected[kept, None]
        found = non_negative_least_squares(relative, measured[kept] / expected[kept])
        expected = matrix @ found
        residuals = measured / expected - 1  # positive: the step took longer
        kept = residuals <= _DISTURBED * max(1e-9, float(np.median(np.abs(residuals))))
    errors = np.abs(expected[kept] / measured[kept] - 1)
    coefficients = dict(zip(_COEFFICIENTS, found.tolist(), strict=True))
    return Fit(
        LinearTime(**coefficients, description=f"fitted to {source}"),
        len(sizes),
        int((~kept).sum()),
        float(np.median(errors)),
        float(np.percentile(errors, 90)),
        float(expected.sum() / measured.sum() - 1),
    )


def non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return x >= 0 that minimizes |matrix x - target|; matrix is [m, n], target [m].

    The active set method: a variable enters if increasing it reduces the error, and leaves when the
    solution over the entered ones would make it negative.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale  # columns of one length, as sizes differ by orders of magnitude
    num_columns = matrix.shape[1]
    x, entered = np.zeros(num_columns), np.zeros(num_columns, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(scaled.T @ target).max()))
    for _ in range(10 * num_columns):
        gain = scaled.T @ (target - scaled @ x)
        gain[entered] = -np.inf
        if entered.all() or gain.max() <= tolerance:
            break
        entered[np.argmax(gain)] = True
        x = _within(scaled, target, x, entered)
    return x / scale


def _within(
    matrix: np.ndarray, target: np.ndarray, x: np.ndarray, entered: np.ndarray
) -> np.ndarray:
    """Move from `x` to the least squares solution of the entered columns, as far as x >= 0.

    Columns that reach 0 on the way leave `entered`.
    """
    while True:
        solution = np.zeros_like(x)
        solution[entered] = np.linalg.lstsq(matrix[:, entered], target, rcond=None)[0]
        below = entered & (solution <= 0)
        if not below.any():
            return solution
        step = np.min(x[below] / np.maximum(x[below] - solution[below], 1e-300))
        x = x + step * (solution - x)
        leaving = below & (x <= 1e-14)
        if not leaving.any():
            leaving = below
        entered[leaving] = False
        x[~entered] = 0.0
