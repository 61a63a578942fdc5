"""The drawings of a report. Each is drawn for a width, since text in a scaled drawing is too small on a phone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from kvrun.report.svg import CHARACTER, Box, Scale, axes, line, number, picture, place_label, polyline, text
from kvrun.results import ResultRow

WIDE, NARROW = 760, 380


@dataclass(frozen=True)
class Point:
    """One row of the comparison in the plot. ours: which of the two marks.  error: one standard error."""

    label: str
    detail: str
    bits: float
    kld: float
    error: float
    ours: bool


def row_label(row: ResultRow) -> str:
    """Short name of a row for direct labels: `kv4`, `kv4 4+32` with sinks and window, `q4_0 rotated`."""
    name = row.type_k if row.type_k == row.type_v else f"{row.type_k}/{row.type_v}"
    name = name.replace("auto", "recipe") if row.recipe else name
    if row.rotation == "on" and not row.recipe:
        name += " rotated"
    if row.engine != "kvrun":
        return name
    return name + (f" {row.sinks}+{row.window}" if row.sinks or row.window else "")


def points_of(rows: Sequence[ResultRow]) -> list[Point]:
    """Rows that can be drawn: with figures, a divergence above 0, not the reference (f16) and not the control."""
    found = []
    for row in rows:
        if row.error or row.control or not row.kld_mean or row.kld_mean <= 0 or row.bits_per_value is None:
            continue
        if row.type_k == row.type_v == "f16":
            continue
        label = row_label(row)
        detail = f"{row.engine} {label}: {row.bits_per_value:.2f} bits/value, KLD {row.kld_mean:.4f}"
        error = row.kld_mean_se or 0.0
        found.append(Point(label, detail, row.bits_per_value, row.kld_mean, error, row.engine == "kvrun"))
    return found


def curves_of(rows: Sequence[ResultRow]) -> dict[str, list[tuple[float, float]]]:
    """For `by_position`: (middle of the bin, mean KL divergence) of ours, and of llama.cpp's q8_0 and q4_0 rotated."""
    curves = {}
    for row in rows:
        beside = row.engine != "kvrun" and not (row.type_k in ("q8_0", "q4_0") and row.rotation == "on")
        if row.error or row.control or row.reference or beside or row.type_k == row.type_v == "f16":
            continue
        bins = row.kld_by_position or []
        curves[row_label(row)] = [((b["low"] + b["high"] - 1) / 2, b["kld_mean"]) for b in bins]
    return {name: points for name, points in curves.items() if points}


def frontier(points: Sequence[Point]) -> list[Point]:
    """Points that no other beats in both size and divergence, from small to large."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.bits, p.kld)):
        if not front or point.kld < front[-1].kld:
            front.append(point)
    return front


def pareto(rows: Sequence[ResultRow], width: int = WIDE) -> str:
    """KL divergence against bits per value, ours and llama.cpp's, each with its own frontier; empty without points."""
    points = points_of(rows)
    if not points:
        return ""
    height, top = (520, 40) if width >= WIDE else (500, 62)
    low_x, high_x = min(p.bits for p in points), max(p.bits for p in points)
    pad = max((high_x - low_x) * 0.08, 0.4)
    x = Scale(max(low_x - pad, 0), high_x + pad, 56, width - 12)
    low_y, high_y = min(p.kld for p in points), max(p.kld for p in points)
    y = Scale(low_y / 1.6, high_y * 1.6, height - 44, top, log=True)
    body = axes(x, y, "bits per value, everything counted", "KL divergence, nats per token (log)")
    taken = [Box(x(p.bits) - 6, y(p.kld) - 6, x(p.bits) + 6, y(p.kld) + 6) for p in points]
    for ours in (False, True):
        css = "ours" if ours else "theirs"
        front = frontier([p for p in points if p.ours is ours])
        corners: list[tuple[float, float]] = []
        for point in front:
            if corners:
                corners.append((x(point.bits), corners[-1][1]))
            corners.append((x(point.bits), y(point.kld)))
        if len(corners) > 1:
            body.append(polyline(corners, f"front {css}"))
    frame = Box(x.start, y.stop - 8, x.stop + 10, y.start)
    for point in sorted(points, key=lambda p: p.kld):
        css, mark_x, mark_y = "ours" if point.ours else "theirs", x(point.bits), y(point.kld)
        at_x, at_y, anchor = place_label(mark_x, mark_y, point.label, taken, frame)
        if abs(at_y - mark_y) > 20:
            body.append(line(mark_x, mark_y, at_x, at_y + math.copysign(7, mark_y - at_y), f"leader {css}"))
        body.append(text(at_x, at_y, point.label, anchor=anchor, css=f"label {css}"))
    body += [_mark(point, x, y) for point in points] + _legend(width)
    return picture(width, height, "KL divergence against bits per value", body)


def _legend(width: int) -> list[str]:
    first, middle = (
        (width - 12 - CHARACTER * 12 * len("kvrun  llama.cpp") - 40, 12.0) if width >= WIDE else (12.0, 32.0)
    )
    second = first + CHARACTER * 12 * 6 + 20
    return [
        f'<circle cx="{first:.1f}" cy="{middle:.1f}" r="5" class="dot ours"/>',
        text(first + 10, middle, "kvrun", css="label ours"),
        f'<rect x="{second - 4.5:.1f}" y="{middle - 4.5:.1f}" width="9" height="9" class="dot theirs"/>',
        text(second + 10, middle, "llama.cpp", css="label theirs"),
    ]


def _mark(point: Point, x: Scale, y: Scale) -> str:
    cx, cy, css = x(point.bits), y(point.kld), "ours" if point.ours else "theirs"
    bar = ""
    if point.error > 0:
        low = max(point.kld - 1.96 * point.error, y.low)
        bar = line(cx, y(low), cx, y(min(point.kld + 1.96 * point.error, y.high)), f"bar {css}")
    shape = (
        f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="5" class="dot {css}"/>'
        if point.ours
        else f'<rect x="{cx - 4.5:.1f}" y="{cy - 4.5:.1f}" width="9" height="9" class="dot {css}"/>'
    )
    return f"<g><title>{escape(point.detail)}</title>{bar}{shape}</g>"


def by_position(curves: Mapping[str, Sequence[tuple[float, float]]], width: int = WIDE) -> str:
    """Mean KL divergence over the position in the window, a line per setting with its name at the end."""
    curves = {name: [(p, k) for p, k in points if k > 0] for name, points in curves.items()}
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return ""
    height = 380
    every = [point for points in curves.values() for point in points]
    room = CHARACTER * 12 * max(len(name) for name in curves) + 14
    low, high = min(p for p, _ in every), max(p for p, _ in every)
    x = Scale(low, high if high > low else low + 1, 56, width - room)
    y = Scale(min(k for _, k in every) / 1.3, max(k for _, k in every) * 1.3, height - 44, 40, log=True)
    body = axes(x, y, "position in the window", "KL divergence, nats per token (log)")
    ends: list[tuple[float, str, int]] = []
    for index, (name, points) in enumerate(curves.items()):
        body.append(
            polyline([(x(p), y(k)) for p, k in points], f"curve c{index % 6}{' second' if index % 12 > 5 else ''}")
        )
        ends.append((y(points[-1][1]), name, index))
    ends.sort()
    last, middles = -math.inf, []
    for at, _, _ in ends:
        last = max(at, last + 14)
        middles.append(last)
    lowest = y.start
    for i in reversed(range(len(middles))):  # what was pushed below the axis pushes the ones above it up
        middles[i] = min(middles[i], lowest)
        lowest = middles[i] - 14
    for middle, (_, name, index) in zip(middles, ends, strict=True):
        body.append(text(x.stop + 8, middle, name, css=f"label t{index % 6}"))
    return picture(width, height, "KL divergence by position in the window", body)


@dataclass(frozen=True)
class Cell:
    """One field of a heat map. row: index into the row labels."""

    layer: int
    row: int
    value: float
    title: str


def heat_map(
    cells: Sequence[Cell], row_labels: Sequence[str], title: str, width: int = WIDE, *, log: bool = True
) -> str:
    """Layers from left to right, sides and heads from top to bottom, darker is more; empty without cells.

    log: shades follow the logarithm of the value.
    """
    if not cells:
        return ""
    values = [cell.value for cell in cells if cell.value > 0] or [1.0]
    low, high = min(values), max(values)
    left = 12 + CHARACTER * 12 * max(len(label) for label in row_labels)
    n_layer = max(cell.layer for cell in cells) + 1
    step = (width - left - 8) / n_layer
    tall = max(min(step, 26.0), 16.0)
    top = 34.0 if width >= WIDE else 50.0
    height = int(top + tall * len(row_labels) + 26)

    def shade(value: float) -> float:
        if value <= 0 or high <= low:
            return 0.04 if value <= 0 else 0.5
        share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        return 0.06 + 0.94 * share

    body = [text(4, 12, title, css="axis-title")]
    body += [
        text(left - 8, top + tall * (i + 0.5), label, anchor="end", css="tick") for i, label in enumerate(row_labels)
    ]
    for cell in cells:
        body.append(
            f'<rect x="{left + step * cell.layer:.1f}" y="{top + tall * cell.row:.1f}" width="{step - 1:.1f}" '
            f'height="{tall - 1:.1f}" class="heat" fill-opacity="{shade(cell.value):.3f}">'
            f"<title>{escape(cell.title)}</title></rect>"
        )
    every = next(n for n in (1, 2, 5, 10, 20, 50) if step * n >= 18)
    bottom = top + tall * len(row_labels)
    for layer in range(0, n_layer, every):
        body.append(text(left + step * (layer + 0.5), bottom + 12, str(layer), anchor="middle", css="tick"))
    body += _shades(width - 8, 12, low, high) if width >= WIDE else _shades(width - 8, 30, low, high)
    return picture(width, height, title, body)


def _shades(right: float, middle: float, low: float, high: float) -> list[str]:
    """The legend: shades from the smallest to the largest value."""
    size = 9
    high_text, low_text = number(float(f"{high:.2g}")), number(float(f"{low:.2g}"))
    start = right - CHARACTER * 12 * len(high_text) - 6 * size - 6
    out = [
        text(right, middle, high_text, anchor="end", css="tick"),
        text(start - 6, middle, low_text, anchor="end", css="tick"),
    ]
    for i in range(6):
        place = f'x="{start + i * size:.1f}" y="{middle - 5:.1f}" width="{size}" height="10"'
        out.append(f'<rect {place} class="heat" fill-opacity="{0.06 + 0.94 * i / 5:.3f}"/>')
    return out
