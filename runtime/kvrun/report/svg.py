"""Pieces of the drawings: text, marks and scales as SVG, coloured by the page's own style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

#: Width of a character of a label, as a share of its font size, on the safe side.
CHARACTER = 0.58
FONT = 12


@dataclass(frozen=True)
class Scale:
    """Values `low .. high` onto pixels `start .. stop`, linear or logarithmic."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Pixel of a value; values beyond the ends land beyond them."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Round values within the ends: 1, 2, 5 per decade (log), or about eight of equal distance."""
        if not self.log:
            step = nice_step((self.high - self.low) / 8)
            first = math.ceil(self.low / step - 1e-9)
            return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1,) if len(decades) > 4 else (1, 2, 5) if len(decades) > 2 else (1, 2, 3, 5, 7)
        return [m * 10.0**d for d in decades for m in steps if self.low <= m * 10.0**d <= self.high]


def nice_step(raw: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))


def number(value: float) -> str:
    """A tick's text: no exponent where it can be helped."""
    return f"{value:.0e}".replace("e-0", "e-") if 0 < abs(value) < 1e-4 else f"{value:.6g}"


def text(x: float, y: float, content: str, *, anchor: str = "start", css: str = "", size: int = FONT) -> str:
    """A line of text; `y` is its middle."""
    return (
        f'<text x="{x:.1f}" y="{y + size * 0.35:.1f}" text-anchor="{anchor}" class="{css}" '
        f'font-size="{size}">{escape(content)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def polyline(points: Sequence[tuple[float, float]], css: str) -> str:
    """A line through points."""
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{css}"/>'


def picture(width: int, height: int, title: str, body: Sequence[str], css: str = "") -> str:
    """The whole drawing, with a title that screen readers read."""
    return (
        f'<svg class="chart {css}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(body)}</svg>'
    )


def axes(x: Scale, y: Scale, x_title: str, y_title: str) -> list[str]:
    """Grid lines, tick labels and titles; the title of the y axis stands above it, so that nobody tilts the head."""
    out = []
    for value in y.ticks():
        out.append(line(x.start, y(value), x.stop, y(value), "grid"))
        out.append(text(x.start - 8, y(value), number(value), anchor="end", css="tick"))
    for value in x.ticks():
        out.append(line(x(value), y.start, x(value), y.start + 4, "axis"))
        out.append(text(x(value), y.start + 15, number(value), anchor="middle", css="tick"))
    out.append(line(x.start, y.start, x.stop, y.start, "axis"))
    out.append(text(x.stop, y.start + 34, x_title, anchor="end", css="axis-title"))
    out.append(text(4, 12, y_title, css="axis-title"))
    return out


@dataclass(frozen=True)
class Box:
    """A rectangle that is taken."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """Area that both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(wide, 0.0) * max(high, 0.0)


def place_label(
    x: float, y: float, content: str, taken: list[Box], frame: Box, size: int = FONT
) -> tuple[float, float, str]:
    """Where the label of a point goes: x, middle y and anchor; the place that covers least of what is taken.

    The place is added to `taken`. Places near the point come first, then ones further up and down.
    """
    wide, high = CHARACTER * size * len(content), size + 2.0
    best: tuple[float, float, float, str, Box] | None = None
    for rank, (dx, dy, anchor) in enumerate(_places()):
        left = x + dx if anchor == "start" else x + dx - wide if anchor == "end" else x + dx - wide / 2
        box = Box(left, y + dy - high / 2, left + wide, y + dy + high / 2)
        outside = wide * high - box.overlap(frame)
        cost = sum(box.overlap(other) for other in taken) + 3 * outside + 1.5 * rank
        if best is None or cost < best[0]:
            best = (cost, x + dx, y + dy, anchor, box)
    assert best is not None
    taken.append(best[4])
    return best[1], best[2], best[3]


def _places() -> list[tuple[float, float, str]]:
    near = [(9.0, 0.0, "start"), (0.0, -13.0, "middle"), (0.0, 14.0, "middle"), (-9.0, 0.0, "end")]
    corners = [(7.0, dy, "start") for dy in (-11.0, 12.0)] + [(-7.0, dy, "end") for dy in (-11.0, 12.0)]
    far = [
        (dx, dy, a)
        for dy in (-24.0, 25.0, -37.0, 38.0, -50.0, 51.0, -63.0, 64.0)
        for dx, a in ((14.0, "start"), (-14.0, "end"))
    ]
    return near + corners + far
