"""Plot the latencies and rates of simulated runs as PNG.

matplotlib is installed by the extra `bench`; no other module imports this one when it is loaded.
"""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from nanoserve.cli.bench.plots import draw_all


def plot_summaries(rows: Mapping[str, Mapping[str, Any]], file: str) -> None:
    """Draw goodput beside throughput, and percentiles of TTFT and ITL, of each run by name."""
    names = [*rows]

    def rates(axes: Axes) -> None:
        _bars(axes, names, rows, {"request_rate": "served", "goodput": "within the objectives"})
        axes.set(ylabel="requests/s", title="Requests")

    def ttft(axes: Axes) -> None:
        _bars(axes, names, rows, {f"ttft_p{p}": f"p{p}" for p in (50, 90, 99)})
        axes.set(ylabel="ms", title="Time to first token", yscale="log")

    def itl(axes: Axes) -> None:
        _bars(axes, names, rows, {f"itl_p{p}": f"p{p}" for p in (50, 90, 99)})
        axes.set(ylabel="ms", title="Inter-token latency")

    draw_all([rates, ttft, itl], file)


def _bars(
    axes: Axes,
    names: list[str],
    rows: Mapping[str, Mapping[str, Any]],
    columns: Mapping[str, str],
) -> None:
    width = 0.8 / len(columns)
    for number, (column, label) in enumerate(columns.items()):
        places = [place + number * width for place in range(len(names))]
        axes.bar(places, [rows[name][column] for name in names], width, label=label)
    middle = 0.4 - width / 2
    axes.set_xticks([place + middle for place in range(len(names))], names, rotation=30)
