"""Run commands with TritonBench as the host in forks of one process, which has imported it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupbench.tracker.facts.record import Record, read

HERE = Path(__file__).parent
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def warm(
    tmp_path_factory: pytest.TempPathFactory, warm_server: dict[str, str], warm_python: tuple[str, ...]
) -> Iterator[Command]:
    """Run the command in a fork of one process: see warm.py. It is itself a fork with torch imported."""
    env = {k: v for k, v in os.environ.items() if k != "FORCE_COLOR"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE.parents[1] / "shared"), warm_server["PYTHONPATH"]])
    main = f"import runpy; runpy.run_path({str(HERE / 'warm.py')!r}, run_name='__main__')"
    program = [*warm_python, "-c", main]
    folder = tmp_path_factory.mktemp("warm")
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as server:

        def run(*args: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
            out, err = folder / "out", folder / "err"
            for file in (out, err):
                file.write_bytes(b"")
            server.stdin.write(json.dumps({"args": list(map(str, args)), "out": str(out), "err": str(err)}) + "\n")
            server.stdin.flush()
            code = int(server.stdout.readline())
            return subprocess.CompletedProcess(args, code, out.read_text(), err.read_text())

        yield run
        server.stdin.close()


@pytest.fixture(scope="session")
def measured(warm: Command, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function that runs a command and returns its process and records."""

    def run(*args: str) -> tuple[subprocess.CompletedProcess[str], list[Record]]:
        path = tmp_path_factory.mktemp("run") / "r.jsonl"
        done = warm(*args, "--records", path)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return done, [record for _, record in read(lines)]

    return run
