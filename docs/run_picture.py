"""A recorded run as one picture: a line for each sequence, a column for each step."""

from pathlib import Path

import svg

from nanoserve.features.trace.reader import Trace, read_trace

_LEFT, _RIGHT, _TOP, _LINE = 92, 24, 44, 30
_WAITING, _VICTIM = svg.FAINT, svg.RED
_CHUNK, _TOKEN, _DRAFTS = svg.PALE_BLUE, svg.PALE_GREEN, svg.PALE_PURPLE


def run_picture(path: Path) -> str:
    """Return an SVG of sequences that wait, prefill, decode or are preempted, step by step."""
    trace = read_trace(path)
    arrived = [new["seq"] for step in trace.steps for new in step["arrived"]]
    lines = {seq: _TOP + _LINE * place for place, seq in enumerate(arrived)}
    bottom = _TOP + _LINE * len(lines)
    title = f"{path.stem.replace('-', ' ')}: the sequences of each step"
    figure = svg.Figure(title, bottom + 56)
    width = (figure.width - _LEFT - _RIGHT) / len(trace.steps)
    _axis(figure, trace, width)
    for seq, y in lines.items():
        figure.text(_LEFT - 10, y + 18, f"#{seq}", anchor="end", bold=True)
    for place, step in enumerate(trace.steps):
        x = _LEFT + place * width
        for seq in step["waiting"]:
            figure.line(x + 1, lines[seq] + 13, x + width - 1, lines[seq] + 13, _WAITING, 3)
        for row in step["rows"]:
            decodes = _DRAFTS if row.get("guesses") else _TOKEN
            fill = decodes if row["kind"] == "decode" else _CHUNK
            figure.rect(x + 0.5, lines[row["seq"]] + 2, width - 1, 22, fill)
            if width >= 11 + 8 * len(str(row["new"])):
                figure.text(x + width / 2, lines[row["seq"]] + 18, row["new"], size=13)
        for seq in step["preempted"]:
            figure.rect(x, lines[seq] + 1, 3, 24, _VICTIM)
    _legend(figure, bottom + 18)
    return str(figure)


def _axis(figure: svg.Figure, trace: Trace, width: float) -> None:
    figure.text(_LEFT - 10, 28, "step", anchor="end", fill=svg.SOFT, size=13)
    every = next(each for each in (1, 2, 5, 10, 20, 50, 100, 1000) if each * width >= 26)
    for place in range(0, len(trace.steps), every):
        label = trace.steps[place]["step"]
        figure.text(_LEFT + (place + 0.5) * width, 28, label, fill=svg.SOFT, size=13)


def _legend(figure: svg.Figure, y: float) -> None:
    x = _LEFT
    for words, fill in (("prefill", _CHUNK), ("decode", _TOKEN), ("with draft tokens", _DRAFTS)):
        figure.rect(x, y, 16, 14, fill)
        figure.text(x + 22, y + 12, words, anchor="start", size=13, fill=svg.SOFT)
        x += 50 + 8 * len(words)
    figure.line(x, y + 7, x + 16, y + 7, _WAITING, 3)
    figure.text(x + 22, y + 12, "waits", anchor="start", size=13, fill=svg.SOFT)
    x += 84
    figure.rect(x, y - 2, 3, 18, _VICTIM)
    figure.text(x + 10, y + 12, "preempted", anchor="start", size=13, fill=svg.SOFT)
