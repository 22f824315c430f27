"""Run one cheat of each kind, and honest backends: `python -m groupbench.operators.integrity`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime

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
    parser = argparse.ArgumentParser(prog="groupbench selftest --integrity", description=__doc__)
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
    outcomes = {cheat.name: _outcome(records[cheat.name]) for cheat in cheats}
    honest = {name: records[name] for name in HONEST[device]}
    unchecked = [name for name, record in honest.items() if is_not_checked(record)]
    flagged = [
        name for name, record in honest.items() if name not in unchecked and record.status not in ("ok", "unavailable")
    ]
    if options.json:
        print(json.dumps(_as_json(device, cheats, records, outcomes, flagged, unchecked)))
    else:
        _print(device, cheats, records, outcomes, flagged, unchecked)
    if flagged or "passed" in outcomes.values():
        return ExitCode.FAILED
    return ExitCode.INCOMPLETE if unchecked or "not checked" in outcomes.values() else ExitCode.OK


def _outcome(record: Record) -> str:
    return "not checked" if is_not_checked(record) else "passed" if caught_by(record) is None else "caught"


def _print(
    device: str,
    cheats: list[Cheat],
    records: dict[str, Record],
    outcomes: dict[str, str],
    flagged: list[str],
    unchecked: list[str],
) -> None:
    for cheat in cheats:
        record, outcome = records[cheat.name], outcomes[cheat.name]
        outcome = f"caught by {caught_by(record)}" if outcome == "caught" else outcome.upper()
        print(f"{cheat.kind:22} {cheat.name:24} {outcome:30} {(record.message or '')[:110]}".rstrip())
    counts = Counter(outcomes.values())
    totals = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    by = Counter(caught_by(records[name]) for name, outcome in outcomes.items() if outcome == "caught")
    print(f"\n{len(cheats)} cheats on the {device}: {totals}")
    print("caught by: " + ", ".join(f"{name} {count}" for name, count in by.most_common()))
    honest = [name for name in HONEST[device] if name not in (*flagged, *unchecked)]
    others = "".join(f"; {name}: {records[name].message}" for name in (*flagged, *unchecked))
    print(f"honest backends: {', '.join(honest)} ok{others}")


def _as_json(
    device: str,
    cheats: list[Cheat],
    records: dict[str, Record],
    outcomes: dict[str, str],
    flagged: list[str],
    unchecked: list[str],
) -> dict[str, object]:
    rows = [
        {
            "name": cheat.name,
            "kind": cheat.kind,
            "outcome": outcomes[cheat.name],
            "caught_by": caught_by(records[cheat.name]),
            "expected": cheat.expected,
            "status": records[cheat.name].status,
            "message": records[cheat.name].message,
        }
        for cheat in cheats
    ]
    return {
        "device": device,
        "counts": {outcome: [*outcomes.values()].count(outcome) for outcome in OUTCOMES},
        "cheats": rows,
        "flagged": {name: records[name].message for name in flagged},
        "unchecked": {name: records[name].message for name in unchecked},
    }


if __name__ == "__main__":
    # Import under its own name, by which the processes that it starts look up its backends.
    import importlib

    sys.exit(importlib.import_module("groupbench.operators.integrity.__main__").main())
