"""Test `groupbench confirm`: the commits that it measures for each series, and the gate's verdicts afterwards."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from click.testing import Result
from msgspec.structs import replace
from repositories import git

from groupbench.tracker.ab import confirm as confirming
from groupbench.tracker.ab.bench import AbCell, AbError, AbResult
from groupbench.tracker.ab.confirm import Measuring, confirm
from groupbench.tracker.ab.worktree import CheckoutError, WorktreeError, trees_are_equal
from groupbench.tracker.facts.loaded import loaded_of
from groupbench.tracker.facts.record import Environment
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import Compared
from groupbench.tracker.store.engine import open_store

Cli = Callable[..., Result]
Stored = Callable[..., Any]

pytestmark = [pytest.mark.usefixtures("two_nights_are_certain"), pytest.mark.sqlite]


@pytest.fixture(autouse=True)
def once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each comparison once, except in the test of the repetition."""
    if "repeated" not in request.node.name:
        monkeypatch.setattr("groupbench.tracker.ab.confirm._Confirming._is_in_doubt", lambda *_: False)


def commit(night: int) -> str:
    return f"{night:03x}" + "c" * 37


class FakeBench:
    """Answers as planned, and records the comparisons."""

    def __init__(self) -> None:
        self.planned: dict[str, dict[str, Any]] = {}  # by backend
        self.compared: list[tuple[str, str, AbCell, float]] = []
        self.trees: list[Path] = []
        self.pythons: list[tuple[str, str]] = []
        self.unknown: set[str] = set()
        self.not_checked_out: set[str] = set()
        self.then: Callable[[], None] = lambda: None  # called after each comparison
        self.unchecked: Callable[[], dict[str, list[str]]] = dict
        self.now = 0.0

    def plan(self, verdict: str, effect: float | None = None, backend: str = "triton", **more: Any) -> None:
        effect = None if effect is None else np.float64(effect)  # as the statistics give it
        interval = {} if effect is None else {"low": effect - 0.002, "high": effect + 0.002, "blocks": 12}
        self.planned[backend] = {"verdict": verdict, "effect": effect, **interval, **more}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @contextmanager
        def checkouts(
            repo: Path, wanted: list[tuple[str, str]], recipe: object, spares: object
        ) -> Iterator[list[Path]]:
            for name, _ in wanted:
                if name in self.unknown:
                    raise WorktreeError(f"git knows no commit {name!r} in {repo}")
                if name in self.not_checked_out:
                    raise CheckoutError(f"git cannot check out {name}: No space left on device")
                self.trees.append(Path(name))
            yield [Path(name) for name, _ in wanted]

        fake = self

        class Bench:
            def __init__(self, base: Any, head: Any) -> None:
                self.base, self.head = base, head

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def compare(self, cell: AbCell, budget_s: float) -> AbResult:
                fake.pythons.append((self.base.python, self.head.python))
                fake.compared.append((self.base.commit, self.head.commit, cell, budget_s))
                fake.now += 50
                planned = fake.planned[cell.backend]
                fake.then()
                if planned["verdict"] == "raise":
                    raise AbError("no such device: cuda")
                return AbResult(cell, self.base, self.head, seconds=50.0, **{"unchecked": fake.unchecked(), **planned})

        monkeypatch.setattr(confirming, "checkouts", checkouts)
        monkeypatch.setattr(confirming, "Bench", Bench)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    fake = FakeBench()
    fake.install(monkeypatch)
    return fake


def suspect(make: Any, ms: float = 1.05, nights: int = 6, **facts: Any) -> list[Any]:
    """Return a series that is quiet except on its newest night."""
    return [*[make(n, ms=1 + 0.001 * (n % 3 - 1), **facts) for n in range(nights)], make(nights, ms=ms, **facts)]


def first_line(result: Result) -> str:
    return result.stdout.split("\n")[0]


def test_different_is_a_regression_with_its_interval(cli: Cli, stored: Stored, make: Any, bench: FakeBench) -> None:
    stored(suspect(make))
    assert cli("gate").exit_code == 3
    bench.plan("different", 0.04)
    done = cli("confirm")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "CONFIRM 1 different")
    assert "different +4.1% (+3.9% .. +4.3%) 005ccccccc..006ccccccc grouped_gemm triton" in done.stdout
    assert "A/B of 005ccccccc and 006ccccccc: 1 series, at most 60 s\n" in done.stderr
    (compared,) = bench.compared
    assert compared[:2] == (commit(5), commit(6))
    assert compared[2] == AbCell("grouped_gemm", "triton", "G=4,N=1024,K=1024", "bf16", "fwd", 0, "cuda")
    result = cli("gate", "--update")
    assert (result.exit_code, first_line(result)) == (1, "GATE regression: 1 series regressed. 1 regressed")
    assert "A/B of 005ccccccc..006ccccccc: +4.1% (+3.9% to +4.3%) in 12 blocks" in result.stdout
    (row,) = json.loads(cli("gate", "--format=json").stdout)["series"]
    assert (row["ab"], row["change"]) == ("different", pytest.approx(0.05, abs=2e-3))
    assert row["now"] == pytest.approx(row["before"] * (1 + row["change"]), rel=1e-3)
    assert json.loads(cli("alerts", "--format=json").stdout)[0]["ab"] == "different"
    assert "nothing to confirm" in cli("confirm").stdout


@pytest.mark.parametrize(("verdict", "effect"), [("different", 0.04), ("same", 0.001), ("unknown", 0.02)])
def test_what_an_ab_could_not_check_stays_with_it(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench, verdict: str, effect: float
) -> None:
    stored(suspect(make))
    busy = "not checked in head: times, because other work kept the CPU busy"
    bench.plan(verdict, effect, unchecked={"head": ["times, because other work kept the CPU busy"]})
    (line,) = (line for line in cli("confirm").stdout.splitlines() if line.startswith(verdict))
    assert line.endswith(f": {busy}")
    assert f"A/B {busy}" in cli("gate", "--update").stdout
    assert cli("gate", "--update", "--format=json").stdout.count(busy) == 1


@pytest.mark.parametrize(
    ("verdict", "effect", "code", "text"),
    [
        ("same", 0.001, 0, "A/B: no difference"),
        ("unknown", 0.02, 3, "A/B unknown: too noisy"),
        ("failed", None, 3, "A/B failed: too noisy"),
        ("different", -0.04, 3, "history and A/B contradict each other"),
    ],
)
def test_what_the_gate_makes_of_it(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench, verdict: str, effect: float | None, code: int, text: str
) -> None:
    stored(suspect(make))
    bench.plan(verdict, effect, message="too noisy" if verdict != "different" else None)
    done = cli("confirm")
    assert done.exit_code == (0 if verdict in ("same", "different") else 3)
    result = cli("gate", "--update")
    assert (result.exit_code, text in result.stdout) == (code, True)
    assert "unresolved" in result.stdout or code == 0
    assert json.loads(cli("alerts", "--format=json").stdout) == []


@pytest.mark.parametrize("verdict", ["unknown", "failed"])
def test_an_ab_that_cannot_tell_hides_no_certain_change(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench, verdict: str
) -> None:
    stored(suspect(make))
    bench.plan(verdict, 0.02 if verdict == "unknown" else None, message="too noisy")
    cli("confirm")
    assert cli("gate").exit_code == 3
    stored([make(night, ms=1.05) for night in (7, 8)])
    result = cli("gate", "--window", "6")
    assert (result.exit_code, first_line(result)) == (1, "GATE regression: 1 series regressed. 1 regressed")
    assert f"A/B {verdict}: too noisy" in result.stdout


def test_an_improvement_is_confirmed_too(cli: Cli, stored: Stored, make: Any, bench: FakeBench) -> None:
    stored(suspect(make, ms=0.9))
    bench.plan("different", -0.1)
    assert cli("confirm").exit_code == 0
    result = cli("gate")
    assert (result.exit_code, first_line(result)) == (0, "GATE ok: 1 series improved. 1 improved")


def test_later_nights_are_judged_by_it(cli: Cli, stored: Stored, make: Any, bench: FakeBench) -> None:
    stored(suspect(make))
    bench.plan("same", 0.0)
    cli("confirm")
    stored([make(7, ms=1.05)])
    assert cli("gate").exit_code == 0  # the commit that was compared is on the same level
    stored([make(8, ms=1.3), make(9, ms=1.3)])
    assert cli("gate").exit_code == 1


def test_a_first_difference_is_repeated(cli: Cli, stored: Stored, make: Any, bench: FakeBench) -> None:
    """A false one would stay red for weeks."""
    stored(suspect(make))
    bench.plan("different", 0.04)
    cli("confirm")
    assert len(bench.compared) == 2


@pytest.mark.parametrize(
    ("first", "second", "kept"), [("different", "unknown", 1), ("unknown", "different", 1), ("different", "same", 0)]
)
def test_a_repeated_answer_counts_if_it_is_one(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench, first: str, second: str, kept: int
) -> None:
    stored(suspect(make))
    bench.plan(first, 0.04)
    bench.then = lambda: bench.plan(second, 0.04)
    cli("confirm")
    assert (len(bench.compared), cli("gate").exit_code) == (2, kept)


def test_what_was_tried_is_not_tried_again_unless_asked(cli: Cli, stored: Stored, make: Any, bench: FakeBench) -> None:
    stored(suspect(make))
    bench.plan("unknown", 0.02)
    assert cli("confirm").exit_code == 3
    again = cli("confirm")
    assert (again.exit_code, len(bench.compared)) == (3, 1)
    assert "--again" in again.stdout
    bench.plan("different", 0.05)
    assert cli("confirm", "--again").exit_code == 0
    assert cli("gate").exit_code == 1
    stored([make(7, ms=1.001)])
    assert cli("gate").exit_code == 0


@pytest.mark.parametrize(
    ("protocol", "timing"),
    [("cooled", (None, False)), ("cooled+idle=0.2s", (0.2, False)), ("sustained+cudagraph", (None, True))],
)
def test_the_ab_times_as_the_series_is_timed(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench, protocol: str, timing: tuple[float | None, bool]
) -> None:
    stored([
        replace(record, cell=replace(record.cell, protocol=protocol)) for record in suspect(make)
    ])  # fmt: skip
    bench.plan("same", 0.0)
    cli("confirm")
    assert [(cell.idle_s, cell.cudagraph) for _, _, cell, _ in bench.compared] == [timing]


def test_the_canary_is_overruled_by_an_ab(cli: Cli, stored: Stored, make: Any, bench: FakeBench) -> None:
    stored([*suspect(make), *suspect(make, operator="canary", backend="copy")])
    assert "1 unresolved, 1 suspect" in first_line(cli("gate"))
    bench.plan("different", 0.05)
    cli("confirm")
    assert [cell.operator for _, _, cell, _ in bench.compared] == ["grouped_gemm"]
    result = cli("gate")
    assert (result.exit_code, "code" in result.stdout) == (1, True)


def test_the_same_kernel_is_overruled_by_an_ab(cli: Cli, stored: Stored, make: Any, bench: FakeBench) -> None:
    stored(suspect(make, kernels=[{"name": "k", "hash": "one"}]))
    assert "infrastructure" in cli("gate").stdout
    bench.plan("different", 0.05)
    cli("confirm")
    result = cli("gate")
    assert (result.exit_code, "compiled kernel unchanged" in result.stdout) == (1, True)
    assert "infrastructure" not in result.stdout


def test_another_card_is_compared_on_one(cli: Cli, stored: Stored, make: Any, bench: FakeBench) -> None:
    other = {"environment": {"gpu_uuid": "GPU-2"}}
    stored([*[make(n) for n in range(6)], make(6, ms=1.2, **other)])
    assert cli("gate").exit_code == 4
    bench.plan("same", 0.0)
    assert cli("confirm").exit_code == 0
    assert bench.compared[0][:2] == (commit(5), commit(6))
    result = cli("gate")
    assert (result.exit_code, "another GPU; A/B on one GPU: no difference" in result.stdout) == (0, True)
    stored([make(7, ms=1.4, environment={"gpu_uuid": "GPU-3"})])
    bench.plan("different", 0.2)
    assert cli("confirm").exit_code == 0
    assert cli("gate").exit_code == 1


def test_another_driver_is_not(cli: Cli, stored: Stored, make: Any, bench: FakeBench) -> None:
    stored([*[make(n) for n in range(6)], make(6, environment={"gpu_uuid": "GPU-2", "driver": "580"})])
    assert "nothing to confirm" in cli("confirm").stdout
    assert bench.compared == []


def test_dirty_trees_cannot_be_measured_again(cli: Cli, stored: Stored, make: Any, bench: FakeBench) -> None:
    stored([*[make(n) for n in range(6)], make(6, ms=1.05, commit_facts={"dirty": True})])
    result = cli("gate")
    assert (result.exit_code, "is a dirty tree, which cannot be measured again" in result.stdout) == (3, True)
    assert "nothing to confirm" in cli("confirm").stdout


def test_a_commit_that_git_lacks_is_unresolved_with_the_reason(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench
) -> None:
    stored(suspect(make))
    bench.unknown = {commit(5)}
    done = cli("confirm")
    assert (done.exit_code, "git knows no commit" in done.stdout) == (3, True)
    result = cli("gate")
    assert (result.exit_code, "1 unresolved" in first_line(result)) == (3, True)
    assert "git knows no commit" in result.stdout


def test_a_full_disk_is_not_the_commits_failure(cli: Cli, stored: Stored, make: Any, bench: FakeBench) -> None:
    stored(suspect(make))
    bench.not_checked_out = {commit(5)}
    done = cli("confirm")
    assert (done.exit_code, "No space left" in done.stdout + done.stderr) == (3, True)
    bench.not_checked_out = set()
    bench.plan("same", 0.001)
    assert cli("confirm").exit_code == 0


@pytest.mark.parametrize(("status", "advice"), [("usage", True), ("oom", False)])
def test_what_fails_on_both_sides_is_told_and_tried_again(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench, status: str, advice: bool
) -> None:
    stored(suspect(make))
    message = "both (005, 006): grouped_gemm has no backend 'triton'"
    bench.plan("failed", message=message, failed_side="both", failed_status=status)
    failed = cli("confirm")
    assert (failed.exit_code, failed.stdout.splitlines()[-1]) == (3, "CONFIRM 1 failed")
    assert message in failed.stdout
    assert ("--plugin" in failed.stdout) is advice
    assert "1 unconfirmed" in first_line(cli("gate"))
    bench.plan("different", 0.04)
    assert cli("confirm", "--plugin", "my.kernels").stdout.splitlines()[-1] == "CONFIRM 1 different"


def test_what_fails_on_one_side_is_kept(cli: Cli, stored: Stored, make: Any, bench: FakeBench) -> None:
    stored(suspect(make))
    bench.plan("failed", message="head (006): cannot compile", failed_side="head", failed_status="error")
    assert cli("confirm").exit_code == 3
    assert "1 earlier comparison gave no decision; repeat them with --again" in cli("confirm").stdout


@pytest.mark.parametrize("wrong", ["device", "model"])
def test_another_machine_says_so_and_stores_nothing(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench, wrong: str
) -> None:
    stored(suspect(make))
    here = {"device": "cuda", "gpu": "NVIDIA B200"}
    bench.plan(*(("raise",) if wrong == "device" else ("same", 0.0)), head_environment=here)
    done = cli("confirm")
    assert (done.exit_code, "1 cannot be measured on this machine" in done.stdout) == (3, True)
    assert "no such device" in done.stderr or "NVIDIA B200" in done.stderr
    assert "1 unconfirmed" in first_line(cli("gate"))


def test_commits_are_checked_out_once_and_the_gravest_come_first(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench
) -> None:
    for number, ms in enumerate((1.05, 0.8, 1.2, 1.1)):
        stored(suspect(make, ms=ms, backend=f"b{number}"))
        bench.plan("same", 0.0, backend=f"b{number}")
    assert cli("confirm").exit_code == 0
    assert [cell.backend for _, _, cell, _ in bench.compared] == ["b2", "b3", "b0", "b1"]
    assert len(bench.trees) == 2


def test_a_spent_budget_is_reported(stored: Stored, make: Any, bench: FakeBench, db: Any) -> None:
    for number in range(4):
        stored(suspect(make, ms=1.2 - number / 50, backend=f"b{number}"))
        bench.plan("same", 0.0, backend=f"b{number}")
    with open_store(db, create=False) as store:
        done = confirm(store, Measuring(Path()), budget_s=120, clock=lambda: bench.now)
        assert [row.series.backend for row in done.left_out] == ["b3"]
        assert "1 left out because the budget is spent" in done.text
        assert not done.decided
        assert [round(budget) for *_, budget in bench.compared] == [60, 60, 20]
        assert confirm(store, Measuring(Path()), budget_s=120, clock=lambda: bench.now).decided


def test_usage(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make()])
    assert "nothing to confirm" in cli("confirm").stdout
    for bad in (["nope"], ["--budget", "0"], ["--budget", "x"]):
        assert cli("confirm", *bad).exit_code == 2


class FakeInterpreters:
    """Has the packages of some versions of Triton."""

    def __init__(self, *versions: str) -> None:
        self.versions = versions

    def find(self, wanted: Environment) -> str | None:
        return f"python-{wanted.triton}" if wanted.triton in self.versions else None


class TestToolchains:
    NEW: ClassVar[dict[str, Any]] = {"environment": {"triton": "3.8.0"}}

    def confirmed(self, db: Any, *versions: str) -> confirming.Confirmed:
        interpreters: Any = FakeInterpreters(*versions)
        with open_store(db, create=False) as store:
            return confirm(store, Measuring(Path(), interpreters=interpreters), budget_s=600)

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

    def test_commits_and_toolchains_are_separated(
        self, cli: Cli, stored: Stored, make: Any, db: Any, bench: FakeBench
    ) -> None:
        stored([*suspect(make)[:6], make(6, ms=1.05, **self.NEW)])
        bench.plan("different", 0.05)
        assert self.confirmed(db, "3.7.1", "3.8.0").text == "CONFIRM 2 different"
        assert [compared[:2] for compared in bench.compared] == [(commit(5), commit(5)), (commit(5), commit(6))]
        assert bench.pythons[1] == (sys.executable, sys.executable)
        (row,) = json.loads(cli("gate", "--format=json").stdout)["series"]
        assert (row["cause"], row["change"]) == ("code and toolchain", pytest.approx(0.05, abs=1e-3))

    @pytest.mark.parametrize("verdict", ["different", "same"])
    def test_what_both_could_not_check_is_named_once(
        self, cli: Cli, stored: Stored, make: Any, db: Any, bench: FakeBench, verdict: str
    ) -> None:
        stored([*suspect(make)[:6], make(6, ms=1.05, **self.NEW)])
        sides = iter(({"base": ["x"], "head": ["x"]}, {"head": ["x", "y"]}))
        bench.plan(verdict, 0.025 if verdict == "different" else 0.0)
        bench.unchecked = lambda: next(sides)
        self.confirmed(db, "3.7.1", "3.8.0")
        (row,) = json.loads(cli("gate", "--format=json").stdout)["series"]
        assert (row["ab"], row["note"].count("x")) == (verdict, 1)
        assert row["note"].endswith("A/B not checked in base and head: x; not checked in head: y")

    def test_an_interpreter_for_the_base_does_not_count_the_toolchain_twice(
        self, cli: Cli, stored: Stored, make: Any, db: Any, bench: FakeBench
    ) -> None:
        stored([*suspect(make)[:6], make(6, ms=1.05, **self.NEW)])
        old = msgspec.to_builtins(make().environment)
        new = old | {"triton": "3.8.0"}
        mixed = Compared(
            commit(5), commit(6), "different", datetime.now(UTC), 0.05, 0.04, 0.06,
            details={"software": [{"triton": "3.7.1"}, {"triton": "3.8.0"}]},
        )  # fmt: skip
        with open_store(db, create=False) as store, store.write() as session:
            comparisons.store(session, 1, mixed)  # as an earlier version stored it
        bench.plan("different", 0.05, base_environment=new, head_environment=new)
        interpreters: Any = FakeInterpreters("3.7.1", "3.8.0")
        with open_store(db, create=False) as store:
            confirm(store, Measuring(Path(), base_python=Path("python-3.7.1"), interpreters=interpreters), budget_s=600)
        assert bench.pythons == [("python-3.7.1", "python-3.8.0"), (sys.executable, sys.executable)]

    def test_an_ab_with_two_toolchains_says_so(
        self, cli: Cli, stored: Stored, make: Any, bench: FakeBench, db: Any
    ) -> None:
        stored(suspect(make))
        here = msgspec.to_builtins(make().environment)
        bench.plan("different", 0.05, base_environment=here | {"triton": "3.6.0"}, head_environment=here)
        with open_store(db, create=False) as store:
            confirm(store, Measuring(Path(), base_python=Path("/opt/old/python")), budget_s=600)
        assert bench.pythons == [("/opt/old/python", sys.executable)]
        (row,) = json.loads(cli("gate", "--format=json").stdout)["series"]
        assert (row["verdict"], row["cause"]) == ("regressed", "code and toolchain")
        assert "triton 3.6.0 → 3.7.1" in row["note"]

    def test_an_old_toolchain_that_nobody_has_is_left_undecided(
        self, cli: Cli, stored: Stored, make: Any, db: Any, bench: FakeBench
    ) -> None:
        stored([*suspect(make)[:6], make(6, ms=1.05, **self.NEW)])
        bench.plan("same", 0.0)
        done = self.confirmed(db, "3.8.0")
        assert (done.decided, done.text) == (False, "CONFIRM 1 same, 1 cannot be measured on this machine")
        (row,) = json.loads(cli("gate", "--format=json").stdout)["series"]
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
                ms = 1.05 if number == 6 else 1 + 0.001 * (number % 3 - 1)
                record = make(number, ms=ms + 1e-5 * (which == "new"), run=f"{which}-{number}", **facts)
                started = record.run.started + timedelta(hours=which == "new")
                records.append(replace(record, run=replace(record.run, started=started)))
        stored(records)
        return "stable-6", "new-6"

    def verdict(self, cli: Cli, run: str) -> str:
        row, *_ = json.loads(cli("gate", "--format=json", "--run", run).stdout)["series"]
        return str(row["verdict"])

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
            read = json.loads(cli("gate", "--format=json", "--run", run).stdout)["series"]
            return [row["verdict"] for row in read if row["metric"] == "pin"][:1]

        assert [pinned(run) for run in runs] == [["suspect"], ["suspect"]]
        bench.plan("same", 0.0)
        assert cli("confirm", runs[0]).exit_code == 0
        assert [pinned(run) for run in runs] == [[], ["suspect"]]

    def test_a_row_that_does_not_say_which_is_evidence_for_neither(
        self, cli: Cli, bench: FakeBench, runs: tuple[str, str], db: Any
    ) -> None:
        _compared_before(db)
        assert [self.verdict(cli, run) for run in runs] == ["unconfirmed", "unconfirmed"]
        bench.plan("same", 0.0)
        assert cli("confirm", runs[1]).exit_code == 0
        assert self.verdict(cli, runs[1]) == "ok"


def _compared_before(db: Any) -> None:
    """Store a comparison that does not say which software measured it, as all did once."""
    with open_store(db, create=False) as store, store.write() as session:
        comparisons.store(session, 1, Compared(commit(5), commit(6), "same", datetime(2026, 1, 8, tzinfo=UTC), 0.0))


@pytest.mark.parametrize("upgraded", [False, True])
def test_a_row_that_does_not_say_which_is_evidence_for_the_only_line(
    cli: Cli, stored: Stored, make: Any, db: Any, upgraded: bool
) -> None:
    nights = suspect(make)
    if upgraded:
        older = [make(n, ms=1 + 0.001 * (n % 3 - 1), environment={"triton": "3.6.0"}) for n in range(3)]
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
    assert compared.software == (head | {"triton": "3.7.0"}, head)
    assert compared.toolchain == ""
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
    stored([*[make(n, ms=1 + 0.001 * (n % 3 - 1), **old) for n in range(3)], *nights[3:]])
    bench.plan("same", 0.0)
    assert cli("confirm").exit_code == 0
    stored([make(7, ms=1.05, **new)])
    assert cli("gate").exit_code == 0


LOADED = loaded_of({"kernel.py": "1"}, {})
OTHER = loaded_of({"kernel.py": "2"}, {})


@pytest.mark.parametrize(
    ("base", "head", "same"), [(LOADED, LOADED, True), (LOADED, OTHER, False), (None, LOADED, False)]
)
def test_known_hashes_of_two_commits(
    stored: Stored, make: Any, db: Any, tmp_path: Path, base: Any, head: Any, same: bool
) -> None:
    stored([make(0, loaded=base), make(1, loaded=head)])
    row = SimpleNamespace(series=SimpleNamespace(pk=1))
    pair = SimpleNamespace(base=commit(0), head=commit(1))
    with open_store(db, create=False) as store:
        why = confirming.same_files(store, tmp_path, row, pair)  # type: ignore[arg-type]
    assert (why is not None) == same


def test_commits_with_equal_trees_are_not_compared(tmp_path: Path) -> None:
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "one"), ("tag", "one")):
        git(tmp_path, *words)
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "two")
    assert trees_are_equal(tmp_path, "one", "HEAD")
    (tmp_path / "README.md").write_text("text")
    git(tmp_path, "add", "README.md")
    git(tmp_path, "commit", "-q", "-m", "three")
    assert not trees_are_equal(tmp_path, "one", "HEAD")
    assert not trees_are_equal(tmp_path, "one", "nowhere")
