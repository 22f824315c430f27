"""Honest backends that do unusual things are not accused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

from groupbench.operators.integrity.__main__ import HONEST, measure_until_checked
from groupbench.operators.integrity.cheat import is_not_checked
from groupbench.operators.measure import environment

HERE = Path(__file__).parent


def _names() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        import honest

        has_layers = "mounts" in str(environment._confinement())
        return [backend.name for backend in honest.BACKENDS if has_layers or backend.name != "keeps_caches"]


ALL = _names()
QUICK = ("repacks_on_version", "nice", "thread_pool", "strided_output", "handles_signals", *ALL[-2:])


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))  # for the processes that measure, too


def check(names: Sequence[str]) -> dict[str, str]:
    """Measure backends. Returns the reasons of those that could not be checked."""
    records = measure_until_checked(names, "cpu", "honest.BACKENDS")
    for name in (*names, *HONEST["cpu"]):
        record = records[name]
        assert record.status == "ok" or is_not_checked(record), (name, record.status, record.message)
        assert record.loaded is None or record.loaded.code is not None, name
        assert record.metrics.get("special_values", 1) == record.metrics.get("fresh_output", 1) == 1, name
    return {name: records[name].message or "" for name in names if is_not_checked(records[name])}


def test_there_are_many() -> None:
    assert len(ALL) >= 26


def test_unusual_backends_are_not_accused() -> None:
    check(QUICK)


@pytest.mark.exhaustive
def test_all_unusual_backends_are_not_accused() -> None:
    check([name for name in ALL if name not in QUICK])


@pytest.fixture
def busy() -> Iterator[None]:
    """Keep two loops running on each core."""
    import os

    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("busy")
def test_nobody_is_accused_on_a_busy_machine() -> None:
    for name, why in check(ALL).items():
        assert "shared with other work" in why, name
