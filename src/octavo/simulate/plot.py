"""Charts as SVG: lines, stacked areas and bars, readable on light and dark backgrounds. Written by hand to avoid a
plotting dependency."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 160, 34, 46  # margins of the plot; the legend is at the right
FREE = "#c9ced6"
COLORS = ("#2f6fb2", "#d9822b", "#3a9a5b", "#b03a48", "#7a5aa6", "#8a8a8a", "#c2a01e")
INK = "#777"


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Area:
    """One layer of a stack; its values belong to the chart's `xs`."""

    name: str
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars of one colour: a value for each of the chart's `labels`."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart. `bars` are grouped, or stacked with `stacked`; `top` limits the y axis if values diverge."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    areas: Sequence[Area] = ()
    bars: Sequence[Bars] = ()
    xs: Sequence[float] = ()
    labels: Sequence[str] = ()
    stacked: bool = False
    log_x: bool = False
    log_y: bool = False
    top: float | None = None


@dataclass(slots=True)
class _Axis:
    low: float
    high: float
    begin: float
    end: float
    log: bool = False
    ticks: list[float] = field(init=False)

    def __post_init__(self) -> None:
        if self.log:
            self.low, self.high = max(self.low, 1e-9), max(self.high, 2e-9)
            if self.high <= self.low:
                self.high = self.low * 2
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            ticks = [m * 10.0**k for k in range(first, last + 1) for m in ((1, 2, 5) if last - first <= 2 else (1,))]
        else:
            if self.high <= self.low:
                self.high = self.low + 1
            step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
            step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= 6)
            ticks = [step * k for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        self.ticks = [t for t in ticks if self.low <= t <= self.high * (1 + 1e-9)]

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)


def svg(charts: Sequence[Chart]) -> str:
    """The charts below one another as the text of an SVG file."""
    height = HEIGHT * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{INK}">'
    ]
    for i, chart in enumerate(charts):
        parts.append(f'<g transform="translate(0 {i * HEIGHT})">')
        parts += _draw_chart(chart)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_chart(chart: Chart) -> list[str]:
    x_axis, y_axis = _axes(chart)
    parts = [_text(LEFT, 20, chart.title, size=13, weight="bold")]
    parts += _frame(chart, x_axis, y_axis)
    if chart.areas:
        parts += _areas(chart, x_axis, y_axis)
    if chart.bars:
        parts += _bars(chart, y_axis)
    for i, line in enumerate(chart.lines):
        points = [(x_axis(x), y_axis(y)) for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y)]
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_color(i)}" stroke-width="1.8"{dash}/>')
        if len(points) <= 24:
            parts += [f'<circle cx="{x}" cy="{y}" r="2.6" fill="{_color(i)}"/>' for x, y in points]
    names = [*(p.name for p in chart.lines), *(p.name for p in chart.areas), *(p.name for p in chart.bars)]
    for i, name in enumerate(names):
        y = TOP + 8 + 17 * i
        parts.append(f'<rect x="{WIDTH - RIGHT + 12}" y="{y - 8}" width="10" height="10" fill="{_color(i, name)}"/>')
        parts.append(_text(WIDTH - RIGHT + 28, y + 1, name))
    return parts


def _axes(chart: Chart) -> tuple[_Axis, _Axis]:
    xs = [*chart.xs, *(x for line in chart.lines for x in line.xs)] or [0.0, 1.0]
    if chart.areas or (chart.bars and chart.stacked):
        layers = chart.areas or [Area(b.name, b.values) for b in chart.bars]
        ys = [sum(column) for column in zip(*(layer.ys for layer in layers), strict=True)]
    else:
        ys = [v for b in chart.bars for v in b.values]
    ys += [y for line in chart.lines for y in line.ys if math.isfinite(y)]
    high = max(ys, default=1.0) * 1.05 if chart.top is None else chart.top
    low = min((y for y in ys if y > 0), default=0.1) if chart.log_y else 0.0
    low_x = min((x for x in xs if x > 0), default=0.1) if chart.log_x else min(xs)
    return (
        _Axis(low_x, max(xs), LEFT, WIDTH - RIGHT, chart.log_x),
        _Axis(low, high, HEIGHT - BOTTOM, TOP, chart.log_y),
    )


def _frame(chart: Chart, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    for tick in y_axis.ticks:
        y = y_axis(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="{INK}" stroke-opacity=".2"/>')
        parts.append(_text(LEFT - 6, y + 4, _number(tick), anchor="end"))
    if not chart.labels:
        parts += [_text(x_axis(t), HEIGHT - BOTTOM + 15, _number(t), anchor="middle") for t in x_axis.ticks]
    base = HEIGHT - BOTTOM
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}" stroke="{INK}"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, chart.x_label, anchor="middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<g transform="rotate(-90 14 {middle})">{_text(14, middle, chart.y_label, anchor="middle")}</g>')
    return parts


def _areas(chart: Chart, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    base = [0.0] * len(chart.xs)
    parts = []
    for i, area in enumerate(chart.areas):
        top = [b + y for b, y in zip(base, area.ys, strict=True)]
        there = [f"{x_axis(x)},{y_axis(y)}" for x, y in zip(chart.xs, top, strict=True)]
        back = [f"{x_axis(x)},{y_axis(y)}" for x, y in zip(chart.xs, base, strict=True)]
        points, colour = " ".join([*there, *reversed(back)]), _color(i, area.name)
        parts.append(f'<polygon points="{points}" fill="{colour}" fill-opacity=".75"/>')
        base = top
    return parts


def _bars(chart: Chart, y_axis: _Axis) -> list[str]:
    parts = []
    room = (WIDTH - RIGHT - LEFT) / len(chart.labels)
    across = 1 if chart.stacked else len(chart.bars)
    width = round(room * 0.76 / across, 1)
    place: Callable[[int, int], float] = lambda group, bar: LEFT + room * (group + 0.12) + width * bar  # noqa: E731
    for group, label in enumerate(chart.labels):
        base = y_axis.low if chart.log_y else 0.0
        for i, bar in enumerate(chart.bars):
            low, high = y_axis(base), y_axis(base + bar.values[group])
            x = round(place(group, 0 if chart.stacked else i), 1)
            parts.append(
                f'<rect x="{x}" y="{high}" width="{width}" height="{round(low - high, 1)}" fill="{_color(i)}"/>'
            )
            shown = bar.values[group]
            if not chart.stacked or low - high > 12:
                y = (low + high) / 2 + 4 if chart.stacked else high - 3
                ink = "#fff" if chart.stacked else INK
                parts.append(_text(x + width / 2, y, _number(shown), anchor="middle", size=9, fill=ink))
            if chart.stacked:
                base += bar.values[group]
        parts.append(_text(LEFT + room * (group + 0.5), HEIGHT - BOTTOM + 15, label, anchor="middle"))
    return parts


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, weight: str = "", fill: str = ""
) -> str:
    style = (f' font-size="{size}"' if size != 11 else "") + (f' font-weight="{weight}"' if weight else "")
    style += f' fill="{fill}"' if fill else ""
    return f'<text x="{round(x, 1)}" y="{round(y, 1)}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _number(value: float) -> str:
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _color(i: int, name: str = "") -> str:
    return FREE if name == "free" else COLORS[i % len(COLORS)]
