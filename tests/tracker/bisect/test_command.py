"""Test `groupbench bisect` on real repositories with simulated comparisons: ranges, logs, exit codes, output."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cases import rarely
from nights import Cli
from repositories import git

from groupbench.tracker.ab.result import AbVerdict, SideAccuracy, accuracy_change
from groupbench.tracker.bisect import drive
from groupbench.tracker.bisect.history import BisectError, read_history, relevant_paths, resolve
from groupbench.tracker.bisect.log import Header, Log, read_header
from groupbench.tracker.bisect.search import AbFinding, ComparisonRequest
from groupbench.tracker.facts.errors import TrackerError

Line = tuple[Path, dict[str, str]]
"""A repository and the hashes of its commits."""
CELL = ("--operator", "grouped_gemm", "--backend", "triton_pointer", "--shape", "2,64,32,16", "--dtype", "fp16")
BUSY = "times, because other work kept the CPU busy"
pytestmark = pytest.mark.sqlite


HEADER = Header(
    repository="r", good="a", bad="b", cell={}, metric="latency", all=False, confidence=0.95
)  # fmt: skip


def test_a_log_that_names_a_direction_still_opens(tmp_path: Path) -> None:
    log = tmp_path / "earlier.jsonl"
    log.write_bytes(msgspec.json.encode({**msgspec.to_builtins(HEADER), "direction": "worse"}) + b"\n")
    assert Log(log, HEADER, resume=True).path == log


def make_repository(folder: Path, commits: list[dict[str, Any]]) -> dict[str, str]:
    """Commits by `git fast-import`: name, parents (default: the one before), files. Returns hash by name."""
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    marks: dict[str, int] = {}
    stream = []
    previous: tuple[str, ...] = ()
    for number, commit in enumerate(commits, 1):
        parents = commit.get("parents", previous)
        subject = commit.get("subject", f"Change {commit['name']}")
        stream.append(f"commit refs/heads/{commit.get('branch', 'main')}\nmark :{number}\n")
        stream.append(f"author A. Uthor <a@b.c> {1_700_000_000 + number} +0000\n")
        stream.append(f"committer C. Ommitter <a@b.c> {1_700_000_000 + number} +0000\n")
        stream.append(f"data {len(subject)}\n{subject}\n")
        for i, parent in enumerate(parents):
            stream.append(f"{'merge' if i else 'from'} :{marks[parent]}\n")
        for path, text in commit.get("files", {"kernels/k.py": commit["name"]}).items():
            stream.append(f"M 100644 inline {path}\ndata {len(text)}\n{text}\n")
        marks[commit["name"]] = number
        previous = (commit["name"],)
    export = folder / ".git" / "marks"
    git(folder, "fast-import", "--quiet", f"--export-marks={export}", stdin="".join(stream))
    hashes = dict(line.split() for line in export.read_text().splitlines())
    return {name: hashes[f":{number}"] for name, number in marks.items()}


@pytest.fixture(scope="module")
def whole_line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    """16 commits, c0 to c15; each odd one changes only the docs."""
    commits = [
        {"name": f"c{i}", "files": {"docs.md" if i % 2 else "kernels/k.py": f"{i}", **({"p.py": "0"} if not i else {})}}
        for i in range(16)
    ]
    folder = tmp_path_factory.mktemp("line") / "repository"
    return folder, make_repository(folder, commits)


@pytest.fixture
def line(whole_line: Line, tmp_path: Path) -> Line:
    """Return a copy of that repository."""
    folder, hashes = whole_line
    return shutil.copytree(folder, tmp_path / "repository"), hashes


class Lab:
    """Simulate comparisons from planted changes, and keep the questions."""

    def __init__(self, folder: Path, hashes: dict[str, str]) -> None:
        self.folder, self.hashes, self.planted = folder, hashes, {hashes["c6"]: 0.02}
        self._above: dict[str, list[str]] = {}
        self.asked: list[ComparisonRequest] = []
        self.stop_after = 10**6
        self.broken: set[str] = set()
        self.routing = ""
        self.unaudited: set[str] = set()  # commits of which the times could not be checked
        self.spoilt: dict[str, SideAccuracy] = {}  # by the commit from which on results are so

    def result(self, commit: str) -> SideAccuracy:
        spoilt = (self.spoilt[name] for name in self.above(commit) if name in self.spoilt)
        return next(spoilt, SideAccuracy("ok", 1e-3))

    def level(self, commit: str) -> float:
        return sum(change for name, change in self.planted.items() if name in self.above(commit))

    def above(self, commit: str) -> list[str]:
        """Return a commit and those before it, newest first."""
        if commit not in self._above:
            self._above[commit] = git(self.folder, "rev-list", commit).split()
        return self._above[commit]

    def __call__(self, question: ComparisonRequest) -> AbFinding:
        if len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(question)
        if question.head in self.broken:
            return AbFinding("failed", message="kernels/k.py: SyntaxError", at="head", seconds=2.0)
        effect = self.level(question.head) - self.level(question.base)
        verdict: AbVerdict = "different" if abs(effect) > 0.001 else "same"
        return AbFinding(
            verdict, effect, effect - 0.001, effect + 0.001, base_value=1.0, head_value=1.0 + effect, blocks=12,
            seconds=10.0, kernels_differ=True,
            accuracy=accuracy_change(self.result(question.base), self.result(question.head)),
            routing=self.routing,
            unchecked={side: [BUSY] for side in ("base", "head") if getattr(question, side) in self.unaudited},
        )  # fmt: skip


@pytest.fixture
def lab(line: Line, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(*line)

    @contextmanager
    def opened(repository: Path, header: Header, keep: object) -> Iterator[Lab]:
        yield made

    monkeypatch.setattr(drive, "AbComparator", opened)
    monkeypatch.chdir(made.folder)
    return made


@pytest.fixture
def search(cli: Cli, lab: Lab) -> Cli:
    """Run the command on the whole line."""
    return lambda *more: cli("bisect", lab.hashes["c0"], lab.hashes["c15"], *CELL, *more)


def test_the_commit_is_named(cli: Cli, lab: Lab) -> None:
    hashes = lab.hashes
    result = cli("bisect", hashes["c0"], "main", *CELL, "--paths", "kernels")
    assert result.exit_code == 1, result.stderr
    first, second = result.stdout.splitlines()[:2]
    assert first.startswith(f"{hashes['c6'][:10]} made grouped_gemm triton_pointer fwd fp16 2,64,32,16 2.02 % slower")
    assert second == f"  {hashes['c6']} Change c6 (A. Uthor)"
    assert "probability that this commit is the cause: above 99.9 %" in result.stdout
    assert "the compiled kernel differs" in result.stdout
    assert "15 commits on the first-parent line; 3 steps, 5 comparisons, 50 s of measuring" in result.stdout
    assert "15 commits on the first-parent line, 7 of which change kernels" in result.stderr
    assert result.stderr.count("\n") == 6
    assert all(question.head != hashes["c7"] for question in lab.asked)


def test_json_holds_it_all(search: Cli, lab: Lab) -> None:
    folder, hashes = lab.folder, lab.hashes
    lab.broken = {hashes["c8"]}
    result = search("--format=json")
    printed = json.loads(result.stdout)
    (culprit,) = printed["culprits"]
    assert (printed["outcome"], printed["exit_code"], result.exit_code) == ("found", 1, 1)
    assert culprit["commits"] == [{"hash": hashes["c6"], "subject": "Change c6", "author": "A. Uthor"}]
    assert culprit["parent"] == hashes["c5"] and culprit["confidence"] > 0.99
    assert culprit["change"] == pytest.approx(0.0202, abs=1e-4)
    assert culprit["low"] < culprit["change"] < culprit["high"]
    assert printed["skipped"] == [{"commit": hashes["c8"], "why": "kernels/k.py: SyntaxError"}]
    assert printed["steps"] == printed["comparisons"]["step"] <= 6  # with the second attempt at c8
    assert printed["cell"]["seed"] == 0 and Path(printed["log"]).parent == (folder / ".git" / "groupbench")
    assert git(folder, "status", "--porcelain", "--untracked-files=no", ".git") == ""


def test_what_comparisons_could_not_check_is_part_of_the_answer(cli: Cli, search: Cli, lab: Lab) -> None:
    hashes = lab.hashes
    assert "not checked" not in search("--paths", "kernels").stdout
    lab.unaudited = {hashes["c0"], hashes["c6"]}
    result = search("--paths", "kernels")
    names = [hashes["c0"][:10], hashes["c6"][:10]]
    assert result.exit_code == 1 and f"not checked in {names[0]} and {names[1]}: {BUSY}\n" in result.stdout
    resumed = cli("bisect", "--resume")
    assert resumed.stdout == result.stdout
    printed = json.loads(cli("bisect", "--resume", "--format=json").stdout)
    assert printed["unchecked"] == {hashes["c0"]: [BUSY], hashes["c6"]: [BUSY]}
    assert (printed["ends"]["unchecked"], printed["culprits"][0]["unchecked"]) == ({"base": [BUSY]}, {"head": [BUSY]})
    table = cli("bisect", "--resume", "--format=csv")
    assert "not checked" not in table.stdout
    assert f"not checked in {names[0]} and {names[1]}: {BUSY}\n" in table.stderr


def test_a_commit_that_builds_its_routing_in_is_told_so(
    cli: Cli, search: Cli, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "routing", "head has a built-in routing")
    result = search()
    assert result.stdout.count("    head has a built-in routing\n") == 1
    (culprit,) = json.loads(cli("bisect", "--resume", "--format=json").stdout)["culprits"]
    assert culprit["routing"] == "head has a built-in routing"


@pytest.mark.parametrize("form", ["--format=csv", "--format=md"])
def test_tables_have_a_row_for_each_commit(search: Cli, lab: Lab, form: str) -> None:
    result = search(form)
    rows = result.stdout.splitlines()
    assert len(rows) == (2 if form == "--format=csv" else 3) and lab.hashes["c6"] in rows[-1]
    assert " made grouped_gemm" in result.stderr


@pytest.mark.parametrize(
    ("planted", "more", "code", "text"),
    [
        ({}, (), 0, "no regression to find: GOOD and BAD measure the same"),
        ({"c4": -0.02}, (), 0, "% faster"),
        *rarely(({"c4": 0.02}, (), 1, "% slower")),
        ({"c4": 0.02, "c10": 0.03}, (), 1, "+2.0 % of the difference is not explained by this; --all"),
        ({"c4": 0.02, "c10": 0.03}, ("--all",), 1, ", and 1 more"),
    ],
)
def test_exit_codes(
    search: Cli, lab: Lab, planted: dict[str, float], more: tuple[str, ...], code: int, text: str
) -> None:
    hashes = lab.hashes
    lab.planted = {hashes[name]: change for name, change in planted.items()}
    result = search(*more)
    assert result.exit_code == code, result.output
    assert text in result.stdout


IS_WRONG = "BAD's result is wrong, and GOOD's is right"
WRONG, COARSE = SideAccuracy("wrong", 0.01), SideAccuracy("ok", 1e-2)


@pytest.mark.parametrize(
    ("planted", "spoilt", "texts"),
    [
        (-0.5, WRONG, (f"{IS_WRONG}; --metric accuracy", "faster (", "result wrong")),
        (0.5, WRONG, ("% slower (64.7 to 65.0), result wrong",)),
        (0.0, COARSE, ("BAD's result is less accurate than GOOD's",)),
        *rarely(
            (0.0, WRONG, (IS_WRONG,)),
            (-0.5, COARSE, ("BAD's result is less accurate than GOOD's; --metric accuracy",)),
        ),
    ],
)
def test_a_result_that_got_worse_is_told_whatever_the_latency(
    search: Cli, lab: Lab, planted: float, spoilt: SideAccuracy, texts: tuple[str, ...]
) -> None:
    hashes = lab.hashes
    lab.planted, lab.spoilt = {hashes["c6"]: planted}, {hashes["c6"]: spoilt}
    result = search()
    assert result.exit_code == 1, result.output
    assert all(text in result.stdout for text in texts), result.stdout
    phrase = "result wrong" if spoilt is WRONG else "less accurate"
    assert phrase in result.stderr  # at the step that saw it
    again = search("--resume", "--format=json")
    assert (again.exit_code, json.loads(again.stdout)["ends"]["accuracy"]) == (1, phrase.removeprefix("result "))


@pytest.mark.parametrize(("before", "after"), [(WRONG, WRONG), (WRONG, SideAccuracy("ok", 1e-3))])
def test_a_result_that_got_no_worse_keeps_bad_from_nothing(
    search: Cli, lab: Lab, before: SideAccuracy, after: SideAccuracy
) -> None:
    hashes = lab.hashes
    lab.planted, lab.spoilt = {hashes["c6"]: -0.02}, {hashes["c0"]: before, hashes["c6"]: after}
    result = search()
    assert result.exit_code == 0 and f"{hashes['c6'][:10]} made " in result.stdout
    assert ("results of both wrong" if after is WRONG else "result fixed") in result.stdout


def test_a_range_that_cannot_be_told_apart_is_not_decided(search: Cli, lab: Lab) -> None:
    hashes = lab.hashes
    lab.broken = {hashes["c5"], hashes["c6"]}
    result = search()
    assert result.exit_code == 3
    assert result.stdout.startswith("narrowed to one of 3 commits: those between could not be compared")
    assert all(hashes[name] in result.stdout for name in ("c5", "c6", "c7"))


@pytest.mark.parametrize("stop", [3, *rarely(1, 2, 4, 5)])
def test_an_interrupted_search_goes_on_where_it_stopped(cli: Cli, search: Cli, lab: Lab, stop: int) -> None:
    whole = search()
    questions = list(lab.asked)
    assert len(questions) == 6
    lab.asked.clear()
    lab.stop_after = stop
    assert search().exit_code == 130
    lab.stop_after = 10**6
    resumed = cli("bisect", "--resume")
    assert lab.asked == questions
    assert (resumed.exit_code, resumed.stdout) == (whole.exit_code, whole.stdout)


def test_a_torn_line_is_measured_again(search: Cli, lab: Lab, tmp_path: Path) -> None:
    log = tmp_path / "search.jsonl"
    whole = search("--log", log)
    number = len(lab.asked)
    log.write_bytes(log.read_bytes()[:-20])
    again = search("--log", log, "--resume")
    assert again.stdout == whole.stdout
    assert len(lab.asked) == number + 1 and len(log.read_text().splitlines()) == number + 1


def test_a_log_of_something_else_is_refused(cli: Cli, search: Cli, lab: Lab, tmp_path: Path) -> None:
    hashes = lab.hashes
    log = tmp_path / "search.jsonl"
    search("--log", log)
    for args, word in (
        ((hashes["c0"], hashes["c14"], *CELL, "--resume"), "its bad is"),
        ((hashes["c0"], hashes["c15"], *CELL, "--resume", "--seed", "1"), "its cell is"),
        ((hashes["c0"], hashes["c15"], *CELL), "exists: continue its search with --resume"),
    ):
        result = cli("bisect", *args, "--log", log)
        assert result.exit_code == 2 and word in result.stderr
    for text in ("{}", '{"x": ' + "[" * 10_000, '{"x": "\udcff"}'):
        log.write_text(text + "\n", errors="surrogateescape")
        assert "is not the log of a search" in cli("bisect", "--resume", "--log", log).stderr
    assert "no search to resume" in cli("bisect", "--resume", "--repo", other_repository(tmp_path)).stderr


def other_repository(tmp_path: Path) -> Path:
    folder = tmp_path / "other"
    make_repository(folder, [{"name": "a"}, {"name": "b", "parents": (), "branch": "lonely"}])
    return folder


def test_a_log_says_what_it_belongs_to(cli: Cli, lab: Lab, tmp_path: Path) -> None:
    folder, hashes = lab.folder, lab.hashes
    log = tmp_path / "search.jsonl"
    cli("bisect", hashes["c0"], "HEAD", *CELL, "--log", log, "--min-effect", "3", "--paths", "kernels")
    header = read_header(log)
    assert (header.repository, header.good, header.bad) == (str(folder), hashes["c0"], hashes["c15"])
    assert header.cell["shape"] == "2,64,32,16" and header.paths == ("kernels",)
    assert header.bench == {"min_effect": 0.03}
    entries = [json.loads(text) for text in log.read_text().splitlines()[1:]]
    assert [entry["head"] for entry in entries] == [question.head for question in lab.asked]
    assert all({"effect", "low", "high", "verdict"} <= set(entry["finding"]) for entry in entries)


def test_a_history_that_changed_is_not_mixed_with_its_log(line: Line, tmp_path: Path) -> None:
    Log(tmp_path / "l", HEADER, resume=False).add(ComparisonRequest("a", "b", "ends"), AbFinding("same"))
    log = Log(tmp_path / "l", HEADER, resume=True)
    with pytest.raises(BisectError, match="start again"):
        log.replay(ComparisonRequest("a", "c", "ends"))


def test_a_comparison_that_cannot_be_kept_leaves_a_log_to_resume(tmp_path: Path, full_disk: Any) -> None:
    path, question = tmp_path / "l", ComparisonRequest("a", "b", "ends")
    log = Log(path, HEADER, resume=False)
    log.add(question, AbFinding("same"))
    before = path.read_bytes()
    with full_disk(len(before) + 10), pytest.raises(BisectError, match=r"l: cannot be written: .") as failed:
        log.add(question, AbFinding("same"))
    assert (failed.value.exit_code, path.read_bytes()) == (3, before)
    assert Log(path, HEADER, resume=True).replay(question) == AbFinding("same")


def test_series_gives_the_cell(cli: Cli, lab: Lab, stored: Any, make: Any) -> None:
    hashes = lab.hashes
    stored([make(0)])
    result = cli("bisect", hashes["c0"], hashes["c15"], "--series", "1", "--format=json")
    assert result.exit_code == 1, result.stderr
    cell = json.loads(result.stdout)["cell"]
    names = ("operator", "backend", "shape", "dtype", "mode", "seed", "plugins")
    assert [cell[name] for name in names] == ["grouped_gemm", "triton", "G=4,N=1024,K=1024", "bf16", "fwd", 0, []]
    assert cli("bisect", hashes["c0"], hashes["c15"], "--series", "1.1", "--format=json").exit_code == 1
    record = make(1)
    stored([msgspec.structs.replace(record, cell=msgspec.structs.replace(record.cell, protocol="cooled+cudagraph"))])
    result = cli("bisect", hashes["c0"], hashes["c15"], "--series", "2", "--format=json")
    assert json.loads(result.stdout)["cell"] == cell | {"cudagraph": True}
    for more, word in ((["99"], "no series"), (["x"], "no series"), (["1", "--dtype", "fp16"], "cannot be combined")):
        refused = cli("bisect", hashes["c0"], hashes["c15"], "--series", *more)
        assert refused.exit_code == 2 and word in refused.stderr


def test_usage(cli: Cli, lab: Lab, tmp_path: Path) -> None:
    hashes = lab.hashes
    for args, word in (
        ((), "GOOD and BAD, or --resume"),
        ((hashes["c0"],), "GOOD and BAD"),
        (("nowhere", "HEAD", *CELL), "git knows no commit 'nowhere'"),
        (("", "HEAD", *CELL), "is not a commit"),
        (("--", "-x", "HEAD"), "git knows no commit '-x'"),
        (("HEAD", "HEAD", *CELL), "are one commit"),
        ((hashes["c0"], "HEAD"), "nothing to measure"),
        ((hashes["c0"], "HEAD", *CELL[:4]), "--shape"),
        ((hashes["c15"], hashes["c0"], *CELL), "give the older commit first"),
        ((hashes["c0"], "HEAD", *CELL, "--paths", "nothing/here"), "no commit of the range has 'nothing/here'"),
        ((hashes["c0"], "HEAD", *CELL, "--paths", "../x"), "relative to the repository's root"),
        ((hashes["c0"], "HEAD", *CELL, "--repo", str(tmp_path)), "is not in a git repository"),
    ):
        result = cli("bisect", *args)
        assert result.exit_code == 2, args
        assert word in result.stderr, result.stderr
    assert not lab.asked


def test_a_merge_is_read_with_what_it_brought(tmp_path: Path) -> None:
    folder = tmp_path / "merging"
    branch = [
        {"name": "b1", "parents": ("root",), "branch": "side", "files": {"kernels/b.py": "1"}},
        {"name": "b2", "branch": "side", "files": {"kernels/b.py": "2"}},
    ]
    merge = {"name": "m2", "parents": ("m1", "b2"), "files": {"kernels/b.py": "2"}}
    hashes = make_repository(folder, [{"name": "root"}, {"name": "m1"}, *branch, merge])
    history = read_history(folder, hashes["m1"], hashes["m2"])
    assert history.inside == {hashes[name] for name in ("b1", "b2", "m2")}
    assert history.first_parents(hashes["m2"]) == (hashes["m1"], [hashes["m2"]])
    assert history.first_parents(hashes["b2"]) == (hashes["root"], [hashes["b1"], hashes["b2"]])
    assert history.commits[hashes["root"]].key
    assert (history.base, history.good) == (hashes["m1"], hashes["m1"])
    assert history.commits[hashes["m2"]].subject == "Change m2"
    other = read_history(folder, hashes["b2"], hashes["m1"])
    assert (other.base, other.good) == (hashes["root"], hashes["b2"]) and hashes["b2"] in other.commits


def test_unrelated_histories_are_refused(tmp_path: Path) -> None:
    folder = other_repository(tmp_path)
    with pytest.raises(BisectError, match="no common ancestor"):
        read_history(folder, resolve(folder, "main"), resolve(folder, "lonely"))


def test_own_paths_are_those_of_this_project_alone(line: Line, tmp_path: Path) -> None:
    assert relevant_paths(line[0], "HEAD") == ()
    folder = tmp_path / "own"
    files = {"kernels/a.py": "1", "operators/b.py": "1", "tracker/facts/record.py": "1"}
    make_repository(folder, [{"name": "a", "files": files}])
    assert relevant_paths(folder, "main") == ("kernels", "operators")
    assert relevant_paths(folder, "main", ("mine.backend",)) == ()


@pytest.mark.parametrize("failures", [1, 2])
def test_a_commit_that_does_not_build_is_built_once_more(
    line: Line, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    builds = Counter[str]()

    @contextmanager
    def checkout(repository: Path, commit: str, *rest: object) -> Iterator[Path]:
        builds[commit] += 1
        if commit == "head" and builds[commit] <= failures:
            raise TrackerError(f"failure {builds[commit]}")
        yield repository

    monkeypatch.setattr(drive, "checkout", checkout)
    monkeypatch.setattr(drive.AbComparator, "_compare", lambda *_: AbFinding("same", 0.0))
    with drive.AbComparator(line[0], HEADER) as compare:
        found = [compare(ComparisonRequest("base", "head", "step")) for _ in range(4)]
    assert [one.message for one in found] == ["failure 1", *([""] if failures == 1 else ["failure 2"]) * 3]
    assert builds == {"base": 1, "head": 2}


def test_the_commit_that_restores_a_commits_files_is_found(tmp_path: Path) -> None:
    folder, file = tmp_path / "repository", "kernels/k.py"
    files = ({file: "fast"}, {file: "slow"}, {"docs.md": "1"}, {file: "fast"}, {"docs.md": "2"}, {file: "other"})
    hashes = make_repository(folder, [{"name": f"c{i}", "files": each} for i, each in enumerate(files)])
    c = list(hashes.values())
    history = read_history(folder, c[0], c[5])
    assert history.restoring(c[0], c[1], c[2:]) == c[3] and history.restoring(c[0], c[1], c[2:3]) is None
    assert history.restoring(c[3], c[4], c[5:]) is None
