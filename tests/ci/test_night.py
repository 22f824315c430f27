"""Run the scripts in a clean clone as the workflows do: nightly runs that finish, stop or overlap, and comparisons."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, TypeAlias
from xml.etree import ElementTree

import pytest
from cases import rarely

from groupbench.tracker.facts.record import Record, read

ROOT = Path(__file__).parents[2]
Checkout: TypeAlias = Any
Service = Callable[..., Any]
Workflow = Callable[[str], Any]
ARTIFACTS = {"summary.md", "comment.md", "gate.xml", "verdict.json"}


def records(folder: Path) -> list[list[Record]]:
    """Return the records of each nightly run, oldest first."""
    files = sorted(folder.glob("2*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [[record for _, record in read(path.read_bytes().splitlines(keepends=True))] for path in files]


def runs(database: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as connection:
        return [uuid for (uuid,) in connection.execute("SELECT uuid FROM run ORDER BY started")]


def test_a_foreign_environment_runs_this_checkouts_code(checkout: Checkout) -> None:
    code = "import groupbench.tracker.facts.record as r, groupbench.operators as o; print(r.__file__, o.__file__)"
    done = checkout.run("bash", "-c", f". ci/environment.sh && groupbench_environment x && python -c '{code}'")
    assert done.returncode == 0, done.stderr
    assert all(Path(name).resolve().is_relative_to(checkout.folder.resolve()) for name in done.stdout.split())
    assert checkout.git("status", "--porcelain") == ""  # or the run's commit would be dirty


def test_a_foreign_environment_is_not_replaced(checkout: Checkout) -> None:
    file = checkout.folder / ".venv" / "file.txt"
    file.parent.mkdir()
    file.write_text("kept")
    done = checkout.run("bash", "-c", ". ci/environment.sh && groupbench_environment x", GROUPBENCH_VENV="")
    assert done.returncode == 2
    assert "was not created by this script" in done.stderr
    assert file.read_text() == "kept"


@pytest.mark.exhaustive  # the script and its steps are those of the night of GitLab
def test_a_night_of_github(checkout: Checkout, github: Service, workflow: Workflow, tmp_path: Path) -> None:
    """It exceeds its budget, and keeps its results."""
    facts = {
        "secrets.GROUPBENCH_DB || 'state/groupbench.db'": "state/groupbench.db",
        "inputs.budget || '2h'": "1ms",
    }
    job, summary = workflow("github/nightly.yml")["jobs"]["night"], tmp_path / "summary.md"
    done = github(job, checkout, facts, GITHUB_STEP_SUMMARY=str(summary))
    assert done.failed == ["Measure, store, confirm, judge, report"], done.text
    assert "skipped: grouped_gemm fwd fp32 G=3,M_g=0|1|5,N=8,K=4 (2 cells)" in done.text
    assert "2 missing" in summary.read_text()
    assert {path.name for path in (checkout.folder / "artifacts").iterdir()} == {*ARTIFACTS, "groupbench.db"}
    (night,) = records(checkout.folder / "state/records")
    assert [record.status for record in night] == ["ok", "ok", "skipped", "skipped"]
    assert {(record.run.trigger, record.run.commit.hash) for record in night} == {
        ("nightly", checkout.git("rev-parse", "HEAD"))
    }
    assert runs(checkout.folder / "state/groupbench.db") == [night[0].run.id]


def test_a_night_of_gitlab(checkout: Checkout, gitlab: Service, workflow: Workflow) -> None:
    """Its database holds a newer run of another machine, whose clock differs."""
    (checkout.folder / "state").mkdir()
    (checkout.folder / "other.jsonl").write_text(json.dumps(wrong_and_foreign()))
    store = "groupbench --db state/groupbench.db ingest other.jsonl"
    stored = checkout.run("bash", "-c", f". ci/environment.sh && groupbench_environment x && {store}")
    assert stored.returncode == 0, stored.stderr
    done = gitlab(workflow("gitlab/nightly.yml")["groupbench-night"], checkout)
    assert not done.failed, done.text
    artifacts = checkout.folder / "artifacts"
    assert {path.name for path in artifacts.iterdir()} == {*ARTIFACTS, "groupbench.db"}
    assert len(list(ElementTree.parse(artifacts / "gate.xml").iter("testcase"))) == 4 + 1  # the verdict
    assert json.loads((artifacts / "verdict.json").read_text())["exit_code"] == 0
    run, foreign = runs(artifacts / "groupbench.db")
    assert [run, foreign] == runs(checkout.folder / "state/groupbench.db")
    assert (json.loads((artifacts / "verdict.json").read_text())["run"], foreign) == (run, "foreign")
    assert "foreign" not in (artifacts / "summary.md").read_text()
    report = (checkout.folder / "report.html").read_text()
    assert "<html" in report and run[:12] in report


def wrong_and_foreign() -> dict[str, Any]:
    """Return the record of a wrong result that another machine measures in 20 hours."""
    commit = {"hash": "f" * 40}
    started = (datetime.now(UTC) + timedelta(hours=20)).isoformat()
    return {
        "schema": 1,
        "run": {"id": "foreign", "started": started, "trigger": "nightly", "plan": "tiny", "commit": commit},
        "environment": {"device": "cpu", "cpu": "X"},
        "cell": {"operator": "grouped_gemm", "backend": "torch_loop", "shape": "1,4,4,4", "dtype": "fp32"},
        "status": "wrong",
        "message": "x",
    }


SLOW = """
import pathlib, time
from groupbench.operators.catalog.grouped_gemm import prepare_torch_loop
from groupbench.operators.operator import Backend

def prepare(inputs):
    pathlib.Path("started").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.1)
    return prepare_torch_loop(inputs)

BACKEND = Backend("triton_pointer", prepare, "a test", operator="grouped_gemm")
"""


def until(path: Path, process: Any) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


@pytest.fixture
def slow(checkout: Checkout) -> tuple[str, ...]:
    """Return the command of a nightly run whose second backend waits for the file `go`."""
    (checkout.folder / "slow.py").write_text(SLOW)
    checkout.environment["GROUPBENCH_CONFIRM_MINUTES"] = "0"
    return ("env", "GROUPBENCH_WRITABLE=.", "bash", "ci/nightly.sh", "--plugin", "slow.BACKEND")


@pytest.mark.parametrize("number", [signal.SIGTERM, *rarely(signal.SIGKILL)], ids=lambda number: number.name)
def test_an_interrupted_night_goes_on(number: signal.Signals, checkout: Checkout, slow: tuple[str, ...]) -> None:
    old = checkout.folder / "artifacts/comment.md"
    old.parent.mkdir()
    old.write_text("nothing got worse")  # of an earlier verdict
    first = checkout.start(*slow)
    until(checkout.folder / "started", first)
    assert not old.exists()
    second = checkout.run(*slow)
    assert second.returncode == 75
    assert f"pid {first.pid} of " in second.stderr and "night --plugin slow.BACKEND" in second.stderr
    if number is signal.SIGKILL:
        os.killpg(first.pid, number)
    else:
        first.send_signal(number)  # only to the script, like CI
    _, err = first.communicate()
    assert first.returncode == (-9 if number is signal.SIGKILL else 130), err
    if number is not signal.SIGKILL:
        assert "repeat the command to continue this run" in err
    assert not (checkout.folder / "groupbench.db").exists()  # an unfinished run is not judged
    (checkout.folder / "go").touch()
    third = checkout.run(*slow)
    assert third.returncode == 0, third.stderr
    assert "resuming the run" in third.stdout or number is signal.SIGKILL
    (night,) = records(checkout.folder / "records")
    assert [record.status for record in night] == ["ok"] * 4
    assert len({record.run.id for record in night}) == 1
    assert len(runs(checkout.folder / "groupbench.db")) == 1


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("none.toml",), "none.toml"),
        (("groupbench.toml", "--op", "x"), "--op"),
        *rarely((("--nonsense",), "--nonsense")),
    ],
    ids=["plan", "option of a plan", "option"],
)
def test_a_night_that_cannot_begin(args: tuple[str, ...], text: str, checkout: Checkout) -> None:
    done = checkout.run("bash", "ci/nightly.sh", *args)
    assert done.returncode == 2
    assert text in done.stderr
    assert "to continue" not in done.stderr
    assert not list((checkout.folder / "records").glob(".unfinished*"))


# ---- pull requests


class Forge(BaseHTTPRequestHandler):
    """A fake of GitHub and GitLab that keeps comments."""

    comments: list[dict[str, Any]]

    answers: dict[str, Any]  # by path: JSON, or a file's bytes

    def _respond(self, status: int, body: Any) -> None:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _posted(self) -> str:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/user":
            self._respond(200, {"login": "bot", "username": "bot", "id": 1})
        elif path in self.answers:
            self._respond(200, self.answers[path])
        elif "/artifacts/" in path:
            self._respond(404, {"message": "404 Not found"})
        else:
            self._respond(200, self.comments)

    def do_POST(self) -> None:
        author = {"login": "bot", "username": "bot", "id": 1}
        made = {"id": len(self.comments) + 1, "body": self._posted(), "user": author, "author": author}
        self.comments.append({**made, "system": False, "html_url": "http://here/1", "performed_via_github_app": None})
        self._respond(201, self.comments[-1])

    def _edit(self) -> None:
        self.comments[0]["body"] = self._posted()
        self._respond(200, self.comments[0])

    do_PATCH = do_PUT = _edit

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def forge(serve: Callable[..., str]) -> tuple[str, type[Forge]]:
    service = type("Service", (Forge,), {"comments": [], "answers": {}})
    return serve(service), service


@pytest.fixture
def event(forge: Any, tmp_path: Path) -> dict[str, str]:
    """Return the variables of GitHub's runner for a pull request."""
    path = tmp_path / "event.json"
    path.write_text(json.dumps({"pull_request": {"number": 7}}))
    return {"GITHUB_API_URL": forge[0], "GITHUB_REPOSITORY": "o/r", "GITHUB_EVENT_PATH": str(path)}


def test_a_verdict_is_one_comment_on_github(
    checkout: Checkout, github: Service, workflow: Workflow, forge: Any, event: dict[str, str]
) -> None:
    job = workflow("github/pull-request.yml")["jobs"]["comment"]
    text = checkout.folder / "artifacts/comment.md"
    text.parent.mkdir()
    for verdict in ("something got worse", "nothing got worse"):
        text.write_text(verdict)
        posted = github(job, checkout, {"github.token": "secret"}, **event)
        assert not posted.failed, posted.text
        assert "secret" not in posted.text
    (comment,) = forge[1].comments
    assert "nothing got worse" in comment["body"]


@pytest.mark.exhaustive  # by default, the measuring job is GitLab's, which runs the same script
def test_a_pull_request_of_github(
    checkout: Checkout, github: Service, workflow: Workflow, forge: Any, event: dict[str, str]
) -> None:
    jobs = workflow("github/pull-request.yml")["jobs"]
    base, head = checkout.git("rev-parse", "HEAD~1"), checkout.git("rev-parse", "HEAD")
    facts = {"github.event.pull_request.base.sha": base, "github.token": "secret"}
    measured = github(jobs["measure"], checkout, facts)
    assert not measured.failed, measured.text
    for _ in range(2):
        posted = github(jobs["comment"], checkout, facts, **event)
        assert not posted.failed, posted.text
        assert "secret" not in posted.text
    (comment,) = forge[1].comments
    assert f"`{head[:10]}` against its merge base `{base[:10]}`" in comment["body"]
    assert "| same |" in comment["body"]
    assert (checkout.folder / "artifacts/comparisons.jsonl").read_text().count("\n") == 1


def of_gitlab(service: type[Forge], text: bytes) -> None:
    """Give the service one open merge request, with the text that its newest pipeline's job stored."""
    ours = {"id": 12, "project_id": 1}
    compare = {"id": 5, "name": "groupbench-compare", "status": "failed", "finished_at": "2026-01-01T00:00:00Z"}
    service.answers = {
        "/projects/1/merge_requests": [{"iid": 7}],
        "/projects/1/merge_requests/7/pipelines": [{"id": 13, "project_id": 2}, ours, {"id": 11, "project_id": 1}],
        "/projects/1/pipelines/12/jobs": [{"id": 4, "name": "lint"}, compare],
        "/projects/1/jobs/5/artifacts/artifacts/comment.md": text,
    }


def test_a_merge_request_of_gitlab(checkout: Checkout, gitlab: Service, workflow: Workflow, forge: Any) -> None:
    """The request breaks a backend, which the comment reports.

    Its code steals its environment, which has no token; the default branch's code posts the text.
    """
    url, service = forge
    read = workflow("gitlab/merge-request.yml")
    with (checkout.folder / "ci/environment.sh").open("a") as script:
        script.write('\nenv >>"$HOME/stolen"\n')
    break_loop(checkout)
    checkout.git("commit", "-qam", "Steal and break it")
    facts = {
        "CI_MERGE_REQUEST_DIFF_BASE_SHA": checkout.git("rev-parse", "HEAD~2"),
        "CI_COMMIT_SHA": checkout.git("rev-parse", "HEAD"),
    }
    measured = gitlab(read["groupbench-compare"], checkout, **facts)
    assert measured.failed == ["script"], measured.text
    of_gitlab(service, (checkout.folder / "artifacts/comment.md").read_bytes())
    stolen = Path(checkout.environment["HOME"]) / "stolen"
    assert "TOKEN" not in stolen.read_text()
    stolen.unlink()

    checkout.git("checkout", "-q", "HEAD~1")  # the default branch
    of_default = {"CI_API_V4_URL": url, "CI_PROJECT_ID": "1", "GITLAB_TOKEN": "secret", "GITLAB_CI": "true"}
    for _ in range(2):
        posted = gitlab(read["groupbench-comments"], checkout, **of_default)
        assert not posted.failed, posted.text
        assert "secret" not in posted.text
    assert not stolen.exists()
    assert ["something got worse" in comment["body"] for comment in service.comments] == [True]


def test_a_request_that_can_read_the_token_is_refused(checkout: Checkout, gitlab: Service, workflow: Workflow) -> None:
    job = workflow("gitlab/merge-request.yml")["groupbench-compare"]
    refused = gitlab(job, checkout, GITLAB_TOKEN="secret")
    assert refused.failed == ["script"]
    assert refused.text == "GITLAB_TOKEN must be protected; this pipeline can read it\n"


def break_loop(checkout: Checkout) -> None:
    """Make the results of a backend wrong."""
    path = checkout.folder / "operators/catalog/grouped_gemm.py"
    right = "def prepare_torch_loop("
    before, after = path.read_text().split(right)
    wrong = f"{right}inputs):\n    run = _prepare_right(inputs)\n    return lambda: run() * 1.01\n\n\n"
    path.write_text(f"{before}{wrong}def _prepare_right({after}")


USAGE = {
    "nothing": ((), {}, "usage: bash ci/pull-request.sh BASE"),
    "an unknown head": (("HEAD", "nonsense"), {}, "nonsense"),
    "an unknown base": (("nonsense",), {}, "git cannot find commit nonsense"),
    "an option": (("--nonsense",), {}, "usage: bash ci/pull-request.sh BASE"),
    "itself": (("HEAD",), {}, "nothing to compare"),
    "its ancestor": (("HEAD", "HEAD~1"), {}, "nothing to compare"),
    "no list": (("HEAD~1",), {"GROUPBENCH_AB": "none.txt"}, "none.txt"),
    "an empty list": (("HEAD~1",), {"GROUPBENCH_AB": "/dev/null"}, "contains no comparisons"),
}


@pytest.mark.parametrize(("args", "environment", "text"), USAGE.values(), ids=USAGE)
def test_usage_of_a_comparison(args: Any, environment: dict[str, str], text: str, checkout: Checkout) -> None:
    old = checkout.folder / "artifacts/comment.md"
    old.parent.mkdir()
    old.write_text("nothing got worse")
    done = checkout.run("bash", "ci/pull-request.sh", *args, **environment)
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
    assert not old.exists()  # or it would be posted as this comparison's verdict


def test_a_list_for_a_gpu_is_refused_without_one(checkout: Checkout) -> None:
    done = checkout.run("bash", "ci/pull-request.sh", "HEAD~1", GROUPBENCH_AB=str(ROOT / "ci/pull-request.txt"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "there is no GPU here" in done.stderr and "GROUPBENCH_AB" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (checkout.folder / "artifacts/comparisons.jsonl").exists()


def test_help_of_a_comparison(checkout: Checkout) -> None:
    done = checkout.run("bash", "ci/pull-request.sh", "HEAD~1", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "bash ci/pull-request.sh BASE [HEAD]" in done.stdout and "GROUPBENCH_AB " in done.stdout
    assert not (checkout.folder / "artifacts").exists()
