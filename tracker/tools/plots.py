"""Draw plots in the terminal, for `tritonbench --plot` and `groupbench history --plot`.

Panels (`Trend`, `ValueTable`) hold the data, and `draw` draws them. The extra `plot` installs plotille.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeAlias

from groupbench.tracker.text.terminal import bar
from groupbench.tracker.text.wording import printable

PALETTE = ((0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (230, 159, 0), (86, 180, 233), (127, 127, 127))
"""Colours that colour-blind readers can distinguish, after Okabe and Ito, "Color universal design" (2008), and grey."""

PANELS = 24
"""Maximum number of panels; the caller reports the omitted ones."""

_NARROWEST, _WIDEST, _HEIGHT = 40, 120, 12
_AXIS = 13
"""Columns that plotille's y axis takes."""
_THIN = "▏"


class DrawError(Exception):
    """A plot cannot be drawn; the message is one line with the cause and the remedy."""


@dataclass(frozen=True)
class Curve:
    """One line of a trend. A y of None was not measured; `low` and `high` are the bounds of each y."""

    name: str
    y: tuple[float | None, ...]  # by tick
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()

    @property
    def measured(self) -> dict[int, float]:
        """The values that were measured, by tick."""
        return {x: y for x, y in enumerate(self.y) if y is not None}


@dataclass(frozen=True)
class Trend:
    """Values over ticks, one tick per commit. A break is (tick, description of a change just before that tick)."""

    title: str
    unit: str
    ticks: tuple[str, ...]
    curves: tuple[Curve, ...]
    breaks: tuple[tuple[int, str], ...] = ()

    @property
    def measured(self) -> list[float]:
        """The values of all curves."""
        return [y for curve in self.curves for y in curve.measured.values()]


@dataclass(frozen=True)
class Row:
    """One problem of a table: a value by name, or None with the reason in `notes`."""

    label: str
    values: dict[str, float | None]
    notes: dict[str, str]


@dataclass(frozen=True)
class ValueTable:
    """Values side by side, such as the latencies of several backends; `names` are the same in all rows."""

    title: str
    unit: str
    names: tuple[str, ...]
    rows: tuple[Row, ...]


Panel: TypeAlias = Trend | ValueTable


def draw(panels: Sequence[Panel], out: IO[str], width: int | None = None) -> None:
    """Draw panels in the terminal.

    Args:
        panels: The panels, of which at most `PANELS` are drawn.
        out: The stream of the terminal.
        width: Columns. Default: those of the terminal.

    Raises:
        DrawError: plotille is not installed.
    """
    width = width or max(_NARROWEST, min(shutil.get_terminal_size((100, 24)).columns, _WIDEST))
    print(terminal(panels, width, coloured=out.isatty() and not os.environ.get("NO_COLOR")), file=out, end="")


def check() -> None:
    """Raise DrawError if plotille is not installed."""
    _plotille()


def _plotille() -> Any:
    try:
        import plotille
    except ImportError:
        raise DrawError("--plot needs plotille: python -m pip install -e '.[plot]'") from None
    return plotille


def terminal(panels: Sequence[Panel], width: int, coloured: bool) -> str:
    """Return the panels as text, one below the other."""
    parts = [
        _trend_text(panel, width, coloured) if isinstance(panel, Trend) else _table_text(panel, width, coloured)
        for panel in panels[:PANELS]
    ]
    return "\n".join(parts)


def _paint(text: str, index: int, coloured: bool) -> str:
    if not coloured:
        return text
    red, green, blue = PALETTE[index % len(PALETTE)]
    return f"\x1b[38;2;{red};{green};{blue}m{text}\x1b[0m"


def _trend_text(panel: Trend, width: int, coloured: bool) -> str:
    measured = panel.measured
    if not measured:
        return f"{printable(panel.title)}\n  nothing was measured\n"
    figure = _plotille().Figure()
    columns, last = max(20, width - _AXIS), max(1, len(panel.ticks) - 1)
    figure.width, figure.height = columns, _HEIGHT
    figure.color_mode, figure.with_colors, figure.origin = "rgb", coloured, False
    figure.set_x_limits(0, last * (1 + 1 / columns))  # includes the last point
    figure.set_y_limits(*_limits(measured))
    figure.y_ticks_fkt = lambda low, high: f"{low:.4g}"
    for index, curve in enumerate(panel.curves):
        _draw(figure, curve, index, coloured)
    for tick, _ in panel.breaks:
        figure.axvline(max(0.0, (tick - 0.5) / last), lc=(128, 128, 128) if coloured else None)
    body = figure.show(legend=False).replace("\u2800", " ").splitlines()[1:-2]  # without plotille's x axis
    ticks = [printable(tick) for tick in panel.ticks]
    lines = [f"{printable(panel.title)}, {panel.unit}", *(line.rstrip() for line in body), _axis(ticks, columns), ""]
    for index, curve in enumerate(panel.curves):
        name = _paint("●", index, True) if coloured else _letter(index)
        values = list(curve.measured.values())
        latest = f"{values[-1]:.4g} {panel.unit} last" if values else "nothing measured"
        lines.append(f"  {name} {printable(curve.name)}: {latest}")
    lines += [f"  | before {ticks[tick]}: {printable(change)}" for tick, change in panel.breaks]
    return "\n".join(lines) + "\n"


def _draw(figure: Any, curve: Curve, index: int, coloured: bool) -> None:
    """Draw a curve. Without colour, a letter at each point identifies it."""
    if curve.measured:
        single = len(curve.measured) == 1
        marker = ("•" if single else None) if coloured else _letter(index)
        colour = PALETTE[index % len(PALETTE)] if coloured else None
        draw = figure.scatter if single else figure.plot
        draw(list(curve.measured), list(curve.measured.values()), lc=colour, marker=marker)


def _axis(ticks: Sequence[str], columns: int) -> str:
    """Return the x axis: as many tick names as fit, each below a column."""
    line, last = "", max(1, len(ticks) - 1)
    for index, tick in enumerate(ticks):
        place = min(round(index * (columns - 1) / last), columns - len(tick))
        if not line or place > len(line):
            line = line.ljust(place) + tick
    return " " * _AXIS + line


def _letter(index: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[index % 26]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an axis: all values with a margin, so that noise of 0.1 % does not look like a step."""
    low, high = min(values), max(values)
    margin = max(0.08 * (high - low), 0.01 * abs(high), 1e-12)
    return (max(0.0, low - margin) if low >= 0 else low - margin), high + margin


def _table_text(panel: ValueTable, width: int, coloured: bool) -> str:
    """Return bars, scaled within each row, because rows may differ by a factor of a thousand."""
    shown = {name: printable(name) for name in panel.names}
    names = max(map(len, shown.values()), default=0)
    room = max(8, width - names - 16)
    lines = [f"{printable(panel.title)}, {panel.unit}"]
    for row in panel.rows:
        lines += ["", printable(row.label)]
        most = max((value for value in row.values.values() if value is not None), default=0.0)
        for index, name in enumerate(panel.names):
            if name not in row.values:
                continue
            value = row.values[name]
            if value is None:
                note = printable(row.notes.get(name, "not measured"))
                lines.append(f"  {shown[name]:<{names}}  {note}"[:width])
            else:
                drawn = bar(value / most if most > 0 else 0.0, room) or _THIN
                lines.append(f"  {shown[name]:<{names}}  {_paint(drawn, index, coloured)} {value:.4g}")
    return "\n".join(lines) + "\n"
