"""Test `ci/gitlab/comments.py` against a server with hostile merge requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from cases import rarely

PROGRAM = Path(__file__).parents[2] / "ci/gitlab/comments.py"
PROJECT = "/api/v4/projects/7"


@dataclass
class Forge:
    """GitLab's API, with one finished job for each merge request."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    texts: dict[int, bytes | int | None] = field(default_factory=dict)  # by request; a status; still running
    tokens: set[str | None] = field(default_factory=set)

    def add(self, text: bytes | int | None, **facts: Any) -> int:
        number = len(self.requests) + 1
        self.requests.append({"iid": number, "description": "", **facts})
        self.texts[number] = text
        return number

    def respond(self, path: str) -> tuple[int, bytes]:
        match path.partition("?")[0].removeprefix(PROJECT).split("/"):
            case ["", "merge_requests"]:
                return 200, json.dumps(self.requests).encode()
            case ["", "merge_requests", number, "pipelines"]:
                return 200, json.dumps([{"id": 99, "project_id": 8}, {"id": int(number), "project_id": 7}]).encode()
            case ["", "pipelines", number, "jobs"]:
                job = {"id": int(number), "name": "groupbench-compare", "finished_at": self.texts[int(number)] and "x"}
                return 200, json.dumps([{"id": 99, "name": "lint", "finished_at": "x"}, job]).encode()
            case ["", "jobs", number, "artifacts", "artifacts", "comment.md"]:
                text = self.texts[int(number)]
                return (text, b"") if isinstance(text, int) else (200, text or b"unfinished")
        return 404, b""


@pytest.fixture
def forge(serve: Callable[..., str]) -> Forge:
    forge = Forge()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            forge.tokens.add(self.headers["PRIVATE-TOKEN"])
            status, body = forge.respond(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    forge.url = serve(Handler)
    return forge


@pytest.fixture
def post(forge: Forge, tmp_path: Path) -> Any:
    """Run the script. Returns (exit code, posted text by request, standard error)."""
    stub = tmp_path / "groupbench"
    stub.write_text(f'#!/bin/sh\nfor last; do :; done\ncat > "{tmp_path}/posted-$last"\n')
    stub.chmod(0o755)

    def post() -> tuple[int, dict[int, str], str]:
        environment = {
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "CI_API_V4_URL": f"{forge.url}/api/v4",
            "CI_PROJECT_ID": "7",
            "GITLAB_TOKEN": "secret",
            "PYTHONUTF8": "1",
        }
        done = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True)
        posted = {int(path.name.removeprefix("posted-")): path.read_text() for path in tmp_path.glob("posted-*")}
        return done.returncode, posted, done.stderr

    return post


def test_each_verdict_is_posted_without_quick_actions_and_mentions(forge: Forge, post: Any) -> None:
    first = forge.add(b"ok\n/close\n > /merge\n  /label ~bug\nthanks @ada")
    second = forge.add(b"slower")
    code, posted, _ = post()
    assert (code, posted[second], forge.tokens) == (0, "slower", {"secret"})
    assert posted[first] == "ok\n\\/close\n > \\/merge\n  \\/label ~bug\nthanks @\u2060ada"


def test_a_job_without_a_verdict_is_left_out(forge: Forge, post: Any) -> None:
    for without in (404, None):
        forge.add(without)
    assert post()[:2] == (0, {})


@pytest.mark.parametrize("status", [500, *rarely(403)])
def test_a_request_that_fails_does_not_stop_the_others(forge: Forge, post: Any, status: int) -> None:
    forge.add(status)
    second = forge.add(b"ok")
    code, posted, errors = post()
    assert (code, posted) == (1, {second: "ok"})
    assert errors.startswith("!1: HTTPError") and "Traceback" not in errors and "secret" not in errors


def test_a_long_description_does_not_hide_the_list(forge: Forge, post: Any) -> None:
    """GitLab accepts a description of a MiB."""
    number = forge.add(b"ok", description="x" * (1 << 20))
    assert post()[:2] == (0, {number: "ok"})


def test_a_long_text_is_cut(forge: Forge, post: Any) -> None:
    number = forge.add(b"x" * (3 << 20))
    code, posted, _ = post()
    assert (code, len(posted[number])) == (0, 1 << 20)
