"""Make plots as plotly's dictionaries, which can be written as JSON. Plotly itself is not imported.

Each figure is {"data": [...], "layout": {...}}. Colours are variables of the style sheet ("var(--series)"), and fonts,
grids and backgrounds are omitted: `draw.js` adds them when it draws, for the current theme. `layout["meta"]` has

    kind       the kind of plot, by which `draw.js` chooses the table of its data
    alt        the text alternative
    min_width  minimum width of the figure in pixels, if any

Texts are escaped for plotly, which interprets a few tags. If `runs` is omitted, a history does not repeat the texts of
its runs: `draw.js` takes them from the page's list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from itertools import cycle
from typing import Any

from groupbench.tracker.metrics import Metric
from groupbench.tracker.report.shown import (
    CanaryCeilings,
    Mark,
    ResultBursts,
    RoofPoint,
    RunLabel,
    ShownHistory,
    SpeedRow,
)

Figure = dict[str, Any]

SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star", "pentagon", "hexagon", "triangle-down")
DASHES = ("solid", "dot", "dash", "longdash", "dashdot")
"""Dashes of a backend's lines if it has one for each toolchain."""
COLOURS = 8
"""Number of colours for backends in the style sheet: --c0, --c1, ..."""
FAR = 2.0
"""Speed-up from which the colour of a heat map is strongest."""
CLEAR = 0.01
"""Speed-ups that differ from 1 by at most this are shown without a direction."""
_TICKS = 5
_COLUMN = 72
"""Minimum width of a column of a heat map in pixels."""
_MARKS = {  # symbol, colour, dash
    "change": ("diamond", "var(--change)", "solid"),
    "environment": ("square-open", "var(--warn)", "dot"),
    "alert": ("triangle-up", "var(--bad)", "dash"),
    "closed": ("triangle-up-open", "var(--faint)", "dash"),
    "verdict": ("diamond-open", "var(--change)", "longdash"),
}
_NAMES = {"closed": "closed alert"}
"""Names of marks in legends, if they differ from the kind."""


def speedup_heatmap(
    rows: Sequence[SpeedRow],  # problems, top to bottom
    backends: Sequence[str],  # left to right
    baseline: str,  # one of the backends
) -> Figure:
    """Return the speed-up of each backend over the baseline, by problem: blue and ▲ faster, orange and ▼ slower."""
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
                absent["hovertext"].append(f"{place_text}<br>{plain(_cut(why, 200))}")
                continue
            z[-1].append(_round(max(-1.0, min(1.0, math.log(speedup) / math.log(FAR))), 3))
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
    left = 14 + 6.0 * max((len(row.label) + 2 * row.older for row in rows), default=0)
    slant = 5.0  # pixels of width and height that a letter of a slanted name takes
    top = 22 + slant * max((len(name) for name in backends), default=0)
    over_the_end = max(
        (slant * len(name) - _COLUMN * (i + 0.5) for i, name in enumerate(reversed(backends))), default=0
    )
    right = 14 + max(over_the_end, 0)
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


def _no_speedup(row: SpeedRow, backend: str, baseline: str) -> tuple[str, str]:
    """Return a word for a cell without a speed-up, and the reason."""
    ms = row.ms.get(backend)
    if ms is None:
        why = row.why.get(backend) or "not measured"
        return _cut(why.split(":")[0], 12), why
    if row.noisy(backend, baseline):
        ends = " and ".join(f"±{100 * row.spread.get(name, 0.0):.0f}%" for name in (backend, baseline))
        return "noisy", f"no speed-up: the bursts scatter by {ends}, more than the effect ({ms:.4g} ms)"
    return f"{ms:#.3g} ms", row.why.get(backend) or f"no speed of {baseline} to compare with"


def roofline(points: Sequence[RoofPoint], ceilings: CanaryCeilings) -> Figure:
    """Return achieved TFLOP/s by arithmetic intensity, below the ceilings that canaries of the same run reached."""
    ridge = 1e3 * ceilings.tflops / ceilings.gbps
    intensities = [point.intensity for point in points]
    low = min([*intensities, ridge]) / 5
    high = max([*intensities, ridge]) * 2
    roof = [(x, min(ceilings.tflops, ceilings.gbps * x / 1e3)) for x in (low, ridge, high)]
    backends = sorted({point.backend for point in points})
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "name": "ceiling", "x": [_round(x, 4) for x, _ in roof],
            "y": [_round(y, 4) for _, y in roof], "line": {"color": "var(--text)", "width": 1.5},
            "hovertemplate": "ceiling: %{y:.4g} TFLOP/s<extra></extra>",
        }
    ]  # fmt: skip
    for number, backend in enumerate(backends):
        of_backend = sorted((point for point in points if point.backend == backend), key=lambda point: point.intensity)
        data.append({
            "type": "scatter", "mode": "markers", "name": plain(backend),
            "x": [_round(point.intensity, 4) for point in of_backend],
            "y": [_round(point.tflops, 4) for point in of_backend],
            "text": [plain(_cut(point.problem, 120)) for point in of_backend],
            "customdata": [[_round(point.gbps, 4), _round(100 * point.share(ceilings), 3)] for point in of_backend],
            "marker": {**mark_of(number), "size": 9},
            "hovertemplate": "%{fullData.name}<br>%{text}<br>%{y:.4g} TFLOP/s, %{customdata[0]:.4g} GB/s<br>"
                             "%{customdata[1]:.3g}% of the ceiling at %{x:.4g} FLOP/byte<extra></extra>",
        })  # fmt: skip
    best = max(points, key=lambda point: point.share(ceilings), default=None)
    alt = (
        f"Roofline of {len(points)} results by {len(backends)} backends, below {_digits(ceilings.tflops)} TFLOP/s and "
        f"{_digits(ceilings.gbps)} GB/s."
    )
    if best is not None:
        alt += f" The nearest to its ceiling is {best.backend} at {best.problem}: {100 * best.share(ceilings):.0f}%."
    lowest = min([point.tflops for point in points] + [roof[0][1]])
    highest = max([point.tflops for point in points] + [ceilings.tflops])
    return {
        "data": data,
        "layout": {
            "height": 420 + 18 * (len(backends) // 4),
            "margin": {"l": 60, "r": 12, "t": 16, "b": 50},
            "showlegend": True,
            "legend": {"orientation": "h", "y": -0.18, "yanchor": "top", "x": 0},
            "xaxis": _log_axis("FLOP per byte that must be moved", low, high),
            "yaxis": _log_axis("TFLOP/s", lowest / 1.6, highest * 2),
            "annotations": [  # anchored at the edges, so that they do not leave a narrow plot
                {
                    "xref": "x domain", "x": 1, "y": math.log10(ceilings.tflops), "xanchor": "right",
                    "yanchor": "bottom", "yshift": 4, "showarrow": False,
                    "text": f"{_digits(ceilings.tflops)} TFLOP/s, {plain(ceilings.dtype)} matmul canary",
                },
                {
                    "xref": "x domain", "x": 0, "y": math.log10(ceilings.tflops), "xanchor": "left",
                    "yanchor": "top", "showarrow": False,
                    "text": f"{_digits(ceilings.gbps)} GB/s, copy canary",
                },
            ],
            "meta": {"kind": "roofline", "alt": alt},
        },
    }  # fmt: skip


def latency_history(history: ShownHistory, runs: Sequence[RunLabel] | None = None) -> Figure:
    """Return latency by run, with burst ranges, levels, changes, environments, alerts and failures."""
    shape = [value for value in (*history.ms, *history.low, *history.high) if value is not None]
    typical = _middle([value for value in history.ms if value is not None])
    data = _results(history, history.ms, runs, "ms", "var(--series)", history.low, history.high)
    if history.levels and len(history.runs) > 1:
        data += _levels(history)
    low, high = _range(shape, typical, 0.03)
    high += 0.09 * len({mark.kind for mark in history.marks}) * (high - low)  # room for their words
    data += _mark_traces(history, low + 0.97 * (high - low))
    layout = _history_layout(history, runs, "ms, interpreted: no speed" if history.interpreted else "ms", (low, high))
    layout["shapes"] = [_line(mark) for mark in history.marks]
    layout["annotations"] = _labels(history)
    layout["meta"] = {"kind": "history", "alt": _history_alt("Latency", "ms", history, history.ms, runs)}
    return {"data": data, "layout": layout}


def _levels(history: ShownHistory) -> list[dict[str, Any]]:
    """Return a trace with the levels of each line."""
    traces = []
    for number in sorted({level.line for level in history.levels}):
        x: list[float | None] = []
        y: list[float | None] = []
        for level in history.levels:
            if level.line == number:
                x += [level.first, level.last, None]
                y += [_round(level.ms, 5), _round(level.ms, 5), None]
        traces.append({
            "type": "scatter", "mode": "lines", "name": "level", "x": x[:-1], "y": y[:-1], "hoverinfo": "skip",
            "line": {"color": "var(--level)", "width": 5}, "zorder": -1,
        })  # fmt: skip
        if history.toolchains:
            traces[-1] |= {"line": {"color": mark_of(number)["color"], "width": 5}, "opacity": 0.25}
            traces[-1] |= {"showlegend": False}
    return traces


def accuracy_history(history: ShownHistory, runs: Sequence[RunLabel] | None = None) -> Figure:
    """Return the relative RMS error by run, on a logarithmic axis if it changed by more than a factor of ten."""
    errors = [value for value in history.rms if value is not None]
    positive = [value for value in errors if value > 0]
    data = _results(history, [_round(value, 4) for value in history.rms], runs, "relative RMS", "var(--accuracy)")
    low, high = _range(errors, _middle(errors), 0.25)
    layout = _history_layout(history, runs, "relative RMS", (low, high))
    layout["yaxis"]["exponentformat"] = "e"
    if len(positive) == len(errors) > 1 and max(positive) > 10 * min(positive):
        ends = (math.log10(min(positive)) - 0.2, math.log10(max(positive)) + 0.2)
        layout["yaxis"] |= {"type": "log", "range": [_round(end, 4) for end in ends]}
    layout["shapes"] = [_line(mark) for mark in history.marks if mark.kind == "environment"]
    layout["meta"] = {"kind": "history", "alt": _history_alt("Relative RMS error", "", history, history.rms, runs)}
    return {"data": data, "layout": layout}


def metric_history(history: ShownHistory, metric: Metric, runs: Sequence[RunLabel] | None = None) -> Figure:
    """Return the history of a metric that records carry by name, by run."""
    values = history.further[metric.name]
    numbers = [value for value in values if value is not None]
    title = metric.unit or metric.name
    data = _results(history, [_round(value, 4) for value in values], runs, title, "var(--c1)")
    layout = _history_layout(history, runs, title, _range(numbers, _middle(numbers), 0.05))
    layout["shapes"] = [_line(mark) for mark in history.marks if mark.kind == "environment"]
    layout["meta"] = {"kind": "history", "alt": _history_alt(metric.name, metric.unit, history, values, runs)}
    return {"data": data, "layout": layout}


def burst_distribution(bursts: Sequence[ResultBursts], runs: Sequence[RunLabel]) -> Figure:
    """Return all samples by burst, of the newest result and the one before it.

    Samples are grouped because noise is shared within a burst. Outliers are clipped and marked at the edge.
    """
    data: list[dict[str, Any]] = []
    alt = []
    for number, each in enumerate(bursts):
        newest = number == len(bursts) - 1
        ink = "var(--series)" if newest else "var(--older)"
        samples = [value for burst in each.ms for value in burst]
        data.append({
            "type": "box", "name": plain(runs[each.run].commit + ("" if newest else ", before")),
            "x": [place for place, burst in enumerate(each.ms, 1) for _ in burst],
            "y": [_round(value, 5) for value in samples], "boxpoints": "all", "jitter": 0.5, "pointpos": 0,
            "marker": {"color": ink, "size": 3, "opacity": 0.7}, "line": {"color": ink, "width": 1},
            "fillcolor": "rgba(0,0,0,0)", "hovertemplate": "burst %{x}: %{y:.5g} ms<extra>%{fullData.name}</extra>",
            "hoveron": "points",
        })  # fmt: skip
        middle = _middle(samples)
        if middle is not None:
            text = f"median {middle:.4g} ms, from {min(samples):.4g} to {max(samples):.4g}"
            alt.append(f"{runs[each.run].commit}: {len(samples)} samples in {len(each.ms)} bursts, {text}.")
    ranges = [_clip([value for burst in each.ms for value in burst]) for each in bursts]  # runs may differ in level
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    outside = [
        (number, value) for each in bursts for number, burst in enumerate(each.ms, 1) for value in burst
        if not low <= value <= high
    ]  # fmt: skip
    if outside:
        data.append(_clipped(outside, low, high))
        alt.append(f"Outside the plot and marked at its edge: {len(outside)} samples.")
    return {
        "data": data,
        "layout": {
            "height": 250, "margin": {"l": 55, "r": 8, "t": 10, "b": 34}, "boxmode": "group",
            "showlegend": len(data) > 1, "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            "xaxis": {"title": {"text": "burst", "standoff": 4}, "dtick": 1, "fixedrange": True},
            "yaxis": {
                "title": {"text": "ms", "standoff": 4}, "automargin": True,
                "range": [_round(low - 0.05 * (high - low), 6), _round(high + 0.05 * (high - low), 6)],
            },
            "meta": {"kind": "bursts", "alt": "Samples by burst. " + " ".join(alt)},
        },
    }  # fmt: skip


def _clip(samples: Sequence[float]) -> tuple[float, float]:
    """Return the range of a plot that one outlier does not flatten.

    It holds every sample within three interquartile ranges of the quartiles, or within 3 % of the median.
    """
    if not samples:
        return 0.0, 1.0
    ordered = sorted(samples)
    lower, middle, upper = (ordered[int(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75))
    reach = max(3 * (upper - lower), 0.03 * abs(middle))
    inside = [value for value in ordered if lower - reach <= value <= upper + reach]
    low, high = inside[0], inside[-1]
    return (low, high) if high > low else (low - 0.01 * abs(low) - 1e-9, high + 0.01 * abs(high) + 1e-9)


def _clipped(outside: Sequence[tuple[int, float]], low: float, high: float) -> dict[str, Any]:
    """Return marks at the edge of a plot for the samples (burst, ms) outside its range."""
    above = [value > high for _, value in outside]
    return {
        "type": "scatter", "mode": "markers", "name": f"{len(outside)} clipped", "cliponaxis": False,
        "x": [burst for burst, _ in outside], "y": [_round(high if up else low, 5) for up in above],
        "text": [f"{value:.5g} ms" for _, value in outside],
        "marker": {
            "color": "var(--warn)", "size": 9, "symbol": ["triangle-up" if up else "triangle-down" for up in above],
        },
        "hovertemplate": "burst %{x}: %{text}, outside the plot<extra></extra>",
    }  # fmt: skip


def backend_latencies(histories: Sequence[ShownHistory], runs: Sequence[RunLabel]) -> Figure:
    """Return the latency of each backend of one problem by run, with a line for each backend.

    The first history is the one that the page is about; its changes of environment are marked.
    """
    data: list[dict[str, Any]] = []
    alt = []
    for number, history in enumerate(histories):
        places = [i for i, value in enumerate(history.ms) if value is not None and i not in history.status]
        if not places:
            continue
        mark = mark_of(number)
        for dash, (toolchain, line_places) in zip(cycle(DASHES), history.split(places), strict=False):
            if not line_places:
                continue
            name = history.series.backend + (f", {toolchain}" if toolchain else "")
            data.append({
                "type": "scatter", "mode": "lines+markers", "name": plain(name),
                "x": [history.runs[i] for i in line_places], "y": [_round(history.ms[i], 5) for i in line_places],
                "line": {"color": mark["color"], "width": 2.2 if number == 0 else 1.2,
                         **({"dash": dash} if toolchain else {})},
                "marker": {**mark, "size": 6}, **_texts(history, line_places, runs),
                "hovertemplate": "%{fullData.name}<br>%{text}<br>%{y:.4g} ms<extra></extra>",
            })  # fmt: skip
        alt.append(f"{history.series.backend} {history.ms[places[-1]]:.4g} ms")
    values = [value for trace in data for value in trace["y"]]
    layout = _history_layout(histories[0], runs, "ms", _range(values, _middle(values), 0.03))
    if values and max(values) > 10 * min(values) > 0:
        ends = (math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1)
        layout["yaxis"] |= {"type": "log", "range": [_round(end, 4) for end in ends]}
    layout |= {
        "height": 330 + 18 * (len(data) // 4), "showlegend": True,
        "margin": {"l": 55, "r": 8, "t": 10, "b": 50},
        "legend": {"orientation": "h", "y": -0.14, "yanchor": "top", "x": 0},
        "shapes": [_line(mark) for mark in histories[0].marks if mark.kind == "environment"],
        "meta": {"kind": "backends", "alt": f"Latency of {len(alt)} backends by run. Newest: {', '.join(alt)}."},
    }  # fmt: skip
    return {"data": data, "layout": layout}


def speedup_text(speedup: float) -> str:
    """Return a speed-up as `▲ 1.25×`. The sign repeats the direction that the colour shows."""
    if abs(speedup - 1) <= CLEAR:
        return times(speedup)
    return f"{'▲' if speedup > 1 else '▼'} {times(speedup)}"


def times(speedup: float) -> str:
    """Return a speed-up as `1.25×`, with two significant digits below 0.1."""
    digits = 0 if speedup >= 100 else 1 if speedup >= 10 else 2
    return f"{speedup:.{digits}f}×" if speedup >= 0.1 else f"{speedup:.2g}×"


@lru_cache(maxsize=8192)
def run_text(run: RunLabel) -> str:
    """Return a run's tooltip, escaped for plotly."""
    return plain(run.text) + (f"<br>{plain(_cut(run.subject, 90))}" if run.subject else "")


def plain(text: str) -> str:
    """Return a text escaped for plotly, which then shows it unchanged."""
    return escape(text, quote=False)


def mark_of(number: int) -> dict[str, str]:
    """Return the colour and the symbol of the n-th backend. The symbol is for readers who cannot tell colours apart."""
    return {"color": f"var(--c{number % COLOURS})", "symbol": SYMBOLS[number % len(SYMBOLS)]}


def _results(
    history: ShownHistory,
    values: Sequence[float | None],  # [n]
    runs: Sequence[RunLabel] | None,
    unit: str,
    ink: str,
    low: Sequence[float | None] = (),
    high: Sequence[float | None] = (),
) -> list[dict[str, Any]]:
    """Return ok results as a line of points, and others as crosses, at the typical value if they have no value.

    Each toolchain that is measured in turns has its own line.
    """
    every = range(len(values))
    if not history.toolchains:
        return _results_of(history, every, values, runs, unit, ink, low, high)
    with_at = dict(zip(history.runs, history.measured_with, strict=True))
    traces = []
    for number, (toolchain, places) in enumerate(history.split(every)):
        mark = mark_of(number)
        line_traces = _results_of(history, places, values, runs, unit, mark["color"], low, high)
        for trace in line_traces:
            trace |= {"legendgroup": plain(str(toolchain)), "showlegend": trace["name"] == "ok"}
            trace["customdata"] = [plain(with_at.get(x, "")) for x in trace["x"]]
            trace["hovertemplate"] = "%{customdata}<br>" + trace["hovertemplate"]
        line_traces[0] |= {"name": plain(str(toolchain)), "marker": {**mark, "size": 6}}
        traces += line_traces
    return traces


def _results_of(
    history: ShownHistory,
    places: Sequence[int],
    values: Sequence[float | None],  # [n], as those of `_results`
    runs: Sequence[RunLabel] | None,
    unit: str,
    ink: str,
    low: Sequence[float | None],
    high: Sequence[float | None],
) -> list[dict[str, Any]]:
    """Return the results at some places as a line and crosses."""
    typical = _middle([value for i in places if (value := values[i]) is not None])
    good = [i for i in places if values[i] is not None and i not in history.status]
    bad = [i for i in places if i in history.status and (values[i] is not None or typical is not None)]
    line = {
        "type": "scatter", "mode": "lines+markers", "name": "ok", "x": [history.runs[i] for i in good],
        "y": [_round(values[i], 5) for i in good], "line": {"color": ink, "width": 1.2},
        "marker": {"color": ink, "size": 5}, **_texts(history, good, runs),
        "hovertemplate": "%{text}<br>%{y:.4g} " + unit + "<extra></extra>",
    }  # fmt: skip
    if low and high and any(high[i] != low[i] for i in good):
        line["error_y"] = _bars(values, low, high, good, ink)
    crosses = {
        "type": "scatter", "mode": "markers", "name": "not ok", "x": [history.runs[i] for i in bad],
        "y": [_round(values[i] if values[i] is not None else typical, 5) for i in bad],
        "marker": {"color": "var(--bad)", "size": 9, "symbol": "x"}, **_texts(history, bad, runs),
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip
    return [line, crosses] if bad else [line]


def _bars(
    values: Sequence[float | None],  # [n], as the following
    low: Sequence[float | None],
    high: Sequence[float | None],
    places: Sequence[int],
    ink: str,
) -> dict[str, Any]:
    """Return bars from the fastest to the slowest burst."""
    return {
        "type": "data", "array": [_distance(high[i], values[i]) for i in places],
        "arrayminus": [_distance(values[i], low[i]) for i in places], "color": ink, "thickness": 1, "width": 2,
    }  # fmt: skip


def _texts(history: ShownHistory, places: Sequence[int], runs: Sequence[RunLabel] | None) -> dict[str, Any]:
    """Return the tooltips of the points; without `runs`, only the text to add to those in the page's list."""
    added = []
    for i in places:
        status, message = history.status.get(i), history.message.get(i)
        added.append(plain(status + (f": {_cut(message, 200)}" if message else "")) if status else "")
    if runs is None:
        return {"meta": "runs", "text": added} if any(added) else {"meta": "runs"}
    labels = [run_text(runs[history.runs[i]]) for i in places]
    return {"text": [label + (f"<br>{more}" if more else "") for label, more in zip(labels, added, strict=True)]}


def _mark_traces(history: ShownHistory, y: float) -> list[dict[str, Any]]:
    """Return a symbol at the top of the plot for each mark. Its tooltip has the whole text."""
    traces = []
    for kind, (symbol, _, _) in _MARKS.items():
        marks = [mark for mark in history.marks if mark.kind == kind]
        name = _NAMES.get(kind, kind)
        if marks:
            traces.append({
                "type": "scatter", "mode": "markers", "name": name, "x": [mark.at - 0.5 for mark in marks],
                "y": [_round(y, 5)] * len(marks),
                "marker": {"color": _ink(marks[-1]), "symbol": symbol, "size": 9},
                "text": [plain(_cut(mark.text, 200)) for mark in marks],
                "hovertemplate": f"{name}: %{{text}}<extra></extra>",
                **({"showlegend": False} if history.toolchains else {}),
            })  # fmt: skip
    return traces


def _line(mark: Mark) -> dict[str, Any]:
    dash = _MARKS[mark.kind][2]
    return {
        "type": "line", "yref": "y domain", "x0": mark.at - 0.5, "x1": mark.at - 0.5, "y0": 0, "y1": 1,
        "line": {"color": _ink(mark), "width": 1, "dash": dash},
    }  # fmt: skip


def _ink(mark: Mark) -> str:
    return "var(--good)" if mark.good else _MARKS[mark.kind][1]


def _labels(history: ShownHistory) -> list[dict[str, Any]]:
    """Return the text of the newest mark of each kind, one below the other. Other marks have only their tooltip."""
    last = {mark.kind: mark for mark in history.marks}
    middle = (history.runs[0] + history.runs[-1]) / 2 if history.runs else 0
    return [
        {
            "x": mark.at - 0.5, "y": 0.93, "yref": "y domain", "yshift": -13 * number, "yanchor": "top",
            "xanchor": "right" if mark.at - 0.5 > middle else "left", "showarrow": False, "borderpad": 1,
            "text": plain(_cut(mark.text, 44)), "font": {"size": 10, "color": _ink(mark)},
            "bgcolor": "var(--ground)",
        }
        for number, mark in enumerate(last.values())
    ]  # fmt: skip


def _history_layout(
    history: ShownHistory, runs: Sequence[RunLabel] | None, unit: str, ends: tuple[float, float]
) -> dict[str, Any]:
    places = history.runs
    step = max(1, math.ceil(len(places) / _TICKS))
    ticks = list(places[::-step][::-1])
    axis: dict[str, Any] = {"tickvals": ticks, "tickangle": 0}
    if places:
        axis["range"] = [places[0] - 0.7, places[-1] + 0.7]
    if runs is not None:
        axis["ticktext"] = [plain(runs[place].commit[:7]) for place in ticks]
    layout = {
        "height": 250,
        "margin": {"l": 55, "r": 8, "t": 10, "b": 28},
        "showlegend": False,
        "xaxis": axis,
        "yaxis": {
            "title": {"text": unit, "standoff": 4},
            "range": [_round(end, 6) for end in ends],
            "automargin": True,
        },
    }
    if history.toolchains:
        room = 20 * len(history.toolchains)  # one below the other, since two side by side are too wide for a phone
        layout |= {
            "height": 250 + room, "margin": {"l": 55, "r": 8, "t": 10 + room, "b": 28}, "showlegend": True,
            "legend": {"orientation": "v", "y": 1.0, "yanchor": "bottom", "x": 0},
        }  # fmt: skip
    return layout


def _history_alt(
    what: str,
    unit: str,
    history: ShownHistory,
    values: Sequence[float | None],
    runs: Sequence[RunLabel] | None,
) -> str:
    numbers = [value for i, value in enumerate(values) if value is not None and i not in history.status]
    sentences = [f"{what} of {history.series}, {len(values)} results."]
    if numbers:
        unit = f" {unit}" if unit else ""
        sentences.append(f"Newest {numbers[-1]:.4g}{unit}, from {min(numbers):.4g} to {max(numbers):.4g}{unit}.")
    for toolchain, places in history.split(range(len(values))) if history.toolchains else ():
        numbers_of_line = [value for i in places if (value := values[i]) is not None and i not in history.status]
        sentences.append(
            f"With {toolchain}: {len(places)} results"
            + (f", newest {numbers_of_line[-1]:.4g}{unit}." if numbers_of_line else ".")
        )
    if history.status:
        sentences.append(f"{len(history.status)} not ok.")
    for mark in history.marks:
        at = f" at {runs[mark.at].commit}" if runs is not None and mark.at < len(runs) else ""
        sentences.append(f"{_NAMES.get(mark.kind, mark.kind).capitalize()}{at}: {mark.text}.")
    return " ".join(sentences)


def _log_axis(title: str, low: float, high: float) -> dict[str, Any]:
    return {
        "type": "log", "title": {"text": title, "standoff": 6}, "dtick": 1 if high / low > 30 else "D2",
        "range": [_round(math.log10(low), 5), _round(math.log10(high), 5)],
    }  # fmt: skip


def _range(values: Sequence[float], typical: float | None, share: float) -> tuple[float, float]:
    """Return the range of an axis: at least `share` of the typical value to each side, so that noise looks small."""
    if not values or typical is None:
        return 0.0, 1.0
    low, high = min(*values, typical * (1 - share)), max(*values, typical * (1 + share))
    if low == high:
        return low - 1, high + 1
    return low - 0.06 * (high - low), high + 0.16 * (high - low)


def _middle(values: Sequence[float]) -> float | None:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None


def _distance(high: float | None, low: float | None) -> float:
    return 0.0 if high is None or low is None else float(f"{max(high - low, 0.0):.2g}")


def _round(value: float | None, digits: int) -> float | None:
    """Return a number rounded to so many significant digits, which keeps the JSON small."""
    return None if value is None else float(f"{value:.{digits}g}")


def _digits(value: float) -> str:
    """Return a number with two significant digits, or as an integer from 10 on: a CPU's ceiling is 0.042 TFLOP/s."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
