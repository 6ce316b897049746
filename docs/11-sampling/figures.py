"""The search for the border of top-p: three trial borders per pass, and no sort."""

from pathlib import Path

import facts
import svg

worked = facts.load(Path(__file__).with_name("worked.py"))

TOP_P = 0.9


def border_search() -> str:
    """The logits on a number line; below it, for each pass, the range and the trial borders."""
    border, passes = worked.border_search(worked.SEARCHED, TOP_P)
    figure = svg.Figure(
        f"Top-p of {TOP_P} by search: the borders of each pass", 250 + 84 * len(passes)
    )
    figure.text(18, 32, "probabilities of the logits", 16, "start", bold=True)
    figure.line(_x(border), 30, _x(border), 236 + 84 * len(passes), svg.GREEN, 1.5, "5 4")
    probs = worked.probabilities(worked.SEARCHED)
    for logit, prob in zip(worked.SEARCHED, probs, strict=True):
        if logit < _LOW:
            continue
        kept = logit >= border
        height = 150 * prob / probs[0]
        colours = (svg.PALE_GREEN, svg.GREEN) if kept else ("#e2e4ea", svg.SOFT)
        figure.rect(_x(logit) - 9, 195 - height, 18, height, *colours)
        if prob >= 0.005:
            aside = -8 if prob < probs[2] else 6
            figure.text(_x(logit) + aside, 188 - height, f"{prob:.2f}", 13, fill=svg.SOFT)
    figure.line(_x(_LOW), 195, _x(_HIGH), 195)
    for logit in range(int(_LOW) + 1, int(_HIGH) + 1):
        figure.line(_x(logit), 195, _x(logit), 201)
        figure.text(_x(logit), 217, logit, 14, fill=svg.SOFT)
    for i, one in enumerate(passes):
        _pass(figure, 244 + 84 * i, i + 1, one)
    figure.text(_x(border) - 8, 32, f"border {border:g}", 15, "end", svg.GREEN, bold=True)
    return str(figure)


_LOW, _HIGH = 13.6, 20.4


def _x(logit: float) -> float:
    return 80 + 615 * (logit - _LOW) / (_HIGH - _LOW)


def _pass(figure: svg.Figure, y: float, number: int, one: tuple) -> None:
    low, high, borders, masses = one
    figure.text(18, y + 16, f"pass {number}", 15, "start", bold=True)
    figure.text(18, y + 36, f"{high - low + 1} keys", 14, "start", svg.SOFT)
    left, right = _x(worked.value_of(low)), _x(worked.value_of(high))
    figure.rect(left - 3, y + 4, max(right - left, 0) + 6, 14, svg.PALE_BLUE, svg.BLUE)
    tried = dict(zip(borders, masses, strict=True))  # the last passes may try one border twice
    apart = max((max(tried) - min(tried)) / 2, 0.72) if len(tried) > 1 else 0
    middle = sum(tried) / len(tried)
    for i, (border, mass) in enumerate(tried.items()):
        colour = svg.GREEN if mass >= TOP_P else svg.RED
        x = _x(middle + apart * (i - (len(tried) - 1) / 2) * 2 / max(len(tried) - 1, 1))
        figure.line(_x(border), y, _x(border), y + 22, colour, 3)
        figure.line(_x(border), y + 22, x, y + 32, colour, 1)
        figure.rect(x - 28, y + 33, 56, 34, svg.CARD)
        figure.text(x, y + 46, f"{border:g}", 14, fill=colour)
        figure.text(x, y + 63, f"{mass:.3f}", 14, fill=colour, bold=True)
