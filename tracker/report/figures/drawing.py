"""Plots as plotly's dictionaries, writable as JSON, with shared texts and marks.

Plotly itself is not imported. Each figure is {"data": [...], "layout": {...}}. Colours are style-sheet variables
("var(--series)"), and fonts, grids and backgrounds are omitted: `draw.js` adds them when it draws, for the current
theme. `layout["meta"]` has

    kind       the kind of plot, by which `draw.js` chooses the table of its data
    alt        the text alternative
    min_width  minimum width of the figure in pixels, if any

Texts are escaped for plotly, which interprets a few tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from html import escape
from typing import Any

from groupbench.tracker.report.shown import RunLabel
from groupbench.tracker.text.wording import commit_text

Figure = dict[str, Any]

SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star", "pentagon", "hexagon", "triangle-down")
COLOURS = 8
"""Number of colours for backends in the style sheet: --c0, --c1, ..."""


def plain(text: str) -> str:
    """Return a text escaped for plotly, which then shows it unchanged."""
    return escape(text, quote=False)


@lru_cache(maxsize=8192)
def run_text(run: RunLabel) -> str:
    """Return a run's tooltip, escaped for plotly."""
    return plain(run.text) + (f"<br>{plain(cut(run.subject, 90))}" if run.subject else "")


def tick_text(run: RunLabel) -> str:
    """Return a run's text below an axis, escaped for plotly: the commit, and below it the month and day."""
    return f"{plain(commit_text(run.commit, digits=7))}<br>{run.started[5:10]}"


def mark_of(number: int) -> dict[str, str]:
    """Return the n-th backend's colour and symbol. The symbol is for readers who cannot tell colours apart."""
    return {"color": f"var(--c{number % COLOURS})", "symbol": SYMBOLS[number % len(SYMBOLS)]}


def rounded(value: float | None, digits: int) -> float | None:
    """Return a number rounded to some significant digits, which keeps the JSON small."""
    return None if value is None else float(f"{value:.{digits}g}")


def two_digits(value: float) -> str:
    """Return a number with two significant digits, or as an integer from 10 on: a CPU's ceiling is 0.042 TFLOP/s."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def middle_of(values: Sequence[float]) -> float | None:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None
