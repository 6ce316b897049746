"""Figures of chapter 2: attention of three tokens, and a pair of dimensions rotated by RoPE."""

import math
from pathlib import Path

import facts
import svg

worked = facts.load(Path(__file__).with_name("worked.py"))

THETA = 10_000
PAIRS = ((5, 3), (105, 103), (5, 4))  # positions of the query and the key


def three_tokens() -> str:
    """Draw scores, weights with the causal mask, and outputs, as three small heat maps."""
    figure = svg.Figure(
        "Scores, causal weights and outputs of three tokens whose queries differ", 280
    )
    scores = [[worked.dot(q, k) / 2 for k in worked.KEYS] for q in worked.QUERIES]
    weights = worked.attention_weights(worked.QUERIES, worked.KEYS, causal=True)
    outputs = worked.attention(worked.QUERIES, worked.KEYS, worked.VALUES, causal=True)
    width, left = 52, (88, 294, 492)
    titles = ("scores / 2", "weights", "output")
    for x, title, rows in zip(left, titles, (scores, weights, outputs), strict=True):
        figure.text(x + width * len(rows[0]) / 2, 36, title, 16, bold=True)
        for j in range(len(rows[0])):
            name = f"dim {j}" if title == "output" else f"key {j}"
            figure.text(x + width * (j + 0.5), 64, name, 14, fill=svg.SOFT)
        largest = max(max(row) for row in rows)
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                hidden = title != "output" and j > i
                _cell(figure, x + width * j, 74 + 50 * i, width, value, largest, hidden)
    for i in range(len(scores)):
        figure.text(left[0] - 10, 104 + 50 * i, f"query {i}", 15, "end")
    for x, words in ((248, "softmax"), (453, "x V")):
        figure.arrow(x, 150, x + 36, 150)
        figure.text(x + 17, 142, words, 13, fill=svg.SOFT)
    figure.text(left[0], 254, "hatched: future keys, masked", 14, "start", svg.SOFT)
    return str(figure)


def turning_pair() -> str:
    """Draw the first pair of dimensions of a query and a key in a plane, at several positions."""
    figure = svg.Figure("A query and a key as arrows that RoPE rotates, at several positions", 330)
    query, key = worked.QUERIES[-1], worked.KEYS[0]
    _panel(figure, 0, "as computed, not rotated", "no position yet", query, key)
    notes = ("distance 2", "distance 2: same angle", "distance 1: other angle")
    for i, ((m, n), note) in enumerate(zip(PAIRS, notes, strict=True), 1):
        turned = worked.rotate(query, m, THETA), worked.rotate(key, n, THETA)
        _panel(figure, i, f"query at {m}, key at {n}", note, *turned)
    figure.arrow(190, 305, 222, 305, svg.BLUE, 3, 9)
    figure.text(230, 310, "query", 15, "start", svg.BLUE)
    figure.arrow(320, 305, 352, 305, svg.ORANGE, 3, 9)
    figure.text(360, 310, "key", 15, "start", svg.ORANGE)
    figure.text(430, 310, "dot: their dot product", 15, "start", svg.SOFT)
    return str(figure)


def _cell(
    figure: svg.Figure,
    x: float,
    y: float,
    width: float,
    value: float,
    largest: float,
    hidden: bool,
) -> None:
    if hidden:
        figure.rect(x, y, width - 3, 47, "#e6e8ee", svg.FAINT)
        for shift in (12, 24, 36):
            figure.line(x + shift, y + 2, x + shift - 10, y + 45, svg.FAINT, 1)
        return
    figure.rect(x, y, width - 3, 47, _shade(value / largest), svg.FAINT)
    text = f"{value:.1f}" if largest > 1 and value == round(value, 1) else f"{value:.2f}"
    figure.text(x + (width - 3) / 2, y + 29, text, 15)


def _shade(share: float) -> str:
    """Return a shade from white to a blue on which dark text is readable."""
    white, blue = (255, 255, 255), (138, 164, 240)
    mixed = [round(a + (b - a) * share) for a, b in zip(white, blue, strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _panel(
    figure: svg.Figure, index: int, title: str, note: str, query: list[float], key: list[float]
) -> None:
    x, y, unit = 92 + 178 * index, 146, 34
    half = len(query) // 2
    arrows = {svg.BLUE: (query[0], query[half]), svg.ORANGE: (key[0], key[half])}
    for i, line in enumerate(title.split(", ")):
        figure.text(x, 28 + 19 * i, line, 15, bold=True)
    figure.circle(x, y, 2.3 * unit, svg.WHITE, svg.FAINT)
    figure.line(x - 2.3 * unit, y, x + 2.3 * unit, y, svg.FAINT, 1)
    figure.line(x, y - 2.3 * unit, x, y + 2.3 * unit, svg.FAINT, 1)
    start = math.atan2(query[half], query[0])
    turn = (math.atan2(key[half], key[0]) - start + math.pi) % (2 * math.pi) - math.pi
    arc = [start + turn * i / 24 for i in range(25)]
    points = [(x + 26 * math.cos(a), y - 26 * math.sin(a)) for a in arc]
    figure.path([(x, y), *points], fill="#e3e5ec", closed=True)
    figure.path(points, stroke=svg.INK)
    for colour, (a, b) in arrows.items():
        figure.arrow(x, y, x + unit * a, y - unit * b, colour, 3, 9)
    product = query[0] * key[0] + query[half] * key[half]
    figure.text(x, 250, f"{abs(math.degrees(turn)):.0f}°, dot {product:.2f}", 16)
    figure.text(x, 273, note, 14, fill=svg.SOFT)
