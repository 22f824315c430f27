"""The store from Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupbench.tracker import open_tracker
from groupbench.tracker.facts.errors import QueryError, StoreError
from groupbench.tracker.query import rows as kinds
from groupbench.tracker.query.rows import HistoryRow, PointDetail
from groupbench.tracker.query.tables import Rows


@pytest.fixture
def tracker(stored: Callable[..., Path], make: Any) -> Any:
    backends = {"a": 1.0, "b": 2.0}
    nights = [make(n, backend=b, ms=ms, cell={"dims": {"M": 8}}) for n in range(3) for b, ms in backends.items()]
    path = stored([*nights, make(3, backend="a", status="oom", environment={"driver": "2"})])
    with open_tracker(path) as tracker:
        yield tracker


def test_importing_the_package_loads_nothing() -> None:
    code = """
import sys
import groupbench.tracker
heavy = ("sqlalchemy", "numpy", "click", "msgspec", "pandas", "pyarrow")
assert not [name for name in heavy if name in sys.modules]
from groupbench.tracker import open_tracker, Tracker
assert not [name for name in ("click", "rich", "pandas", "pyarrow") if name in sys.modules]
try:
    groupbench.tracker.nope
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "no attribute 'nope'" in done.stdout


def test_history(tracker: Any) -> None:
    rows = tracker.history(backend="a", baseline="b")
    assert [row.point.run.id for row in rows] == ["run-000", "run-001", "run-002", "run-003"]
    assert rows[0].speedup == pytest.approx(2, rel=1e-2)
    assert rows[3].environment_changed == ("driver 570.1 → 2",)
    assert isinstance(rows[0], HistoryRow)
    assert len(tracker.history(backend=["a", "b"])) == 7
    assert len(tracker.history(where="M>=8", since="2026-01-03", until="2026-01-03")) == 2
    assert len(tracker.history(limit=1)) == 2
    assert [row.point.run.id for row in tracker.history(commit="001..", backend="b")] == ["run-002"]
    with pytest.raises(QueryError, match="no backend 'z'; known: a, b"):
        tracker.history(backend="z")
    with pytest.raises(QueryError, match="is not a date"):
        tracker.history(since="yesterday")


def test_each_answer_is_a_list_of_dataclasses(tracker: Any) -> None:
    answers = {
        HistoryRow: tracker.history(),
        kinds.SeriesSummary: tracker.series(backend="a"),
        kinds.RunSummary: tracker.runs(2),
        kinds.CommitSummary: tracker.commits(branch=()),
        kinds.EnvironmentSummary: tracker.environments(),
        kinds.PointRow: tracker.run("run-001"),
    }
    for kind, rows in answers.items():
        assert isinstance(rows, Rows)
        assert all(isinstance(row, kind) for row in rows)
        assert rows
        assert all(set(line) == set(kind.columns()) for line in rows.flat())
        with pytest.raises(AttributeError):
            rows[0].anything = 1
    with pytest.raises(TypeError, match="no filter 'bakend'"):
        tracker.series(bakend="a")


def test_a_point(tracker: Any) -> None:
    row = tracker.history(backend="a")[0]
    detail = tracker.point(row.point.id)
    assert isinstance(detail, PointDetail)
    assert detail.point == row.point
    assert len(detail.bursts_ms) == 5
    assert all(len(burst) == 7 for burst in detail.bursts_ms)
    with pytest.raises(QueryError, match="not a point id"):
        tracker.point("x")


def test_compare(tracker: Any, write: Any, make: Any) -> None:
    comparison = tracker.compare("000", "002", backend="a")
    assert [pair.verdict for pair in comparison.pairs] == ["ok"]
    assert comparison.geometric_mean == pytest.approx(1, rel=1e-2)
    path = write([make(9, backend="a", ms=1.5)])
    assert [pair.verdict for pair in tracker.compare("000", str(path), backend="a").pairs] == ["regressed"]


@pytest.mark.sqlite
def test_sql(tracker: Any) -> None:
    assert tracker.sql("SELECT count(*) AS n FROM run").flat() == [{"n": 4}]


def test_pandas(tracker: Any) -> None:
    pytest.importorskip("pandas")
    frame = tracker.history(baseline="b").to_pandas()
    assert list(frame.columns) == list(HistoryRow.columns())
    assert len(frame) == 7
    assert frame.groupby("backend").speedup.median().round(1).to_dict() == {"a": 2.0, "b": 1.0}
    assert str(frame.started.dtype).startswith("datetime64")
    empty = tracker.history(since="2030-01-01").to_pandas()
    assert list(empty.columns) == list(HistoryRow.columns())
    assert list(tracker.compare("000", "001").to_pandas().verdict) == ["ok", "ok"]


def test_without_pandas(tracker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(QueryError, match="needs pandas, which is not installed"):
        tracker.runs().to_pandas()


def test_nothing_is_created(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such database"):
        open_tracker(tmp_path / "none.db")
    assert not list(tmp_path.iterdir())
