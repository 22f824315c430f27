"""Settings and fixtures of all tests: an environment that the caller's shell does not affect, and pairwise selection.

Without a GPU, Triton's kernels run in its interpreter.

The default run takes minutes. Every behaviour and every named case has a test in it, at the cheapest level where it can
fail. These are marked `exhaustive` instead, and run with --exhaustive:
- members of a product of parameters that reach no other code than the members that stay. Of tests marked `pairwise`,
  those stay that together have every pair of values.
- campaigns beyond one or two members: kills, damage, many seeds or examples, all cheats, pages or window sizes.
- a journey a second time: through another service, starter, host or database, or where other tests take each step.
Cheats and losses of data that must be caught stay in the default run, each in one form.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import pkgutil
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from forks import become, end, start_server
from hypothesis import settings

# Without a deadline, no test fails on a busy machine. Every run tries the same examples, so that an unrelated change
# cannot fail because of a new one. `--hypothesis-profile=search` looks for new examples.
settings.register_profile("groupbench", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("exhaustive", deadline=None, derandomize=True, max_examples=200)
settings.register_profile("search", deadline=None)
settings.load_profile("groupbench")

# Remove variables of the caller's shell or git hook. GROUPBENCH_TEST_* and GROUPBENCH_BROWSER are for the tests.
_OF_THE_CALLER = ("GIT_", "GROUPBENCH_", "FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES")
_OF_THE_TESTS = ("GROUPBENCH_TEST_", "GROUPBENCH_BROWSER")
for _name in [n for n in os.environ if n.startswith(_OF_THE_CALLER) and not n.startswith(_OF_THE_TESTS)]:
    del os.environ[_name]

# Each process of the tests has devices of its own: its commands wait for no others.
os.environ["GROUPBENCH_LOCKS"] = str(Path(tempfile.gettempdir(), f"groupbench-locks-{os.getpid()}"))

# Most programs that tests start run the same code several times, in clones and worktrees that begin without bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# There are more processes than cores, so more threads would only compete. Besides, threads do not survive a fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Helion imports scikit-learn, which takes 2 s, for a search that no test runs. It works without it.
sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]

gc.disable()  # until the tests are collected: see pytest_collection
if importlib.util.find_spec("torch"):
    import torch

    if not torch.cuda.is_available():
        # Set this before any test module imports a kernel: triton reads it when it is imported.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        if importlib.util.find_spec("triton"):
            from launches import patch_once

            patch_once()
    else:
        # A test of the CPU sets the interpreter up in this process. Kernels that are first imported after it would be
        # interpreted, and could not call those that are compiled.
        from groupbench import kernels

        for _module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
            with contextlib.suppress(ImportError):
                importlib.import_module(_module.name)


@pytest.fixture(autouse=True)
def _same_interpreter() -> Iterator[None]:
    """Undo the choice of Triton's interpreter that a command for a CPU makes for its own process."""
    before = os.environ.get("TRITON_INTERPRET")
    yield
    os.environ.pop("TRITON_INTERPRET", None)
    if before is not None:
        os.environ["TRITON_INTERPRET"] = before


@pytest.fixture(autouse=True)
def _fresh_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin each test as a command that has not measured yet, and that does not wait for a device."""
    from groupbench.tracker.tools import lease

    monkeypatch.setattr(lease.WAITING, "begun", False)
    monkeypatch.setattr(lease.WAITING, "first_s", 0.0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="Also run the tests marked `exhaustive`.")


WARM = Path(__file__).parent / "shared" / "warm"
WARM_PYTHON = (sys.executable, "-I", "-S", str(WARM / "start.py"), sys.executable)


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(lambda: shutil.rmtree(os.environ["GROUPBENCH_LOCKS"], ignore_errors=True))
    if not hasattr(config, "workerinput"):  # else the process that started this one has done it
        folder = Path(tempfile.gettempdir(), f"groupbench-warm-{secrets.token_hex(8)}-{os.getpid()}")
        os.environ["GROUPBENCH_TEST_WARM"] = str(folder)
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS  # a few tests may need none of the packages
        if whole and os.environ.get("TRITON_INTERPRET") == "1" and config.getoption("tx", None):
            start_warm_server(folder)
            config.option.tx = [f"popen//python={shlex.join(WARM_PYTHON)}" for _ in config.option.tx]
    # This process's own fork server is forked from the warm server too, if that runs by then.
    spec = importlib.util.spec_from_file_location("warm_fork_servers", WARM / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    if config.getoption("exhaustive") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("exhaustive")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers of `-n auto`: three for two cores, up to 16, since each imports torch.

    A quarter of the time, a test waits for a limit or for its processes. A worker more uses that time.
    """
    cores = len(os.sched_getaffinity(0))
    return min(cores + (cores + 1) // 2, 16)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    products: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "pairwise" in marks and "exhaustive" not in marks:
            products[item.nodeid.partition("[")[0]].append(item)
    for product in products.values():
        rows = [[id(value) for value in item.callspec.params.values()] for item in product]
        kept = cover_pairs(rows)
        for number, item in enumerate(product):
            if number not in kept:
                item.add_marker("exhaustive")
    if not config.getoption("exhaustive"):
        deselected = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=deselected)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without garbage collections, which find nothing among tests and modules, and keep these out of later.

    Later ones are rarer than Python's, which take a twentieth of the time that interpreted kernels take.
    """
    try:
        return (yield)
    finally:
        if "helion" in sys.modules:
            importlib.import_module("binds").patch_once()
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


def cover_pairs(rows: Sequence[Sequence[Any]]) -> set[int]:
    """Return the indices of a few rows that together have every pair of values of two columns.

    The choice is greedy: always the row with the most missing pairs, and the first of equal ones. It is deterministic.
    """
    pairs = [set(combinations(enumerate(row), 2)) or {(row,)} for row in rows]
    missing: set[Any] = set().union(*pairs)
    kept: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda number: len(pairs[number] & missing))
        kept.add(best)
        missing -= pairs[best]
    return kept


@pytest.fixture(scope="session", autouse=True)
def default_signals() -> Iterator[None]:
    """Give the programs that tests start the default signals, even under `nohup` or in a shell's background.

    Children inherit ignored signals, but a caught signal has its default in them. A hangup still does not end the tests
    themselves.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    ignored = [number for number, handler in before.items() if handler is signal.SIG_IGN]
    for number in ignored:
        handler = signal.default_int_handler if number is signal.SIGINT else lambda *_: None
        signal.signal(number, handler)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session")
def warm_server() -> dict[str, str]:
    """Start the server in shared/warm, and return the variables of programs whose fork servers it shall fork."""
    start_warm_server(Path(os.environ["GROUPBENCH_TEST_WARM"]))
    path = os.pathsep.join([str(WARM), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "GROUPBENCH_TEST_WARM": os.environ["GROUPBENCH_TEST_WARM"]}


@pytest.fixture(scope="module")
def warm_imports(warm_server: dict[str, str]) -> Iterator[dict[str, str]]:
    """Fork the fork servers of programs that the module starts from one that has imported torch.

    Gives the variables, for programs with an environment of their own. Tests of the fork server itself, or of the
    processes that a command leaves, do not use this.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", warm_server["PYTHONPATH"])
        yield warm_server


@pytest.fixture(scope="session")
def warm_python(warm_server: dict[str, str]) -> tuple[str, ...]:
    """Return the command of a Python for `-c CODE` that has imported torch, and Triton with its interpreter."""
    return WARM_PYTHON


def start_warm_server(folder: Path) -> None:
    """Start the server that all test processes share, unless it is running."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    start_server(folder, "socket", ["-P", str(WARM / "server.py")], environment)


Forked = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Forked:
    """Return a function that runs `module:function` as a command in a fork of this process.

    The fork has already imported torch and other packages, which would take a new process about five seconds. The
    arguments, environment, folder, output and exit code are those of a new process. The start of the interpreter is not
    tested.
    """
    folder = tmp_path_factory.mktemp("forked")

    def run(
        program: str,
        *args: str | os.PathLike[str],
        cwd: str | os.PathLike[str] = ".",
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        module, _, function = program.partition(":")
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():  # a fork cannot use CUDA
            code = f"import sys; from {module} import {function}; {function}()"
            command = [sys.executable, "-c", code, *map(str, args)]
            return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)
        main = getattr(importlib.import_module(module), function)
        out, err = folder / "out", folder / "err"
        pid = os.fork()
        if pid == 0:
            end(lambda: _as_command(main, [program, *map(str, args)], (Path(os.devnull), out, err), cwd, env))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return subprocess.CompletedProcess(args, status, out.read_text(), err.read_text())

    return run


def _as_command(
    main: Callable[[], object],
    argv: list[str],
    streams: Sequence[Path],
    cwd: str | os.PathLike[str],
    environment: Mapping[str, str] | None,
) -> None:
    """Make a fork look like a new process, and run `main` there."""
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    os.chdir(cwd)
    tempfile.tempdir = None
    sys.path[:0] = [str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    become(argv, streams)
    main()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the reasons of skipped tests, which are otherwise a letter in a line of dots."""
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    for reason, number in reasons.items():
        if "NOT TESTED" in reason:
            terminalreporter.write_line(f"{number} skipped: {reason.removeprefix('Skipped: ')}", yellow=True, bold=True)
