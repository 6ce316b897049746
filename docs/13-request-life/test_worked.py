"""Tests of the worked examples on the life of a request, against values computed by hand."""

import pytest
from counting_executor import make_engine, run

from nanoserve import SamplingParams
from nanoserve.engine.extension import Extension

from . import worked as request_life


def test_35_tokens_of_which_16_are_cached_in_steps_of_8() -> None:
    steps = [
        (8, 24, 35, False),
        (8, 32, 35, False),
        (3, 35, 36, True),
        (1, 36, 37, True),
        (1, 37, 38, True),
    ]
    assert request_life.progress(35, 16, budget=8, num_output_tokens=3) == steps
    rows = request_life.progress_table(35, 16, budget=8, num_output_tokens=3).splitlines()
    assert rows[4:6] == ["| 3 | 3 | 35 | 36 | yes |", "| 4 | 1 | 36 | 37 | yes |"]


def test_100_tokens_of_which_64_are_cached_leave_36() -> None:
    assert request_life.progress(100, 64, budget=2048, num_output_tokens=1) == [
        (36, 100, 101, True)
    ]
    assert request_life.left_behind(36) == 35


@pytest.mark.parametrize(("budget", "num_output_tokens"), [(8, 3), (64, 5), (35, 1)])
def test_the_engine_takes_these_steps(budget: int, num_output_tokens: int) -> None:
    """An observer is called at the end of the step."""
    engine = make_engine(max_num_batched_tokens=budget)
    seen = []
    engine.observers.append(
        lambda plan, batch, result, times: seen.extend(
            (row.n, row.start + row.n, row.seq.num_tokens) for row in plan.rows
        )
    )
    engine.add_request("r", list(range(35)), SamplingParams(max_tokens=num_output_tokens))
    run(engine)
    expected = request_life.progress(35, 0, budget, num_output_tokens)
    assert seen == [step[:3] for step in expected]


def test_the_clock_of_a_request() -> None:
    """Waits 0.2 s, first token 0.3 s later, then gaps of 40, 40 and 120 ms; EOS 40 ms later."""
    metrics = request_life.clock(10.0, 10.2, [10.5, 10.54, 10.58, 10.70], 10.74)
    assert metrics.queue_time == pytest.approx(0.2)
    assert metrics.time_to_first_token == pytest.approx(0.5)
    assert metrics.inter_token_time == pytest.approx(0.2 / 3)
    assert metrics.total_time == pytest.approx(0.74)
    assert request_life.gaps([10.5, 10.54, 10.58, 10.70]) == pytest.approx([0.04, 0.04, 0.12])


def test_the_table_has_every_method_and_every_extension() -> None:
    methods = [name for name in vars(Extension) if not name.startswith("_")]
    assert list(request_life.METHODS) == methods
    classes = {node.name for node in request_life.extension_classes()}
    assert classes == request_life.FEATURES.keys()
    assert request_life.users_of("token_budget") == ["pipeline parallelism"]
    assert request_life.users_of("sample_inputs") == ["structured output"]
    rows = request_life.extensions_table().splitlines()
    assert len(rows) == 2 + len(methods)
    assert rows[4].endswith("| lower the token budget of this step | pipeline parallelism |")
