"""Triton's digest of its own files, computed once for the processes of a fork server."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from groupbench.operators.measure import triton_key


@pytest.mark.parametrize("defines", triton_key.MODULES)
def test_the_digest_is_kept_until_it_is_forgotten(defines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    modules = {name: SimpleNamespace() for name in triton_key.MODULES}
    modules[defines].triton_key = lru_cache(lambda: computed.append("digest"))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for _ in range(2):
        triton_key.compute()
    assert computed == ["digest"]
    triton_key.forget()
    triton_key.compute()
    assert computed == ["digest", "digest"]


def test_triton_keeps_the_digest_where_it_is_looked_for() -> None:
    pytest.importorskip("triton")
    assert triton_key._cached() is not None


def test_without_triton_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", *triton_key.MODULES):
        monkeypatch.setitem(sys.modules, name, None)
    triton_key.compute()
    triton_key.forget()


PROGRAM = """
import time
from groupbench.operators.measure import triton_key, worker

def computed():
    key = triton_key._cached()
    return key is not None and key.cache_info().currsize == 1

def main():
    found = [worker.call(computed)]
    until = time.monotonic() + 60
    while not found[-1] and len(found) < LOOKS and time.monotonic() < until:
        time.sleep(0.2)
        found.append(worker.call(computed))
    print(found[0], found[-1])
"""


@pytest.mark.parametrize("interprets", [False, True])
def test_a_fork_server_computes_it_when_it_is_idle_unless_triton_interprets(interprets: bool, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("LOOKS", "3" if interprets else "300"))
    setting = {"TRITON_INTERPRET": str(int(interprets)), "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    program = [sys.executable, "-c", "import program; program.main()"]
    done = subprocess.run(program, env=os.environ | setting, capture_output=True, text=True)
    assert done.stdout.split() == ["False", str(not interprets)], done.stderr
