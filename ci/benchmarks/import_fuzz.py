"""Check that `import` either refuses a mutated file in one line, or reads the same values as an independent reader.

    python ci/benchmarks/import_fuzz.py --files 100000 --seed 1

A mutation flips, removes, repeats or inserts bytes, replaces a number or a text by a hostile one, or removes, repeats
or replaces a value of the JSON. Accepted records must survive encoding and decoding. Their latencies must be among
those of `latencies_of`, a slow reader with a few lines per format that shares no code with the importers. Prints each
problem, and the totals by format. The exit code is 1 if there is a problem.
"""

from __future__ import annotations

import argparse
import copy
import csv
import io
import json
import math
import random
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.record import Record, decode, encode
from groupbench.tracker.formats import Loaded, Options, load

DATE = datetime(2026, 1, 31, tzinfo=UTC)
OPTIONS = Options(commit="a" * 40, date=DATE, gpu="NVIDIA H100")
UNITS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "µs": 1e-3, "μs": 1e-3, "ns": 1e-6}

GOOGLE = {
    "context": {"date": "2026-01-31T13:00:00+01:00", "host_name": "box", "num_cpus": 8, "git_commit": "a" * 40},
    "benchmarks": [
        {"name": "BM_A/64/N:8", "run_type": "iteration", "real_time": 10.5, "cpu_time": 1.0, "time_unit": "us"},
        {"name": "BM_A/64/N:8", "run_type": "iteration", "real_time": 11.5, "cpu_time": 1.0, "time_unit": "us"},
        {"name": "BM_B", "run_type": "iteration", "real_time": 2.0, "cpu_time": 1.0, "time_unit": "ms"},
    ],
}
PYTEST = {
    "machine_info": {"node": "box", "machine": "x86_64", "python_version": "3.12.1", "system": "Linux"},
    "commit_info": {"id": "a" * 40, "time": "2026-01-30T12:00:00+01:00", "dirty": False, "branch": "main"},
    "benchmarks": [
        {"name": "test_a[64]", "fullname": "t.py::test_a[64]", "params": {"n": 64}, "extra_info": {},
         "stats": {"median": 0.002, "data": [0.001, 0.002, 0.003]}},
        {"name": "test_b", "fullname": "t.py::test_b", "params": None, "stats": {"median": 0.5}},
    ],
    "datetime": "2026-01-31T12:00:00.5",
    "version": "5.1.0",
}  # fmt: skip
ASV = {
    "commit_hash": "a" * 40,
    "env_name": "virtualenv-py3.12",
    "date": 1767225600000,
    "params": {"arch": "x86_64", "cpu": "EPYC", "machine": "box", "os": "Linux"},
    "python": "3.12",
    "requirements": {"numpy": "2.0"},
    "result_columns": ["result", "params", "version", "started_at", "duration"],
    "results": {
        "bench.time_keys": [[0.001, None, 0.003, 0.004], [["10", "20"], ["'a'", "'b'"]], "v1", 1767229200000, 3.5],
        "bench.time_plain": [[0.5], [], "v1", 1767229100000, 1.0],
    },
    "version": 2,
}
V3 = [
    {
        "benchmark": {"name": "b", "mode": "fwd", "dtype": "bf16", "extra_info": {"run": "r"}},
        "model": {"name": "gemm", "type": "op", "backend": backend},
        "metric": {"name": "latency", "benchmark_values": values, "extra_info": {"input_shape": shape}},
        "runners": [{"type": "cuda", "gpu_info": "H100"}],
        "timestamp": 1767225600,
        "head_sha": "a" * 40,
    }
    for backend, shape, values in (("a", "8", [0.5, 0.6]), ("b", "8", [1.5]), ("a", "16", [2.5]))
]
TABLE = "x_val;a-latency;a-tflops;b-latency;b-accuracy\n8;0.5;1.5;0.75;1.0\n16;2.5;;CUDA OOM;\n32;3.5;2;4.25;0\n"
PLAIN = "operator,backend,M,latency_ms,commit,date\n" + "".join(
    f"g,{cell},c1,2026-01-01\n" for cell in ("a,8,1.5", "a,8,1.6", "b,8,3")
)


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=1).encode()


def _records() -> bytes:
    lines = []
    for number in range(3):
        body = {
            "schema": 1,
            "run": {"id": "r", "started": "2026-01-31T03:00:00Z", "commit": {"hash": "a" * 40}},
            "environment": {"device": "cuda", "gpu": "H100"},
            "cell": {"operator": "g", "backend": "a", "shape": f"M={number}", "dtype": "bf16", "dims": {"M": number}},
            "status": "ok",
            "latency": {"timing": "gpu", "bursts_ms": [[1.5, 1.25], [2.5 + number]]},
        }
        lines.append(json.dumps(body).encode() + b"\n")
    return b"".join(lines)


TRITONBENCH = {
    "tritonbench_gemm_fwd[x_8-a]_latency": "0.5",
    "tritonbench_gemm_fwd[x_8-b]_latency": 0.75,
    "tritonbench_gemm_fwd[x_16-a]_latency": "2.5",
    "tritonbench_gemm_fwd[x_16-b]_latency": "CUDA OOM",
    "tritonbench_gemm_fwd[x_8-b]_tflops": 3.5,
}

SAMPLES: dict[str, tuple[str, bytes]] = {
    "records": ("x.jsonl", _records()),
    "google-benchmark": ("x.json", _json(GOOGLE)),
    "pytest-benchmark": ("x.json", _json(PYTEST)),
    "asv": ("x.json", _json(ASV)),
    "v3": ("x.json", _json(V3)),
    "tritonbench-json": ("x.json", _json(TRITONBENCH)),
    "tritonbench-csv": ("gemm_fwd.csv", TABLE.encode()),
    "csv": ("x.csv", PLAIN.encode()),
}
"""Valid files by format: (file name, content)."""


# --- an independent reader --------------------------------------------------------------------------------------------


def _number(value: Any) -> float | None:
    """Return a latency in the notation of tables, or None."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        plain = re.sub(r"\(±[^)]*\)\s*$", "", value).strip()
        if not re.fullmatch(r"[-+0-9.eE]+|[-+]?nan|[-+]?inf(inity)?", plain, re.IGNORECASE):
            return None
        try:
            return float(plain)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) else None


def _google(data: bytes) -> list[float]:
    return [
        float(one["real_time"]) * UNITS[one.get("time_unit", "ns")]
        for one in json.loads(data)["benchmarks"]
        if isinstance(one.get("real_time"), int | float) and one.get("time_unit", "ns") in UNITS
    ]


def _pytest(data: bytes) -> list[float]:
    stats = [one["stats"] for one in json.loads(data)["benchmarks"] if one.get("stats")]
    values = [one.get("data") or [one.get("median")] for one in stats]
    return [1e3 * value for each in values for value in each if isinstance(value, int | float)]


def _asv(data: bytes) -> list[float]:
    content = json.loads(data)
    place = content["result_columns"].index("result")
    cells = [row[place] for row in content["results"].values() if isinstance(row, list) and len(row) > place]
    values = [_number(value) for cell in cells if cell for value in cell]
    return [1e3 * value for value in values if value is not None]


def _v3(data: bytes) -> list[float]:
    content = json.loads(data) if data.lstrip().startswith(b"[") else [json.loads(x) for x in data.splitlines() if x]
    latencies: list[float] = []
    for entry in content:
        name = re.fullmatch(r"latency(?:\s*[(_]\s*(s|ms|us|µs|ns)\s*\)?)?", entry["metric"]["name"].strip(), re.I)
        if name:
            unit = (name[1] or entry["metric"].get("extra_info", {}).get("unit", "ms")).lower()
            latencies += [(_number(value) or 0.0) * UNITS[unit] for value in entry["metric"]["benchmark_values"]]
    return latencies


def _tritonbench(data: bytes) -> list[float]:
    values = [_number(value) for key, value in json.loads(data).items() if key.endswith("latency")]
    return [value for value in values if value is not None]


def _table(data: bytes) -> list[float]:
    text = data.decode("utf-8-sig")
    lines = [line for line in csv.reader(io.StringIO(text, newline=""), delimiter=";") if line]
    columns = [place for place, name in enumerate(lines[0]) if name.strip().endswith("-latency")]
    values = [_number(line[place]) for line in lines[1:] for place in columns if place < len(line)]
    return [value for value in values if value is not None]


def _plain(data: bytes) -> list[float]:
    text = data.decode("utf-8-sig")
    header = text.split("\n", 1)[0]
    lines = [
        line for line in csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=header.count)) if line
    ]
    place = [name.strip() for name in lines[0]].index("latency_ms")
    values = [_number(line[place]) for line in lines[1:]]
    return [value for value in values if value is not None]


def _lines(data: bytes) -> list[float]:
    bodies = [json.loads(line) for line in data.split(b"\n") if line.strip()]
    return [ms for body in bodies for burst in (body.get("latency") or {}).get("bursts_ms", ()) for ms in burst]


READERS: dict[str, Callable[[bytes], list[float]]] = {
    "records": _lines,
    "google-benchmark": _google,
    "pytest-benchmark": _pytest,
    "asv": _asv,
    "v3": _v3,
    "tritonbench-json": _tritonbench,
    "tritonbench-csv": _table,
    "csv": _plain,
}


def latencies_of(name: str, data: bytes) -> list[float]:
    """Return every latency in a file, in ms, of any cell."""
    return READERS[name](data)


# --- mutations --------------------------------------------------------------------------------------------------------

NUMBERS = [
    *("0", "-1", "1e400", "-0.0", "1e-320", "9223372036854775808", "NaN", "Infinity", "1_000", "0x10", "1,5", "١"),
    *("true", "null", '"1.5"', '""', "[]", "{}", "1e5", "00", "+1", "1e", "4.9e-324", "99999999999999999999999999"),
]
TEXTS = ["", "\0", "a" * 30_000, "\ud800", "=cmd()", "\x1b[31m", "é", "\u202e", "CUDA OOM", "nan", "../../x", "1e400"]
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1e308,
    math.nan,
    math.inf,
    2**70,
    "",
    "x",
    [],
    {},
    [[]],
    [None],
    {"": 0},
    *TEXTS,
]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return a file with one to three mutations."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.randrange(7)
        if kind < 3 and data[:1] in b"{[":
            data = _in_json(data, rng)
            continue
        at = rng.randrange(len(data) + 1)
        end = min(at + int(rng.expovariate(0.1)) + 1, len(data))
        numbers = list(re.finditer(rb"-?\d+(\.\d+)?", data))
        if kind in (3, 4) and numbers:
            old = rng.choice(numbers)
            data = data[: old.start()] + rng.choice(NUMBERS).encode() + data[old.end() :]
        elif kind == 5:
            data = data[:at] + rng.choice((b"", data[at:end] * 2, data[end:])) + data[end:]
        else:
            new = rng.choice((bytes([rng.randrange(256)]), rng.randbytes(3), b'"', b"\n", b",", b";", b"\xef\xbb\xbf"))
            data = data[:at] + new + data[at + rng.randrange(2) :]
    return data


def _in_json(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n") if data.count(b'"schema"') else [data]
    place = rng.randrange(len(lines))
    try:
        content = json.loads(lines[place])
    except ValueError:
        return data
    parents: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            parents.append((value, key))
            if isinstance(below, dict | list):
                walk(below)

    if isinstance(content, dict | list):
        walk(content)
    if parents:
        parent, key = rng.choice(parents)
        kind = rng.randrange(4)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif kind == 2 and isinstance(parent, dict):
            parent[rng.choice(TEXTS)] = parent.pop(key)
        else:
            parent[key] = copy.deepcopy(rng.choice(VALUES))
    lines[place] = json.dumps(content).encode("utf-8", "surrogatepass")
    return b"\n".join(lines)


# --- checks -----------------------------------------------------------------------------------------------------------


def check(name: str, path: Path, data: bytes) -> tuple[str, str | None]:
    """Import one file. Returns ("refused" or "accepted", the problem or None)."""
    path.write_bytes(data)
    try:
        loaded = load(path, name, OPTIONS)
    except TrackerError as error:
        message = str(error)
        lines = message.splitlines()
        return "refused", None if len(lines) == 1 and str(path) in message else f"bad message: {message[:300]!r}"
    except Exception:
        return "refused", f"traceback: {traceback.format_exc().splitlines()[-1]}"
    return "accepted", _wrong(name, loaded, data)


def _wrong(name: str, loaded: Loaded, data: bytes) -> str | None:
    for record in loaded.records:
        if decode(encode(record)) != record:
            return "a record changes when it is encoded and decoded"
    try:
        expected = Counter(f"{ms:.9g}" for ms in latencies_of(name, data))
    except Exception as error:
        return f"the independent reader fails: {error!r}"
    read = Counter(f"{ms:.9g}" for record in loaded.records for ms in _samples(record))
    wrong = read - expected
    return f"read latencies that are not in the file: {dict(wrong)}" if wrong else None


def _samples(record: Record) -> list[float]:
    return [] if record.latency is None else [ms for burst in record.latency.bursts_ms for ms in burst]


def problem(name: str, seed: int, folder: Path) -> tuple[str, str | None]:
    """Import the mutated file of a seed. Returns ("refused" or "accepted", the problem or None)."""
    file, data = SAMPLES[name]
    return check(name, folder / file, mutated(data, random.Random(f"{name} {seed}")))


def marks() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=100_000, metavar="N", help="Number of mutated files in all.")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="Seed of the first file.")
    options = parser.parse_args()
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in SAMPLES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.files):
            name = list(SAMPLES)[number % len(SAMPLES)]
            seed = options.seed + number // len(SAMPLES)
            outcome, wrong = problem(name, seed, Path(folder))
            outcomes[name][outcome] += 1
            if wrong:
                outcomes[name]["problems"] += 1
                print(f"{name}, seed {seed}: {outcome}: {wrong}", flush=True)
    for name, counts in outcomes.items():
        print(f"{name}: {counts['refused']} refused, {counts['accepted']} accepted, {counts['problems']} problems")
    total = sum((counts for counts in outcomes.values()), Counter[str]())
    print(f"{options.files} files: {total['problems']} problems")
    return 1 if total["problems"] else 0


if __name__ == "__main__":
    sys.exit(marks())
