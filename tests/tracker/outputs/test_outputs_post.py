"""`groupbench post`, against a server here: in place, with patience, and without the secret."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from cases import Cli, refused
from click.testing import Result

from groupbench.tracker.facts.errors import OutputError
from groupbench.tracker.outputs import comment, http, post

pytestmark = pytest.mark.sqlite

TOKEN = "ghp_verysecret123"
HIDDEN = "services/T0/B0/hush"
VARIABLES = (
    *("GITHUB_TOKEN", "GH_TOKEN", "GITHUB_API_URL", "GITHUB_REPOSITORY", "GITHUB_REF", "GITHUB_EVENT_PATH"),
    *("GITLAB_CI", "GITLAB_TOKEN", "CI_API_V4_URL", "CI_PROJECT_ID", "CI_PROJECT_PATH", "CI_MERGE_REQUEST_IID"),
    *("GITHUB_STEP_SUMMARY", "GITHUB_SERVER_URL", "CI_PROJECT_URL"),
)


@dataclass
class Forge:
    """A server with comments. `plan` has its first responses: (status, headers, body, whether it acts)."""

    url: str = ""
    gitlab: bool = False
    me: str | None = "me"
    comments: list[dict[str, Any]] = field(default_factory=list)
    plan: dict[str, list[tuple[int, dict[str, str], Any, bool]]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    received: list[Any] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    links: bool = True

    def add(self, body: str, author: str = "me", kind: str = "User") -> None:
        who = {"author": {"username": author}} if self.gitlab else {"user": {"login": author, "type": kind}}
        key = len(self.comments) + 1
        self.comments.append({"id": key, "body": body, "html_url": f"https://forge/{key}", **who})

    def respond(
        self, method: str, path: str, query: dict[str, list[str]], body: Any
    ) -> tuple[int, dict[str, str], Any]:
        if path.endswith("/user"):
            if self.me is None:
                return 403, {}, {"message": "Resource not accessible by integration"}
            return 200, {}, {"username": self.me} if self.gitlab else {"login": self.me}
        if method == "GET":
            size, page = int(query["per_page"][0]), int(query["page"][0])
            more = len(self.comments) > size * page
            link = f'<{self.url}{path}?page={page + 1}>; rel="{"next" if more else "last"}"'
            return 200, {"Link": link} if self.links else {}, self.comments[size * (page - 1) : size * page]
        if method == "POST" and not path.startswith("/services"):
            self.add(body["body"], self.me or "github-actions[bot]", "User" if self.me else "Bot")
            return 201, {}, self.comments[-1]
        if method in ("PATCH", "PUT"):
            comment = self.comments[int(path.rpartition("/")[2]) - 1]
            comment["body"] = body["body"]
            return 200, {}, comment
        return 200, {}, None


@pytest.fixture
def forge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forge]:
    state = Forge()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            parts = urlsplit(self.path)
            state.requests.append(f"{self.command} {self.path}")
            state.tokens.add(self.headers.get("PRIVATE-TOKEN") or self.headers.get("Authorization"))
            if self.command != "GET":
                state.received.append(body)
            planned = state.plan.get(self.command, [])
            if planned:
                status, headers, body_sent, done = planned.pop(0)
                if done:
                    state.respond(self.command, parts.path, parse_qs(parts.query), body)
            else:
                status, headers, body_sent = state.respond(self.command, parts.path, parse_qs(parts.query), body)
            data = b"ok" if body_sent is None else json.dumps(body_sent).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_PUT = handle_any

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name, value in {
        "GITHUB_TOKEN": TOKEN, "GITHUB_API_URL": state.url, "GITHUB_REPOSITORY": "o/r",
        "GITHUB_REF": "refs/pull/7/merge",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(http, "sleep", waited.append)
    return waited


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "c.md"
    path.write_text(f"{comment.mark('nightly', 'H100')}\n### GATE ok\n")
    return path


def no_secret(result: Result) -> None:
    assert TOKEN not in result.output
    assert "hush" not in result.output


def test_a_first_one_is_created_and_a_second_edits_it(cli: Cli, forge: Forge, page: Path) -> None:
    forge.add("someone's")
    first = cli("post", page)
    assert (first.exit_code, first.stdout) == (0, "https://forge/2\n")
    assert "created" in first.stderr
    assert forge.comments[1]["body"] == page.read_text()
    page.write_text(page.read_text() + "more 😀\n")
    second = cli("post", page)
    assert (second.stdout, "edited" in second.stderr) == ("https://forge/2\n", True)
    assert [entry["body"] for entry in forge.comments] == ["someone's", page.read_text()]
    assert "unchanged" in cli("post", page).stderr
    assert [line.split()[0] for line in forge.requests].count("PATCH") == 1
    assert "POST /repos/o/r/issues/7/comments" in forge.requests
    assert "PATCH /repos/o/r/issues/comments/2" in forge.requests
    assert forge.tokens == {f"Bearer {TOKEN}"}


def test_gitlab(cli: Cli, forge: Forge, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forge.gitlab = True
    for name, value in {
        "GITLAB_CI": "true", "GITLAB_TOKEN": TOKEN, "CI_API_V4_URL": f"{forge.url}/api/v4", "CI_PROJECT_ID": "a/b",
        "CI_MERGE_REQUEST_IID": "3",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert cli("post", page).exit_code == 0
    page.write_text(page.read_text() + "more\n")
    assert "edited" in cli("post", page).stderr
    assert "PUT /api/v4/projects/a%2Fb/merge_requests/3/notes/1" in forge.requests
    assert forge.tokens == {TOKEN}
    assert len(forge.comments) == 1


@pytest.mark.parametrize("links", (True, False))
def test_it_is_found_on_a_later_page(cli: Cli, forge: Forge, page: Path, links: bool) -> None:
    forge.links = links
    for number in range(230):
        forge.add(f"comment {number}", "other")
    forge.add(page.read_text() + "old")
    assert "edited" in cli("post", page).stderr
    assert sum("page=" in line for line in forge.requests) == 3
    assert len(forge.comments) == 231


def test_a_mark_of_somebody_else_is_left_alone(cli: Cli, forge: Forge, page: Path) -> None:
    forge.add(page.read_text() + "mine!", "mallory")
    forge.add("quoted: " + page.read_text(), "me")
    assert "created" in cli("post", page).stderr
    assert [entry["body"][-5:] for entry in forge.comments] == ["mine!", page.read_text()[-5:], page.read_text()[-5:]]
    assert forge.comments[1]["body"].startswith("quoted: ")


def test_a_workflows_token_edits_what_a_program_wrote(cli: Cli, forge: Forge, page: Path) -> None:
    forge.me = None
    forge.add(page.read_text() + "a person's", "mallory")
    forge.add(page.read_text() + "another program's", "deploy[bot]", "Bot")
    forge.plan["PATCH"] = [(403, {}, {"message": "Resource not accessible by integration"}, False)]
    assert "created" in cli("post", page).stderr
    forge.plan["PATCH"] = [(403, {}, {"message": "Resource not accessible by integration"}, False)]
    page.write_text(page.read_text() + "more\n")
    assert "edited" in cli("post", page).stderr
    assert [entry["body"] == page.read_text() for entry in forge.comments] == [False, False, True]


def test_any_text_from_a_pipe(cli: Cli, forge: Forge) -> None:
    assert cli("post", "-", stdin=b"| a |\n").exit_code == 0
    assert comment.mark_of(forge.comments[0]["body"])
    assert "edited" in cli("post", "-", stdin=("😀 x\n" * 40_000).encode()).stderr
    assert len(forge.comments[0]["body"].encode()) < 65_536
    assert "created" in cli("post", "-", "--key", "other", stdin=b"x").stderr
    assert comment.mark("a", "H100") != comment.mark("a", "H200")
    assert len(forge.comments) == 2


def test_errors_of_the_server_are_waited_out(cli: Cli, forge: Forge, page: Path, waits: list[float]) -> None:
    forge.plan["GET"] = [(500, {}, None, False), (502, {}, None, False)]
    forge.plan["POST"] = [(503, {}, None, False)]
    assert "created" in cli("post", page).stderr
    assert len(forge.comments) == 1
    assert len(waits) == 3


def test_a_comment_that_was_written_before_the_error_is_not_written_twice(
    cli: Cli, forge: Forge, page: Path, waits: list[float]
) -> None:
    forge.plan["POST"] = [(502, {}, None, True)]
    assert cli("post", page).exit_code == 0
    assert len(forge.comments) == 1


@pytest.mark.parametrize(
    ("status", "headers"),
    [(429, {"Retry-After": "7"}), (403, {"Retry-After": "7"})],
    ids=["too-many", "secondary"],
)
def test_limits_are_waited_out(
    cli: Cli, forge: Forge, page: Path, waits: list[float], status: int, headers: dict[str, str]
) -> None:
    forge.plan["POST"] = [(status, headers, {"message": "slow down"}, False)]
    assert cli("post", page).exit_code == 0
    assert waits == [7.0]


SPENT = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "99999999999"}
REFUSALS: dict[str, tuple[tuple[int, dict[str, str], Any], str, int]] = {
    "a limit of an hour": ((403, SPENT, {"message": "API rate limit exceeded"}), "API rate limit exceeded", 1),
    "ill for long": ((500, {}, None), "GET /user at 127.0.0.1: 500.*given up after 5 attempts", 5),
    "a wrong token": (
        (401, {}, {"message": f"Bad credentials {TOKEN}"}),
        r"401 Bad credentials \*\*\*; check that the token is correct and still valid", 1,
    ),
    "another server": ((302, {"Location": "http://127.0.0.1:9/elsewhere"}, None), "it has moved", 1),
}  # fmt: skip


@pytest.mark.parametrize(("response", "message", "requests"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_says_why_and_never_the_token(
    cli: Cli, forge: Forge, page: Path, waits: list[float], response: Any, message: str, requests: int
) -> None:
    forge.plan["GET"] = [(*response, False)] * 9
    result = cli("post", page)
    assert (result.exit_code, forge.requests) == (2, ["GET /user"] * requests)
    assert re.search(message, result.stderr)
    assert (sum(waits) <= http.RETRY_WAIT_S, len(waits)) == (True, requests - 1)
    no_secret(result)


def test_nobody_there(cli: Cli, forge: Forge, page: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_API_URL", "http://127.0.0.1:9")
    result = cli("post", page)
    assert result.exit_code == 2
    assert "no answer" in result.stderr
    no_secret(result)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("GITHUB_TOKEN", "", "post on github needs GITHUB_TOKEN"),
        ("GITHUB_REPOSITORY", "", "--repo or GITHUB_REPOSITORY"),
        ("GITHUB_REPOSITORY", "../x/y", "does not have the form OWNER/NAME"),
        ("GITHUB_REF", "refs/heads/main", "--pr, or a workflow that a pull request started"),
        ("GITHUB_TOKEN", TOKEN + "\r\nX: y", "a character that no token has"),
        ("GITHUB_API_URL", "file:///etc", "does not begin with https://"),
    ],
    ids=["token", "repository", "traversal", "number", "newline", "file"],
)
def test_what_is_missing_is_named(
    cli: Cli, forge: Forge, page: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    result = cli("post", page)
    assert result.exit_code == 2
    assert message in result.stderr
    assert forge.requests == []
    no_secret(result)


@pytest.mark.parametrize(
    "event",
    [
        {"pull_request": {"number": 12}},
        {"issue": {"number": 12}},
        {"issue": {"number": 12, "pull_request": {"url": "x"}}},
        {"workflow_run": {"pull_requests": [{"number": 12}]}},
    ],
    ids=["pull", "issue", "comment", "workflow"],
)
def test_the_number_comes_from_the_event(tmp_path: Path, event: dict[str, Any]) -> None:
    (tmp_path / "event.json").write_text(json.dumps(event))
    environ = {"GITHUB_TOKEN": "t", "GITHUB_REPOSITORY": "o/r", "GITHUB_EVENT_PATH": str(tmp_path / "event.json")}
    if event == {"issue": {"number": 12}}:
        with pytest.raises(OutputError, match="--pr"):  # an issue, and no request
            post.forge(environ)
        return
    assert post.forge(environ).number == 12
    assert post.forge(environ, number=3).number == 3


def test_a_dry_run_asks_nobody(cli: Cli, forge: Forge, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_TOKEN")
    result = cli("post", page, "--dry-run")
    assert (result.exit_code, forge.requests) == (0, [])
    assert result.stdout.startswith(page.read_text())


@pytest.mark.parametrize(("text", "message"), [("", "is empty"), (None, "No such file")], ids=["empty", "absent"])
def test_a_file_without_a_comment(cli: Cli, forge: Forge, tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "x.md").write_text(text)
    assert message in refused(cli, "post", tmp_path / "x.md")


# ---- the page


DOCS = (Path(__file__).parents[3] / "docs" / "guide" / "ci.md").read_text(encoding="utf-8")
SECTION = DOCS.split("\n## Outputs\n")[1].split("\n## ")[0]
EXAMPLES = [line.removeprefix("$ ") for line in SECTION.split("\n") if line.startswith("$ groupbench ")]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_the_page_run(
    cli: Cli,
    forge: Forge,
    stored: Any,
    make: Any,
    two_nights_are_certain: None,
    page: Path,
    example: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored([make(n, ms=1.05 if n >= 6 else 1.0) for n in range(8)])
    artifacts = page.with_name("artifacts")
    artifacts.mkdir()
    page.rename(artifacts / "comment.md")
    monkeypatch.chdir(page.parent)
    _, *args = example.split()
    result = cli(*args)
    assert result.exit_code == (1 if args[0] == "gate" else 0), result.stderr
    assert result.stdout


def test_the_page_lists_every_format_and_verdict() -> None:
    from groupbench.tracker.facts.verdicts import Verdict
    from groupbench.tracker.outputs import FORMATS

    assert all(f"| `{form}` |" in SECTION for form in FORMATS)
    assert all(f"`{verdict}`" in SECTION for verdict in Verdict if verdict is not Verdict.UNKNOWN)
    assert {example.split()[1] for example in EXAMPLES} == {"gate", "post"}
