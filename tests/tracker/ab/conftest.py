"""Fixtures of the tests of comparisons."""

from __future__ import annotations

import pytest
from planned_ab import FakeBench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    fake = FakeBench()
    fake.install(monkeypatch)
    return fake
