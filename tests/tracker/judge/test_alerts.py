"""The life of an alert: opened by the gate, updated by people, closed and reopened by new results."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from nights import Cli, Stored, commit, first_line, keep, measured, members, quiet, rows
from sqlalchemy import select

from groupbench.tracker import open_tracker
from groupbench.tracker.facts.record import LONGEST_NAME, LONGEST_TEXT
from groupbench.tracker.judge import incident_moves
from groupbench.tracker.judge import members as stored_members
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.store.schema import IncidentEvent
from groupbench.tracker.store.verify import verify


def twice(make: Any, night: int, ms: float, **fields: Any) -> list[Any]:
    """Return two results of a night, which with that of another night make a change certain."""
    return [make(night, ms=ms, **fields), make(night, ms=ms * 1.0001, run=f"run-{night:03d}-again", **fields)]


@pytest.fixture
def slower(cli: Cli, stored: Stored, make: Any, fill: Callable[..., None]) -> Cli:
    """Six quiet nights, and three results that are 5 % slower, with their alert: judged once for all tests."""

    def judge() -> None:
        facts = {"subject": "Tiles", "author": "Ada", "branch": "main"}
        stored([*quiet(make, 6), make(6, ms=1.05, commit_facts=facts), *twice(make, 7, 1.05)])
        result = cli("gate", "--update")
        assert result.exit_code == 1 and "incidents: 1 opened (1)" in result.stderr

    fill(b"slower", judge)
    return cli


@pytest.mark.sqlite
def test_the_gate_alone_writes_nothing(cli: Cli, stored: Stored, make: Any) -> None:
    stored([*quiet(make, 6), make(6, ms=1.05), *twice(make, 7, 1.05)])
    assert cli("gate").exit_code == 1
    result = cli("incidents")
    assert (result.stdout, result.stderr) == (
        "",
        "no incident is open; `gate` lists undecided series, --all closed incidents\n",
    )


def test_an_alert_names_the_change(slower: Cli, db: Any) -> None:
    (alert,) = members(slower)
    assert (alert["state"], alert["metric"], alert["cause"]) == ("new", "latency", "code")
    assert (alert["commits"], alert["subject"], alert["author"]) == ("005ccccccc..006ccccccc", "Tiles", "Ada")
    assert alert["change"] == pytest.approx(0.05, abs=0.002)
    table = slower("incidents").stdout
    assert all(text in table for text in ("new", "grouped_gemm", "triton", "+5.0%", "Tiles"))
    assert "triton" in slower("incidents", "--each").stdout
    assert slower("incidents", "--each", "--format=csv").stdout.startswith("incident,state,metric")
    with open_tracker(db) as tracker:
        assert [row.pk for row in tracker.incidents()] == [1]
        each = tracker.gate()
    assert (each.exit_code, each.rows[0].alert.incident.pk) == (1, 1)
    assert each.table().flat()[0]["incident"] == 1


@pytest.mark.sqlite
@pytest.mark.parametrize("ms", [1.0, 1.2], ids=["faster", "slower"])
def test_uncommitted_code_changes_no_incident(ms: float, slower: Cli, stored: Stored, make: Any) -> None:
    for night in (8, 9, 10, 11):
        stored([make(night, ms=ms, commit_facts={"dirty": True})])
        result = slower("gate", "--update")
        assert "incidents: unchanged, since the run measured uncommitted code" in result.stderr
    assert result.exit_code == (0 if ms == 1.0 else 1)
    stored([make(12, ms=1.05)])
    result = slower("gate", "--update")
    assert (result.exit_code, "incidents: nothing new" in result.stderr) == (1, True)
    (alert,) = members(slower, "--all")
    assert (alert["state"], alert["incident"], alert["commits"]) == ("new", 1, "005ccccccc..006ccccccc")


@pytest.mark.sqlite
@pytest.mark.parametrize("ms", [0.5, 2.0])
def test_uncommitted_code_is_no_history(ms: float, cli: Cli, stored: Stored, make: Any) -> None:
    dirty = (make(night, ms=ms, commit_facts={"dirty": True}) for night in (6, 7, 8))
    stored([*quiet(make, 6), *dirty, make(9, ms=1.0)])
    result = cli("gate", "--update")
    assert result.exit_code == 0 and "no change above" in first_line(result)


@pytest.mark.sqlite
def test_one_change_is_one_alert_however_many_nights_see_it(slower: Cli, stored: Stored, make: Any) -> None:
    for night in (8, 9, 10):
        stored([make(night, ms=1.05)])
        result = slower("gate", "--update")
        assert (result.exit_code, "incidents: nothing new" in result.stderr) == (1, True)
    assert "incident 1 new since 20" in result.stdout and "run-0" not in result.stdout
    handle = "handle it with `groupbench incidents ack 1` or `groupbench incidents expect 1`"
    assert handle in " ".join(result.stdout.split())
    assert len(members(slower, "--all")) == 1


@pytest.mark.sqlite
@pytest.mark.parametrize("ms", [1.05, 1.0, None], ids=["slow", "fast", "untimed"])
def test_a_wrong_result_does_not_hide_an_open_alert(slower: Cli, stored: Stored, make: Any, ms: float | None) -> None:
    """Its latency is not judged: the alert stays open, with the numbers of its change."""
    stored([make(8, ms=ms, status="wrong")])
    result = slower("gate", "--update", "--format=json")
    assert "incidents: 1 opened (2)" in result.stderr
    rows = {row["metric"]: row for row in json.loads(result.stdout)["series"]}
    assert sorted(rows) == ["latency", "result"]
    slow = rows["latency"]
    assert (slow["verdict"], slow["incident"], slow["commits"]) == ("regressed", 1, "005ccccccc..006ccccccc")
    assert slow["note"].startswith("still open, not judged because the result is wrong; incident 1 new since")
    assert (slow["before_ms"], slow["change"]) == pytest.approx((1.0, 0.05), abs=0.002)
    assert [alert["state"] for alert in members(slower)] == ["new", "new"]
    stored([make(9, ms=1.05)])
    assert "incidents: 1 fixed (2)" in slower("gate", "--update").stderr
    assert [alert["incident"] for alert in members(slower)] == [1]


@pytest.mark.sqlite
def test_a_wrong_result_on_an_accepted_level_has_one_row(slower: Cli, stored: Stored, make: Any) -> None:
    slower("incidents", "expect", "1", "--reason", "so be it")
    stored([make(8, ms=1.05, status="wrong")])
    (row,) = json.loads(slower("gate", "--format=json").stdout)["series"]
    assert row["verdict"] == "wrong"


@pytest.mark.sqlite
def test_changes_of_one_commit_and_backend_stand_together(cli: Cli, stored: Stored, make: Any) -> None:
    shapes = [f"G=4,N={n},K=64" for n in (64, 128, 256)]
    for shape in shapes:
        stored([*quiet(make, 6, shape=shape), make(6, ms=1.05, shape=shape), *twice(make, 7, 1.05, shape=shape)])
    assert "1 opened (1)" in cli("gate", "--update").stderr
    lines = cli("incidents").stdout.splitlines()
    assert (len(lines), lines[0]) == (3, "1 new: latency +5.0% in 3 series of grouped_gemm triton")
    lines = cli("incidents", "--each").stdout.splitlines()
    assert len(lines) == 4 + 3 and lines[-1].startswith("reproduce ")
    assert " && tritonbench --host builtin --op grouped_gemm --only " in lines[-1]
    assert cli("incidents", "expect", "1", "--series", "2", "--reason", "a larger tile").exit_code == 0
    assert sorted(alert["incident"] for alert in members(cli)) == [1, 1, 2]
    assert [alert["state"] for alert in members(cli) if alert["incident"] == 2] == ["expected"]


@pytest.mark.sqlite
def test_acknowledged_is_listed_and_passes(slower: Cli) -> None:
    assert "incident 1 acknowledged by Ada: on it" in slower("incidents", "ack", "1", "--reason", "on it").stdout
    gate = slower("gate")
    assert (gate.exit_code, "1 acknowledged regression. 1 regressed" in first_line(gate)) == (0, True)
    assert "acknowledged by Ada: on it" in gate.stdout
    strict = slower("gate", "--strict")
    assert (strict.exit_code, "GATE regression: 1 series" in strict.stdout) == (1, True)


NUMBER = "is not the number of an incident, such as 3; `groupbench incidents` lists them"
BLANK = "'--reason': it must not be blank"


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("command", "says"),
    [
        *((f"{words} --reason=\t", BLANK) for words in ("ack 1", "close 1 --as fixed")),
        *((f"{words} --reason=", BLANK) for words in ("expect 1", "ack --improvements", "accept-transition")),
        *((f"expect 1 --reason r --until={until}", "") for until in ("2020-01-01", "nonsense", "12345678", "")),
        *((command, "") for command in ("ack 7", "ack", "ack 1", "close 1", "expect 1")),
        *(
            (command, NUMBER)
            for command in ("ack 0", "ack 2-5", "expect abc --reason r", "close 0 --as fixed --reason r")
        ),
        ("ack 1 9 --reason known", "no incident 9"),
    ],
)
def test_usage(slower: Cli, command: str, says: str) -> None:
    result = slower("incidents", *command.split(" "))
    assert (result.exit_code, says in result.stderr) == (2, True), result.stderr
    assert members(slower)[0]["state"] == "new"


@pytest.mark.parametrize(("name", "longest"), [("who", LONGEST_NAME), ("reason", LONGEST_TEXT)])
def test_who_and_why_have_limits(slower: Cli, name: str, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for length, code in ((longest + 1, 2), (longest, 0)):
        if name == "who":
            monkeypatch.setenv("GIT_AUTHOR_NAME", "x" * length)
        result = slower("incidents", "ack", "1", "--reason", "on it" if name == "who" else "x" * length)
        assert result.exit_code == code, result.stderr
        if code:
            assert f": {name} is {length:,} characters long; at most {longest:,} are stored\n" in result.stderr


@pytest.mark.parametrize(
    "words", ["ack 1", "note 1", "expect 1 --until 2100-01-31", "close 1 --as fixed", "close 1 --as invalid"]
)
def test_what_people_do_leaves_no_damage(words: str, slower: Cli) -> None:
    assert slower("incidents", *words.split(), "--reason", "known").exit_code == 0
    assert slower("db", "verify").exit_code == 0


def test_an_expected_level_is_the_one_to_judge_by(slower: Cli, stored: Stored, make: Any) -> None:
    assert slower("incidents", "expect", "1", "--until", "2100-01-31", "--reason", "accuracy").exit_code == 0
    result = slower("gate", "--update")
    assert result.exit_code == 0 and "1 on an expected level" in first_line(result)
    assert "expected by Ada, until 2100-02-01 00:00 UTC: accuracy" in result.stdout
    stored([make(8, ms=1.05), make(9, ms=1.1)])
    assert "1 unconfirmed" in first_line(slower("gate")) and "+4.8%" in slower("gate").stdout
    stored([make(10, ms=1.1), make(11, ms=1.1)])
    result = slower("gate", "--update")
    assert (result.exit_code, "1 opened (2)" in result.stderr) == (1, True)
    stored([make(night, ms=1.1) for night in range(12, 20)])
    assert slower("gate").exit_code == 1
    assert slower("incidents", "expect", "2", "--reason", "too").exit_code == 0
    assert slower("gate").exit_code == 0
    stored([make(20, ms=1.2), *twice(make, 21, 1.2)])
    assert slower("gate").exit_code == 1


@pytest.mark.sqlite
def test_an_expectation_ends_at_its_date(slower: Cli, stored: Stored, make: Any, db: Any) -> None:
    until = datetime(2026, 1, 12, tzinfo=UTC)
    with open_store(db, create=False) as store, store.write() as session:
        now = until - timedelta(days=3)
        incident_moves.change(session, [1], "expected", "Ada", "for now", now, until="2026-01-11")
    stored([make(night, ms=1.05) for night in (8, 9, 10)])
    assert slower("gate", "--update").exit_code == 0
    stored([make(11, ms=1.05)])
    result = slower("gate")
    assert (result.exit_code, "expired" in result.stdout) == (1, True)
    assert members(slower)[0]["state"] == "expected"  # the gate alone writes nothing
    assert "1 reopened (1)" in slower("gate", "--update").stderr and members(slower)[0]["state"] == "new"


@pytest.mark.sqlite
def test_an_expectation_ends_when_its_commit_is_measured(slower: Cli, stored: Stored, make: Any) -> None:
    stored([make(9, backend="other", commit="f" * 40, ms=1.0, plan=None)])
    assert slower("incidents", "expect", "1", "--until", "ffffffff", "--reason", "until then").exit_code == 0
    stored([make(8, ms=1.05)])
    assert slower("gate", "--run", "run-008").exit_code == 0
    child = {"parents": ["f" * 40]}
    stored([make(10, ms=1.05, commit_facts=child)])
    assert slower("gate").exit_code == 1


@pytest.mark.sqlite
@pytest.mark.parametrize("night", [7, 3])
def test_an_expectation_cannot_end_at_a_commit_that_is_measured(slower: Cli, night: int) -> None:
    """It would end at once."""
    result = slower("incidents", "expect", "1", "--until", commit(night)[:10], "--reason", "r")
    assert (result.exit_code, "is already measured for grouped_gemm" in result.stderr) == (2, True)
    assert members(slower)[0]["state"] == "new"


@pytest.mark.sqlite
def test_a_span_to_come_is_a_date(slower: Cli) -> None:
    assert slower("incidents", "expect", "1", "--until", "30d", "--reason", "r").exit_code == 0
    until = datetime.strptime(members(slower)[0]["until"], "%Y-%m-%d %H:%M UTC").replace(tzinfo=UTC)
    assert timedelta(days=29) < until - datetime.now(UTC) < timedelta(days=31)


def test_it_closes_itself_and_a_later_slowdown_has_an_alert_of_its_own(slower: Cli, stored: Stored, make: Any) -> None:
    stored([make(8, ms=1.001)])
    assert "1 fixed (1)" in slower("gate", "--update").stderr and members(slower) == []
    assert members(slower, "--all")[0]["last"].startswith("fixed by groupbench: back on the earlier level")
    stored([make(night, ms=1.0) for night in (9, 10, 11)])
    assert slower("gate", "--update").exit_code == 0
    stored([make(12, ms=1.05), *twice(make, 13, 1.05)])
    result = slower("gate", "--update")
    assert (result.exit_code, "1 opened (2)" in result.stderr) == (1, True)
    assert members(slower)[0]["commits"] == "00bccccccc..00cccccccc"


@pytest.mark.sqlite
def test_a_regression_that_history_grew_used_to_stays_one(slower: Cli, stored: Stored, make: Any) -> None:
    stored([make(night, ms=1.05) for night in range(8, 20)])
    result = slower("gate", "--update", "--window", "5")
    assert (result.exit_code, "still there; incident 1 new" in " ".join(result.stdout.split())) == (1, True)
    (row,) = (row for row in rows(slower, "--window", "5") if row["incident"])
    assert row["low"] <= row["change"] <= row["high"], "of one estimate"
    slower("incidents", "ack", "1", "--reason", "known")
    assert slower("gate", "--window", "5").exit_code == 0
    stored([make(20, ms=1.0)])
    assert "1 fixed" in slower("gate", "--update", "--window", "5").stderr


@pytest.mark.sqlite
@pytest.mark.parametrize("ms", [1.025, 1.2])
def test_a_newer_change_does_not_hide_an_open_alert(slower: Cli, stored: Stored, make: Any, ms: float) -> None:
    stored([*(make(night, ms=1.05) for night in range(8, 15)), make(15, ms=ms), *twice(make, 16, ms)])
    of = {row["incident"]: row for row in rows(slower, "--window", "11") if row["metric"] == "latency"}
    grew = ms > 1.05
    assert {alert: row["verdict"] for alert, row in of.items()} == dict.fromkeys(
        {1, None} if grew else {1}, "regressed"
    )
    assert (of[1]["before_ms"], of[1]["p"]) == (pytest.approx(1.0, abs=0.002), None)
    assert grew or "partly taken back at 00fccccccc" in of[1]["note"]
    assert slower("gate", "--window", "11").exit_code == 1
    slower("incidents", "ack", "1", "--reason", "known")
    result = slower("gate", "--window", "11")
    assert result.exit_code == grew
    acknowledged = ["acknowledged" in row for row in result.stdout.split("\nregressed")[1:]]
    assert acknowledged == ([False, True] if grew else [True]) and result.stdout.count("reproduce") == grew


@pytest.mark.sqlite
def test_an_acknowledged_regression_that_grows_is_news(slower: Cli, stored: Stored, make: Any) -> None:
    slower("incidents", "ack", "1", "--reason", "known")
    stored([make(night, ms=1.2) for night in range(8, 13)])
    assert slower("gate").exit_code == 1 and "1 opened (2)" in slower("gate", "--update").stderr
    assert members(slower)[1]["change"] == pytest.approx(1.2 / 1.05 - 1, abs=0.01)
    assert "nothing new" in slower("gate", "--update").stderr


@pytest.mark.sqlite
def test_half_the_way_back_is_not_fixed(slower: Cli, stored: Stored, make: Any) -> None:
    stored([make(8, ms=1.03)])
    assert "fixed" not in slower("gate", "--update").stderr


def test_another_environment_fixes_nothing(slower: Cli, stored: Stored, make: Any) -> None:
    stored([make(8, ms=1.0, environment={"gpu_uuid": "GPU-other"})])
    result = slower("gate", "--update")
    assert (result.exit_code, "incidents: nothing new" in result.stderr) == (4, True)


def test_closed_by_people(slower: Cli, stored: Stored, make: Any) -> None:
    assert slower("incidents", "close", "1", "--as", "invalid", "--reason", "the fan").exit_code == 0
    assert slower("gate").exit_code == 0
    stored([make(8, ms=1.05)])
    assert slower("gate", "--update").exit_code == 0 and members(slower) == []
    assert slower("incidents", "ack", "1", "--reason", "known").exit_code == 2
    assert slower("incidents", "close", "1", "--as", "invalid", "--reason", "again").exit_code == 2


@pytest.mark.sqlite
def test_accuracy_and_repeatability(cli: Cli, stored: Stored, make: Any) -> None:
    stored([*quiet(make, 5), *quiet(make, 5, backend="b"), make(5, rms=9e-3), make(5, backend="b", repeatable=False)])
    assert "2 opened (1, 2)" in cli("gate", "--update").stderr
    assert {alert["metric"] for alert in members(cli)} == {"accuracy", "repeatability"}
    stored([make(6, rms=9e-3), make(6, backend="b", repeatable=False)])
    again = cli("gate", "--update")
    assert (again.exit_code, "nothing new" in again.stderr) == (1, True)
    assert cli("incidents", "expect", "1", "2", "--reason", "split K").exit_code == 0
    assert cli("gate").exit_code == 0
    stored([make(7, rms=9e-3), make(7, backend="b", repeatable=False)])
    assert cli("gate").exit_code == 0
    stored([make(8, rms=5e-2), make(8, backend="b", repeatable=True)])
    result = cli("gate", "--update")
    assert result.exit_code == 1 and "1 opened (3), 1 fixed (1)" in result.stderr
    stored([make(9, rms=2e-3)])
    assert "fixed (2, 3)" in cli("gate", "--update").stderr


@pytest.mark.sqlite
@pytest.mark.parametrize(("before", "after"), [(1.5e-7, 2e-6), (0.0, 3e-6)], ids=["fp32", "from_exact"])
def test_levels_of_an_accuracy_are_its_errors(cli: Cli, stored: Stored, make: Any, before: float, after: float) -> None:
    """Errors are judged with a floor, which is not part of the stored levels."""
    stored([*quiet(make, 5, rms=before), make(5, rms=after), make(6, rms=after)])
    gate = cli("gate", "--update")
    assert (gate.exit_code, f"rms {before:g} → {after:g}" in gate.stdout) == (1, True)
    (alert,) = members(cli)
    assert (alert["before"], alert["after"]) == (pytest.approx(before, abs=1e-12), pytest.approx(after))
    assert alert["change"] == (pytest.approx(after / before - 1) if before else None)
    assert cli("incidents", "ack", "1", "--reason", "known").exit_code == 0
    assert first_line(cli("gate")) == ("GATE ok: nothing new; 1 acknowledged regression. 1 regressed (1 acknowledged)")
    assert cli("incidents", "expect", "1", "--reason", "so be it").exit_code == 0
    stored([make(7, rms=after)])
    assert cli("gate", "--update").exit_code == 0
    stored([make(8, rms=before)])
    assert "1 fixed (1)" in cli("gate", "--update").stderr


@pytest.mark.sqlite
def test_a_wrong_result_fails_despite_its_alert(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0), make(1, status="wrong")])
    assert "1 opened (1)" in cli("gate", "--update").stderr
    fix = "the gate fails until the result is correct: fix the backend"
    assert fix in cli("gate").stdout and "groupbench incidents ack" not in cli("gate").stdout
    assert fix in cli("incidents", "ack", "1", "--reason", "known").stdout
    assert (cli("gate").exit_code, fix in cli("gate").stdout) == (1, True)
    assert "cannot be accepted; fix backend or tolerance" in cli("incidents", "expect", "1", "--reason", "r").stderr
    assert cli("incidents", "close", "1", "--as", "invalid", "--reason", "r").exit_code == 2
    stored([make(2)])
    assert "1 fixed (1)" in cli("gate", "--update").stderr
    assert "next: nothing: fixed" in cli("incidents", "--all").stdout
    stored([make(3, status="wrong")])
    assert "1 opened (2)" in cli("gate", "--update").stderr


@pytest.mark.sqlite
@pytest.mark.parametrize("together", [True, False])
def test_a_wrong_result_has_one_alert_whichever_night_is_judged(
    cli: Cli, stored: Stored, make: Any, together: bool
) -> None:
    right, wrong = [make(n) for n in range(4)], [make(n, status="wrong") for n in (4, 5, 6)]
    for nights in [[*right, *wrong]] if together else [right, *([night] for night in wrong)]:
        stored(nights)
        cli("gate", "--update")
    assert [(alert["metric"], alert["commits"]) for alert in members(cli)] == [("result", "003ccccccc..004ccccccc")]
    assert cli("incidents", "close", "1", "--as", "fixed", "--reason", "r").exit_code == 0
    cli("gate", "--update")
    assert [alert["incident"] for alert in members(cli)] == [1]  # again
    stored([make(7), make(8, status="wrong")])
    assert "1 opened (2), 1 fixed (1)" in cli("gate", "--update").stderr
    assert members(cli)[-1]["commits"] == "007ccccccc..008ccccccc"


@pytest.mark.sqlite
def test_who_is_gits_user_by_default(slower: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GIT_AUTHOR_NAME")
    monkeypatch.setattr("groupbench.tracker.cli.here.user", lambda: "Grace <grace@example.org>")
    assert "by Grace" in slower("incidents", "ack", "1", "--reason", "known").stdout


class TestKeeping:
    """Alerts and comparisons in backup, merge, verify and prune."""

    @pytest.fixture
    def judged(self, slower: Cli, db: Any) -> Cli:
        keep(db, *[measured(commit(5), commit(7), "different", 0.05)] * 2)
        slower("incidents", "ack", "1", "--reason", "known")
        return slower

    def test_merge_keeps_them_and_is_idempotent(self, judged: Cli, db: Any, tmp_path: Path) -> None:
        other = tmp_path / "other.db"
        for _ in range(2):
            assert judged("db", "merge", db, db=other).exit_code == 0
        for place in (db, other):
            with open_store(place, create=False) as store, store.read() as session:
                assert list(verify(session)) == []
                (alert,) = stored_members.find(session)
                assert [event.state for event in alert.incident.events] == ["new", "acknowledged"]
                assert alert.state == "acknowledged"
                assert [len(each) for each in comparisons.of_series(session, [1]).values()] == [1]

    @pytest.mark.both
    def test_the_newest_event_of_two_databases_holds(self, judged: Cli, db: Any, tmp_path: Path) -> None:
        other = tmp_path / "other.db"
        assert judged("db", "merge", db, db=other).exit_code == 0
        assert judged("incidents", "expect", "1", "--reason", "there", db=other).exit_code == 0
        assert judged("db", "merge", other).exit_code == 0
        (alert,) = json.loads(judged("incidents", "--each", "--format=json").stdout)
        assert alert["state"] == "expected" and len(alert["events"]) == 3
        assert judged("db", "merge", other).exit_code == 0 and len(members(judged)[0]["events"]) == 3

    def test_prune_keeps_the_points_of_an_alert(self, judged: Cli, stored: Stored, make: Any, db: Any) -> None:
        stored([make(night, ms=1.05) for night in range(8, 300)])
        result = judged("db", "prune", "--apply", "--every", "60")
        assert "2 evidence" in result.stdout
        with open_store(db, create=False) as store, store.read() as session:
            assert list(verify(session)) == []
            (alert,) = stored_members.find(session)
            assert (alert.span.base.id, alert.run.id, alert.machine is None) == ("run-005", "run-006", False)
        assert judged("gate").exit_code == 0

    @pytest.mark.both
    def test_verify_reports_missing_events(self, judged: Cli, db: Any) -> None:
        with open_store(db, create=False) as store, store.write() as session:
            for event in session.scalars(select(IncidentEvent)):
                session.delete(event)
            session.get_one(comparisons.ABComparison, 1).verdict = "same"
        output = judged("db", "verify").stdout
        assert "orphan: 1 incident without an event (id 1)" in output
        assert "hash: comparison 1 does not match its hash" in output
