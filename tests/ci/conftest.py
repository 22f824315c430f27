"""Fixtures: a clean clone of this checkout with a tiny nightly plan, and runners of GitHub's and GitLab's jobs."""

from __future__ import annotations

import compileall
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import pytest
from repositories import git
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
WARM = ROOT / "tests" / "shared" / "warm"

PLAN = """
name = "tiny"
[[measure]]
operator = "grouped_gemm"
shapes = ["1,4,4,4", "G=3,M_g=0|1|5,N=8,K=4"]
dtypes = ["fp32"]
only = ["torch_loop", "triton_pointer"]
bursts = 1
samples = 2
"""

COMPARISONS = """# one cell whose verdict is certain on any machine, not --device cuda; the last line has no newline

--operator grouped_gemm --backend torch_loop --shape 1,64,128,128 --dtype fp32 --budget 60 --min-effect 900"""

TOPS = ("kernels", "operators", "tracker", "ci", "groupbench.toml", "pyproject.toml", "README.md", ".gitignore")
"""What a clone contains. Tests and documents would only make it larger."""

REMOVED = ("TRITON_INTERPRET", "FORCE_COLOR", "PYTHONPATH", "CI", "GITLAB_CI")
"""Variables that a person or a service may have set, and that must not affect the scripts."""


@dataclass
class Checkout:
    """A clone, and the environment variables of its scripts."""

    folder: Path
    environment: dict[str, str]
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def git(self, *args: str) -> str:
        return git(self.folder, *args)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*command, **environment)
        out, err = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository of two commits: the product and its scripts with a tiny plan, then one with an extra file."""
    if shutil.which("git") is None:
        pytest.fail("git is missing: apt-get install git")
    folder = tmp_path_factory.mktemp("origin")
    try:
        listed = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *TOPS).split("\0")
        files = [name for name in listed if name and (ROOT / name).is_file()]
    except AssertionError:  # a copy without git history
        files = [
            str(p.relative_to(ROOT)) for top in TOPS for p in [ROOT / top, *(ROOT / top).rglob("*")] if p.is_file()
        ]
    for name in files:
        if "__pycache__" not in name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "groupbench.toml").write_text(PLAN)
    (folder / "ci/pull-request.txt").write_text(COMPARISONS)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "Everything")
    (folder / "WORD").write_text("more\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "A word more")
    return folder


@pytest.fixture(scope="session")
def compiled_clone(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone with bytecode, which is checked by the sources' contents, so that it outlives their changes."""
    folder = tmp_path_factory.mktemp("compiled") / "clone"
    git(folder.parent, "clone", "-q", str(origin), str(folder))
    for name in ("kernels", "operators", "tracker"):
        assert compileall.compile_dir(folder / name, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return folder


def restore(clone: Path) -> None:
    """Undo a test's changes to a clone, except for bytecode: a new copy of its 1,600 files would take 2 s."""
    git(clone, "checkout", "-qfB", "main", "origin/main")
    git(clone, "clean", "-ffdxq", "-e", "__pycache__")
    git(clone, "worktree", "prune")


@pytest.fixture
def checkout(compiled_clone: Path, tmp_path: Path, warm_imports: dict[str, str]) -> Iterator[Checkout]:
    """Yield the session's clone as it was when it was made, and an environment with folders of this test's own."""
    restore(compiled_clone)
    prefixes = ("GROUPBENCH_", "GITHUB_", "CI_", "RUNNER_")
    kept = {k: v for k, v in os.environ.items() if k not in REMOVED and not k.startswith(prefixes)}
    added = {
        "GROUPBENCH_VENV": sys.prefix,
        "GROUPBENCH_LOCKS": str(tmp_path / "locks"),
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(tmp_path),
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton")),
    }
    warm = {"PYTHONPATH": str(WARM), "GROUPBENCH_TEST_WARM": warm_imports["GROUPBENCH_TEST_WARM"]}
    made = Checkout(compiled_clone, kept | added | warm)
    yield made
    for process in made.running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


# ---- workflows


@pytest.fixture(scope="session")
def workflow() -> Callable[[str], Any]:
    return lambda name: YAML(typ="safe").load((ROOT / "ci" / name).read_text())


@dataclass(frozen=True)
class Outcome:
    failed: list[str]  # names of steps with an exit code other than 0
    text: str  # output of all steps


@pytest.fixture(scope="session")
def github() -> Callable[..., Outcome]:
    return run_github_job


@pytest.fixture(scope="session")
def gitlab() -> Callable[..., Outcome]:
    return run_gitlab_job


def run_github_job(job: Mapping[str, Any], checkout: Checkout, facts: Mapping[str, str], **environment: str) -> Outcome:
    """Run the `run` steps of a job like GitHub: each with `bash -e`, and after a failure only those with `always()`.

    facts  the value of each `${{ ... }}`; a missing one fails the test
    """

    def filled(text: Any) -> str:
        return re.sub(r"\$\{\{\s*(.*?)\s*\}\}", lambda match: facts[match[1]], str(text))

    failed: list[str] = []
    output = ""
    for step in job["steps"]:
        name = step.get("name", step.get("uses"))
        if "run" not in step or (failed and "always()" not in str(step.get("if", ""))):
            continue
        assert "${{" not in step["run"], "untrusted text in a script: pass it by `env`"
        variables = {k: filled(v) for k, v in ({**job.get("env", {}), **step.get("env", {})}).items()}
        done = checkout.run("bash", "-e", "-c", step["run"], **variables, **environment)
        output += done.stdout + done.stderr
        if done.returncode != 0:
            failed.append(name)
    return Outcome(failed, output)


def run_gitlab_job(job: Mapping[str, Any], checkout: Checkout, **environment: str) -> Outcome:
    """Run the script of a job and then its after_script in a new shell, like GitLab."""
    variables = {k: str(v) for k, v in job.get("variables", {}).items()} | environment
    failed, output = [], ""
    for part in ("script", "after_script"):
        if part in job:
            done = checkout.run("bash", "-eo", "pipefail", "-c", "\n".join(job[part]), **variables)
            output += done.stdout + done.stderr
            if done.returncode != 0:
                failed.append(part)
    return Outcome(failed, output)


@pytest.fixture
def serve() -> Iterator[Callable[[type[BaseHTTPRequestHandler]], str]]:
    """Return a function that starts a service, which ends with the test, and returns its address."""
    servers: list[ThreadingHTTPServer] = []

    def start(handler: type[BaseHTTPRequestHandler]) -> str:
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
