"""The benchmark of the kernels, `python -m ci.benchmarks kernels`, and the pages that it writes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from msgspec.structs import replace

from groupbench.tracker.facts.record import Accuracy, Cell, Commit, Environment, Latency, Record, Run, encode

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "ci.benchmarks", "kernels"]
PAGES = [
    page
    for page in sorted((ROOT / "docs/reference/measured").glob("*.md"))
    if "ci.benchmarks kernels" in page.read_text() and "--brief" not in page.read_text()
]


@pytest.fixture(scope="module")
def marks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_marks", ROOT / "ci/benchmarks/kernels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_marks"] = module
    spec.loader.exec_module(module)
    return module


RUN = Run(id="r", started=datetime(2026, 11, 21, tzinfo=UTC), commit=Commit(hash="abcdef1234"))
LARGE, NAME = "G=8,M=32768,N=4096,K=7168,routing=balanced,W=nk", "moe/dsv3_gu_ep32"
DECODE, DECODE_NAME = "G=128,M=512,N=1536,K=2048,routing=multinomial,W=nk", "moe/qwen30b_decode"
FLOPS = 2 * 32768 * 4096 * 7168
OVER_TORCH = "fastest Triton backend over torch_grouped_mm"
FP8, SCALED = "grouped_gemm_fp8", "torch_scaled_grouped_mm"


def record(
    backend: str, ms: float | None, shape: str = LARGE, operator: str = "grouped_gemm", **more: object
) -> Record:
    dims = dict(part.split("=") for part in shape.replace("copy,", "").replace("matmul,", "").split(","))
    sizes = {letter: int(dims[letter]) for letter in "GMNK" if dims.get(letter, "").isdecimal()}
    sizes |= {"M": 32768} if "M_g" in dims else {}
    cell = Cell(operator=operator, backend=backend, shape=shape, dtype="bf16", dims=sizes, flops=FLOPS, min_bytes=10**9)
    fields: dict = {"status": "ok", "accuracy": Accuracy(rms=1.5e-3)} | more
    latency = Latency(timing="gpu", bursts_ms=((ms, ms), (ms * 1.01,), (ms * 0.99,))) if ms else None
    environment = Environment(device="cuda", gpu="NVIDIA H100", gpu_uuid="GPU-12345678", torch="2.11.0")
    return Record(schema=1, run=RUN, environment=environment, cell=cell, latency=latency, **fields)


def rows(text: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {line[0].strip(): [part.strip() for part in line] for line in lines}


def test_ratios_means_and_verdicts(marks: ModuleType) -> None:
    records = [
        record("torch_grouped_mm", 2.0),
        record("torch_loop", 1.0),
        record("triton_flat", 1.25, accuracy=Accuracy(rms=3e-3)),
        record("helion_worklist", 2.5),
        record("helion_persistent", 5.0),
        record("torch", 1.0, "matmul,M=32768,N=4096,K=7168,W=nk", "canary"),
    ]
    text = marks.tables(records, ["x.jsonl"])
    marked = rows(text)
    assert marked[OVER_TORCH][1:] == ["1", "1.600", f"1.60 ({NAME})", ">= 1.15, least 1", "pass"]
    assert marked[f"{OVER_TORCH} or torch_loop"][2::3] == ["0.800", "**miss**"]
    assert marked["helion_worklist over helion_persistent"][2::3] == ["2.000", "**miss**"]
    dense = next(row for name, row in marked.items() if "dense cuBLAS of as many operations" in name)
    assert dense[2::3] == ["0.800", "**miss**"]
    assert dense[3] == f"0.800 ({NAME})"
    row = marked[NAME]
    assert "1.250" in row
    assert row[-1] == "0.80"


def test_a_mean_is_geometric_and_the_least_is_named(marks: ModuleType) -> None:
    records = [
        record("torch_grouped_mm", 4.0), record("triton_flat", 1.0),
        record("torch_grouped_mm", 1.0, DECODE), record("triton_flat", 4.0, DECODE),
    ]  # fmt: skip
    row = rows(marks.tables(records, []))[OVER_TORCH]
    assert row[2:4] == ["1.000", f"0.25 ({DECODE_NAME})"]


@pytest.mark.parametrize(("slow", "passed"), [(1.0, "pass"), (0.99, "**miss**")], ids=["as_fast", "slower"])
def test_a_mark_holds_each_shape_to_its_least_too(marks: ModuleType, slow: float, passed: str) -> None:
    records = [
        record("torch_grouped_mm", 4.0), record("triton_flat", 1.0),
        record("torch_grouped_mm", slow, DECODE), record("triton_flat", 1.0, DECODE),
    ]  # fmt: skip
    row = rows(marks.tables(records, []))[OVER_TORCH]
    assert row[3:] == [f"{slow:.2f} ({DECODE_NAME})", ">= 1.15, least 1", passed]


@pytest.mark.parametrize("layout", ["", ",W=nk", ",B=shared"], ids=["as_stored", "nk", "shared"])
def test_a_suites_shape_counts_in_any_layout(marks: ModuleType, layout: str) -> None:
    shape = "G=4,M_g=4096,N=4096,K=4096" + layout
    assert OVER_TORCH in rows(
        marks.tables([record("torch_grouped_mm", 2.0, shape), record("triton_flat", 1.0, shape)], [])
    )


@pytest.mark.parametrize("shape", ["G=2,M_g=64,N=8,K=8", "G=3,M_g=200|0|56,N=512,K=512"], ids=["nobodys", "ragged"])
def test_shapes_of_other_suites_count_in_no_mark(marks: ModuleType, shape: str) -> None:
    records = [
        record("torch_grouped_mm", 4.0), record("triton_flat", 2.0),
        record("torch_grouped_mm", 1.0, shape), record("triton_flat", 9.0, shape),
    ]  # fmt: skip
    text = marks.tables(records, [])
    assert rows(text)[OVER_TORCH][1:4] == ["1", "2.000", f"2.00 ({NAME})"]
    assert "0.11" in text, "but the table shows it"


def test_few_rows_a_group_are_held_to_copy_bandwidth(marks: ModuleType) -> None:
    """The copy reads and writes 1 GB in 0.5 ms; balanced large shapes are not counted."""
    records = [
        record("triton_flat", 0.52, DECODE),
        record("triton_contiguous", 0.9, DECODE),
        record("triton_flat", 0.1),
        record("copy", 0.5, "copy,N=1000", "canary"),
    ]
    name = "fastest of ours over copy bandwidth on min_bytes, few rows per group, each"
    assert rows(marks.tables(records, []))[name][1:] == ["1", "0.962", f"0.962 ({DECODE_NAME})", ">= 0.95", "pass"]
    records[0] = record("triton_flat", 0.54, DECODE)
    assert rows(marks.tables(records, []))[name][3:] == [f"0.926 ({DECODE_NAME})", ">= 0.95", "**miss**"]
    assert name not in rows(marks.tables(records[:3], [])), "without a canary there is nothing to hold it to"


@pytest.mark.parametrize(
    ("rms", "least", "passed"),
    [(1.5e-3, "1.0000", "pass"), (1.506e-3, "0.9960", "pass"), (3e-3, "0.5000", "**miss**")],
    ids=["as_right", "rounding", "less_accurate"],
)
def test_errors_are_held_to_torchs(marks: ModuleType, rms: float, least: str, passed: str) -> None:
    """The least accurate of our backends counts, except fast accumulation and wrong results."""
    records = [
        record("torch_grouped_mm", 2.0),
        record("triton_flat", 1.0),
        record("triton_contiguous", 1.5, accuracy=Accuracy(rms=rms)),
        record("triton_flat_fast", 0.5, accuracy=Accuracy(rms=1.0)),
        record("triton_bad", 0.5, accuracy=Accuracy(rms=1.0), status="wrong", message="off"),
        record("helion_worklist", 1.5, accuracy=Accuracy(rms=1.0)),
    ]
    row = rows(marks.tables(records, []))["torch's relative RMS error over ours"]
    assert row[1] == "1"
    assert row[3] == f"{least} ({NAME})"
    assert row[-1] == passed


@pytest.mark.parametrize(
    ("operator", "backend", "baseline", "row"),
    [
        ("grouped_gemm_dgrad", "triton_x", "torch_grouped_mm", OVER_TORCH),
        ("grouped_gemm_wgrad", "triton_x", "torch_grouped_mm", OVER_TORCH),
        (FP8, "triton_flat", SCALED, f"triton_flat over {SCALED}"),
        (FP8, "triton_flat_fast", f"{SCALED}_fast", f"triton_flat_fast over {SCALED}_fast"),
    ],
    ids=["dgrad", "wgrad", "fp8", "fp8_fast"],
)
def test_other_operators_have_marks(marks: ModuleType, operator: str, backend: str, baseline: str, row: str) -> None:
    records = [record(baseline, 2.0, operator=operator), record(backend, 1.0, operator=operator)]
    assert rows(marks.tables(records, []))[row][2::3] == ["2.000", "pass"]


def test_failures_are_listed_and_a_wrong_result_cannot_win(marks: ModuleType) -> None:
    records = [
        record("torch_grouped_mm", 2.0),
        record("triton_flat", 1.9),
        record("triton_bad", 0.1, status="wrong", message="off"),
        record("torch_compile", None, status="unavailable", message="no template", accuracy=None),
    ]
    text = marks.tables(records, [])
    assert rows(text)[OVER_TORCH][2] == "1.053"
    assert "**wrong** 0.1000" in text
    assert "- grouped_gemm, fwd, moe/dsv3_gu_ep32, torch_compile: unavailable, no template" in text


def test_a_row_is_of_one_card_and_one_commit(marks: ModuleType) -> None:
    def elsewhere(measured: Record) -> Record:
        environment = msgspec.structs.replace(measured.environment, gpu_uuid="GPU-2")
        return msgspec.structs.replace(measured, environment=environment)

    records = [elsewhere(record("torch_grouped_mm", 9.0)), elsewhere(record("torch_loop", 0.1))]
    records += [record("torch_grouped_mm", 2.0), record("triton_flat", 1.0)]
    marked = rows(marks.tables(records, []))
    assert marked[OVER_TORCH][2] == marked[f"{OVER_TORCH} or torch_loop"][2] == "2.000"
    run = msgspec.structs.replace(RUN, commit=Commit(hash="0123456789"))
    records.append(msgspec.structs.replace(record("triton_flat", 0.5), run=run))
    assert OVER_TORCH not in rows(marks.tables(records, []))


def test_of_a_cell_measured_twice_the_last_counts(marks: ModuleType) -> None:
    records = [record("torch_grouped_mm", 2.0), record("triton_flat", 9.0), record("triton_flat", 1.0)]
    assert rows(marks.tables(records, []))[OVER_TORCH][2] == "2.000"


def test_writes_between_the_markers_and_again_the_same(marks: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(encode(record("torch_grouped_mm", 2.0)) + encode(record("triton_flat", 1.0)))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{marks.BEGIN}\nold\n{marks.END}\nafter\n")
    pages = []
    for _ in range(2):
        subprocess.run([*COMMAND, tmp_path / "r.jsonl", "--write", page], check=True, cwd=ROOT)
        pages.append(page.read_text())
    assert pages[0] == pages[1]
    assert pages[0].startswith(f"before\n{marks.BEGIN}\nMade by")
    assert pages[0].endswith(f"{marks.END}\nafter\n")
    assert "old" not in pages[0]


@pytest.mark.parametrize(
    ("content", "page", "message"), [(b"{", "x", "line 1"), (b"", "x", "timed on a GPU")], ids=["no_record", "nothing"]
)
def test_says_in_one_line_what_is_wrong(content: bytes, page: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    done = subprocess.run([*COMMAND, path], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_up_to_date(marks: ModuleType, page: Path) -> None:
    """If this fails, run the command that the page names."""
    text = page.read_text()
    (command,) = re.findall(r"Made by `python -m ci\.benchmarks kernels (.*)`\.", text)
    files, operators, path = re.fullmatch(r"(.*) --only (\S+) --write (\S+)", command).groups()
    assert ROOT / path == page
    names = files.split()
    made = marks.tables(marks.load(ROOT / file for file in names), names, operators.split(","), Path(path))
    assert marks.splice(text, made) == text


def test_the_pages_show_every_operator_of_the_records(marks: ModuleType) -> None:
    text = "".join(page.read_text() for page in PAGES)
    records = marks.load(sorted((ROOT / "tests/data/h100_kernels").glob("*.jsonl")))
    assert {r.cell.operator for r in records} - {"canary"} <= set(re.findall(r"^### (\w+), ", text, re.MULTILINE))


def test_operators_are_shown_alone(marks: ModuleType) -> None:
    records = [record("torch", 1.0), record("torch", 1.0, operator="moe_layer"), record("torch", 1.0, COPY, "canary")]
    text = marks.tables(records, ["x.jsonl"], ["moe_layer"], Path("page.md"))
    assert text.startswith("Made by `python -m ci.benchmarks kernels x.jsonl --only moe_layer --write page.md`.")
    assert "### moe_layer" in text and "### grouped_gemm" not in text


COPY = "copy,N=16384"
COPIED = "fastest of ours over copy bandwidth on min_bytes, each"


def test_copies_are_held_to_the_device_copy(marks: ModuleType) -> None:
    shape = "T=8192,k=8,G=128,H=2048,routing=zipf(1.2)"
    records = [
        record("torch", 1.0, COPY, "canary"),
        record("torch", 3.0, shape, "moe_permute"),
        record("triton", 1.25, shape, "moe_permute"),
        record("helion", 1.06, shape, "moe_permute"),
    ]
    assert rows(marks.tables(records, []))[COPIED][1:4] == ["1", "0.943", f"0.943 (`{shape}`)"]
    assert rows(marks.tables(records[:3], []))[COPIED][-1] == "**miss**"


def test_a_cell_bound_by_its_launch_is_not_compared_with_the_copy(marks: ModuleType) -> None:
    records = [record("torch", 1.0, COPY, "canary"), record("triton", 1.0, "N=268435456", "vector_add")]
    assert rows(marks.tables(records, []))[COPIED][-1] == "pass"
    slow = record("triton", 9.0, "N=1048576", "vector_add")
    few = replace(slow, cell=replace(slow.cell, min_bytes=2**21))
    assert COPIED not in rows(marks.tables([records[0], few], []))


@pytest.mark.parametrize(
    ("backend", "verdict"), [("triton_atomic", "pass"), ("triton_fixup", "**miss**")], ids=["atomics may", "others not"]
)
def test_only_atomics_may_differ_between_two_runs(marks: ModuleType, backend: str, verdict: str) -> None:
    shape = "M=16,N=16,K=4096,W=nk"
    records = [
        record("torch_mm", 1.0, shape, "split_k_matmul"),
        record("helion_barrier", 1.0, shape, "split_k_matmul", accuracy=Accuracy(rms=1e-3, repeatable=True)),
        record(backend, 1.0, shape, "split_k_matmul", accuracy=Accuracy(rms=1e-3, repeatable=False)),
    ]
    row = rows(marks.tables(records, []))["bitwise equal in two runs"]
    assert row[3] == f"all but {backend}"
    assert row[-1] == verdict


def test_modes_have_marks_of_their_own(marks: ModuleType) -> None:
    shape = "T=8192,k=2,G=8,H=4096,F=14336,routing=multinomial"
    pair = [record("torch", 2.5, shape, "moe_layer"), record("triton", 2.0, shape, "moe_layer")]
    assert rows(marks.tables(pair, []))["fastest Triton backend over torch"][-2:] == [">= 1.3", "**miss**"]
    both = [replace(one, cell=replace(one.cell, mode="fwd_bwd")) for one in pair]
    assert rows(marks.tables(both, []))["fastest Triton backend over torch"][-2:] == [">= 1.2", "pass"]
