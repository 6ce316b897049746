"""Figures as PNG: throughput over batch size, latency over rate, where a step's time goes.

matplotlib comes with the extra `bench`; nothing else imports this module.
"""

import statistics
from collections.abc import Mapping
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from report import Point

PARTS = ("schedule", "pack", "model", "sample", "update")


def plot_points(points: list[Point], num_output_tokens: int, file: str) -> None:
    """As many panels as there is something to show."""
    offline = [point for point in points if point.request_rate is None]
    online = [point for point in points if point.request_rate is not None]
    steps = [
        (f"{label}\n{point.title()}", runs[-1]["step_times"])
        for point in points
        for label, runs in point.done().items()
        if runs[-1].get("step_times")
    ]
    panels = [
        *([lambda axes: draw_throughput(axes, offline, num_output_tokens)] if offline else []),
        *([lambda axes: draw_latency(axes, online)] if online else []),
        *([lambda axes: draw_steps(axes, steps)] if steps else []),
    ]
    figure, all_axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), squeeze=False)
    for draw, axes in zip(panels, all_axes[0], strict=True):
        draw(axes)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def plot_steps(steps: list[tuple[str, Mapping[str, float]]], file: str) -> None:
    """Two panels: all parts, and without the model, which hides what is the engine's own."""
    figure, (whole, own) = plt.subplots(2, 1, figsize=(max(6, 0.5 * len(steps)), 8), sharex=True)
    draw_steps(whole, steps)
    draw_steps(own, steps, without=("model",))
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def draw_throughput(axes: Axes, points: list[Point], num_output_tokens: int) -> None:
    for label in points[0].runs:
        at = [point for point in points if label in point.done()]
        speeds = [
            [num_output_tokens / run["seconds"] for run in point.done()[label]] for point in at
        ]
        sizes = [str(point.max_num_seqs or "default") for point in at]
        middle = [statistics.median(s) for s in speeds]
        below = [m - min(s) for m, s in zip(middle, speeds, strict=True)]
        above = [max(s) - m for m, s in zip(middle, speeds, strict=True)]
        axes.errorbar(sizes, middle, yerr=[below, above], marker="o", capsize=3, label=label)
    limits = [num_output_tokens / point.limit.seconds for point in points]
    sizes = [str(point.max_num_seqs or "default") for point in points]
    axes.plot(sizes, limits, "k--", label="roofline")
    axes.set(xlabel="max_num_seqs", ylabel="output tokens/s", title="Throughput", ylim=(0, None))
    axes.legend()


def draw_latency(axes: Axes, points: list[Point]) -> None:
    for label in points[0].runs:
        at = [point for point in points if label in point.done()]
        rates = [point.request_rate for point in at]
        for name, style in (("ttft_p50", "-"), ("ttft_p99", "--"), ("itl_p50", ":")):
            values = [
                statistics.median(run["latencies"][name] for run in point.done()[label])
                for point in at
            ]
            axes.plot(rates, values, style, marker="o", label=f"{label} {name}")
    axes.set(xlabel="requests/s", ylabel="ms", title="Latency", yscale="log")
    axes.legend()


def draw_steps(
    axes: Axes, steps: list[tuple[str, Mapping[str, Any]]], without: tuple[str, ...] = ()
) -> None:
    labels, bottom = [label for label, _ in steps], [0.0] * len(steps)
    for part in (part for part in PARTS if part not in without):
        heights = [1000 * times[part] for _, times in steps]
        axes.bar(labels, heights, bottom=bottom, label=part)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    what = f"Step without {', '.join(without)}" if without else "Step"
    axes.set(ylabel="ms per step", title=what)
    axes.tick_params(axis="x", rotation=45)
    axes.legend()
