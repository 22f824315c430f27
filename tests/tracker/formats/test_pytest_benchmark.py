"""pytest-benchmark's JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.record import Record
from groupbench.tracker.formats import Options, load

DOCUMENT: dict[str, Any] = {
    "machine_info": {
        "node": "box", "processor": "x86_64", "python_implementation": "CPython", "python_version": "3.12.1",
        "system": "Linux", "release": "6.1", "cpu": {"brand_raw": "AMD EPYC", "count": 8},
    },
    "commit_info": {"id": "a" * 40, "time": "2026-01-30T12:00:00+01:00", "dirty": True, "branch": "main"},
    "benchmarks": [
        {
            "group": "sort", "name": "test_sort[64-a]", "fullname": "tests/test_x.py::test_sort[64-a]",
            "params": {"n": 64, "kind": "a"}, "param": "64-a", "extra_info": {}, "options": {"timer": "perf_counter"},
            "stats": {"min": 0.001, "median": 0.002, "rounds": 3, "data": [0.001, 0.002, 0.003]},
        },
        {"group": None, "name": "test_plain", "fullname": "t.py::test_plain", "params": None, "stats": {"median": 0.5}},
        {"name": "test_broken", "stats": None},
    ],
    "datetime": "2026-01-31T12:00:00.5",
    "version": "5.1.0",
}  # fmt: skip


def read(write: Any, change: dict[str, Any] | None = None, **facts: Any) -> tuple[Record, ...]:
    path = write([json.dumps(DOCUMENT | (change or {})).encode()], "0001.json")
    return load(path, options=Options(**facts)).records


def test_a_file(write: Any) -> None:
    first, second, broken = read(write)
    assert first.cell.operator == "tests/test_x.py::test_sort"
    assert (first.cell.backend, first.cell.shape) == ("sort", "n=64,kind=a")
    assert first.cell.dims == {"n": 64}
    assert first.latency is not None
    assert first.latency.bursts_ms == (pytest.approx((1.0, 2.0, 3.0)),)
    assert second.latency is not None
    assert second.latency.bursts_ms == ((500.0,),)
    assert (second.cell.backend, second.cell.shape) == ("pytest-benchmark", "-")
    assert (broken.status, broken.latency) == ("error", None)
    commit = first.run.commit
    assert (commit.hash, commit.dirty, commit.branch) == ("a" * 40, True, "main")
    assert commit.time == datetime(2026, 1, 30, 11, tzinfo=UTC)
    assert first.run.started == datetime(2026, 1, 31, 12, 0, 0, 500000, tzinfo=UTC)
    environment = first.environment
    machine = (environment.cpu, environment.python, environment.os, environment.host)
    assert machine == ("AMD EPYC", "3.12.1", "Linux 6.1", "box")


def test_an_unversioned_tree_needs_a_commit(write: Any) -> None:
    unversioned = {"commit_info": {"id": "unversioned", "dirty": True}}
    with pytest.raises(IngestError, match="names no commit"):
        read(write, unversioned)
    assert read(write, unversioned, commit="b")[0].run.commit.dirty is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"benchmarks": []}, "contains no results"),
        ({"benchmarks": [{"name": "x", "stats": {}}]}, r"benchmarks\[0\].stats: neither data nor median"),
        ({"benchmarks": [{"name": "x", "stats": {"data": ["1"]}}]}, r"at `benchmarks\[0\].stats.data\[0\]`"),
        ({"datetime": "soon"}, "datetime: 'soon' is not a date"),
        ({"machine_info": None}, "at `machine_info`"),
    ],
)
def test_what_is_wrong_is_named(write: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(IngestError, match=message):
        read(write, change)
