"""A picture of a run of the playground, for readers of its page as plain Markdown."""

import re
from pathlib import Path

import facts
import svg

runs = facts.load(Path(__file__).with_name("runs.py"))

_LEFT, _CELL, _LINE, _TOP = 96, 20, 34, 62


def example() -> str:
    """The run of the default setting: a line for each request, a column for each step."""
    setting = runs.DEFAULTS
    requests = runs.REQUESTS[setting["requests"]]
    steps = [step.split(";") for step in runs.run(setting).steps]
    figure = svg.Figure("A run of the playground: six requests in four slots", 358)
    words = (
        f"budget {setting['budget']}, {setting['slots']} slots, "
        f"{setting['pool'] // setting['block_size']} blocks of {setting['block_size']} tokens"
    )
    figure.text(_LEFT, 28, words, 16, "start", bold=True)
    for number in range(len(steps)):
        if number == 0 or number % 5 == 4:
            figure.text(_LEFT + _CELL * (number + 0.5), 52, number + 1, 13, fill=svg.SOFT)
    for i, request in enumerate(requests):
        y = _TOP + _LINE * i
        figure.text(14, y + 20, runs.NAMES[i], 16, "start", svg.COLOURS[i], bold=True)
        figure.text(34, y + 20, f"{request.prompt}+{request.output}", 14, "start", svg.SOFT)
        for number, fields in enumerate(steps):
            _cell(figure, _LEFT + _CELL * number, y, i, fields)
    legend = "line: waits; dark: a chunk of the prompt; light: a token; cross: preempted"
    figure.text(_LEFT, _TOP + _LINE * len(requests) + 26, legend, 14, "start", svg.SOFT)
    figure.text(
        *(_LEFT, _TOP + _LINE * len(requests) + 50, "numbers: tokens computed in the step"),
        **{"size": 14, "anchor": "start", "fill": svg.SOFT},
    )
    return str(figure)


def _cell(figure: svg.Figure, x: float, y: float, request: int, fields: list[str]) -> None:
    name = runs.NAMES[request]
    row = re.search(rf"{name}([dpbt])(\d+)", fields[0])
    if row:
        decodes = row[1] == "d"
        fill = svg.PALE[request] if decodes else svg.COLOURS[request]
        figure.rect(x, y, _CELL - 1, 28, fill, radius=1)
        ink = svg.INK if decodes else svg.WHITE
        figure.text(x + (_CELL - 1) / 2, y + 19, row[2], 13, fill=ink)
    elif name in fields[3][::2]:
        for slope in (1, -1):
            figure.line(x + 4, y + 14 - 6 * slope, x + 15, y + 14 + 6 * slope, svg.RED, 2.5)
    elif name in fields[1]:
        figure.line(x, y + 14, x + _CELL - 1, y + 14, svg.FAINT, 3)
