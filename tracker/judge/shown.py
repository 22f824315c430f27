"""The levels and the change that every output shows of a judged row."""

from __future__ import annotations

from dataclasses import dataclass

from groupbench.tracker.facts.metrics import LATENCY, RMS, Metric
from groupbench.tracker.text.wording import latency, milliseconds, signed_change, signed_ends, times


@dataclass(frozen=True)
class Shown:
    """The levels of one metric, in its unit, and the relative change between them: 0.03 is a 3 % increase."""

    metric: Metric
    before: float | None
    now: float | None
    change: float | None
    low: float | None = None  # interval of the change
    high: float | None = None
    timing: str | None = None

    @property
    def before_text(self) -> str:
        return self._text(self.before, milliseconds(self.before))

    @property
    def now_text(self) -> str:
        """The level now, or `interpreted`: the interpreter's time is not a latency."""
        return self._text(self.now, latency(self.now, self.timing))

    def _text(self, value: float | None, ms: str) -> str:
        """Return a value with its unit, or with the name of a metric without a unit."""
        if value is None:
            return ""
        if self.metric is LATENCY:
            return ms if ms.isalpha() else f"{ms} ms"
        return self.metric.text(value) if self.metric.unit else f"{self.metric.text(value)} {self.metric.name}"

    @property
    def change_text(self) -> str:
        return signed_change(self.change)

    @property
    def factor_text(self) -> str:
        """The change of an error as `rms 4.50×`, since errors grow by factors, and any other in percent."""
        if self.metric is RMS and self.change is not None:
            return f"rms {times(self.change + 1)}"
        return self.change_text

    def interval(self, between: str = " .. ") -> str:
        """Return the interval of the change: `+2.1% .. +3.9%`."""
        if self.low is None or self.high is None:
            return ""
        return signed_ends(self.low, self.high, between)
