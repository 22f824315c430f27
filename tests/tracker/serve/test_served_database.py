"""`groupbench serve`: the database is only read, but for alerts, and one that cannot be is named."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from starlette.testclient import TestClient

from groupbench.tracker.errors import StoreError
from groupbench.tracker.serve import database
from groupbench.tracker.serve.app import create_app

Cli = Callable[..., Result]
Client = Callable[..., TestClient]
Act = Callable[..., Any]


def test_the_database_is_opened_to_read(nights: Any) -> None:
    found = database.open_to_read(str(nights))
    with found.read() as session, pytest.raises(Exception, match=r"readonly|read-only"):
        from sqlalchemy import text

        session.execute(text("DELETE FROM alert_event"))
    found.close()


@pytest.mark.sqlite
def test_a_database_that_cannot_be_served_is_named(tmp_path: Path, cli: Cli, nights: Any) -> None:
    with pytest.raises(StoreError, match="no such database"):
        create_app(str(tmp_path / "none.db"))
    (tmp_path / "text.db").write_text("text " * 100)
    with pytest.raises(StoreError, match="is not a SQLite database"):
        create_app(str(tmp_path / "text.db"))
    old = tmp_path / "old.db"
    shutil.copy(nights, old)
    with sqlite3.connect(old) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
    before = old.read_bytes()
    with pytest.raises(StoreError, match=r"is at revision 0001.*`groupbench runs` migrates it"):
        create_app(str(old))
    assert old.read_bytes() == before
    result = cli("serve", db=tmp_path / "none.db")
    assert (result.exit_code, "no such database" in result.stderr) == (2, True)


@pytest.mark.sqlite
def test_a_locked_database_is_told_and_not_waited_for_long(
    nights: Any, serve: Client, monkeypatch: Any, bearer: Any, token: str, act: Act
) -> None:
    monkeypatch.setattr(database, "BUSY_MS", 50)
    client = serve(token=token)
    other = sqlite3.connect(nights, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        answer = act(client, {**bearer, "Accept": "application/json"})
        assert answer.status_code == 503
        assert "locked" in answer.json()["error"]
        assert client.get("/alerts").status_code == 200  # readers go on
    finally:
        other.rollback()
        other.close()
    assert act(client).status_code == 303
