"""How far an output may be from the reference: one table, by dtype of the output.

An exact product rounded once to a dtype with unit roundoff u (2^-8 bf16, 2^-11 fp16, 2^-24 fp32) is off by 0.4 u RMS
and u at most. `rms` leaves room for kernels that accumulate in another order, and none for a result that is 1 % off
anywhere: it is asked of the whole output and of every row and 64 x 64 block of it. `rtol` and `atol` bound each
element: atol is in units of the output's own RMS, since an element near zero inherits its error from its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tolerance:
    """rms: relative RMS error allowed; an element passes when |out - ref| <= atol * rms(ref) + rtol * |ref|."""

    rms: float
    rtol: float
    atol: float

    def with_overrides(self, rtol: float | None, atol: float | None) -> Tolerance:
        """The same with the user's `--rtol`, `--atol`; a looser rtol loosens rms too."""
        changed = replace(self, rtol=self.rtol if rtol is None else rtol, atol=self.atol if atol is None else atol)
        return replace(changed, rms=max(self.rms, changed.rtol)) if rtol is not None else changed


TOLERANCES: dict[str, Tolerance] = {
    "bf16": Tolerance(rms=5e-3, rtol=1.6e-2, atol=1.6e-2),
    "fp16": Tolerance(rms=1e-3, rtol=2e-3, atol=2e-3),
    # IEEE fp32: a sum of K terms in any order, K up to 2^15. TF32 (3e-4) is wrong for fp32, by design.
    "fp32": Tolerance(rms=5e-6, rtol=1e-4, atol=1e-4),
}
