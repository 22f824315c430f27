"""Decisions about history: rejected runs, muted series, renamed and removed cells, limits of the plan."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cases import Cli, refused

from groupbench.tracker.judge.evidence import Evidence
from groupbench.tracker.judge.rules import RULES
from groupbench.tracker.night.plan import may_measure, store_plan
from groupbench.tracker.project import PlanEntry
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.query.series import series_rows
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.store.verify import verify

NOW = datetime(2026, 2, 1, tzinfo=UTC)
ENTRY = PlanEntry("grouped_gemm")
pytestmark = pytest.mark.sqlite


def verdicts(cli: Cli) -> dict[str, str]:
    rows = json.loads(cli("gate", "--format=json").stdout)["series"]
    return {row["backend"]: row["verdict"] for row in rows}


@pytest.fixture
def slower(stored: Any, make: Any) -> None:
    """Eight nights of two backends, one of which is slower in the last three."""
    stored([make(n, 1.0 if n < 5 or name == "b" else 1.2, backend=name) for n in range(8) for name in "ab"])


def test_a_muted_series_passes_until_its_date(slower: None, cli: Cli) -> None:
    assert cli("gate").exit_code == 1
    muted = cli("incidents", "mute", "1", "--until", "2099-01-31", "--reason", "noisy").stdout
    assert "muted until 2099-02-01 00:00 UTC: " in muted
    passed = cli("gate")
    assert passed.exit_code == 0
    assert "muted" in passed.stdout.splitlines()[0]
    assert "judged again" in cli("incidents", "unmute", "1").stdout
    assert cli("gate").exit_code == 1


def test_a_mute_needs_a_date_to_come_and_a_known_series(slower: None, cli: Cli) -> None:
    assert cli("incidents", "mute", "1", "--until", "2020-01-31", "--reason", "old").exit_code == 2
    assert cli("incidents", "mute", "99", "--until", "2099-01-31", "--reason", "old").exit_code == 2
    assert cli("incidents", "mute", "1", "--reason", "old").exit_code == 2


def test_a_mute_may_last_for_a_time(slower: None, cli: Cli) -> None:
    end = f"{datetime.now(UTC) + timedelta(days=30):%Y-%m-%d}"
    assert f"muted until {end}" in cli("incidents", "mute", "1", "--until", "30d", "--reason", "noisy").stdout


@pytest.mark.usefixtures("two_nights_are_certain")
def test_an_incident_stays_whole_when_it_reopens_and_keeps_its_reason(stored: Any, make: Any, cli: Cli) -> None:
    stored([make(night, 1.0 if night < 4 else 1.1, backend=name) for night in range(7) for name in "abc"])
    assert "1 opened (1)" in cli("gate", "--update").stderr
    cli("incidents", "ack", "1", "--reason", "a fix is in review")
    cli("incidents", "note", "1", "--reason", "seen in serving too")
    assert "acknowledged by" in (row := cli("gate").stdout) and ": a fix is in review" in row
    for options in ((), ("--all",)):
        assert ": a fix is in review" in (shown := cli("incidents", *options).stdout)
        assert ": seen in serving too\n" in shown
    (last, *_) = {each["last"] for each in json.loads(cli("incidents", "--each", "--format=json").stdout)}
    assert last.startswith("note by ") and last.endswith(": seen in serving too")
    cli("incidents", "close", "1", "--as", "fixed", "--reason", "done")
    assert "1 reopened (1)" in cli("gate", "--update").stderr
    (incident,) = json.loads(cli("incidents", "--all", "--format=json").stdout)
    assert incident["incident"] == 1


@pytest.mark.usefixtures("two_nights_are_certain")
def test_an_incident_costs_a_share_of_all_runs_of_its_night(stored: Any, make: Any, cli: Cli) -> None:
    stored([make(night, 1.0 if night < 4 else 2.0) for night in range(7)])
    stored([make(night, 8.0, backend="other", run=f"second-{night}") for night in range(7)])
    cli("gate", "--update")
    assert "costs 10 % of the night's time" in cli("incidents").stdout  # 1 ms of 2 + 8


def test_a_wrong_result_of_a_muted_series_fails(slower: None, cli: Cli, stored: Any, make: Any) -> None:
    cli("incidents", "mute", "1", "--until", "2099-01-31", "--reason", "noisy")
    stored([make(8, backend="a", status="wrong"), make(8, backend="b")])
    assert cli("gate").exit_code == 1


def test_no_run_is_compared_with_a_rejected_one(stored: Any, make: Any, cli: Cli) -> None:
    stored([make(n, 1.5 if n in (5, 6, 7) else 1.0) for n in range(8)])
    assert cli("gate").exit_code == 1
    for run in ("run-005", "run-006", "run-007"):
        assert f"rejected: run {run}" in cli("db", "reject", run, "--reason", "another job").stdout
        assert "another job" in cli("show", run).stdout
    again = cli("gate")
    assert again.exit_code == 0
    stored([make(8)])
    assert "ok" in cli("gate").stdout
    assert "counts again" in cli("db", "reject", "run-007", "--undo", "--reason", "a mistake").stdout
    marked = {row["run"]: row["rejected"] for row in json.loads(cli("list", "runs", "--format=json").stdout)}
    assert [run for run, why in marked.items() if why == "another job"] == ["run-006", "run-005"]
    for form in ("table", "md", "csv"):
        assert cli("list", "runs", f"--format={form}").stdout.count("another job") == 2


def test_the_latest_run_is_rejected_by_that_word(slower: None, cli: Cli) -> None:
    for run in ("run-007", "run-006"):
        assert f"rejected: run {run}" in cli("db", "reject", "latest", "--reason", "another job").stdout


def test_a_list_without_rejected_runs_has_no_column_for_them(slower: None, cli: Cli) -> None:
    assert "rejected" not in cli("list", "runs").stdout


def test_a_renamed_backend_continues_its_history(slower: None, cli: Cli, stored: Any, make: Any, db: Any) -> None:
    before = json.loads(cli("gate", "--format=json").stdout)["series"]
    assert "in 1 series" in cli("db", "rename", "backend", "a", "c").stdout
    stored([make(8, 1.2, backend="c"), make(8, backend="b")])
    after = {row["backend"]: row for row in json.loads(cli("gate", "--format=json").stdout)["series"]}
    assert after["c"]["verdict"] == "regressed"
    assert after["c"]["n"] == before[0]["n"] + 1
    with open_store(str(db), create=False) as store, store.read() as session:
        assert list(verify(session)) == []
    assert cli("db", "rename", "backend", "a", "c").exit_code == 2


def test_results_under_the_new_name_get_the_history_of_the_old_one(
    slower: None, cli: Cli, stored: Any, make: Any, db: Any
) -> None:
    stored([make(8, 1.2, backend="c"), make(8, backend="b")])
    assert verdicts(cli) == {"a": "missing", "b": "ok", "c": "new"}
    cli("db", "rename", "backend", "a", "c")
    assert verdicts(cli) == {"b": "ok", "c": "regressed"}
    assert "results of backend 'b' and of 'c'" in cli("db", "rename", "backend", "b", "c").stderr
    with open_store(str(db), create=False) as store, store.read() as session:
        assert list(verify(session)) == []


def test_the_plan_renames_the_series_that_it_measures(slower: None, cli: Cli, stored: Any, make: Any, db: Any) -> None:
    stored([make(8, 1.2, backend="c"), make(8, backend="b")])
    names = {"a": "c", "b": "b2", "c": "never"}
    with open_store(str(db), create=False) as store, store.write() as session:
        store_plan(session, find_run(session), [ENTRY], NOW, renamed=names)
        store_plan(session, find_run(session), [ENTRY], NOW, renamed=names)
        assert list(verify(session)) == []
    assert verdicts(cli) == {"b": "ok", "c": "regressed"}


def test_names_that_one_run_has_both_are_left_alone(slower: None, cli: Cli, db: Any) -> None:
    before = verdicts(cli)
    with open_store(str(db), create=False) as store, store.write() as session:
        store_plan(session, find_run(session), [ENTRY], NOW, renamed={"a": "b"})
    assert verdicts(cli) == before


def test_the_plan_removes_cells_and_limits_changes(slower: None, cli: Cli, stored: Any, make: Any, db: Any) -> None:
    stored([make(8, 1.2, backend="a")])
    assert verdicts(cli)["b"] == "missing"
    entry = PlanEntry("grouped_gemm", only=("a",), min_effect=0.5)
    with open_store(str(db), create=False) as store, store.write() as session:
        store_plan(session, find_run(session), [entry], NOW)
        store_plan(session, find_run(session), [entry], NOW)
    assert verdicts(cli) == {"a": "ok", "b": "ok"}
    assert "removed from the plan" in cli("gate").stdout
    with open_store(str(db), create=False) as store, store.write() as session:
        store_plan(session, find_run(session), [PlanEntry("grouped_gemm")], NOW)
    assert verdicts(cli)["a"] == "regressed"


@pytest.mark.parametrize(
    ("entry", "may"),
    [
        (ENTRY, True),
        (PlanEntry("softmax"), False),
        (PlanEntry("grouped_gemm", mode="bwd"), False),
        (PlanEntry("grouped_gemm", dtypes=("fp16",)), False),
        (PlanEntry("grouped_gemm", skip=("triton",)), False),
        (PlanEntry("grouped_gemm", shapes=("4,1024,1024",)), True),
        (PlanEntry("grouped_gemm", shapes=("4,2048,1024",)), False),
        (PlanEntry("grouped_gemm", shapes=("4,2048,1024",), suites=("default",)), True),
    ],
)
def test_only_what_an_entry_names_rules_a_series_out(
    entry: PlanEntry, may: bool, stored: Any, make: Any, db: Any
) -> None:
    stored([make(0)])
    with open_store(str(db), create=False) as store, store.read() as session:
        assert may_measure(entry, series_rows(session, [1])[1]) is may


def test_a_muted_latency_is_not_among_those_that_were_judged(stored: Any, make: Any, cli: Cli) -> None:
    stored([make(0, backend=name) for name in "ab"])
    cli("incidents", "mute", "1", "--until", "2099-01-31", "--reason", "noisy")
    assert cli("gate").stdout.startswith("GATE not judged: ")


def test_a_number_explains_its_series_alone(stored: Any, make: Any, cli: Cli) -> None:
    stored([make(n, backend=name, shape="M=1,N=2") for n in range(2) for name in "ab"])
    assert cli("gate", "--why", "1").stdout.count(" M=1,N=2") == 1
    why = cli("gate", "--why", "M=1,N=2").stdout
    assert why.count(" M=1,N=2") == 2 and "\n  changes of less than 0.3 % do not count\n" in why
    assert f"\n  rule {len(RULES)} of {len(RULES)}, the first that applies, unchanged: none of these\n" in why


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("incidents", "mute", "foo"), "'foo' is not the number of a series, such as 3; `groupbench list series`"),
        (("incidents", "unmute", "0"), "'0' is not the number of a series"),
        (("incidents", "ack", "foo"), "'foo' is not the number of an incident, such as 3; `groupbench incidents`"),
        (("incidents", "close", "1", "--series", "x"), "'x' is not the number of a series"),
        (("gate", "--window", "x"), "'x' is not a valid number"),
        (("gate", "--window", "2"), "2 is not in the range x>=3"),
    ],
)
def test_a_number_that_is_none_names_what_is_expected(cli: Cli, words: tuple[str, ...], message: str) -> None:
    assert message in refused(cli, *words)


def test_one_result_and_a_large_scatter_read_well() -> None:
    lines = Evidence(n=1, counts=math.log(2.77), reach=0.003, since=1).lines
    assert lines == [
        "earlier results: 1",
        "a first night is out beyond 0.3 %",
        "changes of less than 177 % up or 63.9 % down do not count",
        "results since the change: 1",
    ]


def test_an_empty_pattern_explains_nothing(stored: Any, make: Any, cli: Cli) -> None:
    stored([make(0)])
    assert "--why needs" in refused(cli, "gate", "--why", " ")


@pytest.mark.parametrize(("ms", "code", "line"), [(1.96, 3, "1 series unconfirmed"), (1.2, 0, "GATE undecided")])
def test_a_second_result_shows_a_gross_change(
    stored: Any, make: Any, cli: Cli, ms: float, code: int, line: str
) -> None:
    """Nothing else can decide about an imported result, because no A/B is possible."""
    stored([make(n, (1.0, ms)[n], timing="cpu") for n in range(2)])
    done = cli("gate")
    assert (done.exit_code, line in done.stdout.splitlines()[0]) == (code, True), done.stdout
