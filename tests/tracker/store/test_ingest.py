"""Records into the store, and back."""

from __future__ import annotations

import csv
import json
import os
import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cases import Cli, refused
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, inspect, select

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.record import Accuracy, Record, decode, encode
from groupbench.tracker.facts.spelling import canonical
from groupbench.tracker.store import checked as checks
from groupbench.tracker.store.engine import Store, open_store
from groupbench.tracker.store.ingest import ingest, ingest_checked
from groupbench.tracker.store.records import stored_records
from groupbench.tracker.store.schema import Base, Point
from groupbench.tracker.store.staged import Staged, check_part
from groupbench.tracker.store.verify import verify


def tables(location: Path | str) -> dict[str, list[Any]]:
    """Every row of every table, as far as there are tables."""
    where = str(location) if "://" in str(location) else f"sqlite:///{location}"
    engine = create_engine(where)
    with engine.connect() as connection:
        there = set(inspect(connection).get_table_names())
        contents = {
            table.name: [tuple(row) for row in connection.execute(select(*table.columns).order_by(table.c.id))]
            for table in Base.metadata.sorted_tables
            if table.name in there
        }
    engine.dispose()
    return contents


def untouched(location: Path | str) -> bool:
    """Return whether no database was made."""
    return not location.exists() if isinstance(location, Path) else tables(location) == {}


def rounded(record: Record) -> Record:
    """Return a record as exported: samples in float32, and None for an empty accuracy."""
    if record.accuracy == Accuracy():
        record = msgspec.structs.replace(record, accuracy=None)
    if record.latency is None:
        return record
    bursts = tuple(tuple(float(np.float32(ms)) for ms in burst) for burst in record.latency.bursts_ms)
    return msgspec.structs.replace(record, latency=msgspec.structs.replace(record.latency, bursts_ms=bursts))


def all_records(path: Path) -> list[Record]:
    with open_store(path, create=False) as store, store.read() as session:
        return list(stored_records(session))


def test_ingesting_twice_changes_nothing(cli: Cli, write: Any, make: Any, db: Path) -> None:
    file = write([make(), make(backend="torch", status="oom")])
    first = cli("ingest", file)
    assert first.exit_code == 0
    assert "2 records: 2 points added, 0 already known, 2 series new; run run-000 at 000ccccccc" in first.stdout
    before = tables(db)
    again = cli("ingest", file)
    assert (again.exit_code, tables(db)) == (0, before)
    assert "0 points added, 2 already known (nothing new), 0 series new" in again.stdout


def test_of_many_runs_the_first_are_named(cli: Cli, write: Any, make: Any) -> None:
    output = cli("ingest", write([make(night=number) for number in range(12)])).stdout
    assert "12 points added" in output
    assert "; run run-004 at 004ccccccc; and 7 more" in output
    assert "run-005" not in output


def test_repeats_within_a_file_are_one_point(cli: Cli, write: Any, make: Any, db: Path) -> None:
    result = cli("ingest", write([make(), make()]))
    assert "2 records: 1 point added, 1 already known" in result.stdout
    assert len(tables(db)["point"]) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2: "),
        (b'{"schema": 2}', "line 2: record schema 2; this groupbench reads schema 1. A newer version wrote it: pip "),
        (b'{"schema": 0}', "line 2: record schema 0; this groupbench reads schema 1\n"),
        (b"\xff\xfe", "line 2: "),
        (b"[1]", "line 2: "),
        (b"[" * 100_000, "line 2: "),
    ],
    ids=["cut", "newer schema", "older schema", "bytes", "array", "deep"],
)
def test_a_malformed_line_is_named_and_nothing_stored(
    cli: Cli, write: Any, make: Any, db: Path, line: bytes, message: str
) -> None:
    assert message in refused(cli, "ingest", write([make(), line + b"\n", make(1)]))
    assert untouched(db)


@pytest.mark.parametrize("end", [b"", b"."], ids=["anywhere", "in a number"])
def test_records_without_their_end_name_the_way_to_continue(
    end: bytes, cli: Cli, write: Any, make: Any, db: Path
) -> None:
    path = write([make(), make(1)])
    whole = path.read_bytes()[:-20]
    path.write_bytes(whole[: whole.rindex(end) + len(end)])
    assert re.search("line 2: .*. If the run was killed, continue it: ", refused(cli, "ingest", path))
    assert untouched(db)


def test_a_file_of_another_kind_is_told_from_records(cli: Cli, write: Any, make: Any) -> None:
    hint = "as `tritonbench --records FILE` writes? `groupbench import` reads other benchmarks' files"
    assert hint in cli("ingest", write([b"import torch\n"], "bad.py")).stderr
    assert hint not in cli("ingest", write([b'{"schema": 2}\n'], "newer.jsonl")).stderr
    assert hint not in cli("ingest", write([make(), b"{\n"])).stderr


def test_a_file_without_records_is_refused(cli: Cli, write: Any) -> None:
    assert "contains no records" in cli("ingest", write([b"\n\n"])).stderr


def test_earlier_files_stay_and_later_ones_wait(cli: Cli, write: Any, make: Any, db: Path) -> None:
    good, bad, last = write([make()], "a"), write([b"{\n"], "b"), write([make(1)], "c")
    result = cli("ingest", good, bad, last)
    assert result.exit_code == 2
    assert "b: line 1: " in result.stderr
    assert "the file before it is stored" in result.stderr
    assert len(tables(db)["run"]) == 1


def test_stdin(cli: Cli, make: Any, db: Path) -> None:
    assert "stdin: 1 record:" in cli("ingest", "-", stdin=encode(make())).stdout
    assert len(tables(db)["point"]) == 1


@pytest.mark.sqlite
def test_a_pipe_is_read_once(cli: Cli, make: Any, db: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    lines = b"".join(encode(make(backend=f"b{number}")) for number in range(700))
    writer = threading.Thread(target=lambda: pipe.write_bytes(lines))
    writer.start()
    output = cli("ingest", pipe).stdout
    writer.join()
    assert "700 records: 700 points added" in output


def test_a_missing_file_and_a_directory(cli: Cli, tmp_path: Path) -> None:
    assert "No such file" in cli("ingest", tmp_path / "none").stderr
    assert "irectory" in cli("ingest", tmp_path).stderr


def test_a_contradiction_names_both_lines(cli: Cli, write: Any, make: Any, db: Path) -> None:
    assert "line 3: contradicts line 1" in refused(cli, "ingest", write([make(), make(backend="b"), make(ms=2.0)]))
    assert untouched(db)


@pytest.mark.both
def test_a_contradiction_with_the_store(cli: Cli, write: Any, make: Any, stored: Any, db: Path) -> None:
    stored([make()])
    before = tables(db)
    assert "line 2: run run-000 is already stored with a different result for grouped_gemm triton" in refused(
        cli, "ingest", write([make(backend="new"), make(ms=2.0)], "b")
    )
    assert tables(db) == before


@pytest.mark.parametrize("split", [True, False], ids=["stored between", "one stream"])
@pytest.mark.both
def test_a_skipped_cell_gives_way_to_its_result(cli: Cli, write: Any, make: Any, db: Path, split: bool) -> None:
    begun = [make(backend="torch"), make(status="skipped", message="the budget was over")]
    gone_on = [make(backend="torch"), make()]
    files = [write(begun, "begun"), write(gone_on, "gone-on")] if split else [write(begun + gone_on)]
    result = cli("ingest", *files)
    assert result.exit_code == 0, result.stderr
    assert {record.cell.backend: record.status for record in all_records(db)} == {"torch": "ok", "triton": "ok"}


def test_a_result_stays_if_a_later_line_skips_its_cell(cli: Cli, write: Any, make: Any, stored: Any, db: Path) -> None:
    stored([make()])
    before = tables(db)
    result = cli("ingest", write([make(status="skipped", message="the budget was over")]))
    assert (result.exit_code, tables(db)) == (0, before)
    assert "0 points added, 1 already known" in result.stdout


def test_a_run_is_of_one_commit(cli: Cli, write: Any, make: Any, db: Path) -> None:
    result = cli("ingest", write([make(), make(backend="b", commit="other")]))
    assert "line 2: run run-000 has commit" in result.stderr
    result = cli("ingest", write([make(), make(backend="b", commit_facts={"dirty": True})]))
    assert "line 2: run run-000 has dirty False" in result.stderr
    assert tables(db)["run"] == []


def test_later_facts_fill_in_a_bare_commit(stored: Any, make: Any, db: Path) -> None:
    stored([make()])
    full = {"parents": ["p"], "branch": "main", "author": "A", "subject": "S", "time": "2026-01-01T00:00:00Z"}
    stored([make(backend="b", commit_facts=full)])
    stored([make(backend="c")])
    stored([make(commit_facts={"subject": "other"})])  # of a record that is stored already
    commit = all_records(db)[0].run.commit
    assert (commit.parents, commit.branch, commit.author, commit.subject) == (("p",), "main", "A", "S")
    assert commit.time is not None and commit.time.year == 2026


def test_environments_are_apart_by_every_fact_and_share_an_identity(stored: Any, make: Any, db: Path) -> None:
    stored([make(0), make(1, environment={"host": "b"}), make(2, environment={"driver": "580.2"})])
    contents = tables(db)
    assert (len(contents["environment"]), len(contents["series"])) == (3, 1)
    assert len({row[2] for row in contents["environment"]}) == 2


def test_statistics_are_of_the_samples(stored: Any, make: Any, db: Path) -> None:
    stored([make(latency={"timing": "gpu", "bursts_ms": [[0.1, 0.2, 0.3], [0.7], [0.4, 0.5]]})])
    with open_store(db, create=False) as store, store.read() as session:
        row = session.execute(select(Point.median_ms, Point.low_ppm, Point.high_ppm, Point.error_ppm)).one()
        low, high, lengths = session.execute(select(Point.low_ms, Point.high_ms, Point.burst_lengths)).one()
    assert row == (0.45, 555556, 555556, 459756)
    assert (low, high) == (pytest.approx(0.2, rel=1e-5), pytest.approx(0.7, rel=1e-5))
    assert lengths == [3, 1, 2]


IMPOSSIBLE: list[tuple[str, object]] = [
    ("accuracy rms", -1.0),
    ("accuracy max_abs", -1e-9),
    ("accuracy mismatch", 1.5),
    ("accuracy mismatch", 1.0),  # although the status is ok
    ("accuracy unwritten", -0.5),
    ("accuracy unwritten", 1.0),
    ("accuracy first_bad", [0, -1]),
    ("accuracy first_bad", [1, 2**64]),
    ("cell flops", -5),
    ("cell flops", 2**63),
    ("cell min_bytes", -1),
    ("cell min_bytes", 2**70),
    ("cell seed", 2**63),
    ("cell dims", {"": 3}),
    ("latency prepare_ms", -1),
    ("latency telemetry", [{"power_w": -1.0}] + [{}] * 4),
    *(("latency bursts_ms", [[1.0, ms]]) for ms in (1e-40, 1e39, 5e-324)),  # which float32 cannot hold
    ("environment cpu_count", -1),
    ("kernels", [{"name": "k", "registers": 3}, {"name": "k", "spills": -1}]),
    ("duration_s", -0.5),
    ("run started", "2999-01-01T00:00:00Z"),
]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_an_impossible_record_is_refused_by_its_line(
    cli: Cli, write: Any, make: Any, db: Path, name: str, value: object
) -> None:
    line = json.loads(encode(make()))
    *part, field = name.split()
    (line[part[0]] if part else line)[field] = value
    result = cli("ingest", write([make(), json.dumps(line, indent=1).replace("\n", "").encode()]))
    assert result.exit_code == 2
    assert re.search(rf"line 2: .*{'.'.join(name.split())}|line 2: .* is not a valid duration", result.stderr)
    assert untouched(db)


@pytest.mark.parametrize(
    "fields",
    [
        {"rms": 0.0, "cell": {"seed": -1, "dims": {"M": 0}, "flops": 0}},
        {"status": "wrong", "accuracy": {"mismatch": 1.0000001192092896, "unwritten": 1}},  # as torch's mean gives it
        {"kernels": [{"name": "k", "config": {"num_stages": -1, "maxnreg": None}}]},
        {"ms": None},  # accurate, and not timed
        {"commit_facts": {"subject": "Revert -1, [-2]"}},
        {"cell": {"shape": "x,dim=-1", "dims": {"dim": -1}}},
        {"status": "error", "message": r"no file C:\u0000.cu, nor \\u0000"},
    ],
    ids=["zeros", "all wrong", "config", "no latency", "subject", "shape", "backslash"],
)
def test_odd_but_possible_records_are_stored(stored: Any, make: Any, db: Path, fields: dict[str, Any]) -> None:
    stored([make(**fields)])
    assert all_records(db) == [rounded(make(**fields))]


def test_a_clock_may_be_a_little_ahead(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The date of the commit does not matter: its author's clock may be years ahead."""
    record = make(commit_facts={"time": "2026-01-01T00:00:00Z"})
    for hours, early in ((-1, False), (-23, False), (-25, True)):
        monkeypatch.setattr(checks, "clock", lambda hours=hours: record.run.started + timedelta(hours=hours))
        for one in (make(), record):
            assert (checks.unstorable_parts(one.run, one.cell) is not None) == early


def rejected_or_stored_exactly(store: Store, line: bytes) -> None:
    """By the second line of a file: refused by its number, or there afterwards as it was."""
    blank = b" \n"
    try:
        with Staged([check_part((1, blank + line), "file")], "file") as staged:
            records = list(staged)
        with store.write() as session:
            for name in ("point", "kernel_set", "series", "run", "environment", "commit"):
                session.connection().exec_driver_sql(f'DELETE FROM "{name}"')
        ingest_checked(store, records, "file")
    except IngestError as error:
        assert "file: line 2: " in str(error) or "contains no records" in str(error)
        return
    event("stored")
    with store.read() as session:
        record = decode(line)
        assert list(stored_records(session)) == [rounded(msgspec.structs.replace(record, cell=canonical(record.cell)))]
        assert list(verify(session)) == []


once = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@once
@given(data=st.data())
@pytest.mark.both
def test_any_damage_is_refused_or_stored_exactly(opened: Store, make: Any, data: st.DataObject) -> None:
    line = bytearray(encode(make()))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(line) - 2))
        line[place] = data.draw(st.sampled_from(b'0123456789.-eE "{}[],:abctfn') | st.integers(11, 255))
    rejected_or_stored_exactly(opened, bytes(line))


def test_each_record_keeps_the_amounts_that_it_gave(opened: Store, make: Any) -> None:
    """Whatever other records of the series say, before it, after it, or in the same file."""
    amounts: list[list[dict[str, Any]]] = [
        [{}, {"flops": 1}], [{"flops": 2, "dims": {"M": 1}}, {}], [{"dims": {"M": 1, "N": 0}, "min_bytes": 0}],
        [{"flops": 1}, {"dims": {"N": 2}, "min_bytes": 2}],
    ]  # fmt: skip
    ingested = [[make(10 * n + i, cell=cell) for i, cell in enumerate(cells)] for n, cells in enumerate(amounts)]
    for records in ingested:
        ingest(opened, enumerate(records, 1), "file")
    with opened.read() as session:
        assert [record.cell for record in stored_records(session)] == [one.cell for file in ingested for one in file]
        assert list(verify(session)) == []


def test_filters_use_a_size_that_the_series_lacked_at_first(cli: Cli, write: Any, make: Any) -> None:
    assert cli("ingest", write([make(0)])).exit_code == 0
    assert cli("ingest", write([make(1, cell={"dims": {"M": 4096}, "flops": 10**12})])).exit_code == 0
    assert json.loads(cli("list", "series", "--shape", "M>=4096", "--format=json").stdout)[0]["flops"] == 10**12
    assert [row["tflops"] for row in json.loads(cli("history", "--format=json").stdout)] == [
        None,
        pytest.approx(1000, 0.01),
    ]
    exported = csv.DictReader(cli("db", "export", "-", "--format", "csv").stdout.splitlines())
    assert [row["flops"] for row in exported] == ["", f"{10**12}"]
    assert cli("db", "verify").exit_code == 0


def test_a_repeat_with_other_amounts_is_a_contradiction(cli: Cli, write: Any, make: Any) -> None:
    assert cli("ingest", write([make(0, cell={"flops": 1})])).exit_code == 0
    assert "a different result" in refused(cli, "ingest", write([make(0, cell={"flops": 2})]))
