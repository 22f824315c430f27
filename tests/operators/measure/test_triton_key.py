"""Triton's digest of its own files, computed once for the processes of a fork server."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
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


SERVER = """
import os, signal, sys, time
from groupbench.operators.measure import triton_key

computed = []
triton_key.compute = lambda: computed.append(os.getpid())
from groupbench.operators.measure import fork_server

fork_server.IDLE_S = 0.001
for first in (True, False):
    child = os.fork()
    if child == 0:
        alarm = signal.getsignal(signal.SIGALRM)
        print("child", alarm is signal.SIG_DFL, computed == [] if first else computed == [os.getppid()], flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    while not computed and os.environ["TRITON_INTERPRET"] == "0":
        time.sleep(0.001)
print("server", computed == [os.getpid()])
"""


@pytest.mark.parametrize("interprets", [False, True])
def test_a_fork_server_computes_it_once_after_its_first_process_unless_triton_interprets(interprets: bool) -> None:
    setting = {"TRITON_INTERPRET": str(int(interprets))}
    done = subprocess.run([sys.executable, "-c", SERVER], env=os.environ | setting, capture_output=True, text=True)
    inherits = not interprets
    assert done.stdout.split("\n")[:3] == ["child True True", f"child True {inherits}", f"server {inherits}"], (
        done.stderr
    )
