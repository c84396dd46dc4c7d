"""Curves as inline SVG, drawn by hand: axes, ticks, lines, and the numbers that a read-out needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

WIDTH, WIDE, HEIGHT = 560, 1136, 270  # WIDE takes the room of two figures
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 34  # room for ticks around the plot
POINTS = 800  # of a line; a longer one keeps the lowest and highest of each stretch
SMOOTHED = 80  # points from which a noisy line gets a smooth one on top
DOTTED = 50  # points up to which each is a dot
COLOURS = 8  # of runs, named in the page's style; the ninth run begins again, dashed


@dataclass(frozen=True, slots=True)
class Line:
    """One run's values over its steps.

    Attributes:
        run: its number, from 0: its colour.
        name: of the run.
        steps: rising.
        values: finite numbers.
    """

    run: int
    name: str
    steps: list[int]
    values: list[float]


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of numbers and where they are drawn.

    Attributes:
        low, high: of the range.
        start, stop: places of low and high, in the SVG's units.
        log: by orders of magnitude.
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where a number is drawn."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return self.start + (value - low) / (high - low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Round numbers in the range."""
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)


def chart(
    title: str, lines: Sequence[Line], *, from_zero: bool = False, smooth: bool = False, wide: bool = False
) -> str:
    """A figure with its lines on a linear and, where all are positive, on a logarithmic scale.

    Args:
        title: plain text.
        lines: each with at least one point.
        from_zero: the linear scale begins at 0.
        smooth: a noisy line gets the mean of its neighbours on top.
        wide: as wide as two figures.
    """
    width = WIDE if wide else WIDTH
    values = [value for line in lines for value in line.values]
    steps = [step for line in lines for step in line.steps]
    across = _spread(min(steps), max(steps), LEFT, width - RIGHT)
    low = min(0.0, *values) if from_zero else min(values)
    margin = (max(values) - low) * 0.06
    bottom = low if from_zero and low == 0 else low - margin
    scales = [("linear", _spread(bottom, max(values) + margin, HEIGHT - BOTTOM, TOP))]
    positive = [value for value in values if value > 0]
    if positive and len(positive) > len(values) / 2:
        scales.append(("log", _decades(min(positive), max(positive))))
    drawn = "".join(
        f'<g class="scale {name}">{_grid(up, width)}'
        f"{''.join(_line(line, across, up, smooth) for line in lines)}</g>"
        for name, up in scales
    )
    looks = " only-linear" * (len(scales) == 1) + " wide" * wide
    return (
        f'<figure class="chart{looks}"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(_words(title, lines))}" data-low="{across.low:g}" data-high="{across.high:g}" '
        f'data-left="{LEFT}" data-right="{width - RIGHT}">{_below(across, width)}{drawn}'
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/></svg></figure>'
    )


def number(value: float) -> str:
    """A number as people read it, with four digits that count."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if size >= 1e-3 else f"{value:.2e}"


def _words(title: str, lines: Sequence[Line]) -> str:
    """The figure for those who do not see it."""
    told = "; ".join(
        f"{x.name}: {number(x.values[0])} at first, {number(x.values[-1])} at last" for x in lines
    )
    return f"{title}. {told}"


def _line(line: Line, across: Axis, up: Axis, smooth: bool) -> str:
    points = [(x, y) for x, y in zip(line.steps, line.values, strict=True) if not up.log or y > 0]
    if not points:
        return ""
    dashed = " dashed" if line.run >= COLOURS else ""
    look = f"r{line.run % COLOURS}{dashed}"
    noisy = smooth and len(points) >= SMOOTHED
    # The read-out takes its numbers from the linear scale, which has all of them.
    data = "" if up.log else f" {_data(line)}"
    parts = [
        f'<polyline class="{look}{" faint" * noisy}"{data} points="{_path(_thin(points), across, up)}"/>'
    ]
    if noisy:
        parts.append(f'<polyline class="{look}" points="{_path(_thin(_smooth(points)), across, up)}"/>')
    if len(points) <= DOTTED:
        parts += [
            f'<circle class="{look}" cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="2.4"/>' for x, y in points
        ]
    return "".join(parts)


def _data(line: Line) -> str:
    points = _thin(list(zip(line.steps, line.values, strict=True)))
    steps = " ".join(str(step) for step, _ in points)
    values = " ".join(number(value) for _, value in points)
    return f'data-run="{line.run}" data-steps="{steps}" data-values="{values}"'


def _path(points: Sequence[tuple[int, float]], across: Axis, up: Axis) -> str:
    return " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in points)


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most about POINTS of them, in which every peak is still there."""
    if len(points) <= POINTS:
        return points
    stretch = math.ceil(len(points) / (POINTS // 2))
    kept: list[tuple[int, float]] = [points[0]]
    for start in range(1, len(points) - 1, stretch):
        part = points[start : min(start + stretch, len(points) - 1)]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [*kept, points[-1]]


def _smooth(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The mean of a point and its neighbours: a twenty-fifth of the line on each side, fewer at the ends."""
    sums = list(accumulate((value for _, value in points), initial=0.0))
    reach = max(2, len(points) // 25)
    found = []
    for place, (step, _) in enumerate(points):
        near = min(reach, place, len(points) - 1 - place)
        low, high = place - near, place + near + 1
        found.append((step, (sums[high] - sums[low]) / (high - low)))
    return found


def _grid(up: Axis, width: int) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{up.at(tick):.1f}" y2="{up.at(tick):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{up.at(tick) + 4:.1f}" text-anchor="end">{_short(tick)}</text>'
        for tick in up.ticks()
    )


def _below(across: Axis, width: int) -> str:
    ticks = [tick for tick in across.ticks() if tick == int(tick)]
    texts = "".join(
        f'<text class="tick" x="{across.at(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
        f"{_short(tick)}</text>"
        for tick in ticks
    )
    middle = (LEFT + width - RIGHT) / 2
    return f'{texts}<text class="tick" x="{middle}" y="{HEIGHT - 2}" text-anchor="middle">step</text>'


def _spread(low: float, high: float, start: float, stop: float) -> Axis:
    """A linear axis; a range of one number gets some room."""
    if high <= low:
        room = abs(low) * 0.05 or 1.0
        low, high = low - room, low + room
    return Axis(low, high, start, stop)


def _decades(low: float, high: float) -> Axis:
    room = max((high / low) ** 0.06, 1.02)
    return Axis(low / room, high * room, HEIGHT - BOTTOM, TOP, log=True)


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    raw = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(place * step, 12) for place in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, or parts of them where they are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [10.0**decade * factor for decade in decades for factor in factors]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) >= 3:
            every = math.ceil(len(found) / 7)
            return found[::every]
    return _ticks(low, high)


def _short(tick: float) -> str:
    if tick == 0:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(tick) >= size * (10 if letter == "k" else 1):
            return f"{tick / size:g}{letter}"
    return f"{tick:g}" if abs(tick) >= 1e-3 else f"{tick:.0e}".replace("e-0", "e-")
