"""The parent of TritonBench's process, with a script in TritonBench's place."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from measured import CPU, RUN

from groupbench.operators.errors import GroupbenchError, Incomplete, UsageError
from groupbench.operators.hosts import tritonbench
from groupbench.operators.hosts.journal import Setup
from groupbench.tracker.facts.record import Record

CHILD = """
import json, os, sys, time
setup = json.load(open(sys.argv[1]))
done = {cell["backend"]: cell["message"] for cell in setup["finished"]}
def tell(**event):
    with open(setup["journal"], "a") as file:
        file.write(json.dumps({"input_id": 0, **event}) + "\\n")
def cell(name):
    return {"operator": "o", "backend": name, "shape": "s", "dtype": "fp16"}
def begin(name):
    tell(backend=name, begun=cell(name))
def finish(name):
    tell(backend=name, cell=cell(name), latency={"timing": "cpu", "bursts_ms": [[1.0]]})
def again(name):
    tell(backend=name, begun=cell(name))
    tell(backend=name)
"""


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Record]]:
    """Return a function that runs a script as the child and returns the records."""
    records: list[Record] = []

    def run(script: str, timeout_s: float = 60) -> list[Record]:
        path = tmp_path / "child.py"
        path.write_text(CHILD + script)
        real = tritonbench._Follower

        def follower(command: list[str], journal: Path, timeout_s: float) -> tritonbench._Follower:
            return real([sys.executable, str(path), command[3]], journal, timeout_s)

        monkeypatch.setattr(tritonbench, "_Follower", follower)
        for record in tritonbench._operator_records(Setup(op="o"), [], CPU, RUN, timeout_s, []):
            records.append(record)
        return records

    run.records = records  # type: ignore[attr-defined]
    return run


def outcomes(records: list[Record]) -> list[tuple[str, str]]:
    return [(record.cell.backend, record.status) for record in records]


# script of the process, seconds that it has -> backends and statuses
OUTCOMES: dict[str, tuple[str, float, list[tuple[str, str]]]] = {
    "all is well": ("for n in 'ab':\n  begin(n)\n  finish(n)", 60, [("a", "ok"), ("b", "ok")]),
    "the baseline again has no second record": (
        "if done:\n  again('a')\nelse:\n  begin('a')\n  finish('a')\n  begin('b')\n  os.kill(os.getpid(), 11)",
        60,
        [("a", "ok"), ("b", "error")],
    ),
    "killed for memory": ("if not done:\n  begin('a')\n  os.kill(os.getpid(), 9)", 60, [("a", "oom")]),
    "silence": ("if not done:\n  begin('a')\n  time.sleep(3600)", 3, [("a", "timeout")]),
    "a line half written": (
        """
begin("a")
line = json.dumps({"input_id": 0, "backend": "a", "cell": cell("a"), "status": "error", "message": "why"}) + "\\n"
for part in (line[:20], line[20:]):
    with open(setup["journal"], "a") as file:
        file.write(part)
    time.sleep(0.5)
""",
        60,
        [("a", "error")],
    ),
}


@pytest.mark.parametrize(("script", "timeout_s", "expected"), OUTCOMES.values(), ids=OUTCOMES)
def test_every_end_has_its_records(
    script: str, timeout_s: float, expected: list[tuple[str, str]], follow: Callable[..., list[Record]]
) -> None:
    assert outcomes(follow(script, timeout_s)) == expected


def test_a_silent_cell_is_named_before_it_fails(
    follow: Callable[..., list[Record]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tritonbench, "NOTICE_S", 0.2)
    follow("if not done:\n  begin('a')\n  time.sleep(3600)", 2)
    warning = r"a, input 0: no answer for \d+ s; it fails after 2 s \(--timeout\)"
    assert len(re.findall(warning, capsys.readouterr().err)) == 1


# script of the process -> the error that is raised, the backends that have a record
ERRORS: dict[str, tuple[str, type[GroupbenchError], str, str]] = {
    "an end before anything": ("sys.exit(2)", UsageError, "exit code 2 before", ""),
    "a refusal": ("tell(refused=\"no backend 'x'\")\nsys.exit(2)", UsageError, "^no backend 'x'$", ""),
    "an exception between cells": (
        *("begin('a')\nfinish('a')\ntell(refused='ValueError: why')", Incomplete),
        *("^TritonBench ended after 1 cell: ValueError: why$", "a"),
    ),
    "an end between cells": ("begin('a')\nfinish('a')\nsys.exit(3)", Incomplete, "exit code 3 after 1 cell$", "a"),
}


@pytest.mark.parametrize(("script", "error", "message", "kept"), ERRORS.values(), ids=ERRORS)
def test_another_end_is_an_error(
    script: str, error: type[GroupbenchError], message: str, kept: str, follow: Callable[..., list[Record]]
) -> None:
    with pytest.raises(error, match=message):
        follow(script)
    assert outcomes(follow.records) == [(name, "ok") for name in kept]  # type: ignore[attr-defined]


def test_what_it_started_ends_with_it(follow: Callable[..., list[Record]], tmp_path: Path) -> None:
    left = tmp_path / "left"
    follow(f"""
import subprocess
begin("a")
finish("a")
open({str(left)!r}, "w").write(str(subprocess.Popen(["sleep", "4242"]).pid))
""")
    status = Path(f"/proc/{left.read_text()}/status")
    for _ in range(1000):  # it was killed, and may take a moment
        if not status.exists() or "zombie" in status.read_text():
            return
        time.sleep(0.01)
    os.kill(int(left.read_text()), signal.SIGKILL)
    raise AssertionError("it is still there")


def test_a_death_is_a_record_and_the_rest_goes_on(follow: Callable[..., list[Record]]) -> None:
    records = follow("""
for name in "abc":
    if name == "a" and done:
        again(name)
    elif name not in done:
        begin(name)
        if name == "b":
            os._exit(9)
        finish(name)
""")
    assert outcomes(records) == [("a", "ok"), ("b", "error"), ("c", "ok")]
    assert records[1].message == "TritonBench's process died (exit code 9) at this cell"


def test_an_interrupt_records_the_cell_and_says_what_is_left(
    follow: Callable[..., list[Record]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        polls.append(seconds)
        if follow.records and len(polls) > 1:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        time.sleep(seconds)

    polls: list[float] = []
    monkeypatch.setattr(tritonbench, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupt))
    with pytest.raises(KeyboardInterrupt, match=r"^input 0 was not finished, and 3 inputs not started$"):
        follow("begin('a')\nfinish('a')\ntell(backend='b', begun=cell('b'), left=3)\ntime.sleep(3600)")
    records = follow.records  # type: ignore[attr-defined]
    assert outcomes(records) == [("a", "ok"), ("b", "skipped")]
    assert records[1].message == "interrupted before it was measured"


# For each operator: its error and the backends that it lacks, or None if unknown -> errors reported and raised.
ENDS: dict[str, tuple[Any, list[str], str | None]] = {
    "well": (((None, {"x"}), (None, set())), [], None),
    "one": (((UsageError("why"), set()), (None, set())), ["o0: why"], None),
    "several": (((UsageError("y"), set()), (None, set()), (Incomplete("n"), set())), ["o0: y", "o2: n"], None),
    "all": (((UsageError("y"), set()), (Incomplete("n"), set())), [], "o0: y; o1: n"),
    "a backend": (((None, {"x", "y"}), (None, {"y"})), ["none of the selected operators has a backend 'y'"], None),
    "a backend of an unknown operator": (((UsageError("why"), None), (None, {"y"})), ["o0: why"], None),
    "interrupted": (
        ((UsageError("y"), set()), (KeyboardInterrupt("3 left"), set()), (None, set())),
        ["o0: y", "interrupted: o1: 3 left", "not started: o2"],
        "3 left",
    ),
}


@pytest.mark.parametrize(("ends", "failures", "raised"), ENDS.values(), ids=ENDS)
def test_an_operators_error_is_reported_after_the_others(
    ends: Any, failures: list[str], raised: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = iter(ends)

    def records(setup: Setup, *args: Any) -> Iterator[str]:
        failure, unknown = next(rest)
        if unknown is not None:
            args[-1][setup.op] = unknown
        if failure is not None:
            raise failure
        yield "record"

    monkeypatch.setattr(tritonbench, "_operator_records", records)
    setups = [(Setup(op=f"o{number}"), []) for number, _ in enumerate(ends)]
    reported: list[str] = []
    run = tritonbench._records(setups, CPU, RUN, 1, reported)
    if raised is None:
        assert list(run) == ["record"] * sum(failure is None for failure, _ in ends)
    else:
        with pytest.raises((GroupbenchError, KeyboardInterrupt), match=raised):
            list(run)
    assert reported == failures


OPTIONS: dict[str, Any] = {
    "ops": ("sum",),
    "rest": (),
    "mode": "fwd",
    "input_id": (),
    "num_inputs": None,
    "cudagraph": False,
    "output": None,
    "output_json": None,
}

# Options on the command line -> options for TritonBench.
UNDERSTOOD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a flag for a mode": ({"rest": ("--bwd", "--causal")}, {"mode": "bwd", "rest": ["--causal"]}),
    "several": ({"rest": ("--fwd-no-grad", "--bwd"), "mode": "fwd_bwd"}, {"mode": "fwd_no_grad", "rest": []}),
    "an operator twice": ({"ops": ("sum", "gemm", "sum")}, {"ops": ("sum", "gemm")}),
    "inputs in any order": ({"input_id": ("3", "0", "3")}, {"input_id": ("0", "3")}),
}


@pytest.mark.parametrize(("options", "understood"), UNDERSTOOD.values(), ids=UNDERSTOOD)
def test_options_are_translated_for_tritonbench(options: dict[str, Any], understood: dict[str, Any]) -> None:
    translated = tritonbench._understood(OPTIONS | options, "cpu")
    assert {name: translated[name] for name in understood} == understood


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "its own processes": ({"rest": ("--isolate",)}, "--isolate cannot be combined with records: each"),
    "an A/B": ({"rest": ("--side-a=--bwd",)}, "--side-a cannot be combined with records: "),
    "graphs on a CPU": ({"cudagraph": True}, "a CPU has no CUDA graphs"),
    "a file of two": ({"ops": ("sum", "gemm"), "output_json": "x"}, "--output-json takes one operator on TritonBench"),
    "no number": ({"input_id": ("x",)}, "--input-id 'x' is not a number"),
    "inputs twice": ({"input_id": ("1", "2"), "num_inputs": 1}, "with at most one --input-id"),
    "our timing": ({"on_command_line": ["device", "idle"]}, "--idle works only with groupbench's operators"),
    "our suites": ({"suites": ("smoke",)}, "sum is not an operator of groupbench"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(changes: dict[str, Any], message: str) -> None:
    options = OPTIONS | {"suites": (), "on_command_line": [], "plugins": ()} | changes
    with pytest.raises(UsageError, match=message):
        tritonbench._setups(tritonbench._understood(options, "cpu"), "cpu")


# Where TritonBench has operators of these names too.
ASKED = {
    "its own": ("vector_add", {}, "cuda", False),
    "its own on a CPU": ("vector_add", {}, "cpu", False),
    "it needs a GPU": ("grouped_gemm", {}, "cpu", True),
    "and has one": ("grouped_gemm", {}, "cuda", False),
    "a suite": ("vector_add", {"suites": ("smoke",)}, "cuda", True),
    "a shape's text": ("vector_add", {"shapes": ("N=257",)}, "cuda", True),
    "its spelling of shapes": ("grouped_gemm", {"shapes": ("4,64,64,64",)}, "cuda", False),
    "a mode of ours": ("grouped_gemm", {"mode": "bwd"}, "cuda", True),
    "no inputs that ours takes": ("split_k_matmul", {}, "cuda", True),
    "no operator of that name": ("canary", {}, "cuda", True),
}


@pytest.mark.parametrize(("op", "more", "device", "is_own"), ASKED.values(), ids=ASKED)
def test_whose_operator_runs(
    op: str, more: dict[str, object], device: str, is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vector_add", "grouped_gemm", "split_k_matmul"):
        (tmp_path / "operators" / name).mkdir(parents=True)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(tritonbench.importlib.util, "find_spec", lambda name: spec)
    options = {"suites": (), "shapes": (), "mode": "fwd"} | more
    assert tritonbench._is_own(op, options, device) is is_own
