"""Time to first token over the rate of requests, of one simulated replica (chapter 28)."""

import math
from pathlib import Path

import facts
import svg

worked = facts.load(Path(__file__).with_name("worked.py"))

_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 150, 30, 330
_SHARES = (0.3, 0.5, 0.7, 0.9, 1.0, 1.1, 1.3)
_MS = (10, 4000)


def saturation() -> str:
    """TTFT in the middle and at the 99th percentile; the vertical scale is logarithmic."""
    figure = svg.Figure("Time to first token, by rate of requests", 396)
    for ms in (10, 30, 100, 300, 1000, 3000):
        figure.line(_LEFT, _y(ms), svg.WIDTH - _RIGHT, _y(ms), svg.FAINT, 1)
        figure.text(_LEFT - 10, _y(ms) + 5, f"{ms:,} ms", 14, "end", svg.SOFT)
    for share in (0.4, 0.6, 0.8, 1.0, 1.2):
        figure.text(_x(share), _BOTTOM + 22, f"{share:.0%}", 14, fill=svg.SOFT)
    middle = (_LEFT + svg.WIDTH - _RIGHT) / 2
    figure.text(middle, _BOTTOM + 48, "of the highest rate", 14, fill=svg.SOFT)
    figure.line(_x(1), _TOP, _x(1), _BOTTOM, svg.SOFT, 1, dash="4 4")
    for name, words, colour in (("ttft_p99", "p99", svg.ORANGE), ("ttft_p50", "p50", svg.BLUE)):
        points = [(_x(share), _y(worked.at_share(share)[name])) for share in _SHARES]
        figure.path(points, stroke=colour, stroke_width=3)
        for x, y in points:
            figure.circle(x, y, 4, colour)
        figure.text(points[-1][0] + 12, points[-1][1] + 5, words, 14, "start", colour, bold=True)
    return str(figure)


def _x(share: float) -> float:
    return _LEFT + (share - 0.25) / 1.1 * (svg.WIDTH - _LEFT - _RIGHT)


def _y(ms: float) -> float:
    part = math.log(ms / _MS[0]) / math.log(_MS[1] / _MS[0])
    return _BOTTOM - part * (_BOTTOM - _TOP)
