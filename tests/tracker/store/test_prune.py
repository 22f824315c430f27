"""`groupbench db prune`: the points that it removes and keeps, and why."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cases import Cli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sqlalchemy import func, select

from groupbench.tracker.store.engine import Store, open_store
from groupbench.tracker.store.ingest import ingest
from groupbench.tracker.store.prune import Policy, apply_pruning, plan_pruning
from groupbench.tracker.store.schema import Environment, KernelSet, Point, Run, Series
from groupbench.tracker.store.verify import verify

DRIVER = {"driver": "580.2"}


def nights_of(db: Any, backend: str = "triton") -> list[int]:
    with open_store(db, create=False) as store, store.read() as session:
        query = select(Run.uuid).join(Point, Point.run_id == Run.id).join(Series, Point.series_id == Series.id)
        starts = session.scalars(query.where(Series.backend == backend).order_by(Run.started))
        return [int(name.removeprefix("run-")) for name in starts]


def test_a_dry_run_changes_nothing_and_counts(cli: Cli, stored: Any, make: Any, db: Any) -> None:
    stored([make(night) for night in range(200)])
    result = cli("db", "prune")
    assert result.exit_code == 0
    assert "200 points: 91 younger than 90 days, 1 at the edge of a stretch" in result.stdout
    assert "--apply removes them" in result.stdout
    assert nights_of(db) == list(range(200))


def test_one_old_night_a_week_stays(cli: Cli, stored: Any, make: Any, db: Any) -> None:
    stored([make(night) for night in range(200)])
    assert cli("db", "prune", "--apply").exit_code == 0
    left = nights_of(db)
    old, young = [night for night in left if night < 109], [night for night in left if night >= 109]
    assert young == list(range(109, 200))
    mondays = [n for n in range(1, 109) if (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=n)).weekday() == 0]
    assert old == [0, *mondays]  # the first point is an edge
    assert cli("db", "verify").exit_code == 0
    again = cli("db", "prune")
    assert "0 would be removed" in again.stdout


def test_a_week_without_its_monday_keeps_its_first_night(cli: Cli, stored: Any, make: Any, db: Any) -> None:
    stored([make(night) for night in range(150) if night not in (4, 11)])
    cli("db", "prune", "--apply")
    assert {5, 12} <= set(nights_of(db))


def test_a_backfill_is_pruned_by_its_commits(cli: Cli, stored: Any, make: Any, db: Any) -> None:
    """Commits 0 to 99 were measured in one hour, the newest first, and 100 nights later."""

    def backfilled(night: int) -> Any:
        begin = datetime(2026, 1, 1, tzinfo=UTC)
        facts = {"time": begin + timedelta(days=night), "parents": [f"{night - 1:03x}" + "c" * 37] if night else []}
        record = make(night, commit_facts=facts, environment=DRIVER if night >= 50 else {})
        started = begin + timedelta(days=100, minutes=100 - night)
        return replace(record, run=replace(record.run, started=started, trigger="backfill"))

    stored([*(backfilled(night) for night in range(100)), *(make(night) for night in range(300, 320))])
    cli("db", "prune", "--apply")
    left = {night for night in nights_of(db) if night < 100}
    mondays = {n for n in range(1, 100) if (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=n)).weekday() == 0}
    assert left == {0, *mondays, 49, 50, 99}
    assert "0 would be removed" in cli("db", "prune").stdout


def test_an_outage_keeps_its_edges_and_its_weeks_prefer_a_result(cli: Cli, stored: Any, make: Any, db: Any) -> None:
    stored([make(night, status="oom" if 30 <= night < 41 else "ok") for night in range(200)])
    cli("db", "prune", "--apply")
    assert {*range(28, 46)} & {*nights_of(db)} == {29, 30, 32, 40, 41}  # not Monday 39, since its week has results


@pytest.mark.both
def test_a_series_that_ended_keeps_its_last(cli: Cli, stored: Any, make: Any, db: Any) -> None:
    stored([make(night, backend="gone") for night in range(10)] + [make(300)])
    cli("db", "prune", "--apply", "--every", "10000")
    assert nights_of(db, "gone") in ([0, 9], [0, 9])


def test_evidence_stays(opened: Store, make: Any) -> None:
    ingest(opened, enumerate((make(night) for night in range(200)), 1), "file")
    with opened.write() as session:
        evidence = select(Point.id).join(Run).where(Run.uuid.in_(["run-007", "run-008", "run-150"]))
        without = plan_pruning(session)
        pruning = plan_pruning(session, evidence=[evidence])
        assert without.removed - pruning.removed == pruning.evidence == 2
        apply_pruning(session, pruning)
        left = set(session.scalars(select(Run.uuid)))
    assert {"run-007", "run-008"} <= left


@pytest.mark.both
def test_unreferenced_rows_are_removed_too(cli: Cli, stored: Any, make: Any, db: Any) -> None:
    kernel = {"name": "k", "hash": "h"}
    stored([make(night, kernels=[{**kernel, "registers": night}]) for night in range(150)])
    cli("db", "prune", "--apply", "--compact")
    with open_store(db, create=False) as store, store.read() as session:
        assert list(verify(session)) == []
        counts = [session.scalar(select(func.count()).select_from(table)) for table in (Run, KernelSet, Point)]
        assert len(set(counts)) == 1
        assert session.scalar(select(func.count()).select_from(Environment)) == 1


@pytest.mark.sqlite
def test_compact_gives_the_space_back(cli: Cli, stored: Any, make: Any, db: Any) -> None:
    stored([make(night, backend=f"b{i}") for night in range(120) for i in range(20)])
    cli("db", "prune", "--all", "1", "--apply")
    before = db.stat().st_size
    cli("db", "prune", "--all", "1", "--apply", "--compact")
    assert db.stat().st_size < before / 1.5


def test_a_clock_that_ran_ahead_ages_nothing(opened: Store, make: Any) -> None:
    ingest(opened, enumerate([*(make(night) for night in range(60)), make(50_000)], 1), "file")
    with opened.read() as session:
        now = datetime(2026, 3, 1, tzinfo=UTC)
        assert plan_pruning(session, now=now).removed == 0


def test_a_database_without_new_runs_loses_nothing(opened: Store, make: Any) -> None:
    ingest(opened, enumerate((make(night) for night in range(60)), 1), "file")
    with opened.read() as session:
        assert plan_pruning(session, now=datetime(2040, 1, 1, tzinfo=UTC)).removed == 0


def test_an_empty_database(cli: Cli, opened: Store) -> None:
    assert "0 points" in cli("db", "prune").stdout
    assert cli("db", "prune", "--apply").exit_code == 0


# Each example makes a database.
@settings(max_examples=settings().max_examples // 3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.sqlite
def test_whatever_happened_edges_stay_and_a_second_time_removes_nothing(
    tmp_path_factory: Any, make: Any, data: st.DataObject
) -> None:
    nights = sorted(data.draw(st.sets(st.integers(0, 160), min_size=1, max_size=60)))
    kinds = [data.draw(st.sampled_from(["ok", "ok", "ok", "oom", "driver"])) for _ in nights]
    records = [
        make(night, status="oom" if kind == "oom" else "ok", environment=DRIVER if kind == "driver" else {})
        for night, kind in zip(nights, kinds, strict=True)
    ]
    policy = Policy(data.draw(st.integers(0, 60)), data.draw(st.integers(1, 30)))
    with open_store(tmp_path_factory.mktemp("prune") / "t.db", create=True) as store:
        ingest(store, enumerate(records, 1), "file")
        with store.write() as session:
            apply_pruning(session, plan_pruning(session, policy))
        with store.read() as session:
            left = {int(name.removeprefix("run-")) for name in session.scalars(select(Run.uuid))}
            assert plan_pruning(session, policy).removed == 0
            assert list(verify(session)) == []
    for i, night in enumerate(nights):
        edge = i in (0, len(nights) - 1) or kinds[i - 1] != kinds[i] or kinds[i + 1] != kinds[i]
        young = night >= nights[-1] - policy.all_days
        assert night in left or not (edge or young)
