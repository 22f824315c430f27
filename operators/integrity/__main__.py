"""Run one cheat of each kind, and honest backends: `python -m groupbench.operators.integrity`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from groupbench.operators import executor
from groupbench.operators.errors import GroupbenchError
from groupbench.operators.integrity.cheat import Cheat, backends, caught_by, is_not_checked
from groupbench.operators.integrity.cheats import CHEATS
from groupbench.operators.measure.environment import resolve_device
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.measure.wire import Job
from groupbench.operators.vet import vetted
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.record import Commit, Record, Run

BACKENDS = backends(CHEATS)
"""The cheats as a plugin: `--plugin groupbench.operators.integrity.__main__.BACKENDS`."""

PLUGIN = "groupbench.operators.integrity.__main__.BACKENDS"
SHAPES = {"cpu": ("G=4,M_g=64,N=128,K=128", "fp32"), "cuda": ("G=8,M_g=1024,N=2048,K=2048,W=nk", "bf16")}
OUTCOMES = ("caught", "not checked", "passed")
HONEST = {"cpu": ("torch_loop", "torch_grouped_mm"), "cuda": ("torch_loop", "torch_grouped_mm", "triton_flat")}
CELL_LIMIT_S = 60.0

TRIES = 3
"""Number of measurements of a backend, if other work on the machine keeps the times from being checked."""


def measure(names: list[str], device: str, plugin: str = PLUGIN) -> list[Record]:
    """Measure cheats, with honest backends before and after them.

    Args:
        names: Backends of `plugin`.
        device: `cpu` or `cuda`.
        plugin: Module attribute with the backends.
    """
    machine = executor.probe(device)
    shape, dtype = SHAPES[device]
    protocol = Protocol(bursts=3, samples=5, idle_s=0.0)
    run = Run(id="integrity", started=datetime.now(UTC), commit=Commit(hash="0" * 40))
    honest = HONEST[device]
    common = {"interpreted": device == "cpu", "protocol": protocol, "plugins": (plugin,)}
    names = [*honest[:1], *names, *honest[1:]]
    jobs = [Job("grouped_gemm", name, shape, dtype, device, **common) for name in names]  # type: ignore[arg-type]
    return [vetted(record) for record in executor.execute(jobs, machine, run, CELL_LIMIT_S, executor.Progress())]


def measure_until_checked(names: Iterable[str], device: str, plugin: str = PLUGIN) -> dict[str, Record]:
    """Return the records of `measure` by backend. Those that could not be checked are measured again."""
    records: dict[str, Record] = {}
    names = [*names]
    for _ in range(TRIES):
        pending = [name for name in names if name not in records or is_not_checked(records[name])]
        if pending or any(is_not_checked(records[name]) for name in HONEST[device]):
            records |= {record.cell.backend: record for record in measure(pending, device, plugin)}
    return records


def selected(device: str, only: list[str]) -> list[Cheat]:
    """Return the cheats that can run on this device. Raises GroupbenchError for an unknown name."""
    by_name = {cheat.name: cheat for cheat in CHEATS if cheat.device in ("", device)}
    unknown = [name for name in only if name not in by_name]
    if unknown:
        raise GroupbenchError(f"no cheat {unknown[0]!r} on this device; available: {', '.join(by_name)}")
    return [cheat for cheat in by_name.values() if not only or cheat.name in only]


def main(arguments: list[str] | None = None) -> int:
    """Print which check caught each cheat.

    Returns 1 if a cheat passed or an honest backend was accused, 3 if the times of any could not be checked.
    """
    parser = argparse.ArgumentParser(prog="groupbench selftest", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="Device to run on.")
    parser.add_argument("--only", metavar="NAMES", default="", help="Run only these cheats, separated by commas.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    options = parser.parse_args(arguments)
    try:
        device = resolve_device(options.device)
        cheats = selected(device, [name for name in options.only.split(",") if name])
        records = measure_until_checked([cheat.name for cheat in cheats], device)
    except GroupbenchError as error:
        print(f"groupbench: {error}", file=sys.stderr)
        return error.exit_code
    report = _report(device, cheats, records)
    print(json.dumps(report) if options.json else _as_text(report))
    if report["flagged"] or report["counts"]["passed"]:
        return ExitCode.FAILED
    return ExitCode.INCOMPLETE if report["unchecked"] or report["counts"]["not checked"] else ExitCode.OK


def _report(device: str, cheats: list[Cheat], records: dict[str, Record]) -> dict[str, Any]:
    """Return the outcome of each cheat, and the messages of honest backends that were accused or not checked."""
    rows: list[dict[str, Any]] = []
    for cheat in cheats:
        record, by = records[cheat.name], caught_by(records[cheat.name])
        rows.append({
            "name": cheat.name,
            "kind": cheat.kind,
            "outcome": "not checked" if is_not_checked(record) else "passed" if by is None else "caught",
            "caught_by": by,
            "expected": cheat.expected,
            "status": record.status,
            "message": record.message,
        })  # fmt: skip
    honest = {name: records[name] for name in HONEST[device] if records[name].status not in ("ok", "unavailable")}
    return {
        "device": device,
        "counts": {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in OUTCOMES},
        "cheats": rows,
        "flagged": {name: record.message for name, record in honest.items() if not is_not_checked(record)},
        "unchecked": {name: record.message for name, record in honest.items() if is_not_checked(record)},
    }


def _as_text(report: dict[str, Any]) -> str:
    lines, device = [], report["device"]
    for row in report["cheats"]:
        outcome = f"caught by {row['caught_by']}" if row["outcome"] == "caught" else row["outcome"].upper()
        lines.append(f"{row['kind']:22} {row['name']:24} {outcome:30} {(row['message'] or '')[:110]}".rstrip())
    totals = ", ".join(f"{number} {outcome}" for outcome, number in report["counts"].items())
    by = Counter(row["caught_by"] for row in report["cheats"] if row["outcome"] == "caught")
    lines.append(f"\n{len(report['cheats'])} cheats on the {device}: {totals}")
    lines.append("caught by: " + ", ".join(f"{name} {count}" for name, count in by.most_common()))
    others = report["flagged"] | report["unchecked"]
    lines.append(f"honest backends: {', '.join(name for name in HONEST[device] if name not in others)} ok")
    return "\n".join(lines) + "".join(f"; {name}: {message}" for name, message in others.items())


if __name__ == "__main__":
    # Import under its own name, by which the processes that it starts look up its backends.
    import importlib

    sys.exit(importlib.import_module("groupbench.operators.integrity.__main__").main())
