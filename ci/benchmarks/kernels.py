"""Make the tables of docs/reference/measured from records.

`--only A,B` shows only these operators. `--write PAGE` writes the tables between the markers of a page. `--brief`
prints one table of grouped_gemm by backend. If a cell was measured twice, its last record counts. A latency is the
median over bursts of their medians. Failed cells are listed, and shapes
for which torch is faster count in the mean.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from groupbench.operators.catalog.shapes import SUITES
from groupbench.operators.registry import get_operator
from groupbench.tracker.facts.record import Record, RecordError, read

BEGIN, END = "<!-- marks: begin -->", "<!-- marks: end -->"
TORCH = {  # backends to compare with; for other operators torch_grouped_mm
    "grouped_gemm_fp8": "torch_scaled_grouped_mm",
    "grouped_gemm_fp8_blockwise": "torch_loop",
    "grouped_gemm_bias_add_permute": "torch_unfused",
    "quantize_fp8": "torch",
    "split_k_matmul": "torch_mm",
    "matmul_outer_k": "torch_mm",
    "vector_add": "torch",
    "moe_permute": "torch",
    "moe_unpermute": "torch",
    "moe_layer": "torch",
}
LARGE_FLOPS = 10**12  # 1.3 ms on an H100, so that the time of a launch does not matter
LARGE_SHARE = 0.98


@dataclass(frozen=True)
class CellLatency:
    """One backend on one shape."""

    record: Record
    ms: float

    @property
    def backend(self) -> str:
        return self.record.cell.backend

    @property
    def kind(self) -> str:
        return self.backend.split("_")[0]

    @property
    def right(self) -> bool:
        """Return whether the result is correct; a wrong cell is shown, but its speed never counts."""
        return self.record.status == "ok"

    @property
    def rms(self) -> float | None:
        return self.record.accuracy.rms if self.record.accuracy else None


@dataclass(frozen=True)
class Mark:
    """A target for the speed-up of `ours` over `rival`, over the shapes for which both were measured.

    A side is a backend's name, `best:KIND` for the fastest backend of a kind, or several names joined by | for the
    fastest of them.
    """

    operator: str
    ours: str
    rival: str
    at_least: float  # for the geometric mean
    least: float = 0.0  # for each shape
    suites: tuple[str, ...] = ("moe", "tritonbench")  # suites whose shapes count; others test correctness
    mode: str = "fwd"


@dataclass(frozen=True)
class CopyMark:
    """A target for the bandwidth of our fastest backend on each shape, as a share of a device copy's bandwidth."""

    operator: str
    at_least: float
    suites: tuple[str, ...]
    from_bytes: int = 0  # smaller problems do not count, because their launch takes as long as the kernel


MARKS = (
    Mark("grouped_gemm", "best:triton", "torch_grouped_mm", 1.15, 1.0),
    Mark("grouped_gemm", "best:triton", "torch_grouped_mm|torch_loop", 1.10, 0.98),
    Mark("grouped_gemm", "helion_worklist", "torch_grouped_mm", 1.0),
    Mark("grouped_gemm", "helion_worklist", "helion_persistent", 4.0),
    Mark("grouped_gemm_dgrad", "best:triton", "torch_grouped_mm", 1.05),
    Mark("grouped_gemm_wgrad", "best:triton", "torch_grouped_mm", 1.05),
    Mark("grouped_gemm_fp8", "triton_flat", "torch_scaled_grouped_mm", 1.05),
    Mark("grouped_gemm_fp8", "triton_flat_fast", "torch_scaled_grouped_mm_fast", 1.05),
    Mark("grouped_gemm_fp8_blockwise", "triton_flat", "torch_loop", 1.05, 1.0),
    Mark("grouped_gemm_bias_add_permute", "best:triton", "torch_unfused", 2.0, suites=("example", "random")),
    Mark("split_k_matmul", "best:triton|helion", "torch_mm", 1.2, suites=("skinny",)),
    Mark("moe_layer", "best:triton", "torch", 1.3),
    Mark("moe_layer", "best:triton", "torch", 1.2, mode="fwd_bwd"),
)
COPY_MARKS = (
    CopyMark("grouped_gemm_bias_add_permute", 0.85, ("example", "random"), from_bytes=2**28),
    CopyMark("moe_permute", 0.90, ("moe",)),
    CopyMark("moe_unpermute", 0.90, ("moe",)),
    CopyMark("vector_add", 0.98, ("bandwidth",), from_bytes=2**28),
)
DECODE_ROWS = 16
DECODE_SHARE = 0.95
"""Share of the copy bandwidth that shapes with at most `DECODE_ROWS` rows per group, on average, must reach."""

LONGEST_NAME = 64

Shapes = dict[str, dict[str, CellLatency]]  # shape text -> backend -> cell


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--only", default="", metavar="A,B", help="operators to show [all]")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page to write the tables into, between its markers")
    parser.add_argument("--brief", action="store_true", help="print only a table of grouped_gemm by backend")


def run(options: argparse.Namespace) -> None:
    """Print the tables, or write them into a page."""
    try:
        records, files = load(options.records), [str(path) for path in options.records]
        names = tuple(name for name in options.only.split(",") if name)
        text = brief(records) if options.brief else tables(records, files, names, options.write)
        if options.write is None:
            print(text)
        else:
            options.write.write_text(splice(options.write.read_text(), text))
    except (OSError, RecordError, ValueError) as error:
        sys.exit(f"kernels: {error}")


def load(paths: Iterable[Path]) -> list[Record]:
    """Return the records of the files, in order. Raises RecordError, with the file's name in front, and OSError."""
    records = []
    for path in paths:
        try:
            records += [record for _, record in read(path.read_bytes().splitlines())]
        except RecordError as error:
            raise RecordError(f"{path}: {error}") from error
    return records


def splice(page: str, text: str) -> str:
    """Return the page with `text` between its markers. Raises ValueError if it has no markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def tables(
    records: Sequence[Record], files: Sequence[str], operators: Sequence[str] = (), page: Path | None = None
) -> str:
    """Return the tables of these operators, or of all, as Markdown."""
    of_host = [r for r in records if r.cell.host == "builtin"]
    shown = [r for r in of_host if not operators or r.cell.operator in operators]
    timed, canaries = _timed(shown, of_host)
    command = ["python -m ci.benchmarks kernels", *files]
    command += ["--only", ",".join(operators)] if operators else []
    command += ["--write", str(page)] if page else []
    parts = [f"Made by `{' '.join(command)}`.", "\n".join(_provenance([*timed, *canaries]))]
    groups: dict[tuple[str, str, str, str], list[Record]] = {}
    for r in timed:
        groups.setdefault((r.cell.operator, r.cell.mode, r.cell.dtype, _protocol(r)), []).append(r)
    for (operator, mode, dtype, protocol), group in groups.items():
        shapes = _by_shape(group)
        parts.append(f"### {operator}, {mode}, {dtype}, {protocol}")
        parts.append(_table(operator, shapes, _canaries(canaries)))
        if protocol == "cooled":
            parts.append(_marks(operator, mode, shapes, _canaries(canaries)))
    parts.append(_failures(r for r in shown if r.latency is None))
    return "\n\n".join(part for part in parts if part)


def _timed(shown: Iterable[Record], of_host: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """Return the kernels' records that were timed on a GPU, and the canary's of the same GPUs. Raises ValueError."""
    timed = [r for r in shown if _on_gpu(r) and r.cell.operator != "canary"]
    canaries = [r for r in of_host if _on_gpu(r) and r.cell.operator == "canary"]
    if not timed and not canaries:
        raise ValueError("no record of the built-in host was timed on a GPU")
    cards = {r.environment.gpu_uuid for r in timed}
    return timed, [r for r in canaries if not timed or r.environment.gpu_uuid in cards]


def _on_gpu(record: Record) -> bool:
    return record.latency is not None and record.latency.timing == "gpu"


def _failures(records: Iterable[Record]) -> str:
    """Return the list of the cells that were not measured."""
    together: dict[tuple[str, ...], list[str]] = {}
    for r in records:
        cell = (r.cell.operator, r.cell.mode, _name(r.cell.shape), f"{r.status}, {r.message}")
        together.setdefault(cell, []).append(r.cell.backend)
    lines = [f"- {', '.join(cell)}, {', '.join(backends)}: {why}" for (*cell, why), backends in together.items()]
    return "\n\n".join(["Not measured:", "\n".join(lines)]) if lines else ""


def brief(records: Sequence[Record]) -> str:
    """Return a table of grouped_gemm's milliseconds by shape and backend, and of triton_flat's speed-up over torch."""
    shapes = _by_shape(r for r in records if r.latency is not None and r.cell.operator == "grouped_gemm")
    backends = list(dict.fromkeys(name for cells in shapes.values() for name in cells))
    rows = [["shape", *backends, "gain"], ["---"] * (len(backends) + 2)]
    for text, cells in shapes.items():
        gain = cells["torch_grouped_mm"].ms / cells["triton_flat"].ms
        rows.append([_name(text), *(_milliseconds(cells.get(name)) for name in backends), f"{gain:.2f}"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _protocol(record: Record) -> str:
    """Return the protocol without the GPU's idle time, which the head of the page has for each run."""
    return record.cell.protocol.split("+")[0]


def _provenance(records: Sequence[Record]) -> list[str]:
    """Return one line for each commit and environment."""
    lines = []
    for record in records:
        run, machine = record.run, record.environment
        versions = [f"torch {machine.torch}", f"triton {machine.triton}", f"helion {machine.helion}"]
        line = (
            f"- commit `{run.commit.hash[:7]}`{' with changes' if run.commit.dirty else ''}, {run.started:%Y-%m-%d}, "
            f"{machine.gpu} (`{(machine.gpu_uuid or '')[4:12]}`), driver {machine.driver}, CUDA {machine.cuda}, "
            f"{', '.join(versions)}, protocol {record.cell.protocol}"
        )
        lines.append(line)
    return list(dict.fromkeys(lines))


def _cell(record: Record) -> CellLatency:
    assert record.latency is not None
    medians = [statistics.median(burst) for burst in record.latency.bursts_ms]
    return CellLatency(record, statistics.median(medians))


def _by_shape(records: Iterable[Record]) -> Shapes:
    """Return the cells by shape. A shape only has cells of one card and commit, those of its last record."""
    every = list(records)
    source = {r.cell.shape: (r.environment.gpu_uuid, r.run.commit.hash) for r in every}
    shapes: Shapes = {}
    for r in every:
        if source[r.cell.shape] == (r.environment.gpu_uuid, r.run.commit.hash):
            shapes.setdefault(r.cell.shape, {})[r.cell.backend] = _cell(r)
    return shapes


def _canaries(records: Iterable[Record]) -> dict[tuple[str | None, str, str], CellLatency]:
    """Return the cells of the canary by (card, shape, dtype)."""
    cells = {}
    for record in records:
        if record.cell.operator == "canary":
            cells[record.environment.gpu_uuid, record.cell.shape, record.cell.dtype] = _cell(record)
    return cells


def _dense(cell: CellLatency, canaries: dict[tuple[str | None, str, str], CellLatency]) -> CellLatency | None:
    """Return torch's dense product with as many operations on the same card, or None."""
    dims = cell.record.cell.dims
    size = f"matmul,M={dims.get('M')},N={dims.get('N')},K={dims.get('K')}"
    order = ("", ",W=nk") if "W=nk" not in cell.record.cell.shape else (",W=nk", "")
    card, dtype = cell.record.environment.gpu_uuid, cell.record.cell.dtype
    return next((canaries[card, size + w, dtype] for w in order if (card, size + w, dtype) in canaries), None)


def _rate(cells: Iterable[CellLatency], amount: Callable[[Record], int | None]) -> float | None:
    rates = [(amount(cell.record) or 0) / cell.ms for cell in cells]
    return max(rates, default=None)


def _table(operator: str, shapes: Shapes, canaries: dict[tuple[str | None, str, str], CellLatency]) -> str:
    baseline = TORCH.get(operator, "torch_grouped_mm")
    backends = list(dict.fromkeys(name for cells in shapes.values() for name in cells))
    backends.sort(key=lambda name: (name != baseline, not name.startswith("torch")))  # torch's first
    head = ["shape", *backends, "dense cuBLAS", "our best over torch's"]
    rows = []
    for text, cells in shapes.items():
        ours = [cell for cell in cells.values() if cell.kind in ("triton", "helion") and cell.right]
        best = min(ours, key=lambda cell: cell.ms, default=None)
        row = [_name(text), *(_milliseconds(cells.get(name)) for name in backends)]
        row.append(_milliseconds(_dense(next(iter(cells.values())), canaries)))
        torches = [cell.ms for cell in cells.values() if cell.kind == "torch" and cell.right]
        rows.append([*row, _digits(_over(min(torches, default=None), best.ms) if best else None, ".2f")])
    if not rows:
        return ""
    columns = list(zip(head, *rows, strict=True))
    shown = [column for n, column in enumerate(columns) if any(column[1:]) and column[1:] != columns[n - 1][1:]]
    lines = list(zip(*shown, strict=True))
    return "\n".join("| " + " | ".join(row) + " |" for row in [lines[0], ["---"] * len(shown), *lines[1:]])


def _over(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


def _digits(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _marks(operator: str, mode: str, shapes: Shapes, canaries: dict[tuple[str | None, str, str], CellLatency]) -> str:
    rows = []
    for mark in MARKS:
        ratios = {} if (mark.operator, mark.mode) != (operator, mode) else _ratios(mark, shapes)
        if ratios:
            mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios.values()))
            worst = min(ratios, key=lambda text: ratios[text])
            title = f"{_side(mark.ours)} over {_side(mark.rival)}"
            least = f"{ratios[worst]:.2f} ({_name(worst)})"
            wanted = f">= {mark.at_least:g}" + (f", least {mark.least:g}" if mark.least else "")
            passed = mean >= mark.at_least and ratios[worst] >= mark.least
            rows.append([title, str(len(ratios)), f"{mean:.3f}", least, wanted, _pass(passed)])
    for share in COPY_MARKS:
        if share.operator == operator:
            rows.append(_each("copy bandwidth on min_bytes, each", _of_copy(share, shapes, canaries), share.at_least))
    if (operator, mode) == ("grouped_gemm", "fwd"):
        dense = "dense cuBLAS of as many operations, large balanced shapes, each"
        rows.append(_each(dense, _large(shapes, canaries), LARGE_SHARE))
        rows.append(
            _each("copy bandwidth on min_bytes, few rows per group, each", _decode(shapes, canaries), DECODE_SHARE)
        )
    rows += [_errors(shapes), _repeatable(shapes)]
    rows = [row for row in rows if row]
    if not rows:
        return ""
    lines = [["comparison", "shapes", "geometric mean", "least", "target", ""], ["---"] * 6, *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def _ratios(mark: Mark, shapes: Shapes) -> dict[str, float]:
    """Return the speed-up by shape."""
    wanted = _problems(mark.operator, mark.suites)
    ratios = {}
    for text, cells in shapes.items():
        ours, rival = _fastest(mark.ours, cells), _fastest(mark.rival, cells)
        if ours and rival and _problem(text) in wanted:
            ratios[text] = rival.ms / ours.ms
    return ratios


def _fastest(side: str, cells: dict[str, CellLatency]) -> CellLatency | None:
    names = side.removeprefix("best:").split("|")
    among = [c for c in cells.values() if (c.kind if side.startswith("best:") else c.backend) in names]
    return min((cell for cell in among if cell.right), key=lambda cell: cell.ms, default=None)


def _large(shapes: Shapes, canaries: dict[tuple[str | None, str, str], CellLatency]) -> dict[str, float]:
    """Return dense cuBLAS's latency over ours by shape, for large balanced shapes."""
    shares = {}
    for text, cells in shapes.items():
        ours = _fastest("best:triton", cells)
        dense = _dense(ours, canaries) if ours else None
        alike = "routing=balanced" in text.split(",") or ("M_g=" in text and "|" not in text)
        if ours and dense and alike and (ours.record.cell.flops or 0) >= LARGE_FLOPS:
            shares[text] = dense.ms / ours.ms
    return shares


def _decode(shapes: Shapes, canaries: dict[tuple[str | None, str, str], CellLatency]) -> dict[str, float]:
    """Return our bandwidth over that of the device's copy by shape, for groups of few rows."""
    shares = {}
    for text, cells in shapes.items():
        ours = _fastest("best:triton", cells)
        dims = ours.record.cell.dims if ours else {}
        if ours is None or dims.get("M", 0) > DECODE_ROWS * dims.get("G", 0):
            continue
        share = _copy_share(ours, canaries)
        if share and _problem(text) in _problems("grouped_gemm", ("moe", "tritonbench")):
            shares[text] = share
    return shares


def _of_copy(
    mark: CopyMark, shapes: Shapes, canaries: dict[tuple[str | None, str, str], CellLatency]
) -> dict[str, float]:
    """Return our fastest backend's bandwidth over that of the device's copy by shape."""
    wanted = _problems(mark.operator, mark.suites)
    shares = {}
    for text, cells in shapes.items():
        ours = _fastest("best:triton|helion", cells)
        share = _copy_share(ours, canaries) if ours else None
        if ours and share and _problem(text) in wanted and (ours.record.cell.min_bytes or 0) >= mark.from_bytes:
            shares[text] = share
    return shares


def _copy_share(cell: CellLatency, canaries: dict[tuple[str | None, str, str], CellLatency]) -> float | None:
    card, dtype = cell.record.environment.gpu_uuid, cell.record.cell.dtype
    copies = (c for (uuid, shape, of), c in canaries.items() if (uuid, of) == (card, dtype) and shape[:4] == "copy")
    copy = _rate(copies, lambda r: r.cell.min_bytes)
    return (cell.record.cell.min_bytes or 0) / cell.ms / copy if copy else None


def _each(title: str, shares: dict[str, float], least: float) -> list[str]:
    """Return the row of a target for each shape."""
    if not shares:
        return []
    worst = min(shares, key=lambda text: shares[text])
    mean = math.exp(statistics.fmean(math.log(share) for share in shares.values()))
    named = f"{shares[worst]:.3f} ({_name(worst)})"
    passed = _pass(shares[worst] >= least)
    return [f"fastest of ours over {title}", str(len(shares)), f"{mean:.3f}", named, f">= {least:g}", passed]


def _errors(shapes: Shapes) -> list[str]:
    """Return the row of torch's error over the largest of our Triton backends' errors."""
    ratios = {}
    for text, cells in shapes.items():
        ours = [c.rms for c in cells.values() if c.kind == "triton" and c.right and c.rms and "fast" not in c.backend]
        torch = [
            c.rms for c in cells.values() if c.backend in ("torch_grouped_mm", "torch_scaled_grouped_mm") and c.rms
        ]
        if ours and torch:
            ratios[text] = torch[0] / max(ours)
    if not ratios:
        return []
    worst = min(ratios, key=lambda text: ratios[text])
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios.values()))
    # A tolerance for rounding in the last bit.
    passed, named = _pass(ratios[worst] >= 0.995), f"{ratios[worst]:.4f} ({_name(worst)})"
    title, wanted = "torch's relative RMS error over ours", ">= 1 (0.5 % is rounding)"
    return [title, str(len(ratios)), f"{mean:.4f}", named, wanted, passed]


def _repeatable(shapes: Shapes) -> list[str]:
    """Return the row of backends whose results are bitwise equal in two runs of every shape."""
    kept: dict[str, bool] = {}
    for cells in shapes.values():
        for cell in cells.values():
            if cell.record.accuracy and cell.record.accuracy.repeatable is not None and cell.kind != "torch":
                kept[cell.backend] = kept.get(cell.backend, True) and cell.record.accuracy.repeatable
    if not kept:
        return []
    lost = [name for name, same in kept.items() if not same]
    repeatable = f"all but {', '.join(lost)}" if lost else "all"
    return [
        "bitwise equal in two runs",
        str(len(shapes)),
        "",
        repeatable,
        "all but atomic",
        _pass(all("atomic" in n for n in lost)),
    ]


def _problems(operator: str, suites: Sequence[str]) -> set[str]:
    """Return the shapes of an operator's suites, without their layout."""
    offered = get_operator(operator).suites
    return {_problem(str(shape)) for suite in suites for shape in offered.get(suite, ())}


def _problem(text: str) -> str:
    """Return a shape without its layout, because some operators only have one layout."""
    return ",".join(part for part in text.split(",") if part not in ("W=nk", "B=shared"))


def _name(text: str) -> str:
    for suite, shapes in SUITES.items():
        for name, shape in shapes.items():
            if str(shape) == text:
                return f"{suite}/{name}"
    if len(text) > LONGEST_NAME:  # a list of all groups' sizes
        text = f"{text[: LONGEST_NAME - 12]}…{text[-8:]}"
    return f"`{text}`".replace("|", "\\|")


def _side(side: str) -> str:
    kinds = " or ".join(kind.capitalize() for kind in side.removeprefix("best:").split("|"))
    return f"fastest {kinds} backend" if side.startswith("best:") else side.replace("|", " or ")


def _milliseconds(cell: CellLatency | None) -> str:
    if cell is None:
        return ""
    digits = max(0, 3 - math.floor(math.log10(cell.ms))) if cell.ms < 1000 else 0
    wrong = "**wrong** " if cell.record.status == "wrong" else ""
    return f"{wrong}{cell.ms:.{digits}f}"


def _pass(passed: bool) -> str:
    return "pass" if passed else "**miss**"
