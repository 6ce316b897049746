"""Latency over load: one server, Poisson arrivals, and the mean time from due to answered."""

from pathlib import Path
from random import Random

import facts
import svg

worked = facts.load(Path(__file__).with_name("worked.py"))

SECONDS, COUNT = 0.1, 20_000  # of one request; requests of each run
LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95)
_RIGHT, _TOP = 1.0, 1.2  # of the axes: load, seconds


def latency_over_load() -> str:
    """The same arrivals at increasing rates."""
    figure = svg.Figure("Mean latency over load, at evenly spaced and at random arrivals", 400)
    for seconds in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        figure.line(_x(0), _y(seconds), _x(_RIGHT), _y(seconds), svg.FAINT, 1)
        figure.text(_x(0) - 8, _y(seconds) + 5, f"{seconds:g} s", 14, "end")
    for load in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        figure.text(_x(load), 348, f"{load:.0%}", 14)
    figure.line(_x(1), _y(0), _x(1), _y(_TOP), svg.RED, 1.5, "5 4")
    figure.text(_x(1) - 8, 40, "capacity", 15, "end", svg.RED)
    figure.text(390, 380, "requests a second, as a share of the server's capacity", fill=svg.SOFT)
    even = [(_x(load), _y(mean_latency(load, is_random=False))) for load in LOADS]
    drawn = [(_x(load), _y(mean_latency(load, is_random=True))) for load in LOADS]
    figure.path(even, svg.BLUE, stroke_width=3)
    figure.path(drawn, svg.ORANGE, stroke_width=3)
    for point in drawn:
        figure.circle(*point, 4, svg.ORANGE)
    figure.text(_x(0.05), 60, "mean latency:", 16, "start", bold=True)
    figure.text(_x(0.05), 86, "Poisson arrivals", 15, "start", svg.ORANGE)
    figure.text(_x(0.05), 110, "evenly spaced arrivals", 15, "start", svg.BLUE)
    return str(figure)


def mean_latency(load: float, is_random: bool) -> float:
    """Mean latency of requests that take `SECONDS` each, served one by one, waiting included."""
    random, rate = Random(1), load / SECONDS
    gaps = [random.expovariate(rate) if is_random else 1 / rate for _ in range(COUNT)]
    due = [sum(gaps[:1])]
    for gap in gaps[1:]:
        due.append(due[-1] + gap)
    return worked.mean(worked.waits(due, [SECONDS] * COUNT))


def _x(load: float) -> float:
    return 70 + 620 * load / _RIGHT


def _y(seconds: float) -> float:
    return 326 - 300 * seconds / _TOP
