"""Test that the answer of a search is stored, and that the gate, alerts and pages show it as the cause."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from nights import Cli, members, rows, wobble
from planned_ab import FakeBench
from repositories import git

from groupbench.tracker.ab.confirm import Measuring, confirm
from groupbench.tracker.ab.result import AbCell, AbResult, SideAccuracy
from groupbench.tracker.ab.side import AbSide
from groupbench.tracker.bisect import drive
from groupbench.tracker.bisect.causes import Searches
from groupbench.tracker.bisect.log import Header
from groupbench.tracker.bisect.search import AbFinding, ComparisonRequest
from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.serve.database import open_to_read
from groupbench.tracker.serve.verdict import judge
from groupbench.tracker.store.engine import open_store

H100 = {"device": "cuda", "gpu": "NVIDIA H100 80GB HBM3", "python": "3.11.9", "torch": "2.13.0", "triton": "3.7.1"}
RIGHT, WRONG = SideAccuracy("ok", 2e-3), SideAccuracy("wrong", 0.5, "12 % outside")
pytestmark = [pytest.mark.sqlite, pytest.mark.usefixtures("two_nights_are_certain")]


class Bench:
    """Simulate the A/Bs of a search from a planted commit, and hand them to the keeper like a real comparator."""

    def __init__(self, commits: list[str]) -> None:
        self.commits = commits
        self.planted = 5  # the commit that is slower, and wrong
        self.effect = 0.05
        self.broken: set[int] = set()
        self.dead: set[str] = set()  # backends of which no side can be measured
        self.asked: list[tuple[int, int]] = []
        self.here = H100

    def __call__(self, question: ComparisonRequest) -> AbFinding:
        base, head = (self.commits.index(commit) for commit in (question.base, question.head))
        self.asked.append((base, head))
        if self.backend in self.dead:
            return AbFinding("failed", message="no compiler", at="base")
        if head in self.broken:
            return AbFinding("failed", message="SyntaxError", at="head")
        effect = self.effect * ((head >= self.planted) - (base >= self.planted))
        is_wrong = self.metric == "accuracy"
        sides = [WRONG if is_wrong and at >= self.planted else RIGHT for at in (base, head)]
        cell = AbCell("grouped_gemm", self.backend, "G=4,N=1024,K=1024", "bf16")
        result = AbResult(
            cell, AbSide("a"), AbSide("b"), "different" if effect else "same", effect, low=effect - 0.001,
            high=effect + 0.001, base_ms=1.0, timing="gpu", min_effect=0.003, base_environment=self.here,
            head_environment=self.here, base_accuracy=sides[0], head_accuracy=sides[1],
        )  # fmt: skip
        self.keep(result, question.base, question.head)
        finding = drive.finding_of_latency if self.metric == "latency" else drive.finding_of_accuracy
        return finding(result)


@pytest.fixture(scope="module")
def ten_commits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository of ten commits, each of which changes a file."""
    folder = tmp_path_factory.mktemp("commits") / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    for number in range(10):
        (folder / "k.py").write_text(str(number))
        git(folder, "add", "k.py")
        git(folder, "commit", "-q", "-m", f"Change {number}", "--author", "Ada <a@b.c>")
    return folder


@pytest.fixture
def bench(ten_commits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Ten commits in a repository that is the current folder."""
    folder = shutil.copytree(ten_commits, tmp_path / "repository")
    monkeypatch.chdir(folder)
    made = Bench(git(folder, "rev-list", "--reverse", "HEAD").split())

    @contextmanager
    def opened(repository: Path, header: Header, keep: Any) -> Iterator[Bench]:
        made.keep, made.metric, made.backend = keep, header.metric, header.cell["backend"]
        yield made

    monkeypatch.setattr(drive, "AbComparator", opened)
    return made


@pytest.fixture
def slower(bench: Bench, stored: Any, make: Any) -> Bench:
    """Six nights at commit 1, and three slower ones at commit 8."""
    facts = {"commit_facts": {"subject": "Change 8", "author": "Bob"}}
    nights = [make(n, commit=bench.commits[1]) for n in range(6)]
    stored([*nights, *(make(n, ms=1.05, commit=bench.commits[8], **facts) for n in (6, 7, 8))])
    return bench


def hints(result: Result) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.startswith("one of ")]


def row_of(cli: Cli, *run: str) -> dict[str, Any]:
    (row,) = rows(cli, *run)
    return row


def test_the_named_commit_is_the_cause_everywhere(cli: Cli, slower: Bench, db: Path, tmp_path: Path) -> None:
    commits, files = slower.commits, {name: tmp_path / name for name in ("junit", "summary")}
    cli("gate", "--update")
    before = cli("gate")
    assert len(hints(before)) == 1 and "named by bisect" not in before.stdout
    assert "(one of 7 commits)" in cli("incidents").stdout
    found = cli("bisect", commits[1], commits[8], "--series", "1")
    assert found.stdout.startswith(f"{commits[5][:10]} made ")
    writes = [word for name, path in files.items() for word in ("-o", f"{name}={path}")]
    gate = cli("gate", *writes)
    assert not hints(gate)
    assert f"{commits[4][:10]}..{commits[5][:10]} (named by bisect)" in " ".join(gate.stdout.split())
    for name in ("junit", "summary"):
        text = files[name].read_text()
        assert "Change 5" in text and commits[5][:10] in text and "named by bisect" in text, name
        assert "since `{commits[8][:10]}`" not in text, name
    row = row_of(cli)
    assert (row["subject"], row["author"], row["one_of"]) == ("Change 5", "Ada", 7)
    assert f"ab {commits[4]} {commits[5]} " in row["repro"]
    (named,) = row["named"]
    assert named["commits"] == [{"hash": commits[5], "subject": "Change 5", "author": "Ada"}]
    assert (named["parent"], named["metric"]) == (commits[4], "latency") and named["confidence"] > 0.99
    (alert,) = members(cli)
    assert (alert["commit"], alert["subject"], alert["author"]) == (commits[5], "Change 5", "Ada")
    assert "(named by bisect)" in cli("incidents").stdout
    (served,) = judge(open_to_read(str(db)), "run-008").rows
    assert (served["label"], served["remark"]) == (commits[5][:10], "named by bisect")
    page = tmp_path / "report.html"
    assert cli("report", "-o", page).exit_code == 0
    assert "Change 5" in page.read_text() and "named by bisect" in page.read_text()
    assert cli("db", "verify").exit_code == 0


def test_the_search_begins_where_the_stored_results_step(
    cli: Cli, slower: Bench, stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = slower.commits
    stored([make(9, ms=1.0, commit=commits[4]), make(10, ms=1.05, commit=commits[6])])
    found = cli("bisect", commits[1], commits[8], "--series", "1")
    assert found.stdout.startswith(f"{commits[5][:10]} made ")
    assert "the search begins at the step of 4 commits with stored results" in found.stderr
    assert slower.asked[:3] == [(1, 8), (1, 4), (1, 6)]


def test_a_search_that_could_not_be_stored_is_stored_when_it_is_resumed(
    cli: Cli, slower: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = slower.commits

    def fails(*arguments: Any, **options: Any) -> Any:
        raise StoreError("groupbench.db: disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr("groupbench.tracker.ab.kept.open_store", fails)
        found = cli("bisect", commits[1], commits[8], "--series", "1")
    assert found.stdout.startswith(f"{commits[5][:10]} made ")
    assert found.stderr.count("not every comparison is stored: groupbench.db: disk I/O error") == 1
    assert not row_of(cli)["named"]
    asked = len(slower.asked)
    cli("bisect", "--resume")
    assert len(slower.asked) == asked
    assert row_of(cli)["named"][0]["parent"] == commits[4]


def test_an_alert_of_a_wider_range_names_it_too(cli: Cli, slower: Bench, stored: Any, make: Any) -> None:
    commits = slower.commits
    cli("gate", "--update")
    stored([make(9, ms=1.05, commit=commits[6])])  # such as by a backfill
    cli("bisect", commits[1], commits[6], "--series", "1")
    (alert,) = members(cli)
    assert alert["commit"] == commits[5]
    assert row_of(cli, "--run", "run-008")["subject"] == "Change 5"


def test_a_search_elsewhere_says_nothing_about_the_change(cli: Cli, slower: Bench, stored: Any, make: Any) -> None:
    commits = slower.commits
    stored(slower_too(slower, make))
    cli("bisect", commits[1], commits[8], "--series", "1")
    of = {row["backend"]: row for row in rows(cli)}
    assert of["triton"]["named"] and not of["other"]["named"]
    assert "--series 2 " in hints(cli("gate"))[0]
    slower.planted = 9
    cli("bisect", commits[8], commits[9], "--series", "1")
    of = {row["backend"]: row for row in rows(cli)}
    assert of["triton"]["subject"] == "Change 5" and not of["other"]["named"]


def test_a_search_for_an_improvement_does_not_explain_a_regression(cli: Cli, slower: Bench) -> None:
    slower.effect = -0.05
    found = cli("bisect", slower.commits[1], slower.commits[8], "--series", "1")
    assert found.stdout.startswith(f"{slower.commits[5][:10]} made ")
    assert row_of(cli)["named"] is None


def test_a_narrowed_range_is_called_so(cli: Cli, slower: Bench) -> None:
    commits = slower.commits
    slower.broken = {4, 5}
    result = cli("bisect", commits[1], commits[8], "--series", "1")
    assert result.stdout.startswith("narrowed to one of 3 commits")
    row = row_of(cli)
    assert [each["hash"] for each in row["named"][0]["commits"]] == commits[4:7]
    assert row["commits"] == f"{commits[3][:10]}..{commits[6][:10]}"
    gate = cli("gate")
    assert "one of 3 commits left by bisect" in " ".join(gate.stdout.split()) and not hints(gate)


def test_a_wrong_result_has_its_own_search(cli: Cli, bench: Bench, stored: Any, make: Any) -> None:
    commits = bench.commits
    wrong = [make(n, status="wrong", message="12 % outside", commit=commits[8]) for n in (6, 7)]
    stored([*(make(n, commit=commits[1]) for n in range(6)), *wrong])
    before = cli("gate")
    (hint,) = hints(before)
    assert hint.startswith("one of 7 commits: ") and "--metric accuracy" in hint
    assert "(one of 7 commits)" in " ".join(before.stdout.split())
    assert cli("bisect", commits[1], commits[8], "--series", "1", "--metric", "accuracy").exit_code == 1
    row = row_of(cli)
    assert (row["verdict"], row["subject"], row["named"][0]["metric"]) == ("wrong", "Change 5", "accuracy")
    assert not hints(cli("gate"))


def slower_too(bench: Bench, make: Any, backend: str = "other", ms: float = 1.05) -> list[Any]:
    """A further series that became slower in the same commits."""
    return [
        make(n, backend=backend, commit=bench.commits[1 if n < 6 else 8], ms=1.0 if n < 6 else ms) for n in range(9)
    ]


def first_screen(cli: Cli) -> str:
    return cli("incidents").stdout


def test_a_night_names_the_commit_and_the_owner_of_each_incident(
    cli: Cli, slower: Bench, stored: Any, make: Any
) -> None:
    stored(slower_too(slower, make))
    done = cli("confirm")
    assert f"{slower.commits[5][:10]} made grouped_gemm " in done.stdout
    number = len(slower.asked)
    assert number < 8 and "no difference" not in done.stdout
    cli("gate", "--update")
    screen = first_screen(cli)
    title = "1 confirmed: latency +5.0% to +5.1% in 2 series of grouped_gemm other, grouped_gemm triton\n"
    assert screen.startswith(title)
    assert f"{slower.commits[4][:10]}..{slower.commits[5][:10]} (named by bisect) 'Change 5'; owner Ada; " in screen
    assert "bisect named the commit (above 99.9 %)" in screen and "by history alone" not in screen
    assert cli("confirm").stdout == "CONFIRM nothing to confirm\n"
    assert len(slower.asked) == number, "one search for each incident"


def test_every_member_keeps_the_commit_that_a_search_of_one_named(
    cli: Cli, slower: Bench, stored: Any, make: Any
) -> None:
    stored(slower_too(slower, make))
    cli("confirm")
    number = len(slower.asked)
    for night, lead in ((8, 1.05), (9, 1.0), (10, 1.0)):  # the searched series is then back on the level
        if night > 8:
            facts = {"commit": slower.commits[9]}
            stored([make(night, ms=lead, backend="other", **facts), make(night, ms=1.05, **facts)])
        cli("confirm")
        gate = cli("gate", "--update")
        assert "of 7 commits" not in gate.stdout + first_screen(cli), night
        assert "(named by bisect)" in first_screen(cli)
    assert len(slower.asked) == number


def test_a_search_that_measures_nothing_waits_for_the_other_causes(
    cli: Cli, slower: Bench, stored: Any, make: Any
) -> None:
    stored(slower_too(slower, make, ms=1.4))
    slower.dead = {"other"}
    lines = cli("confirm").stderr.splitlines()
    searched = [line.split()[3] for line in lines if line.startswith("bisect ")]
    assert sorted(searched) == ["other", "triton"], "each once a night"
    cli("gate", "--update")
    assert "bisect named no commit: GOOD" in first_screen(cli)
    stored(slower_too(slower, make, "third", ms=2.0))
    lines = cli("confirm").stderr.splitlines()
    assert [line.split()[3] for line in lines if line.startswith("bisect ")] == ["third", "other"]
    assert sum("fails: no compiler" in line for line in lines) == 2, "measured again, and printed once"
    slower.dead = set()
    assert f"{slower.commits[5][:10]} made grouped_gemm other " in cli("confirm").stdout


def test_a_search_without_an_answer_is_not_repeated(cli: Cli, slower: Bench) -> None:
    cli("gate", "--update")
    assert "by history alone" in first_screen(cli) and "next: groupbench bisect " in first_screen(cli)
    slower.planted = 99
    assert "no regression to find" in cli("confirm").stdout
    assert slower.asked == [(1, 8)]
    assert cli("confirm").stdout == "CONFIRM nothing to confirm\n" and slower.asked == [(1, 8)]
    screen = first_screen(cli)
    assert "A/B of 1 series, 0 different, bisect named no commit: no regression to find" in screen
    assert "by history alone" not in screen and "groupbench bisect" not in screen


def test_a_search_continues_on_the_next_night(cli: Cli, slower: Bench, db: Path) -> None:
    """Each night has the time of two comparisons, and each comparison counts once."""
    now = [0.0]

    def search() -> bool:
        with open_store(db, create=False) as store:
            searches = Searches(store, str(db), Measuring(Path()), print, now[0] + 15, lambda: now[0])
            confirm(store, searches.measuring, budget_s=15, search=searches, clock=lambda: now[0])
            return bool(searches.done)

    compare = Bench.__call__

    def slow(bench: Bench, question: ComparisonRequest) -> AbFinding:
        now[0] += 10
        return compare(bench, question)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "__call__", slow)
        nights = 1
        while not search():
            nights += 1
    assert nights == -(-len(slower.asked) // 2) > 1
    assert len(set(slower.asked)) >= len(slower.asked) - 1, "only the named commit is compared again"
    assert row_of(cli)["subject"] == "Change 5"


def test_a_search_by_hand_names_the_owner_at_once(cli: Cli, slower: Bench) -> None:
    cli("gate", "--update")
    assert "owner unknown" in first_screen(cli)
    cli("bisect", slower.commits[0], slower.commits[9], "--series", "1")  # wider ends than the change's
    assert "owner Ada" in first_screen(cli)


def suspect_too(bench: Bench, make: Any, ms: float, **facts: Any) -> list[Any]:
    quiet = [make(n, commit=bench.commits[1], ms=wobble(n), **facts) for n in range(6)]
    return [*quiet, make(8, commit=bench.commits[8], ms=ms, **facts)]


@pytest.fixture
def noisy(stored: Any, make: Any, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    """Suspects whose A/Bs find nothing: they lack two of the nights of `slower`."""
    pairs = FakeBench()
    pairs.install(monkeypatch)
    for number in range(3):
        stored(suspect_too(bench, make, 1.15, backend=f"noise{number}"))
        pairs.plan("same", 0.0, backend=f"noise{number}")
    return pairs


def test_the_search_of_a_known_cause_comes_before_suspects(cli: Cli, slower: Bench, noisy: FakeBench) -> None:
    searched: list[int] = []
    noisy.then = lambda: searched.append(len(slower.asked))
    done = cli("confirm")
    assert f"{slower.commits[5][:10]} made grouped_gemm " in done.stdout
    assert searched == [len(slower.asked)] * 3 and searched[0] > 1


def test_a_cause_that_an_ab_finds_is_searched_before_the_other_suspects(
    cli: Cli, bench: Bench, noisy: FakeBench, stored: Any, make: Any
) -> None:
    stored(suspect_too(bench, make, 1.3))
    noisy.plan("different", 0.26)
    cells = []
    noisy.then = lambda: cells.append((noisy.compared[-1][2].backend, bool(bench.asked)))
    done = cli("confirm")
    assert f"{bench.commits[5][:10]} made grouped_gemm triton" in done.stdout
    assert [name for name, _ in cells[:2]] == ["triton", "triton"], "the second repeats the first"
    assert [was for _, was in cells] == [False, False, True, True, True]


def test_another_machine_searches_nothing(cli: Cli, slower: Bench) -> None:
    slower.here = H100 | {"gpu": "NVIDIA A100"}
    assert "this machine has NVIDIA A100" in cli("confirm").stderr
    slower.here = H100
    assert " made " in cli("confirm").stdout


def test_an_acknowledged_incident_and_one_commit_need_no_search(cli: Cli, slower: Bench) -> None:
    cli("gate", "--update")
    cli("incidents", "ack", "1", "--reason", "on it")
    cli("confirm")
    assert not slower.asked
