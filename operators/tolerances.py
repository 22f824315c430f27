"""Output tolerances: one table, by output dtype.

An exact product rounded once to a dtype with unit roundoff u (2^-8 bf16, 2^-11 fp16, 2^-24 fp32) is off by 0.4 u RMS
and u at most. `rms` leaves room for kernels with another accumulation order, and none for a result 1 % off anywhere: it
applies to the whole output and to every row and 64 x 64 block. `rtol` and `atol` bound each element. atol is in units
of the larger RMS of row and output, since an element near zero inherits the errors of large terms: the first rows of
causal attention average few values, and are several times the output's RMS.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from groupbench.operators.operator import Operator


@dataclass(frozen=True)
class Tolerance:
    """The largest errors in a right output.

    Attributes:
        rms: Relative RMS error of the output, and of each of its rows and blocks.
        rtol: An element may differ from the reference by atol * max(rms(ref), rms(row)) + rtol * |ref|.
        atol: See rtol.
    """

    rms: float
    rtol: float
    atol: float

    def with_overrides(self, rtol: float | None, atol: float | None) -> Tolerance:
        """Return the tolerance with the user's `--rtol` and `--atol`. A looser rtol loosens rms too."""
        changed = replace(self, rtol=self.rtol if rtol is None else rtol, atol=self.atol if atol is None else atol)
        return replace(changed, rms=max(self.rms, changed.rtol)) if rtol is not None else changed


TOLERANCES: dict[str, Tolerance] = {
    "bf16": Tolerance(rms=5e-3, rtol=1.6e-2, atol=1.6e-2),
    "fp16": Tolerance(rms=1e-3, rtol=2e-3, atol=2e-3),
    # IEEE fp32: a sum of K terms in any order, K up to 2^15. TF32 (3e-4) is wrong for fp32, by design.
    "fp32": Tolerance(rms=5e-6, rtol=1e-4, atol=1e-4),
    # A mixture-of-experts layer: several products in a row, each result rounded. torch's parts are off by 0.005 RMS in
    # bf16, by 0.008 in a row, and ours by less. A gradient that meets one token has single elements far from that.
    "bf16_layer": Tolerance(rms=1.2e-2, rtol=6.4e-2, atol=2.5e-1),
    "fp16_layer": Tolerance(rms=1.5e-3, rtol=8e-3, atol=3.2e-2),
    "fp32_layer": Tolerance(rms=1e-5, rtol=1e-3, atol=1e-3),
    # A sum of a few terms, each rounded, possibly with a rounding at each addition, as in torch's parts. Terms that
    # cancel are several times the sum's RMS. Eight normal rows, weighted: 0.004 RMS in bf16 and at most 0.031.
    "bf16_summed": Tolerance(rms=8e-3, rtol=1.6e-2, atol=6.4e-2),
    "fp16_summed": Tolerance(rms=1e-3, rtol=2e-3, atol=8e-3),
    "fp32_summed": Tolerance(rms=5e-6, rtol=1e-4, atol=1e-4),
    # e4m3fn: u is 2^-4, and its rounding 0.027 RMS; a value cut off instead of rounded would be at 0.053. A little more
    # for the scale's rounding, and atol for values that are subnormal relative to the largest of their row.
    "fp8": Tolerance(rms=4e-2, rtol=6.26e-2, atol=1e-4),
    # The layer with operands in fp8: each is off by 0.027 RMS, and two to four of them meet in a result.
    "fp8_layer": Tolerance(rms=1.2e-1, rtol=5e-1, atol=1.0),
    # bf16, of fp8 products whose sums stayed in Hopper's tensor cores (13 bits, cut off: kernels/grouped_gemm/fp8.py).
    # For standard normal values that adds 0.003 RMS and 0.025 at most at K = 16384.
    "bf16_fast_accum": Tolerance(rms=8e-3, rtol=1.6e-2, atol=4e-2),
    # A reference in fp64 sums in another order than the backends.
    "fp64": Tolerance(rms=1e-13, rtol=1e-12, atol=1e-12),
    **dict.fromkeys(("int8", "int32", "int64", "bool"), Tolerance(rms=0.0, rtol=0.0, atol=0.0)),
}


def tolerance_of(operator: Operator, backend: str, dtype: str) -> Tolerance:
    """Return the tolerance for a backend's output in a cell with this dtype; the backend may be another host's."""
    row = next((candidate.tolerance for candidate in operator.backends if candidate.name == backend), None)
    return table_of(operator)[(row or "{dtype}").format(dtype=operator.output_dtype(dtype))]


def table_of(operator: Operator) -> dict[str, Tolerance]:
    """Return the tolerance table with the operator's additional rows."""
    return TOLERANCES | dict(operator.tolerances)
