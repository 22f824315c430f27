"""Read the tables of TritonBench's `--output` and `--csv`.

Cells are separated by `;`. A row is an input, a column a backend and metric.

    x_val;aten_grouped_mm-latency;aten_grouped_mm-tflops;triton_grouped_gemm-latency;triton_grouped_gemm-speedup;…
    1024;0.073856;116.307;CUDA OOM;;…

The first column is the operator's x value. If an x value repeats, because the inputs differ in a size that x does not
name, the rows are numbered: `x_val=1024`, `x_val=1024#2`. The file does not contain the operator: it comes from the
file's name, which TritonBench writes as `op_NAME_….csv` or `NAME.csv`, or from the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from groupbench.tracker.formats.common import Options, Read, read_runs
from groupbench.tracker.formats.tritonbench_json import MODES, TableReader, TableRow, shape_of
from groupbench.tracker.formats.values import FormatError, csv_table, read_bytes

TITLE = "TritonBench CSV"

_METRICS = ("latency", "speedup", "accuracy", "tflops", "gbps", "walltime", "compile_time")


def recognise(head: bytes, path: Path) -> bool:
    first = head.split(b"\n", 1)[0]
    if b";" not in first or first.lstrip().startswith((b"{", b"[")):
        return False
    return any(re.search(rb";[^;]+-" + metric.encode() + rb"\s*(;|$)", first) for metric in _METRICS)


def read(path: Path, options: Options) -> Iterator[Read]:
    data = read_bytes(path)
    header, table = csv_table(data, ";")
    columns = [_column(name) for name in header]
    twice = [place for place, column in enumerate(columns) if column[0] and columns.count(column) > 1]
    if twice:
        raise FormatError(f"line 1: {len(twice)} columns are named {header[twice[0]].strip()!r}")
    if not any(metric == "latency" for _, metric in columns[1:]):
        raise FormatError("line 1: no column is named BACKEND-latency")
    return read_runs([TableReader(data, options, {_benchmark(path, options): _rows(columns, table)})])


def _rows(columns: list[tuple[str | None, str]], table: list[tuple[int, list[str]]]) -> list[TableRow]:
    """Return a row for each input and backend."""
    rows: list[TableRow] = []
    seen: dict[str, int] = {}
    for number, cells in table:
        if len(cells) > len(columns):
            raise FormatError(f"line {number}: {len(cells)} cells for {len(columns)} columns")
        x_val = cells[0]
        if x_val in ("average", "hashes"):
            continue
        seen[x_val] = seen.get(x_val, 0) + 1
        if seen[x_val] > 1:
            x_val = f"{shape_of(x_val)}#{seen[x_val]}"
        backends: dict[str, TableRow] = {}
        for (backend, metric), value in zip(columns[1:], [*cells[1:], *[""] * len(columns)], strict=False):
            if backend is not None:
                backends.setdefault(backend, TableRow(x_val, backend)).metrics[metric] = value
        rows += backends.values()
    return rows


def _column(header: str) -> tuple[str | None, str]:
    """Return (backend, metric); the backend is None for a metric of the input."""
    backend, dash, metric = header.strip().partition("-")
    return (backend, metric) if dash and backend else (None, header)


def _benchmark(path: Path, options: Options) -> str:
    """Return the benchmark's name as TritonBench writes it, `grouped_gemm_fwd`."""
    stem = path.name.removesuffix(".csv")
    written = re.fullmatch(r"op_(.+)_[a-z0-9_]{8}", stem)
    name = written[1] if written else stem
    if options.operator:
        name = f"{options.operator}_{next((mode for mode in MODES if name.endswith(f'_{mode}')), 'fwd')}"
    elif not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
        raise FormatError("the file's name does not name the operator; give --operator NAME")
    return name
