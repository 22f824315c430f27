"""A pytest fixture for measuring by groupbench's protocol: a project's tests become series.

    def test_softmax(benchmark_gpu):
        y = benchmark_gpu(softmax, x)
        torch.testing.assert_close(y, torch.softmax(x, -1))

Without --groupbench or --groupbench-records the function is called once, and nothing from groupbench is imported. With
one option it is measured on the tensors' device. In the record, the operator is the test, the backend the function, and
the shape the test's parameters. If the test fails, the result counts as wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from groupbench.operators.pytest_session import PytestSession

KEY: pytest.StashKey[PytestSession | None] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("groupbench")
    group.addoption("--groupbench", action="store_true", help="Measure functions passed to benchmark_gpu.")
    group.addoption(
        "--groupbench-records", type=Path, metavar="FILE", help="Measure, and append records for `groupbench ingest`."
    )
    group.addoption(
        "--groupbench-wait",
        metavar="DURATION",
        default="0s",
        help="Wait up to this long, such as 20m, while other commands measure on the device.",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[KEY] = None
    records = config.getoption("--groupbench-records")
    if not (records or config.getoption("--groupbench")):
        return
    if getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput"):
        raise pytest.UsageError("--groupbench measures one test at a time: omit -n")
    from groupbench.operators.errors import GroupbenchError
    from groupbench.operators.pytest_session import PytestSession

    try:
        session = PytestSession(records, config.rootpath, config.invocation_params.args)
        session.wait(config.getoption("--groupbench-wait"))
    except GroupbenchError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[KEY] = session
    config.add_cleanup(session.close)


@pytest.fixture
def benchmark_gpu(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Call a function with arguments and return the result; with --groupbench, also measure it.

    The function is called many times with the same arguments, and must not change them.
    """
    session = request.config.stash[KEY]
    name, _, parameters = request.node.nodeid.partition("[")

    def benchmark(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        if session is not None:
            shape = re.sub(r"\]$", "", parameters) or "default"
            session.measure(name, shape, function, args, kwargs)
        return out

    return benchmark


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    session = item.config.stash.get(KEY, None)
    if session is not None and call.when == "call":
        reason = call.excinfo.exconly() if call.excinfo is not None else ""
        if report.failed:
            session.finish_test("wrong", f"the test failed: {(reason or str(report.longrepr)).strip()}")
        elif report.skipped:  # or expected to fail
            session.finish_test("unavailable", f"the test was skipped, or failed as expected: {reason}")
        else:
            session.finish_test("ok", None)
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    session = config.stash.get(KEY, None)
    if session is not None and session.records:
        terminalreporter.section("groupbench")
        terminalreporter.write(session.summary())
