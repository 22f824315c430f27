"""Plots by run for a series: latency, accuracy or another metric, and several backends' latencies.

If `runs` is omitted, a history does not repeat the run texts: `draw.js` takes them from the page's list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

from groupbench.tracker.facts.metrics import Metric
from groupbench.tracker.report.figures.drawing import (
    Figure,
    cut,
    mark_of,
    middle_of,
    plain,
    rounded,
    run_text,
    tick_text,
)
from groupbench.tracker.report.shown import Mark, RunLabel, ShownHistory

DASHES = ("solid", "dot", "dash", "longdash", "dashdot")
"""Dashes of a backend's lines if it has one for each toolchain."""
_TICKS = 5
_MARKS = {  # symbol, colour, dash
    "change": ("diamond", "var(--change)", "solid"),
    "environment": ("square-open", "var(--warn)", "dot"),
    "alert": ("triangle-up", "var(--bad)", "dash"),
    "closed": ("triangle-up-open", "var(--faint)", "dash"),
    "verdict": ("diamond-open", "var(--change)", "longdash"),
}
_BETTER = {"change": "star-triangle-down", "verdict": "star-triangle-down-open"}
"""Symbols of the marks of improvements, which are green."""
_FACTOR = 3.0
"""Ratio of the largest value to the smallest from which an axis is logarithmic."""
_NAMES = {"closed": "closed alert"}
"""Names of marks in legends, if they differ from the kind."""


def latency_history(history: ShownHistory, runs: Sequence[RunLabel] | None = None) -> Figure:
    """Return latency by run, with burst ranges, levels, changes, environments, alerts and failures."""
    shape = [value for value in (*history.ms, *history.low, *history.high) if value is not None]
    typical = middle_of([value for value in history.ms if value is not None])
    data = _results(history, history.ms, runs, "ms", "var(--series)", history.low, history.high)
    if history.levels and len(history.runs) > 1:
        data += _levels(history)
    axis = _axis(shape, typical, 0.03, words=len({mark.kind for mark in history.marks}))
    data += _mark_traces(history, axis.value_at(0.97))
    layout = _history_layout(history, runs, "ms, interpreted: no speed" if history.interpreted else "ms", axis)
    layout["shapes"] = [_line(mark) for mark in history.marks]
    layout["annotations"] = _labels(history)
    layout["meta"] = {"kind": "history", "alt": _history_alt("Latency", "ms", history, history.ms, runs)}
    return {"data": data, "layout": layout}


def _levels(history: ShownHistory) -> list[dict[str, Any]]:
    """Return a trace with each line's levels."""
    traces = []
    for number in sorted({level.line for level in history.levels}):
        x: list[float | None] = []
        y: list[float | None] = []
        for level in history.levels:
            if level.line == number:
                x += [level.first, level.last, None]
                y += [rounded(level.ms, 5), rounded(level.ms, 5), None]
        traces.append({
            "type": "scatter", "mode": "lines", "name": "level", "x": x[:-1], "y": y[:-1], "hoverinfo": "skip",
            "line": {"color": "var(--level)", "width": 5}, "zorder": -1,
        })  # fmt: skip
        if history.toolchains:
            traces[-1] |= {"line": {"color": mark_of(number)["color"], "width": 5}, "opacity": 0.25}
            traces[-1] |= {"showlegend": False}
    return traces


def accuracy_history(history: ShownHistory, runs: Sequence[RunLabel] | None = None) -> Figure:
    """Return the relative RMS error by run."""
    figure = _plain_history(
        history, history.rms, runs, "relative RMS", "var(--accuracy)", 0.25, ("Relative RMS error", "")
    )
    figure["layout"]["yaxis"]["exponentformat"] = "e"
    return figure


def metric_history(history: ShownHistory, metric: Metric, runs: Sequence[RunLabel] | None = None) -> Figure:
    """Return the history for a metric carried by name, by run."""
    values, title = history.further[metric.name], metric.unit or metric.name
    return _plain_history(history, values, runs, title, "var(--c1)", 0.05, (metric.name, metric.unit))


def _plain_history(
    history: ShownHistory,
    values: Sequence[float | None],  # [n]
    runs: Sequence[RunLabel] | None,
    title: str,
    ink: str,
    share: float,  # of the typical value, to each side
    alt: tuple[str, str],  # name and unit
) -> Figure:
    """Return values by run, with environment changes."""
    numbers = [value for value in values if value is not None]
    data = _results(history, [rounded(value, 4) for value in values], runs, title, ink)
    layout = _history_layout(history, runs, title, _axis(numbers, middle_of(numbers), share))
    layout["shapes"] = [_line(mark) for mark in history.marks if mark.kind == "environment"]
    layout["meta"] = {"kind": "history", "alt": _history_alt(*alt, history, values, runs)}
    return {"data": data, "layout": layout}


def backend_latencies(histories: Sequence[ShownHistory], runs: Sequence[RunLabel]) -> Figure:
    """Return one problem's latencies by run, with a line for each backend.

    The first history belongs to the page; environment changes are marked there.
    """
    data: list[dict[str, Any]] = []
    alt = []
    for number, history in enumerate(histories):
        places = history.ok(history.ms)
        if places:
            data += _backend_lines(history, places, runs, number)
            alt.append(f"{history.series.backend} {history.ms[places[-1]]:.4g} ms")
    values = [value for trace in data for value in trace["y"]]
    layout = _history_layout(histories[0], runs, "ms", _axis(values, middle_of(values), 0.03))
    layout |= {
        "height": 330 + 18 * (len(data) // 4), "showlegend": True,
        "margin": {"l": 55, "r": 8, "t": 10, "b": 62},
        "legend": {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0},
        "shapes": [_line(mark) for mark in histories[0].marks if mark.kind == "environment"],
        "meta": {"kind": "backends", "alt": f"Latency of {len(alt)} backends by run. Newest: {', '.join(alt)}."},
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _backend_lines(
    history: ShownHistory, places: Sequence[int], runs: Sequence[RunLabel] | None, number: int
) -> Iterator[dict[str, Any]]:
    """Yield a line for each toolchain with this backend. The backend with number 0 has a thick one."""
    mark = mark_of(number)
    for dash, (toolchain, of_line) in zip(cycle(DASHES), history.split(places), strict=False):
        if not of_line:
            continue
        name = history.series.backend + (f", {toolchain}" if toolchain else "")
        line = {"color": mark["color"], "width": 1.2 if number else 2.2}
        yield {
            "type": "scatter", "mode": "lines+markers", "name": plain(name),
            "x": [history.runs[i] for i in of_line], "y": [rounded(history.ms[i], 5) for i in of_line],
            "line": line | ({"dash": dash} if toolchain else {}),
            "marker": {**mark, "size": 6}, **_texts(history, of_line, runs),
            "hovertemplate": "%{fullData.name}<br>%{text}<br>%{y:.4g} ms<extra></extra>",
        }  # fmt: skip


def _results(
    history: ShownHistory,
    values: Sequence[float | None],  # [n]
    runs: Sequence[RunLabel] | None,
    unit: str,
    ink: str,
    low: Sequence[float | None] = (),
    high: Sequence[float | None] = (),
) -> list[dict[str, Any]]:
    """Return ok results as a line with points, and others as crosses, at the typical value if they have no value.

    Each alternating toolchain has a line.
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
    typical = middle_of([value for i in places if (value := values[i]) is not None])
    good = history.ok(values, places)
    drawn = {i: typical if values[i] is None else values[i] for i in places}
    bad = [i for i in places if i in history.status and drawn[i] is not None]
    line = {
        "type": "scatter", "mode": "lines+markers", "name": "ok", "x": [history.runs[i] for i in good],
        "y": [rounded(values[i], 5) for i in good], "line": {"color": ink, "width": 1.2},
        "marker": {"color": ink, "size": 5}, **_texts(history, good, runs),
        "hovertemplate": "%{text}<br>%{y:.4g} " + unit + "<extra></extra>",
    }  # fmt: skip
    line |= _bars(values, low, high, good, ink) if low and high else {}
    crosses = {
        "type": "scatter", "mode": "markers", "name": "not ok", "x": [history.runs[i] for i in bad],
        "y": [rounded(drawn[i], 5) for i in bad],
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
    """Return bars from the fastest to the slowest burst; nothing if no result has both."""
    if all(high[i] == low[i] for i in places):
        return {}
    return {"error_y": {
        "type": "data", "array": [_distance(high[i], values[i]) for i in places],
        "arrayminus": [_distance(values[i], low[i]) for i in places], "color": ink, "thickness": 1, "width": 2,
    }}  # fmt: skip


def _texts(history: ShownHistory, places: Sequence[int], runs: Sequence[RunLabel] | None) -> dict[str, Any]:
    """Return the points' tooltips; without `runs`, only the text to add to the page's list."""
    if runs is None:
        added = [_status_text(history, i) for i in places]
        return {"meta": "runs", "text": added} if any(added) else {"meta": "runs"}
    texts = [run_text(runs[history.runs[i]]) for i in places]
    for number, i in enumerate(places) if history.status else ():
        if more := _status_text(history, i):
            texts[number] += f"<br>{more}"
    return {"text": texts}


def _status_text(history: ShownHistory, place: int) -> str:
    """Return the tooltip text for a result's status, escaped for plotly; empty for an ok result."""
    status, message = history.status.get(place), history.message.get(place)
    return plain(status + (f": {cut(message, 200)}" if message else "")) if status else ""


def _mark_traces(history: ShownHistory, y: float) -> list[dict[str, Any]]:
    """Return a symbol at the plot's top for each mark. The tooltip has the whole text."""
    traces = []
    for kind, good in product(_MARKS, (False, True)):
        marks = [mark for mark in history.marks if mark.kind == kind and mark.good == good]
        symbol = _BETTER.get(kind, _MARKS[kind][0]) if good else _MARKS[kind][0]
        name = "improvement" if good and kind in _BETTER else _NAMES.get(kind, kind)
        if marks:
            traces.append({
                "type": "scatter", "mode": "markers", "name": name, "x": [mark.at - 0.5 for mark in marks],
                "y": [rounded(y, 5)] * len(marks),
                "marker": {"color": _ink(marks[-1]), "symbol": symbol, "size": 9},
                "text": [plain(cut(mark.text, 200)) for mark in marks],
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
    """Return the newest mark's text for each kind, one below the other. Other marks have only their tooltip."""
    last = {mark.kind: mark for mark in history.marks}
    middle = (history.runs[0] + history.runs[-1]) / 2 if history.runs else 0
    return [
        {
            "x": mark.at - 0.5, "y": 0.93, "yref": "y domain", "yshift": -13 * number, "yanchor": "top",
            "xanchor": "right" if mark.at - 0.5 > middle else "left", "showarrow": False, "borderpad": 1,
            "text": plain(cut(mark.text, 44)), "font": {"size": 10, "color": _ink(mark)},
            "bgcolor": "var(--ground)",
        }
        for number, mark in enumerate(last.values())
    ]  # fmt: skip


def _history_layout(history: ShownHistory, runs: Sequence[RunLabel] | None, unit: str, y: _Axis) -> dict[str, Any]:
    places = history.runs
    step = max(1, math.ceil(len(places) / _TICKS))
    ticks = list(places[::-step][::-1])
    axis: dict[str, Any] = {"tickvals": ticks, "tickangle": 0}
    if places:
        axis["range"] = [places[0] - 0.7, places[-1] + 0.7]
    if runs is not None:
        axis["ticktext"] = [tick_text(runs[place]) for place in ticks]
    layout = {
        "height": 250,
        "margin": {"l": 55, "r": 8, "t": 10, "b": 40},
        "showlegend": False,
        "xaxis": axis,
        "yaxis": {
            "title": {"text": unit, "standoff": 4},
            "range": [rounded(end, 6) for end in (y.low, y.high)],
            "automargin": True,
            **({"type": "log"} if y.is_log else {}),
        },
    }
    if history.toolchains:
        room = 20 * len(history.toolchains)  # one below the other, since two side by side are too wide for a phone
        layout |= {
            "height": 250 + room, "margin": {"l": 55, "r": 8, "t": 10 + room, "b": 40}, "showlegend": True,
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
    numbers = [values[i] or 0.0 for i in history.ok(values)]
    sentences = [f"{what} of {history.series}, {len(values)} results."]
    if numbers:
        unit = f" {unit}" if unit else ""
        sentences.append(f"Newest {numbers[-1]:.4g}{unit}, from {min(numbers):.4g} to {max(numbers):.4g}{unit}.")
    for toolchain, places in history.split(range(len(values))) if history.toolchains else ():
        of_line = history.ok(values, places)
        newest = f", newest {values[of_line[-1]]:.4g}{unit}" if of_line else ""
        sentences.append(f"With {toolchain}: {len(places)} results{newest}.")
    if history.status:
        sentences.append(f"{len(history.status)} not ok.")
    for mark in history.marks:
        at = f" at {runs[mark.at].commit}" if runs is not None and mark.at < len(runs) else ""
        sentences.append(f"{_NAMES.get(mark.kind, mark.kind).capitalize()}{at}: {mark.text}.")
    return " ".join(sentences)


@dataclass(frozen=True)
class _Axis:
    """The range of an axis. The ends of a logarithmic one are logarithms to base 10."""

    low: float
    high: float
    is_log: bool = False

    def value_at(self, share: float) -> float:
        """Return the value at a share from the axis's lower end."""
        at = self.low + share * (self.high - self.low)
        return 10**at if self.is_log else at


def _axis(values: Sequence[float], typical: float | None, share: float, words: int = 0) -> _Axis:
    """Return an axis for some values, logarithmic if they span more than a factor of three.

    A linear one has at least `share` of the typical value to each side, so that noise looks small. `words` is the
    number of lines of text at the top.
    """
    if not values or typical is None:
        return _Axis(0.0, 1.0)
    is_log = max(values) > _FACTOR * min(values) > 0
    if is_log:
        low, high = math.log10(min(values)), math.log10(max(values))
    else:
        low, high = min(*values, typical * (1 - share)), max(*values, typical * (1 + share))
    if low == high:
        return _Axis(low - 1, high + 1)
    low, high = low - 0.06 * (high - low), high + 0.16 * (high - low)
    return _Axis(low, high + 0.09 * words * (high - low), is_log)


def _distance(high: float | None, low: float | None) -> float:
    return 0.0 if high is None or low is None else float(f"{max(high - low, 0.0):.2g}")
