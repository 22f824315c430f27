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


def test_errors_are_held_to_torchs(marks: ModuleType) -> None:
    """The least accurate of our backends counts, except fast accumulation and wrong results."""
    records = [
        record("torch_grouped_mm", 2.0),
        record("triton_flat", 1.0),
        record("triton_contiguous", 1.5, accuracy=Accuracy(rms=3e-3)),
        record("triton_flat_fast", 0.5, accuracy=Accuracy(rms=1.0)),
        record("triton_bad", 0.5, accuracy=Accuracy(rms=1.0), status="wrong", message="off"),
        record("helion_worklist", 1.5, accuracy=Accuracy(rms=1.0)),
    ]
    row = rows(marks.tables(records, []))["torch's relative RMS error over ours"]
    assert row[3] == f"0.5000 ({NAME})"


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
