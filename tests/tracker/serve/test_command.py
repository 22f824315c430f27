"""Test `groupbench serve`: the command from its options to its end, and its documentation."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cases import Cli, rarely, refused

from groupbench.tracker.cli.serve import _names
from groupbench.tracker.store.engine import open_store

from .conftest import Client

TOKEN = "a-token-of-some-length"
DOCS = (Path(__file__).parents[3] / "docs" / "guide" / "serve.md").read_text(encoding="utf-8")


@pytest.fixture
def empty(db: Any) -> None:
    """Make a database without a run."""
    open_store(db, create=True).close()


@pytest.mark.parametrize(
    ("args", "token", "says"),
    [
        (("--write",), None, "--write needs a token"),
        (("--write", "--host", "0.0.0.0"), None, "--write needs a token"),
        (("--write",), "short", "it needs 16 or more"),
        (("--token-file", "FILE"), None, "requires --write"),
        (("--write", "--token-file", "EMPTY"), None, "EMPTY: the first line, which should hold the token, is empty"),
        (("--write", "--token-file", "NONE"), None, "'NONE' does not exist"),
        (("--host", "no.such.host.invalid"), None, "cannot listen on"),
        (("--port", "70000"), None, "70000"),
        (("--proxy", "proxy.example"), None, "--proxy: 'proxy.example' is not an IP address"),
    ],
)
def test_it_does_not_start(
    empty: None, cli: Cli, tmp_path: Path, monkeypatch: Any, args: Any, token: Any, says: str
) -> None:
    monkeypatch.delenv("GROUPBENCH_TOKEN", raising=False)
    if token:
        monkeypatch.setenv("GROUPBENCH_TOKEN", token)
    (tmp_path / "FILE").write_text(TOKEN)
    (tmp_path / "EMPTY").touch()
    monkeypatch.chdir(tmp_path)
    assert says in refused(cli, "serve", *args)


def test_a_port_that_is_taken_is_named(empty: None, cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = cli("serve", "--port", str(taken.getsockname()[1]))
    assert (result.exit_code, "give another" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("number", "codes"),
    [(signal.SIGINT, (0, 130)), *rarely((signal.SIGTERM, (0,)))],
    ids=["int", "term"],
)
def test_it_runs_by_its_command_and_ends_when_asked_to(
    nights: Any, tmp_path: Path, number: int, codes: tuple[int, ...]
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    command = [sys.executable, "-m", "groupbench.tracker", "--db", str(nights), "serve", "--port", "0", "--write"]
    process = subprocess.Popen([*command, "--token-file", str(token)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert address is not None, line
        assert "incidents can be changed" in line
        with urllib.request.urlopen(f"{address[0]}/overview.json", timeout=60) as response:
            assert b'"run-007"' in response.read()
        with socket.create_connection(("127.0.0.1", int(address[0].rpartition(":")[2])), 30) as raw:
            raw.sendall(b"GET /series?q=" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 400 ")
        process.send_signal(number)
        assert process.wait(30) in codes
        rest = process.stderr.read()
        assert "leaked" not in rest
        assert TOKEN not in line + rest
        assert "Traceback" not in rest
    finally:
        process.kill()
        process.wait()


def test_the_page_lists_every_address_parameter_and_action(nights: Any, serve: Client) -> None:
    from groupbench.tracker.serve.incidents import ACTIONS

    client = serve()
    for route in client.app.routes:  # type: ignore[attr-defined]
        named = re.sub(
            r"\{(\w+)(:path)?\}", lambda match: {"key": "KEY", "name": "NAME"}.get(match[1], "ID"), route.path
        )
        unlisted = ("/overview", "/login", "/logout", "/static/NAME", "/incidents/change")
        assert f"{named}`" in DOCS or named in unlisted, named
    assert "/incidents/change.json" in DOCS
    for page in ("/runs", "/runs/run-007", "/series", "/series/1", "/incidents"):
        parameters = client.get(f"{page}.json?nothing=1").json()["error"].partition("known: ")[2].split(", ")
        assert all(re.search(rf"`[a-z ]*\b{name}\b[^`]*`", DOCS) for name in parameters), (page, parameters)
    assert all(f"`{action}`" in DOCS for action in ACTIONS)


def test_a_proxy_may_be_given_as_ipv4_within_ipv6() -> None:
    assert _names(("::ffff:127.0.0.1", "2001:DB8::1"), "X-User").proxies == {"127.0.0.1", "2001:db8::1"}
