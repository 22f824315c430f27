"""Test `groupbench confirm` between toolchains: the comparisons, and the rows judged by them."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from msgspec.structs import replace
from nights import Cli, Stored, commit, first_line, keep, measured, rows, suspect, wobble
from planned_ab import FakeBench

from groupbench.tracker.ab import confirm as confirming
from groupbench.tracker.ab.confirm import Measuring, confirm
from groupbench.tracker.facts.record import Environment
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.engine import open_store

pytestmark = [pytest.mark.usefixtures("two_nights_are_certain", "once"), pytest.mark.sqlite]


class FakeInterpreters:
    """Has the packages of some versions of Triton."""

    def __init__(self, *versions: str) -> None:
        self.versions = versions

    def find(self, wanted: Environment) -> str | None:
        return f"python-{wanted.triton}" if wanted.triton in self.versions else None


class TestToolchains:
    NEW: ClassVar[dict[str, Any]] = {"environment": {"triton": "3.8.0"}}

    def confirmed(self, db: Any, *versions: str, **options: Any) -> confirming.Confirmed:
        interpreters: Any = FakeInterpreters(*versions)
        with open_store(db, create=False) as store:
            return confirm(store, Measuring(Path(), interpreters=interpreters, **options), budget_s=600)

    @pytest.fixture
    def upgraded(self, bench: FakeBench, stored: Stored, make: Any) -> FakeBench:
        """A series that is 5 % slower at another commit with another Triton."""
        stored([*suspect(make)[:6], make(6, ms=1.05, **self.NEW)])
        return bench

    @pytest.mark.parametrize(("effect", "verdict", "code"), [(0.05, "regressed", 1), (0.0, "ok", 0)])
    def test_one_commit_is_measured_in_both(
        self, cli: Cli, stored: Stored, make: Any, db: Any, bench: FakeBench, effect: float, verdict: str, code: int
    ) -> None:
        stored([*suspect(make)[:6], make(6, ms=1.05, commit=commit(5), **self.NEW)])
        bench.plan("different" if effect else "same", effect)
        assert self.confirmed(db, "3.7.1", "3.8.0").text.startswith("CONFIRM 1 ")
        assert [compared[:2] for compared in bench.compared] == [(commit(5), commit(5))]
        assert bench.pythons == [("python-3.7.1", "python-3.8.0")]
        done = cli("gate", "--format=json")
        (row,) = json.loads(done.stdout)["series"]
        assert (done.exit_code, row["verdict"], row["cause"]) == (code, verdict, "toolchain")
        assert self.confirmed(db, "3.7.1", "3.8.0").text == "CONFIRM nothing to confirm"

    def test_commits_and_toolchains_are_separated(self, cli: Cli, db: Any, upgraded: FakeBench) -> None:
        bench = upgraded
        bench.plan("different", 0.05)
        assert self.confirmed(db, "3.7.1", "3.8.0").text == "CONFIRM 2 different"
        assert [compared[:2] for compared in bench.compared] == [(commit(5), commit(5)), (commit(5), commit(6))]
        assert bench.pythons[1] == (sys.executable, sys.executable)
        (row,) = rows(cli)
        assert (row["cause"], row["change"]) == ("code and toolchain", pytest.approx(0.05, abs=1e-3))

    @pytest.mark.parametrize("verdict", ["different", "same"])
    def test_what_both_could_not_check_is_named_once(
        self, cli: Cli, db: Any, upgraded: FakeBench, verdict: str
    ) -> None:
        sides = iter(({"base": ["x"], "head": ["x"]}, {"head": ["x", "y"]}))
        upgraded.plan(verdict, 0.025 if verdict == "different" else 0.0)
        upgraded.unchecked = lambda: next(sides)
        self.confirmed(db, "3.7.1", "3.8.0")
        (row,) = rows(cli)
        assert (row["ab"], row["note"].count("x")) == (verdict, 1)
        assert row["note"].endswith("A/B not checked in base and head: x; not checked in head: y")

    def test_an_interpreter_for_the_base_does_not_count_the_toolchain_twice(
        self, make: Any, db: Any, upgraded: FakeBench
    ) -> None:
        new = msgspec.to_builtins(make().environment) | {"triton": "3.8.0"}
        software = [{"triton": "3.7.1"}, {"triton": "3.8.0"}]  # as an earlier version stored it
        keep(db, measured(commit(5), commit(6), "different", 0.05, 0.01, details={"software": software}))
        upgraded.plan("different", 0.05, base_environment=new, head_environment=new)
        self.confirmed(db, "3.7.1", "3.8.0", base_python=Path("python-3.7.1"))
        assert upgraded.pythons == [("python-3.7.1", "python-3.8.0"), (sys.executable, sys.executable)]

    def test_an_ab_with_two_toolchains_says_so(
        self, cli: Cli, stored: Stored, make: Any, bench: FakeBench, db: Any
    ) -> None:
        stored(suspect(make))
        here = msgspec.to_builtins(make().environment)
        bench.plan("different", 0.05, base_environment=here | {"triton": "3.6.0"}, head_environment=here)
        self.confirmed(db, base_python=Path("/opt/old/python"))
        assert bench.pythons == [("/opt/old/python", sys.executable)]
        (row,) = rows(cli)
        assert (row["verdict"], row["cause"]) == ("regressed", "code and toolchain")
        assert "triton 3.6.0 → 3.7.1" in row["note"]

    def test_an_old_toolchain_that_nobody_has_is_left_undecided(self, cli: Cli, db: Any, upgraded: FakeBench) -> None:
        upgraded.plan("same", 0.0)
        done = self.confirmed(db, "3.8.0")
        assert (done.decided, done.text) == (False, "CONFIRM 1 same, 1 cannot be measured on this machine")
        (row,) = rows(cli)
        assert (row["verdict"], row["cause"]) == ("unconfirmed", "toolchain")  # since it is not the code


class TestOneToolchainIsNoEvidenceForAnother:
    """Both toolchains of a plan have the same suspect, and the A/B of one finds no difference."""

    WAYS: ClassVar[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
        "named, of the same versions": ({"plan": "nightly@stable"}, {"plan": "nightly@new"}),
        "the plan's own and a named one": ({}, {"plan": "nightly@new", "environment": {"triton": "3.8.0"}}),
        "in turns": ({}, {"environment": {"triton": "3.8.0"}}),
    }

    @pytest.fixture(params=list(WAYS))
    def runs(self, request: pytest.FixtureRequest, stored: Stored, make: Any) -> tuple[str, str]:
        """Return the newest runs of both toolchains."""
        sides = self.WAYS[request.param]
        records = []
        for number in range(7):
            for which, facts in zip(("stable", "new"), sides, strict=True):
                ms = 1.05 if number == 6 else wobble(number)
                record = make(number, ms=ms + 1e-5 * (which == "new"), run=f"{which}-{number}", **facts)
                started = record.run.started + timedelta(hours=which == "new")
                records.append(replace(record, run=replace(record.run, started=started)))
        stored(records)
        return "stable-6", "new-6"

    def verdict(self, cli: Cli, run: str) -> str:
        return str(rows(cli, "--run", run)[0]["verdict"])

    def test_a_suspect(self, cli: Cli, bench: FakeBench, runs: tuple[str, str]) -> None:
        stable, new = runs
        assert [self.verdict(cli, run) for run in runs] == ["unconfirmed", "unconfirmed"]
        bench.plan("same", 0.0)
        assert cli("confirm", stable).exit_code == 0
        assert [self.verdict(cli, run) for run in runs] == ["ok", "unconfirmed"]
        bench.plan("different", 0.05)
        assert cli("confirm", new).exit_code == 0
        assert len(bench.compared) == 2
        assert [self.verdict(cli, run) for run in runs] == ["ok", "regressed"]

    def test_a_pin(self, cli: Cli, bench: FakeBench, runs: tuple[str, str]) -> None:
        cli("pins", "add", commit(5), "--max-slowdown", "4.9%", "--name", "v1")

        def pinned(run: str) -> list[str]:
            return [row["verdict"] for row in rows(cli, "--run", run) if row["metric"] == "pin"][:1]

        assert [pinned(run) for run in runs] == [["suspect"], ["suspect"]]
        bench.plan("same", 0.0)
        assert cli("confirm", runs[0]).exit_code == 0 and [pinned(run) for run in runs] == [[], ["suspect"]]

    def test_a_row_that_does_not_say_which_is_evidence_for_neither(
        self, cli: Cli, bench: FakeBench, runs: tuple[str, str], db: Any
    ) -> None:
        _compared_before(db)
        assert [self.verdict(cli, run) for run in runs] == ["unconfirmed", "unconfirmed"]
        bench.plan("same", 0.0)
        assert cli("confirm", runs[1]).exit_code == 0 and self.verdict(cli, runs[1]) == "ok"


def _compared_before(db: Any) -> None:
    """Store a comparison that does not say which software measured it, as all did once."""
    keep(db, measured(commit(5), commit(6), "same", 0.0))


@pytest.mark.parametrize("upgraded", [False, True])
def test_a_row_that_does_not_say_which_is_evidence_for_the_only_line(
    cli: Cli, stored: Stored, make: Any, db: Any, upgraded: bool
) -> None:
    nights = suspect(make)
    if upgraded:
        older = [make(n, ms=wobble(n), environment={"triton": "3.6.0"}) for n in range(3)]
        nights = [*older, *nights[3:]]
    stored(nights)
    assert cli("gate").exit_code == 3
    _compared_before(db)
    assert cli("gate").exit_code == 0


def test_what_measured_is_stored(cli: Cli, stored: Stored, make: Any, bench: FakeBench, db: Any) -> None:
    stored(suspect(make))
    here = msgspec.to_builtins(make().environment) | {"helion": "1.5.1"}
    bench.plan("same", 0.0, base_environment=here | {"triton": "3.7.0"}, head_environment=here)
    assert cli("confirm").exit_code == 0
    with open_store(db, create=False) as store, store.read() as session:
        (compared,) = comparisons.of_series(session, [1])[1]
    head = {"torch": "2.13.0", "triton": "3.7.1", "helion": "1.5.1", "cuda": "13.0", "python": "3.11"}
    assert compared.software == (head | {"triton": "3.7.0"}, head) and compared.toolchain == ""
    assert cli("gate").exit_code == 0


def test_another_toolchain_says_so_and_stores_nothing(cli: Cli, stored: Stored, make: Any, bench: FakeBench) -> None:
    stored(suspect(make))
    here = msgspec.to_builtins(make().environment) | {"triton": "3.8.0"}
    bench.plan("same", 0.0, head_environment=here)
    done = cli("confirm")
    assert (done.exit_code, "1 cannot be measured on this machine" in done.stdout) == (3, True)
    assert "the suspects ran with triton 3.7.1, this interpreter has triton 3.8.0: name" in done.stderr
    assert "1 unconfirmed" in first_line(cli("gate"))


@pytest.mark.parametrize("upgraded", ["older", "newer"])
def test_an_upgrade_of_the_line_keeps_its_evidence(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench, upgraded: str
) -> None:
    """The A/B of the night of the change counts on later nights, also after an upgrade."""
    old = {"environment": {"triton": "3.6.0"}} if upgraded == "older" else {}
    new = {"environment": {"triton": "3.8.0"}} if upgraded == "newer" else {}
    nights = suspect(make)
    stored([*[make(n, ms=wobble(n), **old) for n in range(3)], *nights[3:]])
    bench.plan("same", 0.0)
    assert cli("confirm").exit_code == 0
    stored([make(7, ms=1.05, **new)])
    assert cli("gate").exit_code == 0
