"""Records that contradict themselves are refused, and each cell is stored under one spelling."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from groupbench.tracker.cli.ingest import store
from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.store import schema
from groupbench.tracker.store.engine import open_store

LINES = (Path(__file__).parents[2] / "data/h100/1-fc7ede9-night.jsonl").read_text().splitlines()
RECORD = next(record for record in map(json.loads, LINES) if record["status"] == "ok" and record.get("accuracy"))

FUTURE = "2999-01-01T00:00:00Z"
Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize("place", ["status", "dtype", "started"])
def test_a_field_given_twice_is_refused(tmp_path: Path, place: str) -> None:
    line = json.dumps(RECORD)
    twice = re.sub(rf'("{place}": "[^"]*")', r"\1, \1", line, count=1)
    with pytest.raises(IngestError, match=f"the field '{place}' is given twice"):
        store(str(tmp_path / "db"), str(written(tmp_path, twice)))


def test_explicit_defaults_are_not_fields_given_twice(tmp_path: Path) -> None:
    assert stored(tmp_path, changed(lambda r: r["run"].update(plan=None)))


SPELLINGS: dict[str, Change] = {
    "a dtype in capitals": lambda r: r["cell"].update(dtype=r["cell"]["dtype"].upper()),
    "spaces in the shape": lambda r: r["cell"].update(shape=r["cell"]["shape"].replace(",", ", ").replace("=", " = ")),
    "a zero-width space": lambda r: r["cell"].update(backend=r["cell"]["backend"] + "\u200b"),
}


@pytest.mark.parametrize("change", SPELLINGS.values(), ids=SPELLINGS)
def test_another_spelling_is_the_same_series(tmp_path: Path, change: Change) -> None:
    stored(tmp_path, RECORD)
    assert len(stored(tmp_path, changed(lambda r: (change(r), r["run"].update(id="another"))))) == 1


def test_another_order_of_sizes_is_refused(tmp_path: Path) -> None:
    stored(tmp_path, changed(lambda r: r["cell"].update(shape="M=32,N=64")))
    other = changed(lambda r: (r["cell"].update(shape="N=64,M=32"), r["run"].update(id="another")))
    with pytest.raises(IngestError, match="line 1: the shape N=64,M=32 is M=32,N=64 in another order"):
        stored(tmp_path, other)


def test_a_commit_is_no_newer_than_its_first_run(tmp_path: Path) -> None:
    stored(tmp_path, changed(lambda r: r["run"]["commit"].update(time=FUTURE)))
    with open_store(str(tmp_path / "db"), create=False) as opened, opened.read() as session:
        (commit, started) = session.execute(select(schema.Commit.time, schema.Run.started).join(schema.Run)).one()
    assert commit == started


def changed(change: Change) -> dict[str, Any]:
    record = copy.deepcopy(RECORD)
    change(record)
    return record


def written(folder: Path, line: str) -> Path:
    path = folder / "records.jsonl"
    path.write_text(line + "\n")
    return path


def stored(folder: Path, record: dict[str, Any]) -> list[str]:
    """Store a record in the test's database, and return the identities of its series."""
    store(str(folder / "db"), str(written(folder, json.dumps(record))))
    with open_store(str(folder / "db"), create=False) as opened, opened.read() as session:
        return list(session.scalars(select(schema.Series.identity)))
