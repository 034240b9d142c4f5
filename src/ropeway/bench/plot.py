"""Draws line charts and stacked bars as self-contained SVG: no scripts, fonts or outside files. Knows no data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#0b6e99", "#d9730d", "#4f7a28", "#8b46a0", "#b3261e", "#5b5b5b")
_BAR_COLOURS = (
    "#0b6e99", "#d9730d", "#4f7a28", "#8b46a0", "#b3261e", "#3aa6c9", "#e8b04b", "#8fbf5a", "#c58bd6", "#e2817b",
    "#5b5b5b", "#9a9a9a", "#1b3a57", "#6b4a2b",
)  # fmt: skip
_WIDTH, _HEIGHT = 460, 300
_COLUMN = 210  # of a bar's lengths in the legend
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 28, 34, 72


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points (x, y) in drawing order, each with a note shown on hovering, and beside it if labelled."""

    name: str
    points: tuple[tuple[float, float], ...]
    notes: tuple[str, ...] = ()
    is_labelled: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes; labels carry the units. Axes start at 0."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: (name, length) of each segment, in order from the origin."""

    label: str
    segments: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps 0..limit to pixels, with ticks at round numbers."""

    limit: float
    step: float
    origin: float
    length: float

    @staticmethod
    def fit(largest: float, origin: float, length: float) -> _Scale:
        largest = largest if largest > 0 else 1.0
        magnitude = 10.0 ** math.floor(math.log10(largest / 4))
        step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor * 5 >= largest)
        return _Scale(step * math.ceil(largest / step - 1e-9), step, origin, length)

    def pixel(self, value: float) -> float:
        return round(self.origin + self.length * value / self.limit, 1)

    @property
    def ticks(self) -> list[float]:
        return [index * self.step for index in range(round(self.limit / self.step) + 1)]


def render_svg(title: str, panels: Sequence[Panel], *, columns: int = 2) -> str:
    """An SVG document with the panels in a grid under one title."""
    num_rows = -(-len(panels) // columns)
    width, height = _WIDTH * min(columns, len(panels)), _HEIGHT * num_rows + 40
    parts = _document(title, width, height)
    for index, panel in enumerate(panels):
        x, y = index % columns * _WIDTH, index // columns * _HEIGHT + 40
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel), "</g>"]
    parts.append("</svg>\n")
    return "\n".join(parts)


def render_html(title: str, svg: str, table: str) -> str:
    """A page with the plot and the table it was drawn from."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head>\n'
        f'<body style="font-family: system-ui, sans-serif; margin: 1.5rem">\n{svg}<pre>{escape(table)}</pre>\n'
        "</body></html>\n"
    )


def render_stacked_bars(title: str, bars: Sequence[Bar]) -> str:
    """An SVG document with one horizontal bar under the other, on one axis, and a legend with every length."""
    names = list(dict.fromkeys(name for bar in bars for name, _ in bar.segments))
    colours = {name: _BAR_COLOURS[index % len(_BAR_COLOURS)] for index, name in enumerate(names)}
    left, top, bar_height, pitch = 40, 52, 34, 66
    width = max(900, int(_legend_x(names, left) + _COLUMN * len(bars)) + left)
    scale = _Scale.fit(max(sum(length for _, length in bar.segments) for bar in bars), left, width - 2 * left)
    axis_y = top + pitch * len(bars)
    height = axis_y + 40 + 18 * (len(names) + 1) + 16
    parts = _document(title, width, height)
    for tick in scale.ticks:
        x = scale.pixel(tick)
        parts.append(f'<path d="M{x} {top}V{axis_y}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x}" y="{axis_y + 16}" text-anchor="middle">{tick:,g}</text>')
    for index, bar in enumerate(bars):
        y, start = top + pitch * index + 20, 0.0
        total = sum(length for _, length in bar.segments)
        parts.append(f'<text x="{left}" y="{y - 6}">{escape(bar.label)}: {total:,.2f}</text>')
        for name, length in bar.segments:
            x = scale.pixel(start)
            start += length
            hover = escape(f"{name}: {length:,.3f} ({length / total:.1%})")
            parts.append(
                f'<rect x="{x}" y="{y}" width="{scale.pixel(start) - x:.1f}" height="{bar_height}" '
                f'fill="{colours[name]}" stroke="#fff" stroke-width="0.5"><title>{hover}</title></rect>'
            )
    parts += _bar_legend(bars, names, colours, left, axis_y + 40)
    parts.append("</svg>\n")
    return "\n".join(parts)


def _legend_x(names: Sequence[str], left: int) -> float:
    """Where the columns of lengths begin: behind the longest name."""
    return left + 30 + max(6.5 * len(name) for name in names)


def _bar_legend(
    bars: Sequence[Bar], names: Sequence[str], colours: Mapping[str, str], left: int, first_y: int
) -> list[str]:
    """A line per segment name, and a column of lengths per bar."""
    column_x = _legend_x(names, left)
    parts = []
    for number, bar in enumerate(bars):
        x = column_x + _COLUMN * (number + 1)
        parts.append(f'<text x="{x}" y="{first_y}" text-anchor="end" font-weight="600">{escape(bar.label)}</text>')
    for row, name in enumerate(names, 1):
        y = first_y + 18 * row
        parts.append(f'<rect x="{left}" y="{y - 10}" width="14" height="12" fill="{colours[name]}"/>')
        parts.append(f'<text x="{left + 22}" y="{y}">{escape(name)}</text>')
        for number, bar in enumerate(bars):
            length, total = dict(bar.segments).get(name, 0.0), sum(length for _, length in bar.segments)
            x = column_x + _COLUMN * (number + 1)
            parts.append(f'<text x="{x}" y="{y}" text-anchor="end">{length:,.3f} ({length / total:.1%})</text>')
    return parts


def _document(title: str, width: float, height: float) -> list[str]:
    """The beginning of an SVG document: a white page with a title."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{width / 2}" y="24" text-anchor="middle" font-size="15" font-weight="600">{escape(title)}</text>',
    ]


def _panel(panel: Panel) -> list[str]:
    points = [point for series in panel.series for point in series.points]
    plot_width, plot_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    x_scale = _Scale.fit(max((x for x, _ in points), default=1.0), _LEFT, plot_width)
    y_scale = _Scale.fit(max((y for _, y in points), default=1.0), _TOP + plot_height, -plot_height)
    parts = [
        f'<text x="{_LEFT + plot_width / 2}" y="20" text-anchor="middle" font-weight="600">{escape(panel.title)}</text>'
    ]
    parts += _axes(panel, x_scale, y_scale)
    for index, series in enumerate(panel.series):
        parts += _line(series, _COLOURS[index % len(_COLOURS)], x_scale, y_scale)
    parts += _legend(panel.series)
    return parts


def _axes(panel: Panel, x_scale: _Scale, y_scale: _Scale) -> list[str]:
    left, right = x_scale.pixel(0), x_scale.pixel(x_scale.limit)
    bottom, top = y_scale.pixel(0), y_scale.pixel(y_scale.limit)
    parts = []
    for tick in x_scale.ticks:
        x = x_scale.pixel(tick)
        parts.append(f'<path d="M{x} {bottom}V{top}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x}" y="{bottom + 15}" text-anchor="middle">{tick:,g}</text>')
    for tick in y_scale.ticks:
        y = y_scale.pixel(tick)
        parts.append(f'<path d="M{left} {y}H{right}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{tick:,g}</text>')
    parts.append(f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#222"/>')
    middle_x, middle_y = (left + right) / 2, (top + bottom) / 2
    parts.append(f'<text x="{middle_x}" y="{bottom + 32}" text-anchor="middle">{escape(panel.x_label)}</text>')
    parts.append(
        f'<text transform="translate(14 {middle_y}) rotate(-90)" text-anchor="middle">{escape(panel.y_label)}</text>'
    )
    return parts


def _line(series: Series, colour: str, x_scale: _Scale, y_scale: _Scale) -> list[str]:
    pixels = [(x_scale.pixel(x), y_scale.pixel(y)) for x, y in series.points]
    path = " ".join(f"{x},{y}" for x, y in pixels)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for index, (x, y) in enumerate(pixels):
        value_x, value_y = series.points[index]
        note = series.notes[index] if index < len(series.notes) else ""
        hover = escape(f"{series.name} {note}: {value_x:,.4g}, {value_y:,.4g}")
        parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"><title>{hover}</title></circle>')
        if note and series.is_labelled:
            parts.append(f'<text x="{x + 5}" y="{y - 6}" fill="{colour}" font-size="9">{escape(note)}</text>')
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    parts = []
    x = float(_LEFT)
    for index, line in enumerate(series):
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(f'<path d="M{x} {_HEIGHT - 16}h16" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 20}" y="{_HEIGHT - 12}">{escape(line.name)}</text>')
        x += 34 + 6.2 * len(line.name)
    return parts
