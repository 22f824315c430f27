"""One side of a comparison, driven like the tracker does: each line of JSON gets one answer, even after a crash."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from groupbench.operators.measure import side, witness
from groupbench.operators.measure.selection import DYNAMO
from groupbench.operators.measure.side import held_to
from groupbench.operators.measure.wire import Burst, Failure
from groupbench.operators.measure.witness import Implausible

STALL = Implausible("implausible: a call uses 2 ms of processor time")
BUSY = Failure("error", "its times could not be checked")
CELL = {
    "operator": "grouped_gemm",
    "backend": "torch_loop",
    "shape": "G=2,M_g=64,N=128,K=128",
    "dtype": "fp32",
    "mode": "fwd",
    "seed": 0,
    "plugins": ["faulty_backends.BACKENDS", "faulty_backends.chatty"],
    "cudagraph": False,
}
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask(warm_imports: dict[str, str]) -> Iterator[Ask]:
    folder = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([folder, warm_imports["PYTHONPATH"]])}
    process = subprocess.Popen(
        [sys.executable, "-m", "groupbench.operators.measure.side"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )

    def question(verb: str, **arguments: Any) -> dict[str, Any]:
        process.stdin.write(json.dumps({"verb": verb, "arguments": arguments}).encode() + b"\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    assert question("hello", device="cpu")["value"]["device"] == "cpu"
    yield question
    process.stdin.write(b'{"verb": "quit"}\n')
    process.stdin.close()
    assert process.wait() == 0
    process.stdout.close()


def prepare(ask: Ask, timeout_s: float = 60.0, **facts: Any) -> dict[str, Any]:
    return ask("prepare", cell=CELL | facts, timeout_s=timeout_s)


def test_a_cell_is_prepared_placed_and_timed(ask: Ask) -> None:
    value = prepare(ask)["value"]
    assert (value["timing"], value["problem"]) == ("cpu", None) and value["accuracy"]["rms"] < 1e-5
    assert ask("adopt", seed=0, samples=1) == {"value": "reloaded"}
    for seed, samples in ((1, 3), (2, 5)):
        assert ask("reload", seed=seed, samples=samples) == {"value": "reloaded"}
        burst = ask("burst")["value"]
        assert len(burst) == samples and all(ms > 0 for ms in burst)
    assert ask("amounts") == {"value": [2 * 128 * 128 * 128, 4 * (128 * 128 + 2 * 128 * 128 + 128 * 128)]}
    assert "value" in ask("unload")


def test_a_built_in_routing_is_found_and_costs_no_more_than_its_process(ask: Ask) -> None:
    shape = {"shape": "G=4,M=64,N=16,K=16,routing=zipf(1.2)", "plugins": ["faulty_backends.ROUTED"]}
    for backend, dynamic in (("torch_loop", False), ("reads_routing", True), ("dies_rerouted", False)):
        value = prepare(ask, backend=backend, **shape)["value"]
        assert (value["problem"], value["dynamic"]) == (None, dynamic), backend
        assert ask("adopt", seed=0, samples=2) == {"value": "reloaded"}
        assert len(ask("burst")["value"]) == 2
    assert prepare(ask, shape="G=2,M_g=64,N=128,K=128,B=shared")["value"]["dynamic"] is None


def test_a_backend_that_is_honest_where_it_is_checked_is_found_where_it_is_timed(
    faulty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The side is this process, so that its audits can be short: they take six seconds, most of them in pauses."""
    monkeypatch.setattr(witness, "LIMITS", witness.Limits(attempts=2))
    monkeypatch.setattr(side, "_one_in", lambda number: True)
    ab = side.AbServer()
    ab.hello("cpu")
    facts = {"backend": "forges_elsewhere", "shape": "G=2,M_g=128,N=256,K=256"}
    try:
        prepared = ab.prepare(CELL | facts | {"plugins": ["faulty_backends.ELSEWHERE"]}, 60.0)
        assert isinstance(prepared, dict) and prepared["problem"] is None
        assert ab.adopt(seed=0, samples=5, fresh=True) == "reloaded"
        answers = [ab.burst()]
        assert isinstance(answers[0], list) and len(answers[0]) == 5
        end = time.monotonic() + 600  # a busy machine can spoil audits, for as long as it is busy
        while not isinstance(answers[-1], Failure) and time.monotonic() < end:
            answers.append(ab.burst())
    finally:
        ab.end()
    failure = answers[-1]
    assert isinstance(failure, Failure) and failure.status == "wrong" and failure.message.startswith("implausible: ")


def test_the_timed_process_is_replaced_and_the_checking_one_stays(ask: Ask) -> None:
    assert "failure" in prepare(ask, backend="raises")
    assert "before anything was loaded" in ask("burst")["failure"]["message"]
    assert "failure" in ask("dance")
    assert "value" in prepare(ask)
    for fresh in (False, False, True):
        assert ask("adopt", seed=1, samples=2, fresh=fresh) == {"value": "reloaded"}
        assert len(ask("burst")["value"]) == 2
    assert ask("reload", seed=4, samples=1) == {"value": "reloaded"}
    assert len(ask("burst")["value"]) == 1
    assert "value" in ask("unload") and "value" in prepare(ask)
    assert ask("adopt", seed=1, samples=1) == {"value": "reloaded"}


def test_a_cell_that_fails_costs_an_answer(ask: Ask) -> None:
    """Each backend comes to its own fault, so the one before has left processes that work."""
    faults = {"crashes": "SIGSEGV", "raises_bytes": r"caf\udce9", "hangs": "no answer within"}
    for backend, message in faults.items():
        failure = prepare(ask, backend=backend, timeout_s=3.0 if backend == "hangs" else 60.0)["failure"]
        assert message in failure["message"]
        assert failure["status"] == ("timeout" if backend == "hangs" else "error")
    assert "value" in prepare(ask)


def test_a_wrong_result_is_prepared_and_reported(ask: Ask) -> None:
    value = prepare(ask, backend="one_percent", shape="G=2,M_g=32,N=16,K=16")["value"]
    assert "RMS error" in value["problem"]
    stale = prepare(ask, backend="goes_stale")["value"]
    assert "in a timed call: relative RMS error 2" in stale["problem"]
    assert stale["accuracy"]["rms"] == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"backend": "nope"}, "has no backend 'nope'"),
        ({"operator": "nope"}, "no operator 'nope'"),
        ({"plugins": ["faulty_backends.does_not_load"]}, r"raised RuntimeError: caf\udce9"),
    ],
)
def test_unknown_names_are_usage_failures(ask: Ask, facts: dict[str, str], message: str) -> None:
    failure = prepare(ask, **facts)["failure"]
    assert failure["status"] == "usage" and message in failure["message"]


def test_a_backends_output_does_not_reach_the_answers(ask: Ask) -> None:
    assert "value" in prepare(ask, backend="chatty")
    assert "value" in ask("adopt", seed=1, samples=2)
    assert len(ask("burst")["value"]) == 2


def test_cells_are_listed(ask: Ask) -> None:
    cells = ask("cells", operator="grouped_gemm", shapes=["2,64,128,128"], dtypes=["fp32", "fp16"])["value"]
    assert {cell["shape"] for cell in cells} == {"G=2,M_g=64,N=128,K=128"}
    assert {cell["dtype"] for cell in cells} == {"fp32", "fp16"}
    assert {"torch_loop", "triton_flat"} <= {cell["backend"] for cell in cells}
    assert all(cell["unavailable"] is None for cell in cells if cell["backend"] == "torch_loop")
    every = ask("cells", operator="canary")["value"]
    assert [cell["shape"] for cell in every] == ["copy,N=2048", "matmul,N=512"]


@pytest.mark.parametrize(
    "selection",
    [{"operator": "nope"}, {"shapes": ["1,2"]}, {"suites": ["nope"]}, {"dtypes": ["fp7"]}, {"mode": "sideways"}],
)
def test_an_invalid_selection_is_a_usage_failure(ask: Ask, selection: dict[str, Any]) -> None:
    assert ask("cells", **{"operator": "grouped_gemm"} | selection)["failure"]["status"] == "usage"


@pytest.mark.parametrize(("killed", "long"), [("driver", False), ("side", True)])
def test_all_processes_end_with_the_driver_or_the_side(
    killed: str, long: bool, warm_imports: dict[str, str], tmp_path: Path
) -> None:
    """The side is killed during a question, whose backend never returns.

    The temporary folder's path may be too long for the address of a socket. The fork server, which is among the
    processes, is a fork of one that has imported torch, unless kernels are compiled.
    """
    if long:
        tmp_path /= "x" * 100
        tmp_path.mkdir()
    paths = [str(Path(__file__).parents[1]), warm_imports["PYTHONPATH"]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(tmp_path)}
    warm = environment.get("TRITON_INTERPRET") == "1"
    if not warm:
        environment["GROUPBENCH_TEST_WARM"] = ""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-m", "groupbench.operators.measure.side"]
    with subprocess.Popen(command, **pipes, env=environment, cwd=tmp_path) as process:
        preparing = {"cell": CELL | {"backend": "hangs"}, "timeout_s": 600.0}
        for verb, arguments in (("hello", {"device": "cpu"}), ("prepare", preparing)):
            process.stdin.write(json.dumps({"verb": verb, "arguments": arguments}).encode() + b"\n")
            process.stdin.flush()
        process.stdout.readline()
        # The side, the fork server, the resource tracker, the cell and its warden; and that in place of the server.
        assert waited(lambda: len(processes_in(tmp_path)) >= 5 + warm), "the processes did not start"
        if killed == "driver":
            process.stdin.close()
        else:
            process.kill()
        process.wait()
    waited(lambda: not processes_in(tmp_path))
    left = processes_in(tmp_path)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    assert [path.name for path in tmp_path.rglob("*") if not path.name.startswith("torch")] == []


def waited(ready: Callable[[], bool]) -> bool:
    """Wait ten minutes at most, for a busy machine. Return whether it is ready."""
    until = time.monotonic() + 600
    while not ready() and time.monotonic() < until:
        time.sleep(0.05)
    return ready()


def processes_in(folder: Path) -> list[int]:
    """Return the running processes whose working directory is the folder."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder:
                pids.append(int(process.name))
    return pids


def audited(faults: list[Any]) -> tuple[side.AbServer, Mock]:
    """Return a side whose audits find these faults one after the other, and its timed cell."""
    live = Mock(problem=None, bursts=[])
    live.burst.side_effect = lambda *_: live.bursts.append(()) or Burst((1.0, 2.0), None, (2, 3), (0, 0))
    live.audit.side_effect = faults
    ab = side.AbServer()
    ab._live, ab._timed, ab._owed = live, Mock(), side.SHARES.most_owed
    return ab, live


UNAUDITED = ["times, because other work kept the CPU busy"]


@pytest.mark.parametrize(
    ("faults", "audits"),
    [([None], 1), ([STALL, None], 2), ([STALL, STALL], 2), (["wrong", None], 1)],
    ids=["plausible", "implausible once", "implausible twice", "wrong"],
)
def test_processor_times_must_be_implausible_in_two_audits(
    faults: list[str | None], audits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ab, live = audited(faults)
    monkeypatch.setattr(ab, "_is_audited", lambda bursts: True)
    blamed_for = faults[audits - 1]
    assert ab.burst() == ([1.0, 2.0] if blamed_for is None else Failure("wrong", str(blamed_for)))
    assert live.audit.call_count == audits


@pytest.mark.parametrize(
    ("faults", "audits", "unchecked"),
    [
        ([None], 1, []),
        ([BUSY, None], 2, []),
        ([STALL, None, None], 3, []),
        ([BUSY] * 9, side.SHARES.most_owed, UNAUDITED),
        ([STALL, BUSY] * 9, 2 * side.SHARES.most_owed, UNAUDITED),
    ],
    ids=["clear", "busy machine", "contradiction", "always busy", "always in doubt"],
)
def test_an_audit_without_a_result_is_tried_again_at_the_next_bursts(
    faults: list[Failure | None], audits: int, unchecked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ab, live = audited(faults)
    monkeypatch.setattr(side, "_one_in", lambda number: False)
    assert ab.unchecked() == []
    assert [ab.burst() for _ in range(9)] == [[1.0, 2.0]] * 9
    assert live.audit.call_count == audits
    assert ab.unchecked() == unchecked


def test_one_clear_audit_of_several_processes_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    ab, _ = audited([BUSY, BUSY, None, BUSY, BUSY])
    monkeypatch.setattr(side, "_one_in", lambda number: False)
    for _ in range(3):
        for _ in range(5):
            ab.burst()
        ab._owed = side.SHARES.most_owed  # as in a new process
    assert ab.unchecked() == []


def test_the_facts_of_a_cell_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, Any]] = []
    monkeypatch.setattr(side, "call", lambda *question: asked.append(question) or len(asked))
    ab = side.AbServer()
    ab._job = job = ab._as_job(CELL)
    base = CELL | {"trusted": [], "base_backend": "torch_grouped_mm"}
    assert [ab._as_held(cell) for cell in (CELL, CELL, base, CELL, base)] == [1, 1, 2, 1, 2]
    assert asked == [(held_to, job), (held_to, replace(job, plugins=(), backend="torch_grouped_mm"))]


STILL = """
import torch
from groupbench.operators.define import operator


@operator({"one": ["N=4"]})
def still(N):
    return {"n": N}


@still.reference
def counted(n):
    return torch.arange(n, dtype=torch.float32)


@still.backend
def mine(n):
    return torch.arange(n, dtype=torch.float32)
"""


def test_dynamo_is_not_imported_before_the_bytes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds, which a wrong result need not wait for."""
    (tmp_path / "plugin.py").write_text(STILL)
    cell = {"operator": "still", "backend": "mine", "shape": "N=4", "plugins": [str(tmp_path / "plugin.py")]}
    monkeypatch.setattr(side, "call", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(side, "preload", preload := Mock())
    monkeypatch.setattr(side.AbServer, "_started", Mock(side_effect=RuntimeError("the first process")))
    ab = side.AbServer()
    with pytest.raises(RuntimeError, match="the first process"):
        ab.prepare(CELL | cell, 1.0)
    preload.assert_called_once_with()
    assert ab.amounts() == [0, 16]
    preload.assert_called_with(DYNAMO)


def test_inputs_that_cannot_change_are_named(ask: Ask, tmp_path: Path) -> None:
    assert "value" in prepare(ask)
    assert ask("unchecked") == {"value": []}
    (tmp_path / "still.py").write_text(STILL)
    prepared = prepare(ask, operator="still", backend="mine", shape="N=4", plugins=[str(tmp_path / "still.py")])
    assert "value" in prepared, prepared
    assert ask("unchecked") == {"value": ["stale results, because its inputs do not change between calls"]}
