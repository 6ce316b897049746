"""Step times: fitted to measured steps, or from the roofline of a GPU."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from simulated import TIME

from nanoserve.cli.bench.roofline import Need, Step
from nanoserve.cli.simulate.fit import (
    MeasuredStep,
    fit_step_time,
    non_negative_least_squares,
    steps_of_trace,
)
from nanoserve.cli.simulate.gpus import GPUS, RooflineTime, gpu_named, num_kv_blocks, weight_bytes
from nanoserve.cli.simulate.models import model_config_of
from nanoserve.cli.simulate.step_time import RecordedTimes, StepSize, WindowShares
from nanoserve.config import EngineConfig
from nanoserve.features.trace.reader import read_trace


def best_of_all_subsets(matrix: np.ndarray, target: np.ndarray) -> float:
    """The least error of x >= 0: least squares over each subset of columns, if none is negative."""
    errors = [float(np.linalg.norm(target))]
    for chosen in product([False, True], repeat=matrix.shape[1]):
        if any(chosen):
            x = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            if (x >= 0).all():
                errors.append(float(np.linalg.norm(matrix[:, chosen] @ x - target)))
    return min(errors)


@pytest.mark.parametrize("seed", range(40))
def test_non_negative_least_squares_finds_the_least_error(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(1, 30)), int(rng.integers(1, 8))
    matrix = rng.normal(size=(rows, columns)) * 10.0 ** rng.integers(-6, 6, columns)
    if seed % 4 == 0 and columns > 1:
        matrix[:, 0] = matrix[:, 1]  # as rows and sampled tokens of pure decode steps
    if seed % 5 == 0:
        matrix[:, -1] = 0
    target = rng.normal(size=rows)
    x = non_negative_least_squares(matrix, target)
    assert (x >= 0).all()
    error = float(np.linalg.norm(matrix @ x - target))
    assert error == pytest.approx(best_of_all_subsets(matrix, target), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_non_negative_least_squares_equals_scipys(seed: int) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="pip install scipy")
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(60, 7)), rng.normal(size=60)
    expected, _ = optimize.nnls(matrix, target)
    assert non_negative_least_squares(matrix, target) == pytest.approx(expected, abs=1e-9)


def drawn_steps(num_steps: int, seed: int = 0) -> list[MeasuredStep]:
    """Steps as an engine has them, which take the time that `TIME` says."""
    rng, steps = Random(seed), []
    for _ in range(num_steps):
        decodes, prompt = rng.randint(0, 30), rng.choice([0, 0, rng.randint(2, 500)])
        rows = decodes + (prompt > 0) or 1
        tokens, context = decodes + prompt or 1, rng.randint(100, 9000)
        pairs = prompt * (prompt + 1) / 2
        size = StepSize(tokens, rows, rows, int(prompt > 0), context, pairs)
        steps.append(MeasuredStep(size, TIME.seconds(size)))
    return steps


def test_planted_coefficients_are_found() -> None:
    fit = fit_step_time(drawn_steps(500))
    for step in drawn_steps(100, seed=1):
        assert fit.step_time.seconds(step.size) == pytest.approx(step.seconds, rel=1e-6)
    # Rows and sampled tokens are equal in these steps: only the sum of their times is known.
    sums = fit.step_time.per_row + fit.step_time.per_sampled
    assert sums == pytest.approx(TIME.per_row + TIME.per_sampled, rel=1e-4)
    assert fit.step_time.per_context == pytest.approx(TIME.per_context, rel=1e-4)
    assert fit.num_disturbed == 0 and abs(fit.total_error) < 1e-9


def test_noise_is_reported_and_disturbed_steps_are_left_out() -> None:
    rng = Random(3)
    steps = [s._replace(seconds=s.seconds * rng.uniform(0.95, 1.05)) for s in drawn_steps(600)]
    for index in (5, 50, 500):
        steps[index] = steps[index]._replace(seconds=2.0)
    fit = fit_step_time(steps)
    assert fit.num_disturbed == 3
    assert 0.015 < fit.median_error < 0.035 and 0.035 < fit.p90_error < 0.06
    assert fit.total_error < -0.2  # the disturbed steps are in the sum
    assert fit.step_time.fixed == pytest.approx(TIME.fixed, rel=0.03)
    assert "3 disturbed steps" in fit.describe() and "fixed" in fit.describe()


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="29 steps are too few to fit a step time: record 30"):
        fit_step_time(drawn_steps(29))
    with pytest.raises(ValueError, match="0 steps"):
        fit_step_time([])
    steps = drawn_steps(40)
    with pytest.raises(ValueError, match="took no time"):
        fit_step_time([*steps, steps[0]._replace(seconds=0.0)])


def test_the_sizes_of_recorded_steps_are_those_of_their_batches() -> None:
    path = Path(__file__).parents[3] / "docs" / "07-preemption" / "chunked-prefill.jsonl"
    trace = read_trace(path)
    for step, measured in zip(
        trace.steps, steps_of_trace(trace, model_config_of("tiny-qwen3")), strict=True
    ):
        rows = step["rows"]
        assert measured.size.context == sum(row["computed"] + row["new"] for row in rows)
        pairs = sum(
            row["computed"] + i + 1 for row in rows if row["new"] > 1 for i in range(row["new"])
        )
        assert measured.size.pairs == pairs
        assert measured.seconds == pytest.approx(sum(step["times"].values()))
    assert any(measured.size.pairs for measured in steps_of_trace(trace, model_config_of("tiny")))


@pytest.mark.parametrize("seed", range(6))
def test_windows_count_what_queries_see(seed: int) -> None:
    """Against a loop over all queries and keys."""
    rng = Random(seed)
    windows = tuple(rng.choice([None, 3, 8]) for _ in range(4))
    model_config = replace(model_config_of("tiny"), sliding_windows=windows, num_hidden_layers=4)
    shares = WindowShares(model_config)
    queries = np.array([rng.choice([1, rng.randint(2, 9)]) for _ in range(5)])
    contexts = queries + np.array([rng.randint(0, 20) for _ in range(5)])
    read = pairs = 0
    for window in windows:
        for n, end in zip(queries.tolist(), contexts.tolist(), strict=True):
            seen = [range(max(0, q + 1 - (window or 99)), q + 1) for q in range(end - n, end)]
            read += len({key for keys in seen for key in keys})
            pairs += sum(map(len, seen)) if n > 1 else 0
    assert shares.context(queries, contexts) == pytest.approx(read / 4)
    assert shares.pairs(queries, contexts) == pytest.approx(pairs / 4)
    ones = np.ones(5, dtype=int)
    grown = [shares.context(ones, contexts + step) for step in range(7)]
    assert np.broadcast_to(shares.decode_contexts(contexts, 7), 7).tolist() == grown


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-30b-a3b", "llama-3.1-8b", "windows"])
@pytest.mark.parametrize("seed", range(3))
def test_the_roofline_is_that_of_the_benchmarks(name: str, seed: int) -> None:
    rng = Random(seed)
    model_config = model_config_of("tiny" if name == "windows" else name)
    if name == "windows":
        windows = (None, 64, 64, 64, 64, None)
        model_config = replace(model_config, sliding_windows=windows)
    gpu, need = gpu_named("H100"), Need(model_config)
    queries = np.array([rng.choice([1, 1, rng.randint(2, 900)]) for _ in range(9)])
    contexts = queries + np.array([rng.randint(0, 3000) for _ in range(9)])
    step = Step(queries, contexts, 9)
    expected = max(need.bytes(step) / gpu.bandwidth, need.operations(step) / gpu.rate)
    shares = WindowShares(model_config)
    context, pairs = shares.context(queries, contexts), shares.pairs(queries, contexts)
    size = StepSize(int(queries.sum()), 9, 9, 0, context, pairs)
    # Of rows with several tokens, a few pairs are counted twice.
    assert float(RooflineTime(model_config, gpu).seconds(size)) == pytest.approx(expected, rel=0.01)
    half = RooflineTime(model_config, gpu, efficiency=0.5, fixed=0.001)
    assert float(half.seconds(size)) == pytest.approx(2 * expected + 0.001, rel=0.01)


def test_more_gpus_are_faster_but_collectives_take_time() -> None:
    model_config = model_config_of("llama-3.1-8b")
    size = StepSize(8, 8, 8, 0, 8000, 0.0)
    seconds = [
        float(RooflineTime(model_config, GPUS["h100"], number).seconds(size))
        for number in (1, 2, 4, 8)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] < 8 * seconds[3]
    assert 2 * 32 * 10e-6 < seconds[1] - seconds[0] / 2 < 2 * 32 * 11e-6


def test_the_pool_is_what_weights_leave() -> None:
    model_config, config = model_config_of("llama-3.1-8b"), EngineConfig("x").for_device("cuda")
    assert weight_bytes(model_config) == pytest.approx(16.06e9, rel=0.01)  # 8.03 B parameters
    blocks = num_kv_blocks(model_config, GPUS["h100"], config)
    block = 16 * 2 * 32 * 8 * 128 * 2
    assert 0.9 * 80e9 - 16.1e9 - 4e9 < blocks * block < 0.9 * 80e9 - 16.0e9
    assert num_kv_blocks(model_config, GPUS["h100"], config, 2) > 2 * blocks
    with pytest.raises(ValueError, match=r"61\.1 GB of weights do not fit .* of 1 GPUs: use more"):
        num_kv_blocks(model_config_of("qwen3-30b-a3b"), GPUS["l40s"], config)
    with pytest.raises(ValueError, match=r"gpu='h1000' must be one of l4, "):
        gpu_named("h1000")


def test_recorded_times_do_not_go_on() -> None:
    times: Any = RecordedTimes([0.5])
    assert times.seconds(None) == 0.5
    with pytest.raises(ValueError, match="more steps than were recorded"):
        times.seconds(None)
