"""Draw plots in the terminal with plotille, and as pictures with matplotlib.

Panels (`Trend`, `ValueTable`) hold the data, and `draw` draws them. `tritonbench --plot` and `groupbench history
--plot` share this module, so it imports nothing else of the tracker but file handling. Neither library needs a browser;
the extra `plot` installs both.
"""

from __future__ import annotations

import os
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

from groupbench.tracker.text.files import whole_file
from groupbench.tracker.text.terminal import bar, shortened
from groupbench.tracker.text.wording import printable

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
"""Colours that colour-blind readers can distinguish, after Okabe and Ito, "Color universal design" (2008).

The last two are additions for plots with many curves; markers differ too.
"""

MARKERS = "osD^vPX*"
PANELS = 24
"""Maximum number of panels in a picture or in the terminal; the caller reports the omitted ones."""

_NARROWEST, _WIDEST, _HEIGHT = 40, 120, 12
_AXIS = 13
"""Columns that plotille's y axis takes."""
_TITLE = 76
"""Characters per line of a picture's title."""
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


def draw(panels: Sequence[Panel], where: str | None, out: IO[str], width: int | None = None) -> None:
    """Draw panels to the terminal, or to a file.

    where  path of a .png or .svg file; None or empty: the terminal
    out    stream of the terminal
    width  columns of the terminal; by default, its own

    Raises DrawError.
    """
    if where:
        picture(panels, Path(where))
    else:
        text = terminal(panels, width or _terminal_width(), coloured=out.isatty() and not os.environ.get("NO_COLOR"))
        print(text, file=out, end="")


def check(where: str | None) -> None:
    """Check that `draw` can write to `where`: suffix, folder and installed packages. Raises DrawError."""
    if not where:
        _plotille()
        return
    path = Path(where)
    if path.suffix.lower() not in (".png", ".svg"):
        raise DrawError(f"--plot {where}: use a .png or .svg file, or no file to draw in the terminal")
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DrawError(f"--plot {where}: cannot be written")
    _matplotlib()


def _plotille() -> Any:
    try:
        import plotille
    except ImportError:
        raise DrawError("--plot needs plotille: python -m pip install -e '.[plot]'") from None
    return plotille


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DrawError("--plot FILE needs matplotlib: python -m pip install -e '.[plot]'") from None
    return Figure


def _terminal_width() -> int:
    import shutil

    return max(_NARROWEST, min(shutil.get_terminal_size((100, 24)).columns, _WIDEST))


# ---- the terminal


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
    red, green, blue = _rgb(index)
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
        if curve.measured:
            # Without colour, a letter at each point identifies its curve.
            marker = (None if len(curve.measured) > 1 else "•") if coloured else _letter(index)
            draw = figure.plot if len(curve.measured) > 1 else figure.scatter
            draw(list(curve.measured), list(curve.measured.values()), lc=_colour(index, coloured), marker=marker)
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


def _axis(ticks: Sequence[str], columns: int) -> str:
    """Return the x axis: as many tick names as fit, each below its column."""
    line, last = "", max(1, len(ticks) - 1)
    for index, tick in enumerate(ticks):
        place = min(round(index * (columns - 1) / last), columns - len(tick))
        if not line or place > len(line):
            line = line.ljust(place) + tick
    return " " * _AXIS + line


def _letter(index: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[index % 26]


def _colour(index: int, coloured: bool) -> tuple[int, int, int] | None:
    return _rgb(index) if coloured else None


def _rgb(index: int) -> tuple[int, int, int]:
    colour = COLOURS[index % 7]  # black would not be seen on every terminal
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


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


# ---- pictures


def picture(panels: Sequence[Panel], path: Path) -> None:
    """Draw all panels on one page. The file is written atomically. Raises DrawError."""
    check(str(path))
    figure_of = _matplotlib()
    from matplotlib import rc_context

    shown = panels[:PANELS] or [ValueTable("nothing was measured", "", (), ())]
    columns = 1 if any(isinstance(panel, ValueTable) for panel in shown) or len(shown) == 1 else 2
    lines = [list(shown[i : i + columns]) for i in range(0, len(shown), columns)]
    heights = [max(_inches(panel) for panel in line) for line in lines]
    figure = figure_of(figsize=(10 if columns == 1 else 15, sum(heights)), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(len(lines), columns, height_ratios=heights)
    for i, line in enumerate(lines):
        for j, panel in enumerate(line):
            axes = figure.add_subplot(grid[i, j])
            if isinstance(panel, Trend):
                _draw_trend(axes, panel)
            else:
                _draw_table(axes, panel)
    # An SVG keeps its text as text, for searches and screen readers. Ignore warnings about glyphs the font lacks.
    with (
        whole_file(path, lambda message: DrawError(f"--plot {message}")) as file,
        warnings.catch_warnings(),
        rc_context({"svg.fonttype": "none"}),
    ):
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=130)


def _inches(panel: Panel) -> float:
    if isinstance(panel, Trend):
        return 3.6 + 0.16 * len(panel.curves)
    return 1.8 + 0.34 * len(panel.rows)


def _plain(text: str) -> str:
    """Escape dollar signs, which would begin a formula, and remove control characters, which an SVG cannot hold."""
    return printable(text).replace("$", r"\$")


def _draw_trend(axes: Any, panel: Trend) -> None:
    for index, curve in enumerate(panel.curves):
        _draw_curve(axes, curve, index, panel.breaks)
    for number, (tick, change) in enumerate(panel.breaks):
        axes.axvline(tick - 0.5, color="#888888", linestyle=":", linewidth=1)
        late = tick > len(panel.ticks) / 2  # its label goes to the left, because the legend is on the right
        axes.annotate(
            _plain(_brief(change)), (tick - 0.5, 1), xycoords=("data", "axes fraction"),
            xytext=(-3 if late else 3, -4 - 9 * (number % 3)), textcoords="offset points", fontsize=6, va="top",
            ha="right" if late else "left", color="#666666",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )  # fmt: skip
    step = max(1, -(-len(panel.ticks) // 12))
    axes.set_xticks(range(0, len(panel.ticks), step), [_plain(t) for t in panel.ticks[::step]], rotation=30, ha="right")
    axes.set_xlim(-0.5, len(panel.ticks) - 0.5)
    if panel.measured:
        bottom, top = _limits(panel.measured)
        if bottom > 0 and top / bottom > 20:
            _logarithmic(axes.yaxis, axes.set_yscale)
        else:
            axes.set_ylim(bottom, top)
    title = textwrap.fill(_plain(panel.title), _TITLE, break_on_hyphens=False)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_ylabel(panel.unit, fontsize=8)
    _style(axes)


def _draw_curve(axes: Any, curve: Curve, index: int, breaks: Sequence[tuple[int, str]]) -> None:
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    ticks = list(curve.measured)
    label = _plain(curve.name)
    for stretch in _stretches(ticks, breaks):
        axes.plot(
            stretch, [curve.y[x] for x in stretch], color=colour, marker=marker, markersize=4, linewidth=1.3,
            label=label,
        )  # fmt: skip
        label = "_nolegend_"
    if curve.low and curve.high:
        low, high = ([bound[x] or curve.y[x] for x in ticks] for bound in (curve.low, curve.high))
        axes.vlines(ticks, low, high, color=colour, alpha=0.35, linewidth=2.5)  # range of the bursts


def _stretches(ticks: Sequence[int], breaks: Sequence[tuple[int, str]]) -> list[list[int]]:
    """Return the groups of ticks that a line may join: values on two sides of a break are not comparable."""
    ends = [tick for tick, _ in breaks]
    stretches: dict[int, list[int]] = {}
    for x in ticks:
        stretches.setdefault(sum(x >= end for end in ends), []).append(x)
    return list(stretches.values()) or [[]]


def _brief(change: str, most: int = 48) -> str:
    """Return a description in `most` characters; long words, such as a card's name, keep their distinctive start."""
    words = [word if len(word) <= 16 else f"{word[:12]}…" for word in change.split()]
    return shortened(" ".join(words), most)


def _draw_table(axes: Any, panel: ValueTable) -> None:
    """Draw a row per problem and a dot per name: positions on one scale are easier to read than many bars."""
    for index, name in enumerate(panel.names):
        points = [(row.values[name], y) for y, row in enumerate(panel.rows) if row.values.get(name) is not None]
        axes.plot(
            [value for value, _ in points], [y for _, y in points], linestyle="none", alpha=0.85, markersize=6,
            marker=MARKERS[index % len(MARKERS)], color=COLOURS[index % len(COLOURS)], label=_plain(name),
        )  # fmt: skip
    positive = [value for row in panel.rows for value in row.values.values() if value is not None and value > 0]
    if positive and max(positive) / min(positive) > 20:
        _logarithmic(axes.xaxis, axes.set_xscale)
    axes.set_yticks(range(len(panel.rows)), [_plain(shortened(row.label, 48)) for row in panel.rows])
    axes.set_ylim(max(len(panel.rows), 1) - 0.5, -0.5)
    axes.set_title(_plain(panel.title), fontsize=10, loc="left")
    axes.set_xlabel(panel.unit, fontsize=8)
    _style(axes)


def _style(axes: Any) -> None:
    """Style the parts that all panels share: tick labels, the grid, the legend and the frame."""
    axes.tick_params(labelsize=7)
    axes.grid(True, color="#e5e5e5", linewidth=0.6)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _logarithmic(axis: Any, set_scale: Any) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
