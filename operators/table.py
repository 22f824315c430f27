"""Show records as a table on the screen, and write them as TritonBench's CSV and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from typing import IO, TYPE_CHECKING, Any

from groupbench.tracker.facts.bursts import Bursts
from groupbench.tracker.facts.identity import OF_PROBLEM
from groupbench.tracker.facts.metrics import GBPS, TFLOPS, Metric, carried, rate
from groupbench.tracker.facts.metrics import METRICS as STORED
from groupbench.tracker.facts.record import Latency, Record
from groupbench.tracker.text.cells import cell_for
from groupbench.tracker.text.terminal import shortened
from groupbench.tracker.text.wording import printable
from groupbench.tracker.tools.plots import Row, ValueTable

if TYPE_CHECKING:
    from rich.table import Table

Value = float | bool | str | None

UNUSABLE_SPREAD = 0.5
"""Above this spread of its bursts, the latency of a cell is unusable."""


def median_ms(latency: Latency) -> float:
    """Return the median over bursts of each burst's median, in ms."""
    return Bursts.of(latency.bursts_ms).median


def spread(latency: Latency) -> float:
    """Return half the burst medians' range, relative to the median."""
    return Bursts.of(latency.bursts_ms).half_spread


def is_restless(record: Record) -> bool:
    """Return whether the bursts vary so much that another process must have used the machine."""
    return record.latency is not None and not _interpreted(record) and spread(record.latency) > UNUSABLE_SPREAD


def _speed(record: Record) -> float | None:
    """Return the latency in ms; None if the result is wrong or missing, or the kernel was interpreted."""
    latency = record.latency
    if record.status != "ok" or latency is None or _interpreted(record):
        return None
    return median_ms(latency)


def _accuracy(name: str) -> Callable[[Record, Record | None], Value]:
    return lambda record, baseline: None if record.accuracy is None else getattr(record.accuracy, name)


def _latency(name: str) -> Callable[[Record, Record | None], Value]:
    return lambda record, baseline: None if record.latency is None else getattr(record.latency, name)


def _interpreted(record: Record) -> bool:
    """Return whether the time comes from Triton's interpreter, which is never shown as the kernel's."""
    return record.latency is not None and record.latency.timing == "interpreted"


def _best_config(record: Record, baseline: Record | None) -> str | None:
    configs = [(kernel.name, kernel.config) for kernel in record.kernels if kernel.config]
    texts = [(name, ", ".join(f"{key}={value}" for key, value in config.items())) for name, config in configs]
    return "; ".join(text if len(texts) == 1 else f"{name}: {text}" for name, text in texts) or None


def _gpu_peak_mem(record: Record, baseline: Record | None) -> float | None:
    workspace, kept = (record.metrics.get(name) for name in ("workspace_mib", "kept_mib"))
    if workspace is None or record.cell.min_bytes is None:
        return None
    return (record.cell.min_bytes + (workspace + (kept or 0.0)) * 2**20) / 1e9


def _speedup(record: Record, baseline: Record | None) -> float | None:
    ms, baseline_ms = _speed(record), _speed(baseline) if baseline else None
    return baseline_ms / ms if ms and baseline_ms else None


_OWN = {
    "speedup": "the baseline's latency divided by this one's",
    "accuracy": "1 if the result is within the tolerances, else 0",
    "best_config": "options and block sizes of the Triton kernels, as TritonBench calls them",
    "compile_time": "ms, TritonBench's name for compile_ms",
    "gpu_peak_mem": "GB, TritonBench's name for device memory of inputs, output, preparation and a call",
}
"""Meanings of the metrics that are not in `tracker/facts/metrics.py`."""

OF_TABLES = ("best_config", "compile_time", "gpu_peak_mem")
"""TritonBench's metrics, which only a table has. The database has all others."""

_VALUES: dict[str, Callable[[Record, Record | None], Value]] = {
    "latency": lambda r, b: None if r.latency is None or _interpreted(r) else median_ms(r.latency),
    "speedup": _speedup,
    "tflops": lambda r, b: rate(r.cell.flops, _speed(r), TFLOPS),
    "gbps": lambda r, b: rate(r.cell.min_bytes, _speed(r), GBPS),
    "accuracy": lambda r, b: None if r.accuracy is None else r.status != "wrong",
    **{name: _accuracy(name) for name in ("rms", "max_abs", "worst_block_rms", "mismatch", "unwritten", "repeatable")},
    **{name: _latency(name) for name in ("prepare_ms", "enqueue_ms")},
    "best_config": _best_config,
    "compile_time": lambda r, b: r.metrics.get("compile_ms"),
    "gpu_peak_mem": _gpu_peak_mem,
}


def _meaning(metric: Metric) -> str:
    return f"{metric.unit}, {metric.meaning}" if metric.unit else metric.meaning


# name -> (meaning, function of a record and the baseline's record)
METRICS = {name: (_OWN.get(name) or _meaning(STORED[name]), value) for name, value in _VALUES.items()}
DEFAULT_METRICS = ("latency", "speedup", "tflops", "rms")


_COST_OF_OWN = {"compile_time": "cold", "gpu_peak_mem": "memory"}


LIMITS = {"dynamic_routing": "fixed", "fresh_output": "reuses output", "special_values": "fragile"}
"""What a backend does not do that a caller may rely on, by metric: its speed-up is over backends that do more."""


def costs_of(metrics: Iterable[str]) -> set[str]:
    """Return the costs to measure for these metrics."""
    return {_COST_OF_OWN.get(name) or (STORED[name].cost if name in STORED else "") for name in metrics} - {""}


def metrics_of_tables() -> dict[str, tuple[str, Callable[[Record, Record | None], Value]]]:
    """Return METRICS, and those carried by name in records."""
    return METRICS | {metric.name: (_meaning(metric), _carried(metric.name)) for metric in carried()}


def _carried(name: str) -> Callable[[Record, Record | None], Value]:
    return lambda record, baseline: record.metrics.get(name)


_SHAPE = OF_PROBLEM.index("shape")
_LONGEST_SHAPE = 100
"""Longest shape, in characters, whose middle is not left out on a screen: 256 groups of sizes take 2,700."""


def baselines(records: Iterable[Record], name: str | None = None) -> dict[tuple[str, ...], Record]:
    """Return each problem's baseline record: the operator's default baseline, or the backend called `name`."""
    return {_problem(r): r for r in records if (r.cell.backend == name if name else r.baseline)}


def _problem(record: Record) -> tuple[str, ...]:
    cell = record.cell
    return tuple(str(getattr(cell, name)) for name in OF_PROBLEM)


def screen_table(records: list[Record], metrics: tuple[str, ...], baseline: str | None) -> Table:
    """Return a table with a row per cell, grouped by problem, without skipped cells."""
    from rich.markup import escape
    from rich.table import Table

    metrics = _known(records, metrics)
    table = Table(box=None, pad_edge=False, header_style="bold")
    several = len({(r.cell.operator, r.cell.dtype, r.cell.mode) for r in records}) > 1
    if several:
        table.add_column("operator")
    table.add_column("shape", overflow="fold")
    table.add_column("backend", no_wrap=True)
    for name in metrics:
        title = {"latency": "latency ms", "rms": "rms error"}.get(name, name)
        is_text = name == "best_config"
        table.add_column(title, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    table.add_column("status", overflow="fold")
    base = baselines(records, baseline)
    previous: tuple[str, ...] | None = None
    for record in records:
        if record.status == "skipped":
            continue
        problem = _problem(record)
        fresh = problem != previous
        if fresh and previous is not None:
            table.add_section()
        previous = problem
        cell = record.cell
        row = [escape(printable(f"{cell.operator} {cell.mode} {cell.dtype}")) if fresh else ""] if several else []
        row += [
            escape(shortened(printable(cell.shape), _LONGEST_SHAPE)) if fresh else "",
            escape(printable(cell.backend)),
        ]
        row += [_shown(name, record, base.get(problem)) for name in metrics]
        table.add_row(*row, _status_text(record))
    return table


def _known(records: list[Record], metrics: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns: by default GB/s instead of TFLOP/s if no operator defines the work, or neither."""
    if metrics != DEFAULT_METRICS or any(record.cell.flops for record in records):
        return metrics
    instead = ["gbps"] if any(record.cell.min_bytes for record in records) else []
    at = metrics.index("tflops")
    return (*metrics[:at], *instead, *metrics[at + 1 :])


def _shown(name: str, record: Record, baseline: Record | None) -> str:
    if name == "latency" and _interpreted(record):
        return "[dim]interpreted[/dim]"
    from rich.markup import escape

    value = metrics_of_tables()[name][1](record, baseline)
    if value is None:
        return ""
    if name == "latency":
        assert record.latency is not None
        if len(record.latency.bursts_ms) == 1:
            return f"{value:.4f}"
        return f"{value:.4f} [dim]±{100 * spread(record.latency):4.1f}%[/dim]"
    if isinstance(value, bool):
        return "yes" if value else "[red]no[/red]"
    if name == "speedup" and (limits := [text for metric, text in LIMITS.items() if record.metrics.get(metric) == 0]):
        return f"{value:.2f} [dim]{', '.join(limits)}[/dim]"
    if isinstance(value, float):
        speedup = f"{value:.2f}" if value >= 0.095 else f"{value:.2g}"
        return {"speedup": speedup, "tflops": f"{value:.3g}", "rms": f"{value:.1e}"}.get(name, f"{value:.4g}")
    return escape(printable(str(value)))


def _status_text(record: Record) -> str:
    from rich.markup import escape

    if record.status == "ok":
        repeats = record.accuracy is None or record.accuracy.repeatable is not False
        return "[green]ok[/green]" if repeats else "[green]ok[/green], but two runs differ"
    style = "dim" if record.status == "unavailable" else "bold red"
    return f"[{style}]{record.status}[/{style}] {escape(printable(record.message or ''))}"


def panels(records: list[Record], metric: str, baseline: str | None) -> list[ValueTable]:
    """Return a metric for all backends, with a panel per operator, mode and dtype.

    A cell without a number has a note with the reason. An interpreted latency is not a number.
    """
    base = baselines(records, baseline)
    of: dict[str, dict[str, dict[str, Record]]] = {}
    for record in records:
        cell = record.cell
        problems = of.setdefault(f"{cell.operator} {cell.mode} {cell.dtype}", {})
        problems.setdefault(cell.shape, {})[cell.backend] = record
    tables = []
    for title, problems in of.items():
        rows = []
        for shape, cells in problems.items():
            values = {name: _drawn(metric, record, base.get(_problem(record))) for name, record in cells.items()}
            notes = {name: _why_not(cells[name]) for name, value in values.items() if value is None}
            rows.append(Row(shape, values, notes))
        names = tuple(dict.fromkeys(name for cells in problems.values() for name in cells))
        tables.append(ValueTable(title, _UNITS.get(metric, metric), names, tuple(rows)))
    return tables


_UNITS = {"latency": "latency, ms", "tflops": "TFLOP/s", "gbps": "GB/s", "prepare_ms": "preparation, ms"}


def _drawn(metric: str, record: Record, baseline: Record | None) -> float | None:
    value = metrics_of_tables()[metric][1](record, baseline)
    return None if value is None or isinstance(value, str) else float(value)


def _why_not(record: Record) -> str:
    if record.status != "ok":
        return f"{record.status}: {record.message}"
    return "interpreted" if _interpreted(record) else "no value"


def write_csv(records: list[Record], metrics: tuple[str, ...], baseline: str | None, file: IO[str]) -> None:
    """Write TritonBench's CSV: `;`, a row per shape, a column per `backend-metric`, averages last.

    Values not measured are empty.
    """
    headers, rows, _ = _wide(records, metrics, baseline)
    writer = csv.writer(file, delimiter=";", lineterminator="\n")
    writer.writerow([cell_for(file, header) for header in headers])
    writer.writerows([["" if value is None else cell_for(file, _number(value)) for value in row] for row in rows])
    averages: list[Any] = ["average"]
    for column in range(1, len(headers)):
        numbers = [row[column] for row in rows if isinstance(row[column], (int, float))]
        averages.append(sum(numbers) / len(numbers) if numbers else "")
    writer.writerow(averages)


def write_json(records: list[Record], metrics: tuple[str, ...], baseline: str | None, file: IO[str]) -> None:
    """Write TritonBench's JSON: one flat object with keys `tritonbench_{op}_{mode}[x_{shape}-{backend}]_{metric}`."""
    headers, rows, problems = _wide(records, metrics, baseline)
    values = {}
    for row, (operator, mode, *_) in zip(rows, problems, strict=True):
        name = f"{operator}_{mode}"
        for header, value in zip(headers[1:], row[1:], strict=True):
            backend, metric = header.rsplit("-", 1)
            values[f"tritonbench_{name}[x_{row[0]}-{backend}]_{metric}"] = _number(value)
    json.dump(values, file, indent=4)
    file.write("\n")


def _wide(
    records: list[Record], metrics: tuple[str, ...], baseline: str | None
) -> tuple[list[str], list[list[Any]], list[tuple[str, ...]]]:
    """Return headers, rows, and each row's problem. A row's name is the shape and other differing fields."""
    base = baselines(records, baseline)
    backends = list(dict.fromkeys(record.cell.backend for record in records))
    cells: dict[tuple[str, ...], dict[str, Record]] = {}
    for record in records:
        cells.setdefault(_problem(record), {})[record.cell.backend] = record
    varies = [len(set(values)) > 1 for values in zip(*cells, strict=True)]
    metric_values = metrics_of_tables()
    headers = ["x_val", *(f"{backend}-{metric}" for backend in backends for metric in metrics)]
    rows: list[list[Any]] = []
    for problem, of in cells.items():
        shape = problem[_SHAPE]
        others = [text for i, text in enumerate(problem) if varies[i] and i != _SHAPE]
        row: list[Any] = [",".join([shape, *others])]
        for backend in backends:
            cell = of.get(backend)
            row += [metric_values[m][1](cell, base.get(_problem(cell))) if cell else None for m in metrics]
        rows.append(row)
    return headers, rows, list(cells)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, bool) else value
