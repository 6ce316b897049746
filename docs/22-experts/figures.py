"""How much longer a step of a mixture takes than a dense one, by tokens in it (chapter 22)."""

import math
from pathlib import Path

import facts
import svg

worked = facts.load(Path(__file__).with_name("worked.py"))

_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 26, 34, 340
_MOST_TOKENS, _MOST_TIMES = 2**13, 11


def hungry_middle() -> str:
    """Step time of a mixture over that of a dense model as large as its active parameters."""
    figure = svg.Figure("A mixture's step over a dense model's, for 1 to 8,192 tokens", 404)
    for times in (1, 4, 7, 10):
        figure.line(_LEFT, _y(times), svg.WIDTH - _RIGHT, _y(times), svg.FAINT, 1)
        figure.text(_LEFT - 10, _y(times) + 5, times, 15, "end", svg.SOFT)
    for tokens in (1, 4, 16, 64, 256, 1024, 4096):
        figure.text(_x(tokens), _BOTTOM + 22, f"{tokens:,}", 15, fill=svg.SOFT)
    figure.text(svg.WIDTH / 2, _BOTTOM + 48, "tokens in the step", 15, fill=svg.SOFT)
    labels = {"Qwen3-30B-A3B": (svg.BLUE, 8), "Mixtral-8x7B": (svg.ORANGE, 8)}
    for model, (colour, at) in labels.items():
        shares = [step / 8 for step in range(8 * round(math.log2(_MOST_TOKENS)) + 1)]
        points = [(_x(2**share), _y(_times(2**share, model))) for share in shares]
        figure.path(points, stroke=colour, stroke_width=3)
        y = _y(_times(2**at, model)) - 12
        figure.text(_x(2**at) - 20, y, model, 15, "middle", colour, bold=True)
    return str(figure)


def _times(tokens: float, model: str) -> float:
    return worked.step_seconds(tokens, model) / worked.dense_seconds(tokens, model)


def _x(tokens: float) -> float:
    share = math.log2(tokens) / math.log2(_MOST_TOKENS)
    return _LEFT + share * (svg.WIDTH - _LEFT - _RIGHT)


def _y(times: float) -> float:
    return _BOTTOM - times / _MOST_TIMES * (_BOTTOM - _TOP)
