"""The plot for a result's samples by burst."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupbench.tracker.report.figures.drawing import Figure, middle_of, plain, rounded
from groupbench.tracker.report.shown import ResultBursts, RunLabel


def burst_distribution(bursts: Sequence[ResultBursts], runs: Sequence[RunLabel]) -> Figure:
    """Return all samples by burst, from the newest result and the one before it.

    Samples are grouped because noise is shared within a burst. Outliers are clipped and marked at the edge.
    """
    data = [_box(each, runs[each.run].commit, newest=each is bursts[-1]) for each in bursts]
    alt = [_sentence(each, runs[each.run].commit) for each in bursts if each.samples]
    lows, highs = zip(*(_clip(each.samples) for each in bursts), strict=True)  # runs may differ in level
    low, high = min(lows), max(highs)
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
                "range": [rounded(low - 0.05 * (high - low), 6), rounded(high + 0.05 * (high - low), 6)],
            },
            "meta": {"kind": "bursts", "alt": "Samples by burst. " + " ".join(alt)},
        },
    }  # fmt: skip


def _box(bursts: ResultBursts, commit: str, newest: bool) -> dict[str, Any]:
    """Return a result's samples, by burst."""
    ink = "var(--series)" if newest else "var(--older)"
    return {
        "type": "box", "name": plain(commit + ("" if newest else ", before")),
        "x": [place for place, burst in enumerate(bursts.ms, 1) for _ in burst],
        "y": [rounded(value, 5) for value in bursts.samples], "boxpoints": "all", "jitter": 0.5, "pointpos": 0,
        "marker": {"color": ink, "size": 3, "opacity": 0.7}, "line": {"color": ink, "width": 1},
        "fillcolor": "rgba(0,0,0,0)", "hovertemplate": "burst %{x}: %{y:.5g} ms<extra>%{fullData.name}</extra>",
        "hoveron": "points",
    }  # fmt: skip


def _sentence(bursts: ResultBursts, commit: str) -> str:
    samples = bursts.samples
    text = f"median {middle_of(samples):.4g} ms, from {min(samples):.4g} to {max(samples):.4g}"
    return f"{commit}: {len(samples)} samples in {len(bursts.ms)} bursts, {text}."


def _clip(samples: Sequence[float]) -> tuple[float, float]:
    """Return a plot range not flattened by one outlier.

    It holds every sample within three interquartile ranges around the quartiles, or within 3 % around the median.
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
    """Return marks at the plot's edge for samples (burst, ms) out of range."""
    above = [value > high for _, value in outside]
    return {
        "type": "scatter", "mode": "markers", "name": f"{len(outside)} clipped", "cliponaxis": False,
        "x": [burst for burst, _ in outside], "y": [rounded(high if up else low, 5) for up in above],
        "text": [f"{value:.5g} ms" for _, value in outside],
        "marker": {
            "color": "var(--warn)", "size": 9, "symbol": ["triangle-up" if up else "triangle-down" for up in above],
        },
        "hovertemplate": "burst %{x}: %{text}, outside the plot<extra></extra>",
    }  # fmt: skip
