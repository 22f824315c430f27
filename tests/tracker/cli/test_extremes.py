"""Odd values in a file: each is stored exactly or refused with its line, and the database stays intact."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pytest
from cases import Cli, rarely, refused

from groupbench.tracker.facts.record import LONGEST_TEXT, Record, encode
from groupbench.tracker.facts.spelling import canonical
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.store.records import stored_records
from groupbench.tracker.store.verify import verify


def held(db: Any) -> list[Record]:
    """Check an intact database and return its content."""
    with open_store(db, create=False) as store, store.read() as session:
        assert list(verify(session)) == []
        return list(stored_records(session))


@pytest.mark.parametrize(
    "latency", ["NaN", "-0.0", "1e999", *rarely("Infinity", "-Infinity", "0", "0.0", "-1.0", "null", '"1"')]
)
def test_a_latency_that_is_none_is_refused_by_its_line(
    cli: Cli, stored: Any, make: Any, write: Any, db: Any, latency: str
) -> None:
    stored([make()])
    good, bad = encode(make(1)), json.loads(encode(make(1, backend="b")))
    bad["latency"]["bursts_ms"] = [[1.0, "HERE"]]
    line = json.dumps(bad).replace('"HERE"', latency).encode() + b"\n"
    assert "bad.jsonl: line 2: " in refused(cli, "ingest", write([good, line], "bad.jsonl"))
    assert len(held(db)) == 1


@pytest.mark.parametrize("samples", [100_000, *rarely(1_000_000)])
def test_many_samples(stored: Any, make: Any, db: Any, samples: int) -> None:
    ms = np.random.default_rng(0).normal(1, 0.01, samples).astype(np.float32).astype(np.float64)
    bursts = (tuple(ms[:1].tolist()), tuple(ms[1:].tolist()))
    stored([make(latency={"timing": "gpu", "bursts_ms": bursts})])
    (back,) = held(db)
    assert back.latency is not None and back.latency.bursts_ms == bursts


def test_the_longest_texts(stored: Any, make: Any, db: Any) -> None:
    long = "ü" * LONGEST_TEXT
    record = make(status="error", message=long, environment={"settings": {"X": long}})
    stored([record])
    assert held(db) == [record]


@pytest.mark.parametrize("field", ["plan", "commit", *rarely("operator", "backend", "run")])
def test_a_name_that_no_index_holds_is_refused_before_the_store(cli: Cli, make: Any, write: Any, field: str) -> None:
    assert "is longer than 1000 bytes" in refused(cli, "ingest", write([make(**{field: "\U0001f600" * 400})]))


NAMES = [
    *("'; DROP TABLE point; --", '"quoted" and `ticked`', "line\nbreak\r\n\ttab", "<script>alert(1)</script>&amp;"),
    *("100% %s %(x)s :name ? {0} $1 \\ \\x00", "日本語 ☃ \U0001f600 e\u0301", "\x1b[31mred\x07", " ", "NULL", "nan"),
    *("*[a-z]?", "HEAD", "a" * 40 + "\n"),
]


def test_any_name_comes_back_and_is_found(cli: Cli, stored: Any, make: Any, db: Any) -> None:
    records = []
    for number, name in enumerate(NAMES):
        facts = {"branch": name, "author": name, "subject": name}
        fields = ("operator", "backend", "shape", "dtype", "mode", "run", "plan")
        records.append(make(number, commit=name, commit_facts=facts, **dict.fromkeys(fields, name)))
    stored([*records, make(20)])
    back = {one.cell.operator: one for one in held(db)}
    for name, record in zip(NAMES, records, strict=True):
        assert (back[name].run, back[name].cell) == (record.run, canonical(record.cell)), name
        rows = json.loads(cli("history", "--operator", name, "--backend", name, "--format=json").stdout)
        assert [row["operator"] for row in rows] == [name]
        assert cli("gate", "--run", name).exit_code in (0, 3), name
    for command in ("history", "list runs", "list commits", "gate", "db export - --format csv", "history --format=md"):
        assert cli(*command.split()).exit_code in (0, 3)


@pytest.mark.parametrize("year", [1, 9999, *rarely(1970, 2100)])
def test_a_clock_that_jumped_orders_its_run_and_nothing_else(
    cli: Cli, stored: Any, make: Any, db: Any, year: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = make(5)
    odd = msgspec.structs.replace(
        odd, run=msgspec.structs.replace(odd.run, started=datetime(year, 6, 1, 12, tzinfo=UTC))
    )
    with monkeypatch.context() as here:  # it jumped where this was stored, too
        here.setattr("groupbench.tracker.store.checked.clock", lambda: datetime(year, 12, 31, tzinfo=UTC))
        stored([odd])
    stored([make(0), make(1), make(2)])
    rows = json.loads(cli("history", "--format=json").stdout)
    place = 0 if year < 2026 else 3
    assert [row["run"] for row in rows].index("run-005") == place
    assert len(held(db)) == 4
    for command in (["list", "runs"], ["gate"], ["list", "commits"], ["db", "prune"], ["report", "-o", "-"]):
        assert cli(*command).exit_code in (0, 1, 2, 3)


@pytest.mark.parametrize("started", ["0001-01-01T00:00:00+05:00", "9999-12-31T23:59:59-05:00"])
def test_an_instant_outside_the_calendar_is_refused(cli: Cli, make: Any, write: Any, started: str) -> None:
    line = json.loads(encode(make()))
    line["run"]["started"] = started
    assert "line 1: a time is out of range" in cli("ingest", write([json.dumps(line).encode()])).stderr


def test_the_first_instant_comes_back(cli: Cli, make: Any, write: Any, db: Any) -> None:
    line = json.loads(encode(make()))
    line["run"]["started"] = line["run"]["commit"]["time"] = "0001-01-01T00:00:00Z"
    assert cli("ingest", write([json.dumps(line).encode()])).exit_code == 0
    (back,) = held(db)
    assert json.loads(encode(back))["run"] == line["run"]


def test_a_zero_without_its_sign_is_the_same_result(cli: Cli, make: Any, write: Any, db: Any) -> None:
    line = json.loads(encode(make()))
    line["accuracy"] |= {"rms": -0.0, "mismatch": -0.0}
    line["duration_s"] = line["latency"]["prepare_ms"] = -0.0
    file = write([json.dumps(line).encode()])
    assert "1 point added" in cli("ingest", file).stdout
    assert len(held(db)) == 1
    assert "1 already known" in cli("ingest", write([json.dumps(line).replace("-0.0", "0.0").encode()])).stdout


def test_a_batch_of_many_series_and_kernels(stored: Any, make: Any, db: Any) -> None:
    """More than a batch, with repeats on both sides of its border."""
    kernel = {"name": "k", "hash": "h", "config": {"B": [1, {"x": None}]}}
    records = [
        make(night, backend=f"b{i}", kernels=[{**kernel, "registers": i % 7}]) for night in range(2) for i in range(300)
    ]
    stored([*records, *records[-3:], *records[:3]])
    assert len(held(db)) == 600


def test_no_statement_is_built_from_text() -> None:
    """An f-string of SQL may only contain quoted names, so that a later change cannot make it an injection."""
    import ast
    from pathlib import Path

    import groupbench.tracker.store.engine as module

    words = ("SELECT ", "INSERT ", "UPDATE ", "DELETE ", "DROP ", "ALTER ", "CREATE ", "ATTACH ")
    problems = []
    for path in sorted(Path(module.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                inserted = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
                quoted = all(ast.unparse(value).startswith("_quoted(") for value in inserted)
                if "".join(map(str, parts)).lstrip().startswith(words) and not quoted:
                    problems.append(f"{path.name}:{node.lineno}")
    assert problems == []
