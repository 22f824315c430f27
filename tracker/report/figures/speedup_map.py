"""The heat map for speed-ups by problem and backend, and speed-ups as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from groupbench.tracker.report.figures.drawing import Figure, cut, plain, rounded
from groupbench.tracker.report.shown import SpeedRow
from groupbench.tracker.text.wording import times

STRONGEST_COLOUR = 2.0
"""Speed-up from which the colour of a heat map is strongest."""
CLEAR = 0.01
"""Speed-ups that differ from 1 by at most this are shown without a direction."""
_COLUMN = 72
"""Minimum width of a column of a heat map in pixels."""


def speedup_heatmap(
    rows: Sequence[SpeedRow],  # problems, top to bottom
    backends: Sequence[str],  # left to right
    baseline: str,  # one of the backends
) -> Figure:
    """Return each backend's speed-up over the baseline, by problem: blue and ▲ faster, orange and ▼ slower."""
    z: list[list[float | None]] = []
    text: list[list[str]] = []
    hover: list[list[str]] = []
    absent: dict[str, list[Any]] = {"x": [], "y": [], "text": [], "hovertext": []}
    best: tuple[float, str, str] | None = None
    slower = 0
    for number, row in enumerate(rows):
        z.append([])
        text.append([])
        hover.append([])
        for place, backend in enumerate(backends):
            ms = row.ms.get(backend)
            place_text = f"{plain(row.problem)}<br>{plain(backend)}"
            speedup = row.speedup(backend, baseline)
            if ms is None or speedup is None:
                label, why = _no_speedup(row, backend, baseline)
                z[-1].append(None)
                text[-1].append("")
                hover[-1].append("")
                absent["x"].append(place)
                absent["y"].append(number)
                absent["text"].append(plain(label))
                absent["hovertext"].append(f"{place_text}<br>{plain(cut(why, 200))}")
                continue
            z[-1].append(rounded(max(-1.0, min(1.0, math.log(speedup) / math.log(STRONGEST_COLOUR))), 3))
            text[-1].append(speedup_text(speedup))
            hover[-1].append(
                f"{place_text}<br>{speedup:.3g}× over {plain(baseline)}: {ms:.4g} ms<br>{plain(row.run.text)}"
            )
            slower += speedup < 1 - CLEAR
            if best is None or speedup > best[0]:
                best = (speedup, backend, row.problem)
    alt = f"Speed-up over {baseline}: {len(rows)} problems by {len(backends)} backends."
    if best is not None:
        alt += f" The largest is {best[0]:.2f}× by {best[1]} at {best[2]}; {slower} are below 1."
    left, top, right = _margins(rows, backends)
    map_ = {
        "type": "heatmap", "z": z, "text": text, "customdata": hover, "zmin": -1, "zmax": 1, "xgap": 2, "ygap": 2,
        "texttemplate": "%{text}", "hovertemplate": "%{customdata}<extra></extra>", "hoverongaps": False,
        "colorscale": [[0, "var(--slow)"], [0.5, "var(--even)"], [1, "var(--fast)"]], "showscale": False,
        "textfont": {"size": 11, "color": "var(--text)"},
    }  # fmt: skip
    lacking = {
        "type": "scatter", "mode": "text", **absent, "textfont": {"size": 10, "color": "var(--faint)"},
        "hovertemplate": "%{hovertext}<extra></extra>", "showlegend": False,
    }  # fmt: skip
    return {
        "data": [map_, lacking] if absent["x"] else [map_],
        "layout": {
            "height": round(top + 24 * max(len(rows), 1) + 12),
            "margin": {"l": round(left), "r": round(right), "t": round(top), "b": 6},
            "xaxis": {
                "side": "top", "ticks": "", "tickangle": -45 if len(backends) > 1 else 0, "fixedrange": True,
                "showgrid": False,
                "tickvals": list(range(len(backends))), "ticktext": [plain(name) for name in backends],
                "range": [-0.5, len(backends) - 0.5],
            },
            "yaxis": {
                "ticks": "", "fixedrange": True, "showgrid": False, "tickvals": list(range(len(rows))),
                "ticktext": [plain(row.label + (" *" if row.older else "")) for row in rows],
                "range": [len(rows) - 0.5, -0.5],
            },
            "meta": {"kind": "heatmap", "alt": alt, "min_width": round(left + _COLUMN * len(backends) + right)},
        },
    }  # fmt: skip


def _margins(rows: Sequence[SpeedRow], backends: Sequence[str]) -> tuple[float, float, float]:
    """Return the pixels left, above and right for problem and backend names."""
    left = 14 + 6.0 * max((len(row.label) + 2 * row.older for row in rows), default=0)
    slant = 5.0  # pixels of width and height that a letter of a slanted name takes
    top = 22 + slant * max(map(len, backends), default=0)
    beyond = (slant * len(name) - _COLUMN * (i + 0.5) for i, name in enumerate(reversed(backends)))
    return left, top, 14 + max([0.0, *beyond])


def _no_speedup(row: SpeedRow, backend: str, baseline: str) -> tuple[str, str]:
    """Return a word for a cell without a speed-up, and the reason."""
    ms = row.ms.get(backend)
    if ms is None:
        why = row.why.get(backend) or "not measured"
        return cut(why.split(":")[0], 12), why
    if row.noisy(backend, baseline):
        ends = " and ".join(f"±{100 * row.spread.get(name, 0.0):.0f}%" for name in (backend, baseline))
        return "noisy", f"no speed-up: the bursts scatter by {ends}, more than the effect ({ms:.4g} ms)"
    return f"{ms:#.3g} ms", row.why.get(backend) or f"no speed of {baseline} to compare with"


def speedup_text(speedup: float) -> str:
    """Return a speed-up as `▲ 1.25×`. The sign repeats the colour's direction."""
    if abs(speedup - 1) <= CLEAR:
        return times(speedup)
    return f"{'▲' if speedup > 1 else '▼'} {times(speedup)}"
