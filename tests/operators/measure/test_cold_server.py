"""A fork server that imports torch itself, unlike those of other tests: its imports, and its processes.

One program asks such a server for everything that the tests are about: its imports take two seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

PROGRAM = """
import importlib
import json
import os
import sys
from groupbench.operators.measure import seal, worker

def imported():
    import torch
    from groupbench.operators.measure.accuracy import poisoned
    with poisoned():
        assert torch.empty(3).isnan().all()
    with open(f"/proc/{os.getppid()}/stat") as file:  # of the warden, whose parent is the server
        server = file.read().rsplit(")", 1)[1].split()[1]
    return [name for name in ("torch._dynamo", "wanted", "later", "broken") if name in sys.modules], server

def replaced(*modules):
    import torch
    for name in modules:
        importlib.import_module(name)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    return seal.problem("cuda")

def main():
    before, server = worker.call(imported)
    worker.preload("wanted", "broken", "missing")
    worker.preload("later")
    after, still = worker.call(imported)
    facts = {"before": before, "after": after, "same server": server == still}
    facts["replaced"] = worker.call(replaced, *sys.argv[1:])
    print(json.dumps(facts))
"""


def ask(folder: Path, *modules: str) -> dict[str, Any]:
    """Return the facts that the program prints. Its last process imports some modules of torch."""
    (folder / "program.py").write_text(PROGRAM)  # a fork server finds functions by their module
    for name in ("wanted.py", "later.py"):
        (folder / name).write_text("")
    (folder / "broken.py").write_text("raise SystemError")
    done = subprocess.run(
        [sys.executable, "-c", "import program; program.main()", *modules],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(done.stdout) | {"stderr": done.stderr}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ask(tmp_path_factory.mktemp("cold"), "torch._dynamo", "torch._inductor", "torch.func", "torch.export")


def test_it_imports_the_modules_asked_for_alone_and_while_it_runs(facts: dict[str, Any]) -> None:
    """Importing Dynamo takes seconds in every process, and torch's dispatch modes import it by default."""
    assert (facts["before"], facts["after"], facts["same server"]) == ([], ["wanted", "later"], True)
    assert facts["stderr"] == ""


def test_torch_itself_may_import_its_modules_and_compile(facts: dict[str, Any]) -> None:
    """Dynamo replaces functions of torch, which the seal does not blame on the backend."""
    assert facts["replaced"] is None
