"""Plot a server's throughput and latencies by load, as PNG. This needs the extra `bench`."""

import statistics
from collections.abc import Callable
from functools import partial

from matplotlib.axes import Axes

from nanoserve.cli.bench.plots import draw_all
from nanoserve.cli.bench.serve.tables import Point

_TITLES = {"ttft": "Time to first token", "itl": "Between chunks", "e2e": "Whole answer"}


def plot_points(points: list[Point], file: str) -> None:
    """Draw all loads in the report's order. Raises `ValueError` if no request was answered."""
    shown = [point for point in points if point.answered()]
    if not shown:
        raise ValueError(f"{file} is not drawn: no request was answered")
    panels: list[Callable[[Axes], None]] = [partial(_draw_rates, points=shown)]
    panels += [partial(_draw_waits, points=shown, name=name) for name in _TITLES]
    draw_all(panels, file)


def _draw_rates(axes: Axes, points: list[Point]) -> None:
    titles = [point.title() for point in points]
    for name in ("output", "input"):
        speeds = [
            statistics.median(run[f"{name}_tokens"] / run["seconds"] for run in point.answered())
            for point in points
        ]
        axes.plot(titles, speeds, marker="o", label=f"{name} tokens")
    axes.set(xlabel="load", ylabel="tokens/s", title="Throughput", ylim=(0, None))


def _draw_waits(axes: Axes, points: list[Point], name: str) -> None:
    titles = [point.title() for point in points]
    for column in ("p50", "p90", "p99"):
        values = [
            statistics.median(run["latencies"][f"{name}_{column}"] for run in point.answered())
            for point in points
        ]
        axes.plot(titles, values, marker="o", label=column)
    axes.set(xlabel="load", ylabel="ms", title=_TITLES[name], yscale="log")
