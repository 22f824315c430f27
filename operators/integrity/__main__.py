"""Run one cheat of each kind, and honest backends: `python -m groupbench.operators.integrity`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from datetime import UTC, datetime

from groupbench.operators import executor
from groupbench.operators.errors import GroupbenchError
from groupbench.operators.integrity.cheat import Cheat, backends, caught_by
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
HONEST = {"cpu": ("torch_loop", "torch_grouped_mm"), "cuda": ("torch_loop", "torch_grouped_mm", "triton_flat")}
TIMEOUT_S = 60.0


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
    return [vetted(record) for record in executor.execute(jobs, machine, run, TIMEOUT_S, executor.Progress())]


def selected(device: str, only: list[str]) -> list[Cheat]:
    """Return the cheats that can run on this device. Raises GroupbenchError for an unknown name."""
    by_name = {cheat.name: cheat for cheat in CHEATS if cheat.device in ("", device)}
    unknown = [name for name in only if name not in by_name]
    if unknown:
        raise GroupbenchError(f"no cheat {unknown[0]!r} on this device; available: {', '.join(by_name)}")
    return [cheat for cheat in by_name.values() if not only or cheat.name in only]


def main(arguments: list[str] | None = None) -> int:
    """Print which check caught each cheat. Return 1 if a cheat passed or an honest backend was not ok."""
    parser = argparse.ArgumentParser(prog="groupbench selftest --integrity", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="Device to run on.")
    parser.add_argument("--only", metavar="NAMES", default="", help="Run only these cheats, separated by commas.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    options = parser.parse_args(arguments)
    try:
        device = resolve_device(options.device)
        cheats = selected(device, [name for name in options.only.split(",") if name])
        records = {record.cell.backend: record for record in measure([cheat.name for cheat in cheats], device)}
    except GroupbenchError as error:
        print(f"groupbench: {error}", file=sys.stderr)
        return error.exit_code
    passed = [cheat for cheat in cheats if caught_by(records[cheat.name]) is None]
    flagged = [name for name in HONEST[device] if records[name].status not in ("ok", "unavailable")]
    if options.json:
        print(json.dumps(_as_json(device, cheats, records, flagged)))
    else:
        _print(device, cheats, records, flagged)
    return ExitCode.FAILED if passed or flagged else ExitCode.OK


def _print(device: str, cheats: list[Cheat], records: dict[str, Record], flagged: list[str]) -> None:
    for cheat in cheats:
        record = records[cheat.name]
        catcher = caught_by(record)
        outcome = "PASSED" if catcher is None else f"caught by {catcher}"
        print(f"{cheat.kind:22} {cheat.name:24} {outcome:30} {(record.message or '')[:110]}".rstrip())
    counts = Counter(caught_by(records[cheat.name]) for cheat in cheats)
    caught = len(cheats) - counts[None]
    by = ", ".join(f"{count} by {name}" for name, count in counts.most_common() if name)
    print(f"\n{caught} of {len(cheats)} cheats caught on the {device}: {by}")
    honest = [name for name in HONEST[device] if name not in flagged]
    print(f"honest backends: {', '.join(honest)} ok" + "".join(f"; {n}: {records[n].message}" for n in flagged))


def _as_json(device: str, cheats: list[Cheat], records: dict[str, Record], flagged: list[str]) -> dict[str, object]:
    rows = [
        {
            "name": cheat.name,
            "kind": cheat.kind,
            "caught_by": caught_by(records[cheat.name]),
            "expected": cheat.expected,
            "status": records[cheat.name].status,
            "message": records[cheat.name].message,
        }
        for cheat in cheats
    ]
    return {"device": device, "cheats": rows, "flagged": {name: records[name].message for name in flagged}}


if __name__ == "__main__":
    # Import under its own name, by which the processes that it starts look up its backends.
    import importlib

    sys.exit(importlib.import_module("groupbench.operators.integrity.__main__").main())
