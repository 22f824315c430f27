"""Fixtures for `groupbench serve`: a database of eight nights with a step, and a client of its dashboard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cases import Cli
from starlette.testclient import TestClient

from groupbench.tracker.serve.answers import Answers
from groupbench.tracker.serve.app import create_app

Act = Callable[..., Any]
Client = Callable[..., TestClient]

BREAKING = """</script><script>alert(1)</script> "quoted" 'it' & <b>%s</b> {{ 7*7 }}"""
STEP = {"subject": BREAKING, "author": "Ada", "branch": "main"}


@pytest.fixture
def token() -> str:
    """Return a token that allows changes of alerts."""
    return "a-token-of-some-length"


@pytest.fixture
def bearer(token: str) -> dict[str, str]:
    """The headers of who has the token."""
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def act(bearer: dict[str, str]) -> Act:
    """Deal with the first alert by the form, with the token or with other headers."""

    def act(client: TestClient, headers: Any = bearer, **fields: Any) -> Any:
        data = {"incident": "1", "action": "acknowledge", "who": "Ada", "reason": "known", **fields}
        return client.post("/incidents/change", data=data, headers=headers)

    return act


@pytest.fixture
def serve(db: Any) -> Iterator[Client]:
    """A client of the dashboard of the test's database, which waits for verdicts and comparisons."""
    with ExitStack() as stack:

        def serve(db: Any = db, patience: float = 60, address: str = "127.0.0.1", **options: Any) -> TestClient:
            app = create_app(str(db), answers=Answers(patience), **options)
            client = TestClient(app, base_url="http://localhost:8642", follow_redirects=False, client=(address, 50000))
            return stack.enter_context(client)

        yield serve


@pytest.fixture(scope="session")
def judged_before() -> list[bytes]:
    """Hold the SQLite database of `nights`, once there is one."""
    return []


@pytest.fixture
def nights(cli: Cli, stored: Any, make: Any, two_nights_are_certain: None, db: Any, judged_before: list[bytes]) -> Any:
    """Eight nights of two backends, an accelerator that is not there, canaries, and one regression with its alert."""
    if judged_before and isinstance(db, Path):
        db.write_bytes(judged_before[0])
        return db
    records = []
    for night in range(8):
        facts = {"commit_facts": STEP if night == 6 else {"branch": "main", "subject": f"change {night}"}}
        sizes = {"cell": {"dims": {"G": 4, "M": 4096, "N": 1024, "K": 1024}, "flops": 10**9, "min_bytes": 10**6}}
        ms = 1 + 0.001 * (night % 3 - 1) + (0.05 if night > 5 else 0)
        records += [
            make(night, ms, **facts, **sizes),
            make(night, 2.0, backend="torch", baseline=True, **facts, **sizes),
            make(night, backend="cutlass", status="unavailable", message=f"needs {BREAKING}", **facts),
            make(night, 1.0, operator="canary", backend="matmul", cell={"dims": {"N": 4096}, "flops": 10**12,
                 "min_bytes": 10**8}, **facts),
            make(night, 1.0, operator="canary", backend="copy", cell={"dims": {}, "min_bytes": 10**9}, **facts),
        ]  # fmt: skip
    database = stored(records)
    assert "1 opened" in cli("gate", "--update").stderr
    if isinstance(db, Path) and not Path(f"{db}-wal").exists():
        judged_before.append(db.read_bytes())
    return database
