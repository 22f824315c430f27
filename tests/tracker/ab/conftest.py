"""Fixtures of the tests of comparisons."""

from __future__ import annotations

import pytest
from planned_ab import FakeBench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    fake = FakeBench()
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each comparison once, except in the test of the repetition."""
    if "repeated" not in request.node.name:
        monkeypatch.setattr("groupbench.tracker.ab.confirm._Confirming._is_in_doubt", lambda *_: False)
