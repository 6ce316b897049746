"""Plot throughput by batch size, latency by request rate, and parts of a step's time as PNG.

matplotlib is installed by the extra `bench`; no other module imports this one.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from nanoserve.cli.bench.report import Point

PARTS = ("schedule", "pack", "model", "sample", "update")


def plot_points(points: list[Point], num_output_tokens: int, file: str) -> None:
    """Draw a panel for each kind of measurement in the points."""
    offline = [point for point in points if point.request_rate is None]
    online = [point for point in points if point.request_rate is not None]
    steps = [
        (f"{label}\n{point.title()}", runs[-1]["step_times"])
        for point in points
        for label, runs in point.done().items()
        if runs[-1]["step_times"]
    ]
    panels: list[Callable[[Axes], None]] = []
    if offline:
        panels.append(partial(draw_throughput, points=offline, num_output_tokens=num_output_tokens))
    if online:
        panels += [partial(draw_latency, points=online, name=name) for name in ("ttft", "itl")]
    if steps:
        panels.append(partial(draw_steps, steps=steps))
    draw_all(panels, file)


def plot_steps(steps: list[tuple[str, Mapping[str, float]]], file: str) -> None:
    """Draw all parts of steps, and again without the model, which dwarfs the engine's own time."""
    own = partial(draw_steps, steps=steps, parts=[part for part in PARTS if part != "model"])
    draw_all([partial(draw_steps, steps=steps), own], file)


def draw_all(panels: list[Callable[[Axes], None]], file: str) -> None:
    figure, all_axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), squeeze=False)
    for draw, axes in zip(panels, all_axes[0], strict=True):
        draw(axes)
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def draw_throughput(axes: Axes, points: list[Point], num_output_tokens: int) -> None:
    """Draw medians, with error bars from the slowest to the fastest run."""
    for label in points[0].runs:
        at = [point for point in points if label in point.done()]
        speeds = [[num_output_tokens / run["seconds"] for run in p.done()[label]] for p in at]
        middle = [statistics.median(s) for s in speeds]
        below = [m - min(s) for m, s in zip(middle, speeds, strict=True)]
        above = [max(s) - m for m, s in zip(middle, speeds, strict=True)]
        if at:
            sizes = [_size(point) for point in at]
            axes.errorbar(sizes, middle, yerr=[below, above], marker="o", capsize=3, label=label)
    limited = [(_size(point), point.limit) for point in points if point.limit is not None]
    limits = [num_output_tokens / limit.seconds for _, limit in limited]
    axes.plot([size for size, _ in limited], limits, "k--", label="roofline")
    axes.set(xlabel="max_num_seqs", ylabel="output tokens/s", title="Throughput", yscale="log")


def draw_latency(axes: Axes, points: list[Point], name: str) -> None:
    """Draw the median as a line, and the 99th percentile dashed in the same colour."""
    for number, label in enumerate(points[0].runs):
        at = [point for point in points if label in point.done()]
        rates: list[Any] = [point.request_rate for point in at]
        for percentile, style in ((50, "-"), (99, "--")) if at else ():
            values = [
                statistics.median(run["latencies"][f"{name}_p{percentile}"] for run in runs)
                for runs in (point.done()[label] for point in at)
            ]
            shown = f"{label} p{percentile}"
            axes.plot(rates, values, style, color=f"C{number}", marker="o", label=shown)
    titles = {"ttft": "Time to first token", "itl": "Inter-token latency"}
    axes.set(xlabel="requests/s", ylabel="ms", title=titles[name], yscale="log")


def draw_steps(
    axes: Axes, steps: list[tuple[str, Mapping[str, Any]]], parts: Sequence[str] = PARTS
) -> None:
    labels, bottom = [label for label, _ in steps], [0.0] * len(steps)
    for part in parts:
        heights = [1000 * times[part] for _, times in steps]
        axes.bar(labels, heights, bottom=bottom, label=part, color=f"C{PARTS.index(part)}")
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set(ylabel="ms", title="A step" + ("" if "model" in parts else ", without the model"))
    axes.tick_params(axis="x", rotation=60, labelsize="small")


def _size(point: Point) -> str:
    return str(point.max_num_seqs or "default")
