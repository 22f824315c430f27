"""Store what measured processes loaded: each list once, whatever the order in which its records come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import Cli, refused
from sqlalchemy import select

from groupbench.tracker.facts.loaded import ListsOnce, loaded_of
from groupbench.tracker.facts.record import Loaded, Record
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.store.records import stored_records
from groupbench.tracker.store.schema import LoadedList

ONE = loaded_of({"a.py": "1", "b.py": "2"}, {"numpy": "2.2.6"})
TWO = loaded_of({"a.py": "x", "b.py": "2"}, {"numpy": "2.2.6"})
NO_LISTS = Loaded(code=ONE.code, packages=ONE.packages)


def stored_in(db: Any) -> tuple[list[Record], dict[str, dict[str, str] | None]]:
    with open_store(db, create=False) as store, store.read() as session:
        lists = {row.content: row.items for row in session.scalars(select(LoadedList))}
        return list(stored_records(session)), lists


def test_each_list_is_stored_once(cli: Cli, db: Any, write: Any, make: Any) -> None:
    assert cli("ingest", write([make(0, loaded=ONE), make(1, loaded=NO_LISTS), make(2, loaded=TWO)])).exit_code == 0
    records, lists = stored_in(db)
    assert [record.loaded for record in records] == [ONE, ONE, TWO]
    assert lists == {ONE.code: ONE.files, ONE.packages: ONE.versions, TWO.code: TWO.files}
    assert cli("db", "verify").exit_code == 0


def test_a_list_may_come_later(cli: Cli, db: Any, write: Any, make: Any) -> None:
    assert cli("ingest", write([make(0, loaded=NO_LISTS)])).exit_code == 0
    records, lists = stored_in(db)
    assert records[0].loaded == NO_LISTS and lists == {ONE.code: None, ONE.packages: None}
    assert cli("db", "verify").exit_code == 0
    assert "1 point added" in cli("ingest", write([make(1, loaded=ONE)], "more.jsonl")).stdout
    records, _ = stored_in(db)
    assert [record.loaded for record in records] == [ONE, ONE]


def test_an_empty_list_is_known(cli: Cli, db: Any, write: Any, make: Any) -> None:
    nothing = loaded_of({}, {})
    assert cli("ingest", write([make(0, loaded=nothing), make(1, loaded=loaded_of(None, {}))])).exit_code == 0
    records, lists = stored_in(db)
    assert lists == {nothing.code: {}}
    assert [record.loaded for record in records] == [nothing, loaded_of(None, {})]


def test_export_and_ingest_give_the_same(cli: Cli, write: Any, make: Any, tmp_path: Path) -> None:
    assert cli("ingest", write([make(n, loaded=each) for n, each in enumerate((ONE, TWO, ONE, None))])).exit_code == 0
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert cli("db", "export", first).exit_code == 0
    assert first.read_bytes().count(b'"b.py"') == 2  # each list once
    other = tmp_path / "other.db"
    assert cli("ingest", first, db=other).exit_code == 0
    assert cli("db", "export", second, db=other).exit_code == 0
    assert second.read_bytes() == first.read_bytes()


def test_another_fingerprint_of_the_same_cell_contradicts(cli: Cli, write: Any, make: Any) -> None:
    assert cli("ingest", write([make(0, loaded=ONE)])).exit_code == 0
    assert "already stored with a different result" in refused(
        cli, "ingest", write([make(0, loaded=TWO)], "other.jsonl")
    )
    assert "1 already known" in cli("ingest", write([make(0, loaded=NO_LISTS)], "same.jsonl")).stdout


def test_a_hash_that_contradicts_its_list_is_refused(cli: Cli, write: Any, make: Any) -> None:
    wrong = write([make(0, loaded=Loaded(code="h", files=ONE.files))])
    assert "line 1: loaded.code is not the hash of loaded.files" in refused(cli, "ingest", wrong)


@pytest.mark.sqlite
def test_verify_finds_a_changed_list(cli: Cli, db: Any, write: Any, make: Any) -> None:
    cli("ingest", write([make(0, loaded=ONE)]))
    with open_store(db, create=False) as store, store.write() as session:
        for row in session.scalars(select(LoadedList)):
            row.items = {**(row.items or {}), "b.py": "3"}
    result = cli("db", "verify")
    assert result.exit_code == 1 and "loaded_list 1 does not match its hash" in result.stdout + result.stderr


def test_records_in_one_file_are_read_in_parts(cli: Cli, db: Any, write: Any, make: Any) -> None:
    once = ListsOnce()
    cli("ingest", write([once(make(n, loaded=ONE)) for n in range(3)]))
    assert [record.loaded for record in stored_in(db)[0]] == [ONE] * 3
