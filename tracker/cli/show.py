"""`groupbench show`: show everything stored about a point or a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from groupbench.tracker.cli.declared import argument, command
from groupbench.tracker.cli.options import reading
from groupbench.tracker.cli.output import (
    APART,
    CELL,
    Column,
    Format,
    marked,
    marked_latency,
    output_formats,
    plain,
    write_json,
    write_table,
)
from groupbench.tracker.facts.environment import declared
from groupbench.tracker.facts.identity import SHOWN
from groupbench.tracker.facts.record import STATUSES
from groupbench.tracker.query.rows import PointDetail, PointRow, RunRow
from groupbench.tracker.text import repro
from groupbench.tracker.text.wording import (
    commit_text,
    fact_text,
    milliseconds,
    printable,
    short_number,
    signed_percent,
    spread,
)

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


_CELLS = (
    Column("id", "id"),
    *CELL,
    *APART,
    Column("ms", "latency_ms", marked_latency, right=True),
    Column("spread", "spread", spread, right=True),
    Column("tflops", "tflops", short_number, right=True),
    Column("rms", "rms", short_number, right=True),
    Column("status", "status"),
    Column("message", "message", wraps=True),
)
_FACTS = (Column("fact", "fact"), Column("value", "value", wraps=True))


@command()
def show(db: str, what: str = argument(metavar="ID"), form: Format = output_formats) -> None:
    """Show everything stored about a point or a run, such as its loaded files and those that differ from before.

    ID is a point's id as `history --ids` prints it (12.3), the start of a run's id (3f2a or run:3f2a), or `latest`.
    """
    from groupbench.tracker.query.points import find_point
    from groupbench.tracker.query.resolve import find_run

    with reading(db) as session:
        if "." in what:
            _point(find_point(session, what), form)
        else:
            _run(session, find_run(session, "latest" if what == "run:" else what.removeprefix("run:")), form)


def _run(session: Session, run: RunRow, form: Format) -> None:
    from groupbench.tracker.query.points import points_of_run

    points = points_of_run(session, run)
    environments = {point.environment.identity: point.environment for point in points}
    rows = [point.flat() for point in points]
    if form == "json":
        described = [{"environment": i, **msgspec.to_builtins(row.facts)} for i, row in environments.items()]
        write_json({"run": _run_facts(run), "environments": described, "points": rows})
    elif form == "csv":
        write_table(plain(PointRow.columns()), rows, form)
    else:
        facts = _run_facts(run) | _counts(points)
        for row in environments.values():
            fields = {name: value for name, value in declared(row.facts).items() if value is not None}
            facts[f"environment {row.identity[:10]}"] = ", ".join(f"{name} {value}" for name, value in fields.items())
        _write_facts(facts, form)
        click.echo()
        write_table(_CELLS, [marked(row) for row in rows], form)


def _run_facts(run: RunRow) -> dict[str, Any]:
    return {"id" if name == "run" else name: value for name, value in run.flat().items()}


def _counts(points: list[PointRow]) -> dict[str, Any]:
    counts = {status: sum(point.status == status for point in points) for status in STATUSES}
    return {"cells": ", ".join(f"{number} {status}" for status, number in counts.items() if number)}


def _point(detail: PointDetail, form: Format) -> None:
    point = detail.point
    facts = {key: value for key, value in _point_facts(detail).items() if value not in (None, [], {})}
    if form == "json":
        parts = {name: getattr(detail, name) for name in ("bursts_ms", "telemetry", "kernels", "loaded")}
        write_json(facts | {"environment_facts": point.environment.facts, **parts})
        return
    if form == "csv":
        samples = {f"burst {i} ms": list(burst) for i, burst in enumerate(detail.bursts_ms, 1)}
        write_table(_FACTS, [{"fact": key, "value": value} for key, value in (facts | samples).items()], form)
        return
    _write_facts(facts, form)
    for title, columns, rows in _tables(detail):
        click.echo(f"\n{title}")
        write_table(columns, rows, form)


def _point_facts(detail: PointDetail) -> dict[str, Any]:
    point, series = detail.point, detail.point.series
    flat = point.flat()
    measured = [
        key for key in flat if key not in (*SHOWN, "id", "started", "commit", "run", "dirty", "branch", "subject")
    ]
    return {
        "id": point.id,
        **{name: flat[name] for name in SHOWN},
        "dims": series.dims,
        "flops": series.flops,
        "min_bytes": series.min_bytes,
        "run": point.run.id,
        "started": point.run.started,
        "trigger": point.run.trigger,
        "plan": point.run.plan,
        "command": detail.command,
        "repro": repro.measure(series, None if point.run.dirty else point.run.commit, point.environment.facts),
        "commit": point.run.commit_text,
        "parents": list(detail.parents),
        "branch": point.run.branch,
        "author": detail.author,
        "committed": detail.committed,
        "subject": point.run.subject,
        **{key: flat[key] for key in ("status", "message", *measured)},
        "loaded_changed": list(detail.since_before.texts) if detail.since_before else None,
        "first_bad": list(detail.first_bad) if detail.first_bad else None,
        "duration_s": point.duration_s,
    }


def _shown(key: str, value: Any) -> str:
    if key == "spread":
        return spread(value)
    if key == "loaded_changed":
        return "; ".join(value)
    if key == "parents":
        return " ".join(map(commit_text, value))
    return fact_text(value)


def _tables(detail: PointDetail) -> Iterator[tuple[str, tuple[Column, ...], list[dict[str, Any]]]]:
    """Yield (title, columns, rows) of a point's environment, kernels, loaded files, packages and bursts."""
    facts = {name: value for name, value in msgspec.to_builtins(detail.point.environment.facts).items() if value}
    settings = facts.pop("settings", {})
    facts |= {f"setting {name}": value for name, value in settings.items()}
    yield "environment", _FACTS, [{"fact": name, "value": value} for name, value in facts.items()]
    if detail.kernels:
        columns = (
            *("name", "launches", "registers", "spills", "shared_bytes", "occupancy", "counts", "counted_in"),
            *("hash", "config"),
        )
        rows = [{name: getattr(kernel, name) for name in columns} for kernel in detail.kernels]
        for row in rows:
            row["config"] = ", ".join(f"{key}={value}" for key, value in row["config"].items())
            row["counts"] = ", ".join(f"{number} {kind}" for kind, number in row["counts"].items())
        yield "kernels", tuple(Column(name, name, wraps=name in ("name", "counts", "config")) for name in columns), rows
    if detail.loaded is not None and detail.loaded.files:
        rows = [{"file": path, "hash": value} for path, value in detail.loaded.files.items()]
        yield f"loaded files ({len(rows)})", (Column("file", "file", wraps=True), Column("hash", "hash")), rows
    if detail.loaded is not None and detail.loaded.versions:
        rows = [{"package": name, "version": version} for name, version in detail.loaded.versions.items()]
        yield "packages", (Column("package", "package"), Column("version", "version")), rows
    if detail.bursts_ms:
        yield "bursts", _burst_columns(detail), _burst_rows(detail)


def _burst_columns(detail: PointDetail) -> tuple[Column, ...]:
    columns = (
        *plain(("burst", "samples"), right=True),
        Column("median ms", "median_ms", milliseconds, right=True),
        Column("from the median", "change", signed_percent, right=True),
    )
    if not detail.telemetry:
        return columns
    return (
        *columns,
        Column("MHz", "sm_clock_mhz", right=True),
        Column("°C", "temperature_c", right=True),
        Column("W", "power_w", right=True),
        Column("throttled by", "throttle", ", ".join, wraps=True),
    )


def _burst_rows(detail: PointDetail) -> list[dict[str, Any]]:
    rows = []
    for i, burst in enumerate(detail.bursts_ms):
        median = statistics.median(burst)
        overall = detail.point.median_ms
        row: dict[str, Any] = {"burst": i + 1, "samples": len(burst), "median_ms": median}
        row["change"] = median / overall - 1 if overall else None
        if detail.telemetry:
            sample = detail.telemetry[i]
            row |= {name: getattr(sample, name) for name in ("sm_clock_mhz", "temperature_c", "power_w", "throttle")}
        rows.append(row)
    return rows


def _write_facts(facts: dict[str, Any], form: Format) -> None:
    texts = {name: _shown(name, value) for name, value in facts.items() if value is not None}
    if form == "md":
        write_table(_FACTS, [{"fact": name, "value": value} for name, value in texts.items()], form)
        return
    width = max(map(len, texts))
    for name, value in texts.items():
        click.echo(f"{printable(name):<{width}}  {printable(value)}")
