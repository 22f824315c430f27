"""`groupbench db sql`: answers, and never writes."""

from __future__ import annotations

import _thread
import hashlib
import json
import os
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cases import Cli, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from groupbench.tracker.facts.errors import QueryError, TrackerError
from groupbench.tracker.store import sql
from groupbench.tracker.store.sql import ask

pytestmark = pytest.mark.sqlite


@pytest.fixture
def path(stored: Any, make: Any) -> Path:
    return stored([make(0), make(1), make(1, backend="b", status="oom")])


def test_answers(cli: Cli, path: Path) -> None:
    counted = "SELECT backend, count(*) AS n FROM series JOIN point ON series_id = series.id GROUP BY 1 ORDER BY 1"
    assert json.loads(cli("db", "sql", counted, "--format=json").stdout) == [
        {"backend": "b", "n": 1},
        {"backend": "triton", "n": 2},
    ]
    assert cli("db", "sql", counted, "--format=csv").stdout == "backend,n\nb,1\ntriton,2\n"
    assert cli("db", "sql", counted, "--format=md").stdout.split("\n")[0] == "| backend | n |"
    assert cli("db", "sql", counted).stdout.split() == ["backend", "n", "b", "1", "triton", "2"]
    assert cli("db", "sql", "PRAGMA table_info(point)").stdout
    assert "<3 bytes>" in cli("db", "sql", "SELECT x'010203' AS b").stdout


@pytest.mark.parametrize(
    ("statement", "row"),
    [
        ("SELECT 1, 1, NULL AS x", {"1": 1, "1:2": 1, "x": None}),
        ('SELECT 1 AS a, 2 AS a, 3 AS "a:2"', {"a": 1, "a:3": 2, "a:2": 3}),
        ("SELECT x'010203' AS b", {"b": "AQID"}),
        ("SELECT 9e999 AS x, -9e999 AS y, 1.5 AS w", {"x": "inf", "y": "-inf", "w": 1.5}),
        (
            "WITH RECURSIVE n(i) AS (VALUES(1) UNION ALL SELECT i+1 FROM n WHERE i<3) SELECT max(i) AS i FROM n",
            {"i": 3},
        ),
    ],
    ids=["equal names", "a name that is taken", "bytes", "no number", "recursive"],
)
def test_json_keeps_every_column_and_value(cli: Cli, path: Path, statement: str, row: dict[str, Any]) -> None:
    assert json.loads(cli("db", "sql", statement, "--format=json").stdout) == [row]


def test_values_are_never_part_of_the_statement(cli: Cli, path: Path) -> None:
    statement = "SELECT count(*) AS n FROM series WHERE backend = :name"
    for name, number in (("b", 1), ("' OR 1=1 --", 0)):
        assert json.loads(cli("db", "sql", statement, "-p", "name", name, "--format=json").stdout) == [{"n": number}]
    assert cli("db", "sql", statement).exit_code == 2


@pytest.mark.parametrize("form", [[], ["--format=md"]])
def test_the_name_of_a_column_cannot_steer_a_terminal(cli: Cli, path: Path, form: list[str]) -> None:
    """A database may have a table of any name and columns."""
    text = cli("db", "sql", 'SELECT 1 AS "a\x9b31m|b"', *form).stdout
    assert "\x9b" not in text
    assert ("a�31m\\|b" if form else "a�31m|b") in text


ENDLESS = "WITH RECURSIVE n(i) AS (VALUES(1) UNION ALL SELECT i + 1 FROM n) SELECT {} FROM n"


def test_an_endless_result_is_refused(cli: Cli, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "MOST_ROWS", 1000)
    assert "more than 1,000 rows; add a LIMIT" in cli("db", "sql", ENDLESS.format("i")).stderr
    assert cli("db", "sql", ENDLESS.format("i") + " LIMIT 1000").stdout.count("\n") == 1001


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (ENDLESS.format("zeroblob(1 << 20)"), "more than 8 MiB; add a LIMIT"),
        (ENDLESS.format("hex(zeroblob(1 << 19))"), "more than 8 MiB; add a LIMIT"),
        ("SELECT zeroblob(1 << 22)", "too big"),
        ("SELECT 'a' LIKE replace(hex(zeroblob(1000)), '00', '%a')", "too complex"),
    ],
)
def test_a_result_that_does_not_fit_into_memory_is_refused(
    cli: Cli, path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, message: str
) -> None:
    monkeypatch.setattr(sql, "RESULT_BYTES", 1 << 23)
    assert message in refused(cli, "db", "sql", statement + " LIMIT 1000")


def test_ctrl_c_ends_a_statement_without_end(path: Path) -> None:
    timer = threading.Timer(0.1, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ask(path, ENDLESS.format("count(*)"))
    timer.join()


def test_the_transaction_of_a_killed_process_is_not_a_refusal(cli: Cli, path: Path, tmp_path: Path) -> None:
    """A reader cannot undo it, unlike any other command."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA cache_size = 1")  # writes pages before the commit
        connection.execute("BEGIN")
        connection.execute("UPDATE point SET message = hex(randomblob(50000))")
        killed = tmp_path / "killed.db"
        for suffix in ("", "-journal"):
            shutil.copyfile(f"{path}{suffix}", f"{killed}{suffix}")
        connection.execute("ROLLBACK")
    result = cli("db", "sql", "SELECT count(*) FROM point", db=killed)
    assert (result.exit_code, sql.REFUSED in result.stderr) == (2, False)
    assert cli("db", "verify", db=killed).exit_code == 0
    assert cli("db", "sql", "SELECT count(*) FROM point", db=killed).exit_code == 0


WRITES = [
    "DELETE FROM point",
    "INSERT INTO run SELECT * FROM run",
    "UPDATE series SET backend = 'x' RETURNING id",
    "DROP TABLE point",
    "CREATE TABLE x (y)",
    "CREATE TEMP TABLE x (y)",
    "ATTACH 'other.db' AS other",
    "VACUUM INTO 'other.db'",
    "PRAGMA query_only = OFF",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA user_version = 7",
    "PRAGMA writable_schema = 1",
    "BEGIN IMMEDIATE",
    "REINDEX",
    "SELECT load_extension('x')",
    "WITH x AS (SELECT 1) DELETE FROM point",
]


@pytest.mark.parametrize("statement", WRITES)
def test_refuses_to_write(cli: Cli, path: Path, tmp_path: Path, monkeypatch: Any, statement: str) -> None:
    monkeypatch.chdir(tmp_path)
    before = content(path)
    assert "`groupbench db sql` only reads" in refused(cli, "db", "sql", statement)
    assert content(path) == before
    assert not (tmp_path / "other.db").exists()


@pytest.mark.parametrize("statement", ["DELETE FROM point", "CREATE TABLE x (y)", "PRAGMA user_version = 7"])
def test_a_second_lock_behind_the_first(path: Path, monkeypatch: pytest.MonkeyPatch, statement: str) -> None:
    """Were the authorizer to let something pass, the file is still opened to be read."""
    monkeypatch.setattr(sql, "_may", lambda *_: sqlite3.SQLITE_OK)
    before = content(path)
    with pytest.raises(QueryError):
        ask(path, statement)
    assert content(path) == before


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("SELECT 1; DELETE FROM point", "one statement"),
        ("SELECT nope FROM point", "no such column"),
        ("SELEC", "syntax error"),
        ("", "the statement is empty"),
        (" ;\n", "the statement is empty"),
        ("-- nothing", "no rows"),
        ("SELECT '\0'", "null character"),
    ],
)
def test_mistakes_are_one_line(cli: Cli, path: Path, statement: str, message: str) -> None:
    assert message in refused(cli, "db", "sql", "--", statement)


def test_a_file_that_is_not_a_database(cli: Cli, tmp_path: Path) -> None:
    assert "no such database" in cli("db", "sql", "SELECT 1", db=tmp_path / "none.db").stderr
    assert not (tmp_path / "none.db").exists()
    text = tmp_path / "text"
    text.write_text("hello " * 100)
    assert "not a database" in cli("db", "sql", "SELECT * FROM run", db=text).stderr
    assert cli("db", "sql", "SELECT 1", db="sqlite:///" + str(tmp_path / "none.db")).exit_code == 2  # type: ignore[arg-type]
    assert cli("db", "sql", "SELECT 1", db="nope://x").exit_code == 2  # type: ignore[arg-type]


def test_a_database_that_cannot_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database in WAL mode in a folder without permission for its files."""
    for beside in (f"{path}-wal", f"{path}-shm"):
        Path(beside).unlink(missing_ok=True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert ask(path, "SELECT count(*) AS n FROM point").rows == ((3,),)
    assert not Path(f"{path}-wal").exists()


WORDS = ("select", "insert", "point", "run", "*", "from", "(", ")", ",", "1", ";", "'a")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=40) | st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_any_statement_answers_or_is_refused(path: Path, statement: str) -> None:
    before = content(path)
    try:
        result = ask(path, statement)
        assert all(len(row) == len(result.columns) for row in result.rows)
    except TrackerError as error:
        assert "\n" not in error.message
    assert content(path) == before


def content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
