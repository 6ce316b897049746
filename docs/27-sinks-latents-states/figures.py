"""What a sequence takes by its length, in four families of models (chapter 27)."""

import math
from pathlib import Path

import facts
import svg

worked = facts.load(Path(__file__).with_name("worked.py"))

_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 188, 30, 360
_LENGTHS = (64, 2**17)
_MIB = (2, 2**14)
_COLOURS = {
    "Qwen3-30B-A3B": svg.BLUE,
    "DeepSeek-V3": svg.ORANGE,
    "Qwen3-Next-80B-A3B": svg.PURPLE,
    "gpt-oss-20b": svg.GREEN,
}


def memory_by_length() -> str:
    """Memory of one sequence over its length; both scales are logarithmic."""
    figure = svg.Figure("Memory of one sequence, for 64 to 131,072 tokens", 424)
    for mib in (4, 16, 64, 256, 1024, 4096):
        figure.line(_LEFT, _y(mib), svg.WIDTH - _RIGHT, _y(mib), svg.FAINT, 1)
        figure.text(_LEFT - 10, _y(mib) + 5, f"{mib:,} MiB", 14, "end", svg.SOFT)
    for tokens in (64, 512, 4096, 32_768):
        figure.text(_x(tokens), _BOTTOM + 22, f"{tokens:,}", 14, fill=svg.SOFT)
    figure.text((_LEFT + svg.WIDTH - _RIGHT) / 2, _BOTTOM + 48, "tokens", 14, fill=svg.SOFT)
    lengths = [_LENGTHS[0] * 2 ** (step / 4) for step in range(45)]
    for model, colour in _COLOURS.items():
        sizes = [worked.sequence_bytes(model, round(length)) / 2**20 for length in lengths]
        points = [(_x(length), _y(size)) for length, size in zip(lengths, sizes, strict=True)]
        figure.path(points, stroke=colour, stroke_width=3)
        below = {"Qwen3-30B-A3B": -2, "DeepSeek-V3": 14, "Qwen3-Next-80B-A3B": -4}.get(model, 16)
        x, y = points[-1]
        figure.text(x + 8, y + below, model, 14, "start", colour, bold=True)
    return str(figure)


def _x(tokens: float) -> float:
    return _LEFT + _share(tokens, *_LENGTHS) * (svg.WIDTH - _LEFT - _RIGHT)


def _y(mib: float) -> float:
    return _BOTTOM - _share(mib, *_MIB) * (_BOTTOM - _TOP)


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)
