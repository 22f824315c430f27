"""A project's tests become series."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from groupbench.operators.pytest_session import name_of
from groupbench.tracker.facts.record import Record, read

pytest_plugins = ["pytester"]

INSTALLED = any(plugin.name == "groupbench" for plugin in entry_points(group="pytest11"))
"""Whether pytest loads the plugin by itself, as for the users of an installed groupbench."""


class Norm:
    """A callable object."""

    def __call__(self, x: float) -> float:
        return abs(x)

    def forward(self, x: float) -> float:
        return abs(x)


FUNCTIONS = {
    "torch's": (torch.softmax, "softmax"),
    "builtin": ([].append, "list.append"),
    "function": (torch.nn.functional.gelu, "gelu"),
    "Python's": (torch.nn.functional.softmax, "softmax"),
    "method": (Norm().forward, "Norm.forward"),
    "object": (Norm(), "Norm"),
    "partial": (functools.partial(functools.partial(torch.softmax, dim=-1), dtype=None), "softmax"),
    "lambda": (lambda x: x, "lambda"),
}


@pytest.mark.parametrize(("function", "name"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_names_its_backend(function: Callable[..., object], name: str) -> None:
    assert name_of(function) == name


TESTS = """
import pytest

def double(x):
    return x + x

@pytest.mark.parametrize("N", [8, 16], ids=lambda N: f"N={N}")
def test_double(benchmark_gpu, N):
    torch = pytest.importorskip("torch")
    x = torch.ones(N, dtype=torch.float16)
    assert benchmark_gpu(double, x).tolist() == [2.0] * N

def test_twice(benchmark_gpu):
    calls = []
    assert benchmark_gpu(calls.append, 1) is None
    benchmark_gpu(lambda: calls.append(0))
    benchmark_gpu(lambda: calls.append(0))
    print("CALLS", len(calls))
"""
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Run the project's tests in this process."""
    pytester.makepyfile(TESTS)

    def started(*args: str) -> pytest.RunResult:
        plugin = () if INSTALLED else ("-p", "groupbench.operators.pytest_plugin")
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-s", *plugin, *args)

    return started


def records(file: Path) -> dict[tuple[str, str, str], Record]:
    stored = [record for _, record in read(file.read_bytes().split(b"\n"))]
    return {(r.cell.operator, r.cell.backend, r.cell.shape): r for r in stored}


def test_without_the_option_nothing_is_measured(run: Run, pytester: pytest.Pytester) -> None:
    result = run()
    result.assert_outcomes(passed=3)
    assert "CALLS 3" in result.stdout.str()
    assert "groupbench" not in re.sub(r"plugins: .*|rootdir: .*", "", result.stdout.str())
    assert not [*pytester.path.glob("*.jsonl")]


def test_each_test_is_an_operator(run: Run, pytester: pytest.Pytester) -> None:
    result = run("--groupbench-records", "out/r.jsonl")
    result.assert_outcomes(passed=3)
    assert int(re.findall(r"CALLS (\d+)", result.stdout.str())[0]) > 30
    stored = records(pytester.path / "out" / "r.jsonl")
    name = "test_each_test_is_an_operator.py::test_"
    assert set(stored) == {
        (f"{name}double", "double", "N=8"),
        (f"{name}double", "double", "N=16"),
        (f"{name}twice", "list.append", "default"),
        (f"{name}twice", "lambda", "default"),
        (f"{name}twice", "lambda", "default #2"),
    }
    double = stored[f"{name}double", "double", "N=8"]
    assert (double.cell.dtype, double.cell.host, double.status) == ("fp16", "pytest", "ok")
    assert double.latency is not None and double.latency.timing == "cpu" and len(double.latency.bursts_ms) == 4
    assert stored[f"{name}twice", "lambda", "default"].cell.dtype == "none"
    assert len({record.run.id for record in stored.values()}) == 1
    assert "records: out/r.jsonl" in result.stdout.str() and "N=16" in result.stdout.str()


def test_a_test_that_fails_makes_its_results_wrong(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_right(benchmark_gpu):
            benchmark_gpu(abs, 1)

        def test_wrong(benchmark_gpu):
            assert benchmark_gpu(abs, 1) == 2

        def test_skipped(benchmark_gpu):
            benchmark_gpu(abs, 1)
            pytest.skip("not today")

        @pytest.mark.xfail
        def test_expected(benchmark_gpu):
            assert benchmark_gpu(abs, 1) == 2

        @pytest.mark.xfail(strict=True)
        def test_unexpected(benchmark_gpu):
            benchmark_gpu(abs, 1)
        """
    )
    result = run("--groupbench-records", "r.jsonl")
    result.assert_outcomes(passed=1, failed=2, skipped=1, xfailed=1)
    stored = records(pytester.path / "r.jsonl").values()
    of_test = {record.cell.operator.rpartition("_")[2]: (record.status, record.message or "") for record in stored}
    assert of_test["right"] == ("ok", "")
    assert of_test["wrong"][0] == "wrong" and "the test failed: AssertionError: assert 1 == 2" in of_test["wrong"][1]
    assert of_test["skipped"] == ("unavailable", "the test was skipped, or failed as expected: Skipped: not today")
    assert of_test["expected"][0] == "unavailable"
    assert of_test["unexpected"] == ("wrong", "the test failed: [XPASS(strict)]")


def test_records_can_be_left_out(run: Run, pytester: pytest.Pytester) -> None:
    result = run("--groupbench", "-k", "double")
    result.assert_outcomes(passed=2, deselected=1)
    assert "latency ms" in result.stdout.str()
    assert not [*pytester.path.glob("*.jsonl")]


def test_a_file_that_cannot_be_written_ends_before_any_test(run: Run) -> None:
    result = run("--groupbench-records", "/proc/nowhere/r.jsonl")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "cannot write /proc/nowhere/r.jsonl" in result.stderr.str()


def test_tests_side_by_side_are_not_measured(run: Run) -> None:
    pytest.importorskip("xdist")
    result = run("--groupbench", "-n", "2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "omit -n" in result.stderr.str()
