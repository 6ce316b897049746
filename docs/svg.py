"""A small drawing library for the course's figures: shapes in, SVG text out.

A figure is a light card with dark text, so that it reads on a light page and on a dark one. Its
units are pixels at 720 of width; text is 13 of them or more. The same calls give the same text,
on any machine: coordinates are rounded to a tenth.
"""

from html import escape

WIDTH = 720
INK, SOFT, FAINT, CARD, WHITE = "#1f2430", "#5b6475", "#c3c9d4", "#f8f9fc", "#ffffff"
BLUE, ORANGE, GREEN, PURPLE, RED, TEAL = (
    *("#3f62c8", "#c66a13", "#2f8551", "#7a4fb0"),
    *("#bf3b36", "#1c7f8c"),
)
# The same six colours, in the same order, as fills on which dark text is readable.
PALE_BLUE, PALE_ORANGE, PALE_GREEN, PALE_PURPLE, PALE_RED, PALE_TEAL = (
    *("#cfdaf8", "#fbdcb8", "#c6e8d2", "#e0d2f3"),
    *("#f6cfcc", "#c3e6ea"),
)
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL)
PALE = (PALE_BLUE, PALE_ORANGE, PALE_GREEN, PALE_PURPLE, PALE_RED, PALE_TEAL)


class Figure:
    """One drawing; later shapes are on top of earlier ones."""

    def __init__(self, title: str, height: float, width: float = WIDTH) -> None:
        self.title, self.width, self.height = title, width, height
        self._shapes: list[str] = []
        self.rect(1, 1, width - 2, height - 2, fill=CARD, stroke=FAINT, radius=10)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "none",
        stroke: str = "none",
        stroke_width: float = 1,
        radius: float = 2,
        dash: str = "",
    ) -> None:
        self._add(
            *("rect", ""),
            **{"x": x, "y": y, "width": width, "height": height, "rx": radius},
            **_paint(fill, stroke, stroke_width, dash),
        )

    def circle(
        self, x: float, y: float, radius: float, fill: str = INK, stroke: str = "none"
    ) -> None:
        self._add("circle", "", cx=x, cy=y, r=radius, **_paint(fill, stroke, 2, ""))

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        stroke: str = INK,
        stroke_width: float = 1.5,
        dash: str = "",
    ) -> None:
        self._add("line", "", x1=x1, y1=y1, x2=x2, y2=y2, **_paint("", stroke, stroke_width, dash))

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        stroke: str = INK,
        stroke_width: float = 1.5,
        head: float = 7,
    ) -> None:
        """Draw a line whose tip, at (x2, y2), is a filled triangle."""
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        dx, dy = (x2 - x1) / length * head, (y2 - y1) / length * head
        self.line(x1, y1, x2 - dx, y2 - dy, stroke, stroke_width)
        corners = [
            (x2, y2),
            (x2 - dx - dy / 2, y2 - dy + dx / 2),
            (x2 - dx + dy / 2, y2 - dy - dx / 2),
        ]
        self.path(corners, fill=stroke, closed=True)

    def path(
        self,
        points: list[tuple[float, float]],
        stroke: str = "none",
        fill: str = "none",
        stroke_width: float = 1.5,
        closed: bool = False,
        dash: str = "",
    ) -> None:
        """Draw straight lines through `points`."""
        steps = " L ".join(f"{_number(x)} {_number(y)}" for x, y in points)
        end = " Z" if closed else ""
        self._add("path", "", d=f"M {steps}{end}", **_paint(fill, stroke, stroke_width, dash))

    def text(
        self,
        x: float,
        y: float,
        words: object,
        size: float = 15,
        anchor: str = "middle",
        fill: str = INK,
        bold: bool = False,
        turned: bool = False,
    ) -> None:
        """Draw text with its base line at `y`; `anchor` is the part of the text that is at `x`."""
        attributes: dict[str, object] = {"font-size": size, "text-anchor": anchor, "fill": fill}
        if bold:
            attributes["font-weight"] = 600
        if turned:
            attributes["transform"] = f"rotate(-90 {_number(x)} {_number(y)})"
        self._add("text", escape(str(words), quote=False), x=x, y=y, **attributes)

    def __str__(self) -> str:
        size = f"{_number(self.width)} {_number(self.height)}"
        title = escape(self.title, quote=False)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" '
            f'width="{_number(self.width)}" height="{_number(self.height)}" '
            'font-family="system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif">'
        )
        return "\n".join([head, f"<title>{title}</title>", *self._shapes, "</svg>", ""])

    def _add(self, tag: str, inside: str, **attributes: object) -> None:
        written = " ".join(f'{name}="{_number(value)}"' for name, value in attributes.items())
        end = f">{inside}</{tag}>" if inside else "/>"
        self._shapes.append(f"<{tag} {written}{end}")


def _paint(fill: str, stroke: str, stroke_width: float, dash: str) -> dict[str, object]:
    found: dict[str, object] = {"fill": fill} if fill else {}
    if stroke != "none":
        found |= {"stroke": stroke, "stroke-width": stroke_width}
    if dash:
        found["stroke-dasharray"] = dash
    return found


def _number(value: object) -> object:
    """Return a coordinate rounded to a tenth; other values unchanged."""
    if isinstance(value, float):
        return f"{round(value, 1) + 0.0:g}" if abs(value) < 1e5 else f"{value:.0f}"
    return value
