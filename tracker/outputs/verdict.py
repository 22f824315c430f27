"""The verdict as JSON, as `gate --format json` prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from groupbench.tracker.judge.verdicts import latencies
from groupbench.tracker.outputs.escape import clean

if TYPE_CHECKING:
    from groupbench.tracker.judge.verdicts import Gate
    from groupbench.tracker.outputs.result import GateResult


def verdict(gate: Gate) -> dict[str, Any]:
    run = gate.run
    return {
        "verdict": gate.word,
        "exit_code": gate.exit_code,
        "summary": gate.summary,
        "run": run.id,
        "commit": run.commit,
        "dirty": run.dirty,
        "counts": gate.counts,
        "notes": list(gate.notes),
        "transitions": list(gate.transitions),
        "latencies": dict(zip(("judged", "measured"), latencies(gate.rows), strict=True)),
        "series": [row.flat() for row in gate.rows],
    }


def render(result: GateResult) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(clean(verdict(result.gate))), indent=2).decode() + "\n"
