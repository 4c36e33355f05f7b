"""Small charts as inline SVG, coloured by the CSS variables of the page that holds them."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 860.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 16.0, 12.0, 30.0
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points (x, y) under one name. `style`: `line`, `faint` (a thin line), or `dots` (a line with marked points)."""

    name: str
    points: Sequence[Point]
    colour: str
    style: str = "line"


@dataclass(frozen=True)
class Axes:
    """Maps values to pixels."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float
    width: float
    height: float

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return LEFT + (value - self.x_min) / (self.x_max - self.x_min) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return TOP + (self.y_max - value) / (self.y_max - self.y_min) * (self.height - TOP - BOTTOM)


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    y_range: tuple[float, float] | None = None,
    percent: bool = False,
    width: float = WIDTH,
    height: float = HEIGHT,
) -> str:
    """Lines over steps, with a legend when there are several. `label` is read out to those who cannot see it."""
    points = [point for one in series for point in one.points]
    if not points:
        return '<p class="muted">Nothing was recorded.</p>'
    axes = _axes(points, y_range, width, height)
    y_ticks = _ticks(axes.y_min, axes.y_max)
    body = "".join(_y_tick(axes, tick, percent) for tick in y_ticks)
    body += "".join(_x_tick(axes, tick) for tick in _ticks(axes.x_min, axes.x_max, most=8) if tick == int(tick))
    body += "".join(_draw_series(axes, one) for one in series)
    legend = _legend(series) if len(series) > 1 else ""
    return (
        f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{html.escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{body}</svg>{legend}'
    )


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean over up to `window` values, ending at each place."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def stacked_bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """One horizontal bar of (name, amount, colour), each part as wide as its share."""
    total = sum(amount for _, amount, _ in parts) or 1.0
    x, body = 0.0, ""
    for name, amount, colour in parts:
        width = amount / total * WIDTH
        title = html.escape(f"{name}: {amount:.2f} s, {amount / total:.0%}")
        body += (
            f'<g><title>{title}</title><rect x="{x:.1f}" y="0" width="{width:.1f}" height="30" fill="{colour}"/></g>'
        )
        x += width
    return (
        f'<svg class="bar" viewBox="0 0 {WIDTH:g} 30" preserveAspectRatio="none" role="img" '
        f'aria-label="seconds per phase" xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def _axes(points: Sequence[Point], y_range: tuple[float, float] | None, width: float, height: float) -> Axes:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    y_min, y_max = y_range or (min(ys), max(ys))
    if y_range is None:
        margin = 0.08 * (y_max - y_min) or abs(y_max) * 0.1 or 1.0
        y_min, y_max = (0.0 if min(ys) >= 0 and y_min - margin < 0 else y_min - margin), y_max + margin
    x_min, x_max = min(xs), max(xs)
    return Axes(x_min, x_max if x_max > x_min else x_min + 1, y_min, y_max, width, height)


def _ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers within a range."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(k * step, 12) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _y_tick(axes: Axes, value: float, percent: bool) -> str:
    y = axes.y(value)
    text = f"{value:.0%}" if percent else f"{value:.4g}"
    return (
        f'<line class="grid" x1="{LEFT}" x2="{axes.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y:.1f}" text-anchor="end" dominant-baseline="central">{text}</text>'
    )


def _x_tick(axes: Axes, value: float) -> str:
    return f'<text class="tick" x="{axes.x(value):.1f}" y="{axes.height - 10}" text-anchor="middle">{value:g}</text>'


def _draw_series(axes: Axes, series: Series) -> str:
    pixels = [(axes.x(x), axes.y(y)) for x, y in series.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    width, opacity = (1.2, 0.45) if series.style == "faint" else (2.4, 1.0)
    line = (
        f'<polyline points="{path}" fill="none" stroke="{series.colour}" stroke-width="{width}" '
        f'stroke-opacity="{opacity}" stroke-linejoin="round" stroke-linecap="round"/>'
    )
    if series.style != "dots" and len(pixels) > 1:
        return line
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{series.colour}" class="dot">'
        f"<title>{html.escape(series.name)}, step {point[0]:g}: {point[1]:.4g}</title></circle>"
        for (x, y), point in zip(pixels, series.points, strict=True)
    )
    return line + dots


def _legend(series: Sequence[Series]) -> str:
    items = "".join(
        f'<li><span class="swatch" style="background:{one.colour};opacity:{0.5 if one.style == "faint" else 1}"></span>'
        f"{html.escape(one.name)}</li>"
        for one in series
    )
    return f'<ul class="legend">{items}</ul>'
