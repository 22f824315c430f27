"""Thousands of series are judged each night: how many alarms may be false? Pure functions of p-values.

Benjamini and Hochberg, "Controlling the false discovery rate", 1995: of all hypotheses that are rejected at level q,
at most the share q is false on average. Where nothing changed at all, the chance of any alarm in the whole night is
at most q. It holds for independent tests and for those that err together in the same direction (Benjamini and
Yekutieli, 2001), as series of one sick machine do; the 10 times stricter rule for any dependence whatever would
blind the night to guard against a dependence that benchmarks do not have.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def adjusted(p: ArrayLike) -> NDArray[np.float64]:
    """q-values: the least false-discovery rate at which each hypothesis is rejected. NaN (not tested) stays NaN.

    p: [n] in 0..1; returns [n] float64. Raises ValueError for a p outside of 0..1.
    """
    p = np.asarray(p, dtype=np.float64)
    if p.ndim != 1 or np.any((p < 0) | (p > 1)):
        raise ValueError("p-values: one dimension, each in 0..1 or NaN")
    q = np.full(p.shape, np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    if len(tested):
        order = tested[np.argsort(-p[tested], kind="stable")]  # largest first
        ranks = np.arange(len(order), 0, -1)
        q[order] = np.minimum(np.minimum.accumulate(p[order] * (len(order) / ranks)), 1.0)
    return q
