"""The second file of every format continues the series of the first: dates, ids and temporary paths begin none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from groupbench.tracker.facts.identity import cell_fields
from groupbench.tracker.formats import FORMATS, Options, load
from tests.tracker.formats import test_asv, test_google_benchmark, test_pytest_benchmark
from tests.tracker.formats.test_others import (
    SERVE,
    action,
    command,
    data_js,
    helion,
    hud,
    nv_state,
    nv_summary,
    nvbench,
)


@dataclass(frozen=True)
class Night:
    """The facts that differ between two runs of one benchmark."""

    day: datetime
    commit: str
    host: str  # a container's id
    address: str
    folder: str  # in /tmp
    pid: int
    ms: float

    @property
    def text(self) -> str:
        return self.day.strftime("%Y-%m-%d")

    @property
    def net(self) -> str:
        return f"<Net at 0x{self.address}>"


@st.composite
def nights(draw: st.DrawFn) -> Night:
    def of(alphabet: str, size: int) -> str:
        return draw(st.text(alphabet, min_size=size, max_size=size))

    hexadecimal = "0123456789abcdef"
    return Night(
        datetime(2026, 3, 1, 4, tzinfo=UTC) + timedelta(days=draw(st.integers(0, 200))),
        of(hexadecimal, 40),
        f"a{of(hexadecimal, 10)}7",
        f"7f{of(hexadecimal, 10)}",
        f"/tmp/tmp{of('abcdefgh', 7)}3",
        draw(st.integers(2, 99999)),
        draw(st.floats(0.01, 100.0)),
    )


def google(night: Night) -> Any:
    one = test_google_benchmark.one
    rows = [one(f"BM_Net<{night.net}>/8", night.ms), one(f"BM_File/{night.folder}/in.bin", night.ms), one("BM_X", 3.0)]
    facts = {"date": night.day.isoformat(), "host_name": night.host, "executable": f"{night.folder}/build/gemm"}
    facts |= {"git_commit": night.commit, "load_avg": [night.ms]}
    return {"context": test_google_benchmark.CONTEXT | facts, "benchmarks": rows}


def pytest_benchmark(night: Night) -> Any:
    stats = {"median": night.ms}
    names = (f"t.py::test_a[{night.net}]", f"t.py::test_b[{night.folder}/x]", f"t.py::test_c[pid{night.pid}]")
    rows = [{"name": name, "fullname": name, "stats": stats} for name in (*names, "t.py::test_d", "t.py::test_d")]
    machine = {"node": night.host, "processor": "", "python_version": "3.12.1"}
    facts = {"commit_info": {"id": night.commit}, "datetime": night.day.isoformat(), "machine_info": machine}
    return test_pytest_benchmark.DOCUMENT | facts | {"benchmarks": rows}


def asv(night: Night) -> Any:
    rows = {
        "m.time_a": [[night.ms, 2.0], [[f"'{night.folder}'", night.net]], "v"],
        "m.peakmem_b": [[night.ms], [], "v"],
    }
    facts = {"commit_hash": night.commit, "date": night.day.timestamp() * 1e3}
    return test_asv.RESULTS | facts | {"results": rows}


def hyperfine(night: Night) -> Any:
    return {"results": [command(f"{night.folder}/bin/run -p {night.text}", night.ms, [night.ms], [0])] * 2}


def vllm(night: Night) -> Any:
    facts = {"date": night.day.strftime("%Y%m%d-%H%M%S"), "label": f"nightly-{night.text}", "median_ttft_ms": night.ms}
    return SERVE | facts | {"request_throughput": night.ms, "model_id": f"{night.folder}/llama"}


def sglang(night: Night) -> Any:
    return {"backend": "sglang", "sharegpt_output_len": None, "tag": f"{night.text}_c8", "median_ttft_ms": night.ms}


def v3(night: Night) -> Any:
    runner = {"name": f"linux.a100-{night.host[-5:]}-runner-8kz5h", "type": "cuda", "gpu_info": "NVIDIA A100"}
    facts = {"runners": [runner], "timestamp": night.day.timestamp(), "head_sha": night.commit}
    entry = hud({"name": "latency"}, [night.ms], **facts)
    entry["model"] = {"name": f"{night.folder}/bert", "backend": "eager"}
    entry["benchmark"]["extra_info"] |= {"workflow_id": night.pid, "run": night.host}
    return [entry, entry]


def tritonbench(night: Night) -> Any:
    metrics = {f"tritonbench_gemm_fwd[x_{night.net}-aten]_latency": str(night.ms)}
    env = {"tritonbench_commit": night.commit, "benchmark_date": night.day.isoformat(), "device": "NVIDIA H100"}
    return {"metrics": metrics, "env": env}


def helion_files(night: Night) -> Any:
    return [helion("helion_latency_ms", [night.ms, 2.0], ["(8, 8)", "(8, 8)"])]


def nv(night: Night) -> Any:
    content = nvbench(nv_state([nv_summary("nv/cold/time/gpu/mean", value=night.ms)]))
    content["meta"]["argv"] = [f"{night.folder}/bench", "--json", night.text]
    return content


def table(separator: str, header: str, row: str) -> bytes:
    return f"{header}\n{row}\n".replace(",", separator).encode()


FILES: dict[str, Callable[[Night], Any]] = {
    "google-benchmark": google,
    "pytest-benchmark": pytest_benchmark,
    "asv": asv,
    "hyperfine": hyperfine,
    "vllm": vllm,
    "sglang": sglang,
    "v3": v3,
    "tritonbench-json": tritonbench,
    "helion": helion_files,
    "nvbench": nv,
    "bencher": lambda night: {f"bench {night.net}": {"latency": {"value": night.ms}}, "b": {"latency": {"value": 1.0}}},
    "github-action-benchmark": lambda night: data_js(s=[action("go", [(f"a {night.folder}", night.ms, "ns/op")])]),
    "tritonbench-csv": lambda night: table(";", "x_val,aten-latency", f"1024,{night.ms}"),
    "csv": lambda night: table(",", "operator,backend,shape,latency_ms", f"op,b,run {night.text},{night.ms}"),
}


def test_every_format_has_a_second_file() -> None:
    assert {*FILES} == {*FORMATS} - {"records"}, "records name their series themselves"


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=nights(), second=nights())
def test_the_second_file_continues_the_series(name: str, first: Night, second: Night, tmp_path: Path) -> None:
    def series(night: Night) -> list[Any]:
        content = FILES[name](night)
        path = tmp_path / f"run{'.csv' if name.endswith('csv') else '.json'}"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        facts = Options(commit=night.commit, date=night.day, device="cpu")
        records = load(path, options=facts if name != "asv" else Options()).records
        return [(*cell_fields(one.cell), one.environment.gpu, one.environment.cpu) for one in records]

    before, after = series(first), series(second)
    assert before == after
    assert len(before) == len({*before}) > 0, "no two results are one series"
