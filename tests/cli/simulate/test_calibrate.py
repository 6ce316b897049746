"""Measured steps of a calibration: they span the sizes, and a fit to them finds what made them."""

from typing import Any

import numpy as np
import pytest
from simulated import TIME, make_setup, random_traffic, simulate

from nanoserve.cli.simulate.calibrate import calibration_waves, measure_steps
from nanoserve.cli.simulate.executor import Scripts, SimulatedExecutor, VirtualClock
from nanoserve.cli.simulate.fit import fit_step_time
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.step_time import LinearTime, StepSize
from nanoserve.engine.guard import GuardedEngine


class Endless(Scripts):
    """Outputs of any length: each request ends at its own limit, as with a real model."""

    def __call__(self, update: Any) -> list[int]:
        return [5] * 100


def engine_with(step_time: LinearTime, **options: Any) -> tuple[GuardedEngine, VirtualClock]:
    """A `GuardedEngine` whose device is simulated, so that its true step times are known."""
    setup, clock = make_setup(2000, **options), VirtualClock()
    parts = setup.config, setup.model_config
    executor = SimulatedExecutor(*parts, 2000, step_time, clock, Endless())
    return GuardedEngine(*parts, executor, None, clock), clock


def test_a_fit_finds_the_coefficients_of_the_device() -> None:
    engine, clock = engine_with(TIME, max_num_seqs=8)
    steps = measure_steps(engine, 600, wait=lambda s: clock.advance_to(clock() + s))
    fit = fit_step_time(steps)
    assert fit.median_error < 1e-6 and fit.num_disturbed == 0
    # Rows and sampled tokens differ only in steps inside a prompt, of which there may be few.
    sizes = [StepSize(64, 1, 1, 1, 64.0, 2080.0), StepSize(8, 8, 8, 0, 4000.0, 0.0)]
    for size in sizes:
        assert fit.step_time.seconds(size) == pytest.approx(TIME.seconds(size), rel=1e-4)
    assert not engine.has_unfinished_requests()


def test_other_traffic_is_predicted() -> None:
    engine, clock = engine_with(TIME, max_num_seqs=6)
    steps = measure_steps(engine, 150, 1, wait=lambda s: clock.advance_to(clock() + s))
    true = make_setup(max_num_seqs=6)
    fitted = Setup(true.config, true.model_config, 500, fit_step_time(steps).step_time)
    runs = [simulate(setup, random_traffic(3))[0].summary() for setup in (true, fitted)]
    for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"):
        assert runs[1][name] == pytest.approx(runs[0][name], rel=1e-3), name


def test_steps_span_the_sizes() -> None:
    engine, clock = engine_with(TIME, max_num_seqs=8)
    steps = measure_steps(engine, 600, wait=lambda s: clock.advance_to(clock() + s))
    sizes = np.array([step.size for step in steps])
    columns = dict(zip(StepSize._fields, sizes.T, strict=True))
    assert {*range(1, 9)} <= {*columns["num_rows"].tolist()}
    decode = columns["pairs"] == 0
    contexts = columns["context"][decode] / columns["num_rows"][decode]
    assert contexts.min() < 60 and contexts.max() > 600
    assert columns["pairs"].max() > 600 * 600 / 2
    beside = (columns["num_admitted"] > 0) & (columns["num_rows"] > columns["num_admitted"])
    assert beside.sum() > 4  # prompts beside rows that decode


@pytest.mark.parametrize("num_slots", [1, 2, 5, 16])
def test_waves(num_slots: int) -> None:
    waves = [*calibration_waves(num_slots, 300, 1000, repeats=2)]
    numbers = [len(wave.prompts) for wave in waves]
    assert numbers[: len(numbers) // 2] * 2 == numbers
    assert numbers[0] == (1 if num_slots > 1 else 2) and max(numbers) == 2 * num_slots
    lengths = [len(prompt) for wave in waves for prompt in wave.prompts]
    assert max(lengths) == 300 and min(lengths) >= 8
    assert all(len(wave.prompts[0]) == 300 for wave in waves)


def test_arguments_are_checked() -> None:
    engine, _ = engine_with(TIME)
    with pytest.raises(ValueError, match=r"longest=1000 leaves no room for 40 .* at most 960"):
        measure_steps(engine, 1000)
    with pytest.raises(ValueError, match="longest=7"):
        measure_steps(engine, 7)
    with pytest.raises(ValueError, match="repeats=0"):
        measure_steps(engine, 100, 0)
