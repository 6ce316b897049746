"""cli/bench/plots.py: a panel for each thing that was measured. Needs the extra `bench`."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="pip install 'nanoserve[bench]'")

from nanoserve.cli.bench import plots
from nanoserve.cli.bench.report import Point
from nanoserve.cli.bench.roofline import Limit

PARTS = {"schedule": 1e-5, "pack": 2e-5, "model": 4e-3, "sample": 5e-5, "update": 3e-5}


def run(seconds: float, **others: Any) -> dict[str, Any]:
    found = {f"{name}_p{p}": 10.0 * p for name in ("ttft", "itl") for p in (50, 90, 99)}
    return {"seconds": seconds, "latencies": found, "step_times": None} | others


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn; they would be closed otherwise."""
    drawn: list[Any] = []
    monkeypatch.setattr(plots.plt, "close", drawn.append)
    return drawn


def test_throughput_over_batch_size_and_the_parts_of_a_step(
    figures: list[Any], tmp_path: Path
) -> None:
    points = [
        Point(size, None, Limit(1 / size, 1, 1, 1), {"a": runs, "b": [{"missing": "no package"}]})
        for size, runs in ((1, [run(8, step_times=PARTS), run(4)]), (4, [run(2), run(1)]))
    ]
    points[0].runs["a"].reverse()
    plots.plot_points(points, 400, str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    throughput, step = figures[0].axes
    roofline = next(line for line in throughput.lines if line.get_label() == "roofline")
    assert roofline.get_ydata().tolist() == [400, 1600]
    measured = throughput.containers[0].lines[0].get_ydata().tolist()
    assert measured == [75, 300]  # medians of 50 and 100, of 200 and 400
    heights = [bars[0].get_height() for bars in step.containers]
    assert heights == pytest.approx([1000 * seconds for seconds in PARTS.values()])


def test_latency_over_rate(figures: list[Any], tmp_path: Path) -> None:
    points = [Point(None, rate, None, {"a": [run(1)], "b": [run(2)]}) for rate in (2.0, 8.0)]
    plots.plot_points(points, 400, str(tmp_path / "x.png"))
    ttft, itl = figures[0].axes
    assert (ttft.get_title(), itl.get_title()) == ("Time to first token", "Inter-token latency")
    shown = {line.get_label(): line.get_ydata().tolist() for line in ttft.lines}
    assert shown == {f"{name} p{p}": [10 * p, 10 * p] for name in "ab" for p in (50, 99)}


def test_the_engines_own_parts_stand_alone(figures: list[Any], tmp_path: Path) -> None:
    plots.plot_steps([("1 x 64", PARTS), ("8 x 64", PARTS)], str(tmp_path / "x.png"))
    whole, own = figures[0].axes
    assert (len(whole.containers), len(own.containers)) == (5, 4)
