"""The roofline of chapter 1, drawn from its numbers."""

import math
from pathlib import Path

import facts
import svg

worked = facts.load(Path(__file__).with_name("worked.py"))
transformer = facts.load(Path(__file__).parents[1] / "02-transformer" / "worked.py")

PARAMETERS = transformer.num_parameters(transformer.LLAMA_2_7B)
WEIGHTS = worked.weight_bytes(PARAMETERS, 2)
KV_PER_USER = 1000 * 524288  # bytes of a context of 1,000 tokens
USERS, PROMPT = (1, 8, 32, 128), 1000
X_RANGE, Y_RANGE = (0.5, 3000), (0.6, 2000)  # operations a byte, 10^12 operations a second


def roofline() -> str:
    """Draw what LLaMA-2-7B attains on two GPUs, over its operations per byte."""
    figure = svg.Figure(
        "Roofline of an A100 and an H100, with decode steps and a prefill of LLaMA-2-7B", 500
    )
    _axes(figure)
    for name, colour in (("H100 SXM", svg.GREEN), ("A100 80 GB", svg.BLUE)):
        device = worked.DEVICES[name]
        ridge = device.matmul_rate / device.bandwidth
        corners = (X_RANGE[0], ridge, X_RANGE[1])
        points = [(_x(x), _y(_reached(name, x))) for x in corners]
        figure.path(points, stroke=colour, stroke_width=3)
        peak = device.matmul_rate / 1e12
        figure.line(_x(ridge), _y(peak), _x(ridge), _y(Y_RANGE[0]), colour, 1, "4 4")
        figure.text(_x(ridge) + 5, _y(0.75), f"{ridge:.0f}", 15, "start", colour, bold=True)
        words = f"{name}: {peak:.0f} TFLOP/s"
        figure.text(_x(X_RANGE[1]), _y(peak) - 8, words, 15, "end", colour, bold=True)
    figure.text(_x(150), _y(1.05), "ridges", 15, "end", svg.SOFT)
    _points(figure)
    return str(figure)


def step_intensity(users: int) -> float:
    """Return the operations of a decode step's products per byte that it reads, KV included."""
    return 2 * PARAMETERS * users / (WEIGHTS + users * KV_PER_USER)


def _points(figure: svg.Figure) -> None:
    """Draw the steps on the A100's roof: the weights alone, and with K and V."""
    name = "A100 80 GB"
    for users in USERS:
        x = worked.weight_intensity(users, 2)
        at = _x(x), _y(_reached(name, x))
        figure.circle(*at, 6, svg.CARD, svg.BLUE)
        figure.text(at[0] + 9, at[1] + 16, users, 15, "start", svg.BLUE)
    for users in USERS:
        x = step_intensity(users)
        at = _x(x), _y(_reached(name, x))
        figure.circle(*at, 6, svg.ORANGE)
        figure.text(at[0] - 3, at[1] + 25, users, 15, fill=svg.ORANGE)
    x = worked.weight_intensity(PROMPT, 2)
    figure.circle(_x(x), _y(_reached(name, x)), 6, svg.PURPLE)
    figure.text(_x(x), _y(_reached(name, x)) + 24, f"prefill of {PROMPT:,}", 15, fill=svg.PURPLE)
    figure.circle(96, 44, 6, svg.CARD, svg.BLUE)
    figure.text(110, 49, "decode of 1 to 128 users, weights only", 15, "start", svg.BLUE)
    figure.circle(96, 68, 6, svg.ORANGE)
    words = f"with {KV_PER_USER / 1e9:.1f} GB of K and V for each user"
    figure.text(110, 73, words, 15, "start", svg.ORANGE)


def _axes(figure: svg.Figure) -> None:
    for x in (1, 10, 100, 1000):
        figure.line(_x(x), _y(Y_RANGE[0]), _x(x), _y(Y_RANGE[1]), svg.FAINT, 1)
        figure.text(_x(x), _y(Y_RANGE[0]) + 20, f"{x:,}")
    for y in (1, 10, 100, 1000):
        figure.line(_x(X_RANGE[0]), _y(y), _x(X_RANGE[1]), _y(y), svg.FAINT, 1)
        figure.text(_x(X_RANGE[0]) - 8, _y(y) + 5, f"{y:,}", anchor="end")
    figure.text(390, 486, "operations per byte read", fill=svg.SOFT)
    figure.text(24, 250, "attainable TFLOP/s", fill=svg.SOFT, turned=True)


def _reached(name: str, intensity: float) -> float:
    """Return the attainable TFLOP/s: limited by the memory or by the GPU's peak."""
    device = worked.DEVICES[name]
    return min(device.bandwidth * intensity, device.matmul_rate) / 1e12


def _x(value: float) -> float:
    return 80 + 620 * _share(value, *X_RANGE)


def _y(value: float) -> float:
    return 440 - 415 * _share(value, *Y_RANGE)


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)
