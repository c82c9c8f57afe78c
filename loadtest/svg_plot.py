"""Line charts as SVG: panels above each other over one time axis. Enough for reports, without a plotting library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _PANEL_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 190, 64, 190, 30, 26
_COLOURS = ("#1f6fb2", "#d1603d", "#3a8f5c", "#8a5fb0", "#b0892f", "#4a4a4a")
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    """Points in order of x."""

    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes; y begins at 0 unless all its values are far above it."""

    title: str
    lines: Sequence[Line]


def draw(panels: Sequence[Panel], x_label: str) -> str:
    """The file's text; ValueError when there is no point at all."""
    xs = [x for panel in panels for line in panel.lines for x, _ in line.points]
    if not xs:
        raise ValueError("there are no points to draw")
    x_axis = _Axis.over(min(0.0, *xs), max(xs))
    height = len(panels) * _PANEL_HEIGHT + _BOTTOM
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        body += _panel(panel, number * _PANEL_HEIGHT, x_axis)
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    body += [f'<text x="{middle:g}" y="{height - 6}" text-anchor="middle">{escape(x_label)}</text>', "</svg>", ""]
    return "\n".join(body)


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    step: float

    @classmethod
    def over(cls, low: float, high: float) -> "_Axis":
        """Round ticks over all of it."""
        span = max(high - low, 0.01 * max(abs(high), 1.0))
        rough = span / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
        first = math.floor(low / step)
        return cls(first * step, max(math.ceil(high / step), first + 1) * step, step)

    def ticks(self) -> list[float]:
        """From low to high."""
        return [self.low + self.step * number for number in range(round((self.high - self.low) / self.step) + 1)]

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)


def _panel(panel: Panel, top: float, x_axis: _Axis) -> list[str]:
    ys = [y for line in panel.lines for _, y in line.points] or [0.0, 1.0]
    low = min(ys)
    y_axis = _Axis.over(low if low > 0.8 * max(ys) else min(0.0, low), max(*ys, 1e-9))
    floor = top + _PANEL_HEIGHT - _BOTTOM
    width, height = _WIDTH - _LEFT - _RIGHT, _PANEL_HEIGHT - _TOP - _BOTTOM

    def x_of(value: float) -> float:
        return _LEFT + width * x_axis.share(value)

    def y_of(value: float) -> float:
        return floor - height * y_axis.share(value)

    parts = [f'<text x="{_LEFT}" y="{top + 18:g}" font-weight="bold">{escape(panel.title)}</text>']
    for tick in y_axis.ticks():
        y = y_of(tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{width}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    for tick in x_axis.ticks():
        parts.append(f'<text x="{x_of(tick):.1f}" y="{floor + 14:g}" text-anchor="middle">{tick:.6g}</text>')
    for number, line in enumerate(panel.lines):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
        x, y = _WIDTH - _RIGHT + 12, top + _TOP + 8 + 16 * number
        parts.append(f'<path d="M{x} {y - 4:g}h16" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 22}" y="{y:g}">{escape(line.label)}</text>')
    return parts
