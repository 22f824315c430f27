"""The roofline: achieved throughput below the same run's ceilings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from groupbench.tracker.report.figures.drawing import Figure, cut, mark_of, plain, rounded, two_digits
from groupbench.tracker.report.shown import CanaryCeilings, RoofPoint


def roofline(points: Sequence[RoofPoint], ceilings: CanaryCeilings) -> Figure:
    """Return achieved TFLOP/s by arithmetic intensity, below the same run's canary ceilings."""
    ridge = 1e3 * ceilings.tflops / ceilings.gbps
    intensities = [point.intensity for point in points]
    low = min([*intensities, ridge]) / 5
    high = max([*intensities, ridge]) * 2
    roof = [(x, min(ceilings.tflops, ceilings.gbps * x / 1e3)) for x in (low, ridge, high)]
    backends = sorted({point.backend for point in points})
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "name": "ceiling", "x": [rounded(x, 4) for x, _ in roof],
            "y": [rounded(y, 4) for _, y in roof], "line": {"color": "var(--text)", "width": 1.5},
            "hovertemplate": "ceiling: %{y:.4g} TFLOP/s<extra></extra>",
        }
    ]  # fmt: skip
    for number, backend in enumerate(backends):
        of_backend = sorted((point for point in points if point.backend == backend), key=lambda point: point.intensity)
        data.append(_marks(backend, of_backend, ceilings, mark_of(number)))
    best = max(points, key=lambda point: point.share(ceilings), default=None)
    alt = (
        f"Roofline of {len(points)} results by {len(backends)} backends, below {two_digits(ceilings.tflops)} TFLOP/s "
        f"and {two_digits(ceilings.gbps)} GB/s."
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
                    "text": f"{two_digits(ceilings.tflops)} TFLOP/s, {plain(ceilings.dtype)} matmul canary",
                },
                {
                    "xref": "x domain", "x": 0, "y": math.log10(ceilings.tflops), "xanchor": "left",
                    "yanchor": "top", "showarrow": False,
                    "text": f"{two_digits(ceilings.gbps)} GB/s, copy canary",
                },
            ],
            "meta": {"kind": "roofline", "alt": alt},
        },
    }  # fmt: skip


def _marks(backend: str, points: Sequence[RoofPoint], ceilings: CanaryCeilings, mark: dict[str, Any]) -> dict[str, Any]:
    """Return a backend's results."""
    return {
        "type": "scatter", "mode": "markers", "name": plain(backend),
        "x": [rounded(point.intensity, 4) for point in points],
        "y": [rounded(point.tflops, 4) for point in points],
        "text": [plain(cut(point.problem, 120)) for point in points],
        "customdata": [[rounded(point.gbps, 4), rounded(100 * point.share(ceilings), 3)] for point in points],
        "marker": {**mark, "size": 9},
        "hovertemplate": "%{fullData.name}<br>%{text}<br>%{y:.4g} TFLOP/s, %{customdata[0]:.4g} GB/s<br>"
                         "%{customdata[1]:.3g}% of the ceiling at %{x:.4g} FLOP/byte<extra></extra>",
    }  # fmt: skip


def _log_axis(title: str, low: float, high: float) -> dict[str, Any]:
    return {
        "type": "log", "title": {"text": title, "standoff": 6}, "dtick": 1 if high / low > 30 else "D2",
        "range": [rounded(math.log10(low), 5), rounded(math.log10(high), 5)],
    }  # fmt: skip
