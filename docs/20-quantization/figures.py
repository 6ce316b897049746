"""Figure of the values that codes can represent, from the numbers of chapter 20."""

from pathlib import Path

import facts
import svg

worked = facts.load(Path(__file__).with_name("worked.py"))

_LEFT, _RIGHT = 120, 24


def values_of_codes() -> str:
    """The values of three formats between zero and the largest magnitude."""
    figure = svg.Figure("The values of int4, int8 and e4m3 between 0 and the largest", 262)
    lines = [
        ("int4", [code / 7 for code in range(8)], svg.ORANGE, "evenly spaced, and few"),
        (
            "int8",
            [code / 127 for code in range(128)],
            svg.BLUE,
            "evenly spaced: the error is half a step",
        ),
        ("e4m3", _of_e4m3(), svg.GREEN, "finer towards 0: the error is a sixteenth of the value"),
    ]
    for index, (name, values, colour, words) in enumerate(lines):
        y = 62 + 64 * index
        figure.text(_LEFT - 16, y + 5, name, 17, "end", colour, bold=True)
        figure.text(_x(0), y - 18, words, 14, "start", svg.SOFT)
        figure.line(_x(0), y, _x(1), y, svg.FAINT, 1)
        for value in values:
            figure.line(_x(value), y - 10, _x(value), y + 10, colour, 1)
    for value, words in ((0, "0"), (0.5, "half"), (1, "the largest")):
        figure.text(_x(value), 240, words, 15, "end" if value == 1 else "middle", svg.SOFT)
    return str(figure)


def _of_e4m3() -> list[float]:
    largest = worked.e4m3_largest()
    return [value / largest for value in worked.e4m3_values() if value >= 0]


def _x(share: float) -> float:
    return _LEFT + share * (svg.WIDTH - _LEFT - _RIGHT)
