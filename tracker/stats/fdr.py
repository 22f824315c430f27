"""False-discovery-rate control for thousands of series. Pure functions of p-values.

Benjamini and Hochberg, "Controlling the false discovery rate", 1995: of all hypotheses rejected at level q, at most a
fraction q is false on average. If nothing changed, the chance of any alarm in the whole night is at most q. This holds
for independent tests and for positively dependent ones (Benjamini and Yekutieli, 2001), such as the series of one
faulty machine. The rule for arbitrary dependence is 10 times stricter and would hide real changes, to guard against a
dependence that benchmarks do not have.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def adjusted(p: ArrayLike) -> NDArray[np.float64]:
    """Return q-values: the smallest false-discovery rate at which each hypothesis is rejected. NaN stays NaN.

    p: [n] in 0..1; returns [n] float64. Raises ValueError for a p outside of 0..1.
    """
    p = np.asarray(p, dtype=np.float64)
    if p.ndim != 1 or np.any((p < 0) | (p > 1)):
        raise ValueError("p-values must be one-dimensional, each in 0..1 or NaN")
    q = np.full(p.shape, np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    if len(tested):
        order = tested[np.argsort(-p[tested], kind="stable")]  # largest first
        ranks = np.arange(len(order), 0, -1)
        q[order] = np.minimum(np.minimum.accumulate(p[order] * (len(order) / ranks)), 1.0)
    return q
