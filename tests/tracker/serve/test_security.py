"""`groupbench serve`: under which names it answers, and that nothing asked for reaches files or programs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from groupbench.tracker.serve.security import COOKIE, LOOPBACK

Client = Callable[..., TestClient]
Act = Callable[..., Any]

HOSTS = (
    *(("localhost", 200), ("localhost:8642", 200), ("127.0.0.1:1", 200), ("[::1]:8642", 200), ("LOCALHOST", 200)),
    *(("evil.example", 421), ("evil.example:8642", 421), ("127.0.0.1.evil.example", 421), ("", 421), ("[::1", 421)),
    *(("localhost@evil.example", 421), ("10.0.0.1", 421)),
)


@pytest.mark.sqlite
def test_on_loopback_only_its_own_names_are_answered(nights: Any, serve: Client) -> None:
    client = serve(hosts=frozenset(LOOPBACK))
    for host, status in HOSTS:
        assert client.get("/healthz", headers={"Host": host}).status_code == status, host


@pytest.mark.sqlite
def test_beyond_loopback_addresses_and_its_own_names_are_answered(nights: Any, serve: Client) -> None:
    client = serve(hosts=frozenset((*LOOPBACK, "perf.example")), numbers=True)
    for host, status in (("10.0.0.1:80", 200), ("[fe80::1]", 200), ("perf.example", 200), ("evil.example", 421)):
        assert client.get("/healthz", headers={"Host": host}).status_code == status, host


ORIGINS = (
    "http://[",
    "http://a]b",
    "null",
    "http://localhost.evil.example",
    "http://localhost@evil.example",
    "//" * 999,
)


@pytest.mark.sqlite
@pytest.mark.parametrize("origin", ORIGINS, ids=lambda origin: origin[:40])
def test_no_origin_but_its_own_may_write(nights: Any, serve: Client, token: str, origin: str) -> None:
    client = serve(token=token)
    assert client.post("/login", data={"token": token}, headers={"Origin": origin}).status_code == 403


@pytest.mark.sqlite
@pytest.mark.parametrize("part", ["\\", "\\1", "\\\\", '\\"'])
def test_no_cookie_stops_the_server(nights: Any, serve: Client, part: str) -> None:
    client = serve()
    began = time.process_time()
    assert client.get("/healthz", headers={"Cookie": f'{COOKIE}="{part * 30_000}"'}).status_code == 200
    assert client.get("/login", headers={"Cookie": f'a=b; {COOKIE}="{part * 30_000}"'}).status_code == 200
    assert time.process_time() - began < 1


TRAVERSALS = (
    *("../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "..\\..\\etc\\passwd"),
    *("/etc/passwd", "serve.css/../../app.py", "app.py", "__init__.py", "serve.css%00.html", "....//etc/passwd"),
)


@pytest.mark.sqlite
def test_no_address_becomes_a_path(nights: Any, serve: Client) -> None:
    client = serve()
    folders = ("/static/", "/", "/runs/", "/operators/", "/points/", "/series/")
    for address in (folder + name for folder in folders for name in TRAVERSALS):
        response = client.get(address)
        assert response.status_code in (400, 404), address
        assert "root:" not in response.text
        assert "import" not in response.text


@pytest.mark.sqlite
def test_no_word_reads_a_file_or_starts_git(
    nights: Any, serve: Client, tmp_path: Path, monkeypatch: Any, token: str, act: Act
) -> None:
    """The command line accepts files and git's names, but the server must not."""
    secret = tmp_path / "secret.jsonl"
    secret.write_text("secret\n")
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setattr(subprocess, "run", lambda *args, **_: pytest.fail(f"started {args}"))
    client = serve(token=token)
    for word in (str(secret), "secret.jsonl", "HEAD", "HEAD~1", "--help", "v1.0", __file__):
        for params in ({"a": word, "b": "latest"}, {"a": "latest", "b": word}):
            response = client.get("/compare", params=params)
            assert response.status_code == 400, word
            assert "no commit or branch" in response.text
        assert client.get("/runs", params={"commit": word}).status_code == 400
        assert act(client, action="expect", reason="r", until=word).status_code == 400
