"""Backends that cheat are caught by the expected mechanism, and honest ones are not."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from unittest.mock import Mock

import msgspec
import pytest

from groupbench.operators.integrity import __main__ as selftest
from groupbench.operators.integrity.__main__ import CHEATS as SHOWN
from groupbench.operators.integrity.__main__ import HONEST, measure_until_checked
from groupbench.operators.integrity.cheat import CATCHERS, Cheat, caught_by, is_not_checked
from groupbench.operators.measure import witness
from groupbench.operators.measure.wire import Burst, Failure, Paced
from groupbench.operators.vet import vetted
from groupbench.tracker.facts.record import Record, decode, encode


def _all() -> tuple[Cheat, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        return importlib.import_module("cheats").CHEATS  # type: ignore[no-any-return]


CHEATS = _all()
ON_CPU = {cheat.name: cheat for cheat in CHEATS if cheat.device != "cuda"}
# Cheats of different kinds, or caught by different checks, none of which needs an idle machine.
QUICK = (
    *("memo_clone", "memo_by_fingerprint", "packed_activations", "dispatch_aware", "lazy_dispatch", "lazy_method"),
    *("thread_in_waiting", "half_precision", "slow_clock", "forged_answer_with_token", "forged_in_the_pipe"),
    *("fails_as_ok", "fails_as_skipped", "excuses_itself"),
    *("stopped_moves", "patched_judge", "loose_tolerance", "signals_parent", "stops_warden"),
    *("keeps_one_output", "patched_kernel"),
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # for the processes that measure, too


def test_the_suite_is_as_large_as_it_says_and_expects_what_there_is() -> None:
    assert len(ON_CPU) >= 96
    assert {catcher for cheat in SHOWN for catcher in cheat.expected} == {*CATCHERS}
    assert len({cheat.name for cheat in CHEATS}) == len(CHEATS)
    assert {catcher for cheat in CHEATS for catcher in cheat.expected} <= {*CATCHERS}


def _gains_nothing(cheat: Cheat, record: Record, honest: Record) -> bool:
    """Return whether a busy machine let a forged time pass that is still longer than an honest one."""
    if cheat.kind not in ("clock", "channel") or record.status != "ok":
        return False
    assert record.latency is not None and honest.latency is not None
    return min(map(min, record.latency.bursts_ms)) > min(map(min, honest.latency.bursts_ms))


def _check(names: Iterable[str], device: str = "cpu") -> None:
    by_name = {cheat.name: cheat for cheat in CHEATS}
    names = tuple(names)
    records = measure_until_checked(names, device, "cheats.BACKENDS")
    for name in HONEST[device]:
        assert records[name].status == "ok", (name, records[name].message)
    missed = {
        name: (records[name].status, records[name].message)
        for name in names
        if caught_by(records[name]) not in by_name[name].expected
        and not is_not_checked(records[name])
        and not _gains_nothing(by_name[name], records[name], records[HONEST[device][0]])
    }
    assert not missed


def test_the_self_test_counts_unchecked_backends_apart(
    make: Callable[..., Record], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A busy machine proves nothing, neither for a backend nor against it."""
    busy = {"status": "error", "message": "not checked: the device is shared with other work"}
    wrong = {"status": "wrong", "message": "in a timed call: relative RMS error 1"}
    facts = {"memo_clone": wrong, "slow_clock": busy, "an_input": {}}
    tries: list[list[str]] = []

    def measured(names: list[str], device: str, plugin: str) -> list[Record]:
        tries.append(names)
        records = [make(name, **{"message": None, **facts.get(name, {})}) for name in (*names, *HONEST[device])]
        return [
            msgspec.structs.replace(record, message=facts.get(record.cell.backend, {}).get("message"))
            for record in records
        ]

    monkeypatch.setattr(selftest, "measure", measured)
    assert selftest.main(["--device=cpu", "--only=memo_clone,slow_clock,an_input", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["counts"] == {"caught": 1, "not checked": 1, "passed": 1}
    assert tries == [["memo_clone", "an_input", "slow_clock"], ["slow_clock"], ["slow_clock"]]
    assert selftest.main(["--device=cpu", "--only=memo_clone,slow_clock"]) == 3
    assert "2 cheats on the cpu: 1 caught, 1 not checked, 0 passed" in capsys.readouterr().out
    assert selftest.main(["--device=cpu", "--only=memo_clone"]) == 0


def test_cheats_are_caught_and_their_honest_neighbours_are_not() -> None:
    _check(QUICK)


def test_a_backend_cannot_say_that_the_machine_is_busy() -> None:
    """No backend is accused then, so a wrong result could hide behind it."""
    (record,) = [r for r in selftest.measure(["excuses_itself"], "cpu", "cheats.BACKENDS") if "excuses" in str(r.cell)]
    assert record.message is not None and record.message.startswith("its process reports: not checked: ")
    assert not is_not_checked(record)


@pytest.mark.exhaustive
def test_all_other_cheats_are_caught() -> None:
    _check(name for name in ON_CPU if name not in QUICK)


@pytest.mark.gpu
@pytest.mark.exhaustive
def test_all_cheats_are_caught_on_a_gpu() -> None:
    _check([cheat.name for cheat in CHEATS if cheat.device != "cpu"], "cuda")


DAEMON = """
import os, subprocess, sys
from groupbench.operators.catalog.grouped_gemm import prepare_torch_loop
from groupbench.operators.operator import Backend

def leaves_a_daemon(inputs):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "7373.5"])
        os._exit(0)
    return prepare_torch_loop(inputs)

BACKEND = Backend("leaves_a_daemon", leaves_a_daemon, "a test", operator="grouped_gemm")
"""


@pytest.mark.usefixtures("warm_imports")
def test_a_daemon_ends_with_its_cell_without_delay(tmp_path: Path) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    command = [
        sys.executable,
        "-m",
        "groupbench.operators",
        "--host",
        "builtin",
        "--op",
        "grouped_gemm",
        "--device",
        "cpu",
    ]
    command += ["--shapes", "G=2,M_g=64,N=128,K=128", "--plugin", "daemon.BACKEND", "--only", "leaves_a_daemon"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for _ in range(50):
        left = [process for process in Path("/proc").glob("[0-9]*") if b"7373.5" in _command(process)]
        if not left:
            return
        time.sleep(0.1)
    os.kill(int(left[0].name), signal.SIGKILL)
    raise AssertionError("it is still there")


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


# --- records ----------------------------------------------------------------------------------------------------------


def test_an_unreadable_record_becomes_an_error(make) -> None:  # type: ignore[no-untyped-def]
    record: Record = make(ms=1.0)
    assert record.latency is not None
    negative = msgspec.structs.replace(record, latency=msgspec.structs.replace(record.latency, prepare_ms=-4.0))
    written = vetted(negative)
    assert written.status == "error" and "prepare_ms" in (written.message or "")
    assert decode(encode(written)) == written
    nan = msgspec.structs.replace(record.latency, bursts_ms=((float("nan"),),))
    assert vetted(msgspec.structs.replace(record, latency=nan)).status == "error"
    assert vetted(record) is record


def test_a_latency_that_no_device_reaches_is_wrong(make) -> None:  # type: ignore[no-untyped-def]
    written = vetted(make(ms=1e-6))
    assert written.status == "wrong" and (written.message or "").startswith("implausible: 1e-06 ms is less than")


# --- the parent's clock -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claimed_ms", "true_ms", "bursts_ms", "caught"),
    [
        *((1.0, 1.0, 1.0, False), (0.9, 1.0, 0.6, False), (0.01, 1.0, 0.01, True), (0.7, 1.0, 0.7, True)),
        *((2.0, 1.0, 1.0, True), (1.0, 1.0, 0.1, True), (1.0, 1.0, 0.4, True), (0.85, 1.0, 0.4, True)),
    ],
    ids=[
        *("honest", "honest and slower in a row", "less than it takes", "two thirds of what it takes"),
        *("more than it takes", "bursts unlike calls in a row", "less than half in bursts", "and forged in a row too"),
    ],
)
def test_calls_in_a_row_are_timed_from_outside(
    claimed_ms: float, true_ms: float, bursts_ms: float, caught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(witness, "now", lambda: clock[0])

    def ask(calls: int) -> Burst:
        clock[0] += calls * true_ms / 1000 + 0.001
        return Burst((claimed_ms,) * calls)

    problem = witness.watch(ask, bursts_ms, None, lambda: 1.0)
    assert (problem is not None) == caught, problem


def test_a_machine_that_is_busy_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls_made = [0.0], [0]
    monkeypatch.setattr(witness, "now", lambda: clock[0])

    def ask(calls: int) -> Burst:
        calls_made[0] += 1
        clock[0] += calls / 1000 + (0.3 if calls_made[0] == 1 else 0.0)
        return Burst((1.0,) * calls)

    assert witness.watch(ask, 1.0, None, lambda: 1.0) is None
    assert calls_made == [2]


@pytest.mark.parametrize(
    ("stretched", "ratio", "expected"),
    [(1.02, 5.0, str), (4.0, 5.0, Failure), (4.0, 100.0, str), (1.02, 1.0, type(None))],
    ids=["idle, forged", "shared", "shared, and forged by far", "honest"],
)
def test_no_backend_is_blamed_for_other_work_on_the_device(
    stretched: float, ratio: float, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that take turns on a GPU stretch calls in a row, by both clocks, but not single calls."""
    clock = [0.0]
    monkeypatch.setattr(witness, "now", lambda: clock[0])

    def ask(calls: int) -> Burst:
        clock[0] += calls * ratio / 1000
        return Burst((ratio,) * calls)

    problem = witness.watch(ask, 1.0, None, lambda: stretched)
    assert isinstance(problem, expected)
    if isinstance(problem, Failure):
        assert (problem.status, "shared with other work" in problem.message) == ("error", True)


@dataclass
class Audited:
    """A cell and a judge of which only the times are known: those of one call, and of all that is around it.

    others_ms  samples of a quarter of the calls, if they are others
    hidden_ms  in which a child works on the call's processor, and ends without a trace
    used       processors that a call uses
    busy       slowdown of each burst by other work, of which the last one stays
    stalled    slowdown of each of the judge's bursts, which all its clocks show
    """

    call_ms: float
    sample_ms: float
    slept_ms: float = 0.0
    hidden_ms: float = 0.0
    threads: int = 1
    used: int = 1
    others_ms: tuple[float, ...] = ()
    busy: list[float] = field(default_factory=lambda: [1.0])
    stalled: list[float] = field(default_factory=lambda: [1.0])
    calls: list[int] = field(default_factory=list)

    def ask(self, calls: int) -> witness.Timed:
        self.calls.append(calls)
        slowdown = _next(self.busy)
        wall_ms = (calls + 1) * (self.call_ms + self.slept_ms + self.hidden_ms + 0.1) * slowdown
        processor_ms = (calls + 1) * (self.call_ms * self.used + 0.1) * min(slowdown, 1.9)
        run_ms = (calls + 1) * (self.call_ms + 0.1) * min(slowdown, 1.9)
        queued_ms = wall_ms - (calls + 1) * self.slept_ms - run_ms
        others = self.others_ms * (calls // 4)
        burst = Burst(others + (self.sample_ms,) * (calls - len(others)), None, (2,), (0,))
        return witness.Timed(burst, wall_ms, processor_ms, run_ms, queued_ms)

    def pace(self, calls: int) -> Paced:
        rest_ms = (calls + 1) * 0.1 * _next(self.stalled)
        return Paced(rest_ms, rest_ms, self.threads, rest_ms)


@dataclass
class Flipping(Audited):
    """A cell and a judge on a processor whose speed flips at random, for both, as with a neighbour on the same core."""

    random: Random = field(default_factory=Random)
    slow: bool = False

    def _flip(self) -> float:
        self.slow ^= self.random.random() < 0.25
        return 2.5 if self.slow else 1.0

    def ask(self, calls: int) -> witness.Timed:
        slowdown = self._flip()
        took_ms = (calls + 1) * (self.call_ms + 0.1) * slowdown
        samples = (self.sample_ms * slowdown,) * calls
        return witness.Timed(Burst(samples, None, (2,), (0,)), took_ms, took_ms, took_ms, 0.0)

    def pace(self, calls: int) -> Paced:
        took_ms = (calls + 1) * 0.1 * self._flip()
        return Paced(took_ms, took_ms, 1, took_ms)


def _next(slowdowns: list[float]) -> float:
    return slowdowns.pop(0) if len(slowdowns) > 1 else slowdowns[0]


@pytest.fixture
def without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "rest", lambda seconds: None)


@pytest.mark.parametrize(
    ("audited", "reported_ms", "expected"),
    [
        (Audited(1.0, 1.0), 1.0, None),
        (Audited(0.003, 0.003), 0.003, None),
        (Audited(900.0, 900.0), 900.0, None),
        (Audited(1.0, 0.5), 0.5, "a call uses 1 ms of processor time"),
        (Audited(1.0, 0.5, threads=8), 0.5, "a call uses 1 ms of processor time"),
        (Audited(1.0, 0.4, others_ms=(2.8,)), 0.4, "a call uses 1 ms of processor time"),
        (Audited(0.0, 0.2, slept_ms=1.0, others_ms=(3.4,)), 0.2, "its process worked and waited for"),
        (Audited(1.0, 0.01), 0.01, "a call uses 1 ms of processor time"),
        (Audited(0.04, 0.0001), 0.0001, "a call uses 0.04 ms of processor time"),
        (Audited(1.0, 1.0), 0.1, "a call uses 1 ms of processor time"),
        (Audited(0.0, 0.01, slept_ms=1.0), 0.01, "its process worked and waited for"),
        (Audited(0.0, 0.2, hidden_ms=1.0), 0.2, "its process worked and waited for"),
        (Audited(0.0, 1.01, slept_ms=1.0), 1.01, None),
        (Audited(0.01, 0.01), 0.0001, "a timed call takes 0.01 ms, and 0.0001 ms is reported"),
        (Audited(0.25, 0.25, used=4, threads=4), 0.25, None),
    ],
    ids=[
        *("honest", "honest and tiny", "honest and long", "half of it before the call", "half, with many threads"),
        *("most samples too short, the others too long", "and the work in another process"),
        "all of it before the call",
        *("a tiny call", "forged in bursts of the record alone", "work of another process before the call"),
        "work of a process that leaves no trace",
        *("work of another process in the call", "forged and tiny"),
        "as many threads as it may have",
    ],
)
def test_the_work_of_a_burst_is_paid_for(
    audited: Audited, reported_ms: float, expected: str | None, without_rest: None
) -> None:
    problem = witness.audit(audited.ask, audited.pace, reported_ms, lambda: 1.0)
    assert problem is None if expected is None else expected in str(problem), problem


@pytest.mark.parametrize(
    ("busy", "bursts"), [([9.0] * 8 + [1.0], 12), ([9.0, 1.0, 9.0, 9.0] * 6, 24)], ids=["at first", "in most bursts"]
)
def test_a_machine_that_is_busy_for_a_while_blames_no_backend(
    busy: list[float], bursts: int, without_rest: None
) -> None:
    audited = Audited(1.0, 1.0, busy=busy)
    assert witness.audit(audited.ask, audited.pace, 1.0, lambda: 9.0) is None
    assert len(audited.calls) == bursts


@pytest.mark.parametrize("share", [1.0, 0.3], ids=["honest", "forged"])
def test_a_processor_whose_speed_flips_neither_accuses_nor_acquits(share: float, without_rest: None) -> None:
    for seed in range(100):
        audited = Flipping(0.05, share * 0.05, random=Random(seed))
        problem = witness.audit(audited.ask, audited.pace, share * 0.05, lambda: 1.0)
        assert (problem is None) == (share == 1), (seed, problem)


@pytest.mark.parametrize(
    ("call_ms", "stalled"), [(0.05, [5.0, 7.0, 3.0, 9.0, 1.0]), (150.0, [2000.0, 3000.0, 1.0])], ids=["short", "long"]
)
def test_stalls_of_the_judge_hide_no_calls(call_ms: float, stalled: list[float], without_rest: None) -> None:
    forged = Audited(call_ms, call_ms / 5, stalled=stalled)
    problem = witness.audit(forged.ask, forged.pace, call_ms / 5, lambda: 1.0)
    assert f"a call uses {call_ms:.4g} ms of processor time" in str(problem)


@pytest.mark.parametrize(("share", "gauged"), [(1.0, False), (0.2, True)], ids=["honest", "forged"])
def test_other_work_is_looked_for_only_if_the_times_are_implausible(
    share: float, gauged: bool, without_rest: None
) -> None:
    audited, gauge = Audited(0.05, share * 0.05, stalled=[5.0, 7.0, 3.0, 9.0, 1.0]), Mock(return_value=1.0)
    assert (witness.audit(audited.ask, audited.pace, share * 0.05, gauge) is None) == (share == 1)
    assert gauge.called == gauged


@pytest.mark.parametrize(
    ("busy", "stalled", "expected"),
    [
        ([1.0], [1.0], witness.Implausible),
        ([1.0] * 4 + [1.5], [1.0] * 5 + [1.3, 1.9] * 20, witness.Disturbed),
    ],
    ids=["quiet", "noisy later"],
)
def test_an_excess_within_the_noise_of_a_calls_rest_accuses_no_backend(
    busy: list[float], stalled: list[float], expected: type, without_rest: None
) -> None:
    audited = Audited(0.02, 0.002, busy=busy, stalled=stalled)  # 0.1 ms around a call
    assert isinstance(witness.audit(audited.ask, audited.pace, 0.002, lambda: 1.0), expected)


def test_a_machine_whose_stalls_never_end_is_named(without_rest: None) -> None:
    audited = Audited(0.05, 0.01, stalled=[float(2**n) for n in range(40, 0, -1)])
    problem = witness.audit(audited.ask, audited.pace, 0.01, lambda: 3.0)
    assert isinstance(problem, witness.Disturbed)


@pytest.mark.parametrize(("sample_ms", "expected"), [(1.0, Failure), (0.01, str)], ids=["honest", "forged by far"])
def test_a_machine_that_stays_busy_is_named(sample_ms: float, expected: type, without_rest: None) -> None:
    audited = Audited(1.0, sample_ms)
    audited.busy = [9.0]
    assert isinstance(witness.audit(audited.ask, audited.pace, sample_ms, lambda: 4.0), expected)


def test_an_audit_ends_with_a_failure_of_either_side_or_a_fault() -> None:
    failure, audited = Failure("error", "why"), Audited(1.0, 1.0)
    assert witness.audit(lambda calls: "a fault", audited.pace, 1.0, lambda: 1.0) == "a fault"
    assert witness.audit(lambda calls: failure, audited.pace, 1.0, lambda: 1.0) is failure
    assert witness.audit(audited.ask, lambda calls: failure, 1.0, lambda: 1.0) is failure


@pytest.mark.parametrize(
    ("rested_s", "spent_s", "caught"), [(1.0, 0.01, False), (0.0, 0.02, False), (10.0, 0.1, False), (1.0, 0.4, True)]
)
def test_a_cell_is_idle_while_others_are_measured(rested_s: float, spent_s: float, caught: bool) -> None:
    assert (witness.restless(rested_s, spent_s) is not None) == caught


def test_each_thread_may_wait_for_more_work_before_it_sleeps() -> None:
    assert witness.restless(1.0, 0.15) is not None
    assert witness.restless(1.0, 0.15, threads=8) is None


def test_samples_cannot_take_longer_than_they_took() -> None:
    assert witness.too_long([1.0] * 10, 0.012) is None
    assert "by the parent's clock" in (witness.too_long([1.0] * 100, 0.012) or "")


def test_a_cell_that_cannot_be_checked_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch, without_rest: None) -> None:
    """Each check takes a second here, and each burst none. The last one may begin just before the limit."""
    clock = [0.0]
    monkeypatch.setattr(witness, "now", lambda: clock[0])
    audited = Audited(1.0, 1.0, busy=[9.0, 1.0, 30.0], stalled=[1.0, 5.0, 1.0, 9.0])

    def ask(calls: int) -> witness.Timed:
        clock[0] += 0.25
        return audited.ask(calls)

    problem = witness.audit(ask, audited.pace, 0.02, lambda: 9.0)
    assert problem is not None
    assert clock[0] <= witness.LIMITS.audit_s + 1.25
