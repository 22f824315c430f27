"""Compare a cell with the GPU's speed of light: the canaries' rate and bandwidth in the same run.

A cell cannot be faster than the operations at the GPU's peak rate, nor than the traffic at the GPU's bandwidth. Both
ceilings are measured by the canaries, a large matrix product and a large copy, in the same run on the same GPU. A hot
or power-capped GPU has lower ceilings, so the gap depends on the kernel and not on the GPU's state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from groupbench.operators.table import median_ms
from groupbench.tracker.facts.record import Record

CANARY = "canary"
RATE = {"bf16": 1.0, "fp16": 1.0, "fp8": 2.0}
"""Rate of products relative to 16-bit ones, on cards with tensor cores. Other dtypes have no compute ceiling here."""


@dataclass
class Ceilings:
    """The canaries' best rates so far, by card."""

    flops: dict[str | None, float] = field(default_factory=dict)  # of 16-bit products, per second
    bandwidth: dict[str | None, float] = field(default_factory=dict)  # bytes per second

    def see(self, record: Record) -> Record:
        """Return the record with the metric `sol_gap`, if the card's ceilings are known. Canaries set the ceilings."""
        if record.status != "ok" or record.latency is None or record.latency.timing != "gpu":
            return record
        if record.cell.operator == CANARY:
            self._learn(record)
            return record
        floor = self.floor_ms(record)
        if not floor:
            return record
        gap = median_ms(record.latency) / floor
        return msgspec.structs.replace(record, metrics={**record.metrics, "sol_gap": gap})

    def floor_ms(self, record: Record) -> float | None:
        """Return the shortest time in ms for a record's problem at the card's ceilings; None if one is unknown."""
        card, cell = record.environment.gpu_uuid, record.cell
        rate, bandwidth = self.flops.get(card), self.bandwidth.get(card)
        if rate is None or bandwidth is None or cell.dtype not in RATE or not cell.flops or not cell.min_bytes:
            return None
        return 1e3 * max(cell.flops / (rate * RATE[cell.dtype]), cell.min_bytes / bandwidth)

    def _learn(self, record: Record) -> None:
        assert record.latency is not None
        card, cell, seconds = record.environment.gpu_uuid, record.cell, median_ms(record.latency) / 1e3
        if cell.flops and cell.dtype in RATE:
            self.flops[card] = max(self.flops.get(card, 0.0), cell.flops / seconds / RATE[cell.dtype])
        if cell.min_bytes:
            self.bandwidth[card] = max(self.bandwidth.get(card, 0.0), cell.min_bytes / seconds)
