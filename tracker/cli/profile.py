"""`groupbench profile`: profile a call on the GPU, and store the counters."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import click

from groupbench.tracker.cli.declared import command, option, options
from groupbench.tracker.cli.here import hold_device, this_project, wait_option
from groupbench.tracker.cli.ingest import store
from groupbench.tracker.cli.options import mode_option, plugins_option
from groupbench.tracker.cli.output import Column, Format, output_formats, write_table
from groupbench.tracker.facts.bursts import Bursts
from groupbench.tracker.facts.measured_tree import with_folders
from groupbench.tracker.facts.metrics import LATENCY, METRICS, NCU, Metric
from groupbench.tracker.facts.record import Record, read
from groupbench.tracker.facts.vocabulary import BACKEND, DTYPE, DTYPE_DEFAULT, OPERATOR, SEED_HELP, SHAPE
from groupbench.tracker.night.measuring import measure
from groupbench.tracker.text.scratch import Scratch
from groupbench.tracker.text.wording import counted, printable
from groupbench.tracker.tools import signals
from groupbench.tracker.tools.parameters import Duration, Number

STDERR = 2
"""The descriptor for the output of `tritonbench`, since standard output has the counters."""


@dataclass(frozen=True)
class ProfileOptions:
    """The cells to profile."""

    operator: str = option(*OPERATOR, required=True, help="Profile this operator.")
    backends: tuple[str, ...] = option(*BACKEND, multiple=True, help="Profile only this backend; may be repeated.")
    shapes: tuple[str, ...] = option(
        *SHAPE,
        multiple=True,
        metavar="TEXT",
        help="Profile this shape; may be repeated. Default: the operator's first shape.",
    )
    dtype: str | None = option(*DTYPE, help=f"Profile this dtype. {DTYPE_DEFAULT}")
    mode: str = mode_option
    seed: int = option("--seed", type=Number(0, 2**63 - 1), default=0, help=SEED_HELP)
    plugins: tuple[str, ...] = plugins_option
    timeout: float = option(
        "--timeout",
        type=Duration(least=0.1, most=1e6),
        default="300s",
        help="Give up on a cell or its profile after this time.",
    )


@command()
@wait_option()
def profile(
    context: click.Context, what: ProfileOptions = options(ProfileOptions), form: Format = output_formats
) -> None:
    """Profile one call on the GPU: count memory traffic, cache hits, tensor-core use and occupancy.

    First measures the cell as `tritonbench` does. Then runs one more call under ncu (Nsight Compute), in a separate
    process. It slows the call down, so the time is stored as ncu_ms, not as the latency. The counters are stored with
    the cell and are not judged.

    \b
    groupbench profile --operator grouped_gemm --backend triton_flat --shape G=4,M_g=1024,N=1024,K=1024
    groupbench explain previous latest        # compare the counters of two commits
    groupbench explain latest --backend triton_flat --against torch_grouped_mm

    \b
    Exit codes:
    0    ok
    1    a result is wrong
    2    usage error, or ncu is not installed
    3    ncu gave no counters; the reason is printed
    75   another run uses this device
    130  interrupted
    """
    hold_device(context, "auto")
    project = this_project(context)
    environment = with_folders(project.python_path(), os.environ)
    arguments = _arguments(what, project.placed_plugins(what.plugins))
    with Scratch("records") as folder:
        file = folder / "profile.jsonl"
        with signals.keeping(lambda: "each finished cell is stored"):
            try:
                code = measure([*arguments, "--records", str(file)], Path(), environment, stdout=STDERR)
            finally:
                if file.exists():
                    _store(context.obj, file, form)
    context.exit(code)


def _store(database: str, file: Path, form: Format) -> None:
    """Store the records in a file, unless every cell was skipped, and print a row for each."""
    with file.open("rb") as lines:
        records = [record for _, record in read(lines)]
    if all(record.status == "skipped" for record in records):
        return
    done = store(database, str(file))
    click.echo(printable(f"stored: {counted(done.records, 'record')}: {done.summary}"), err=True)
    _write(records, [metric for metric in METRICS.values() if metric.cost == NCU], form)


def _arguments(what: ProfileOptions, plugins: tuple[str, ...]) -> list[str]:
    """Return the arguments of `tritonbench`."""
    costs = f"memory,kernels,{NCU}"
    arguments = ["--host", "builtin", "--op", what.operator, "--costs", costs, "--trigger", "profile"]
    arguments += ["--mode", what.mode, "--seed", str(what.seed), "--timeout", f"{what.timeout}s"]
    arguments += ["--only", ",".join(what.backends)] if what.backends else []
    arguments += ["--precision", what.dtype] if what.dtype else []
    arguments += [word for plugin in plugins for word in ("--plugin", plugin)]
    return arguments + ([word for shape in what.shapes for word in ("--shapes", shape)] or ["--num-inputs", "1"])


def _write(records: list[Record], counters: list[Metric], form: Format) -> None:
    """Print a row for each cell: latency and counters."""
    known = [metric for metric in counters if any(metric.name in record.metrics for record in records)]
    names = ("backend", "shape", "dtype", "mode", "status")
    columns = [Column(name, name, varies=name in ("dtype", "mode", "status") and form == "table") for name in names]
    columns += [Column(m.title, m.name, _number, right=True) for m in (LATENCY, *known)]
    rows = [
        {name: getattr(record.cell, name, None) for name in names}
        | {"status": record.status, LATENCY.name: _median(record)}
        | {metric.name: record.metrics.get(metric.name) for metric in known}
        for record in records
    ]
    write_table(columns, rows, form)


def _median(record: Record) -> float | None:
    return None if record.latency is None else Bursts.of(record.latency.bursts_ms).median


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
