"""A cell that is driven with a process and a judge of which only the answers are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from groupbench.operators.measure import live, witness
from groupbench.operators.measure.exchange import Sent
from groupbench.operators.measure.live import CHECKS, Live, settle, warm_up
from groupbench.operators.measure.rest import LOOKS, Rest
from groupbench.operators.measure.wire import Burst, Failure, HeldTo, Job, Prepared

PREPARED = Prepared("cpu", 1.0, None, (), Sent("tensor", ()), True, None)
STALL = witness.Implausible("implausible: a call uses 2 ms of processor time")
SHARED = witness.Disturbed("error", "not checked: the device is shared with other work")


class Process:
    """A cell's process that uses some processor time in each break between bursts: `spent_s`, the last one for ever."""

    def __init__(self, *spent_s: float) -> None:
        self.spent_s, self.used_s, self.others = [*spent_s], 0.0, True
        self.libraries: set[str] = set()

    def begin_log(self) -> None: ...

    def has_started_others(self) -> bool:
        return self.others

    def has_mapped(self, libraries: tuple[str, ...]) -> bool:
        return bool(self.libraries.intersection(libraries))

    def rest(self) -> None:
        self.used_s += self.spent_s.pop(0) if len(self.spent_s) > 1 else self.spent_s[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(witness, "now", lambda: clock[0])
    return clock


def _cell(process: Process) -> Live:
    job = Job("grouped_gemm", "torch_loop", "G=2,M_g=8,N=16,K=16", "fp32", "cpu")
    return Live(job, process, lambda: None, held_to=HeldTo(None, ()))  # type: ignore[arg-type, return-value]


def let_rest(process: Process, cell: Live, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def rest(seconds: float) -> None:
        clock[0] += seconds
        process.rest()

    monkeypatch.setattr(cell.rest, "clocks", lambda: (clock[0], process.used_s))
    monkeypatch.setattr(witness, "rest", rest)


@pytest.mark.parametrize(
    ("spent_s", "caught"),
    [((0.0,), False), ((0.3, 0.0), False), ((0.3, 0.3, 0.0, 0.3, 0.0), False), ((0.3,), True), ((0.0, 0.3), False)],
    ids=["idle", "one stall", "several stalls", "busy in all breaks", "idle in the break that counts"],
)
def test_a_cell_that_stays_busy_is_accused(
    spent_s: tuple[float, ...], caught: bool, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(*spent_s)
    cell = _cell(process)
    monkeypatch.setattr(cell, "_timed", lambda secret: None)
    let_rest(process, cell, clock, monkeypatch)
    cell.rest.begin()
    witness.rest(1.0)
    fault = cell._intruding()
    assert (fault is not None) == caught, fault
    assert (cell.rest._balance == LOOKS.accused) == caught


@pytest.mark.parametrize(
    ("share", "seconds", "caught"),
    [(1.0, 5.0, True), (0.1, 5.0, True), (1.0, 0.4, False), (0.005, 60.0, False)],
    ids=["an idle machine", "a loaded one", "a stall", "a thread that wakes up now and then"],
)
def test_work_in_a_single_long_break_is_found_however_little_of_the_processor_it_gets(
    share: float, seconds: float, caught: bool, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(0.0)
    cell = _cell(process)
    monkeypatch.setattr(cell.rest, "clocks", lambda: (clock[0], process.used_s))
    cell.rest.begin()
    while clock[0] < 60:  # one burst of a rival after the other
        clock[0] += LOOKS.look_s
        process.used_s += share * LOOKS.look_s if clock[0] <= seconds + LOOKS.look_s else 0.0
        cell.rest.look()
    assert (cell.rest.end() is not None) == caught


@pytest.mark.parametrize("rests", [True, False], ids=["for a while", "for ever"])
def test_work_that_preparation_has_begun_is_only_held_against_a_cell_if_it_does_not_end(
    rests: bool, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(*[0.3] * 30, 0.0 if rests else 0.3)
    cell = _cell(process)
    monkeypatch.setattr(cell, "_timed", lambda secret: None)
    let_rest(process, cell, clock, monkeypatch)
    monkeypatch.setattr(live, "CHECKS", replace(CHECKS, settle_s=1.0))
    settle([cell])
    for _ in range(25):
        cell.rest.begin()
        witness.rest(1.0)
        assert cell.rest.end() is None
    witness.rest(1.0)
    assert (cell._intruding() is None) == rests


@pytest.mark.parametrize(
    ("variable", "spent_s", "caught"),
    [
        (None, 0.02, False),
        ("Intel", 0.2, False),
        (None, 0.2, True),
        ("GOMP_SPINCOUNT", 1.9, False),
        ("KMP_BLOCKTIME", 3, True),
    ],
    ids=["GNU's OpenMP", "Intel's OpenMP", "work", "spinning by the user's wish", "and work besides"],
)
def test_idle_threads_of_openmp_may_wait_for_the_next_call(
    variable: str | None, spent_s: float, caught: bool, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    process = Process(0.0)
    process.libraries = {"libiomp5"} if variable == "Intel" else set()
    monkeypatch.setenv(variable or "OTHER", "1")
    rest = Rest(process, "cpu")  # type: ignore[arg-type]
    monkeypatch.setattr(rest, "clocks", lambda: (clock[0], process.used_s))
    for _ in range(3):
        rest.begin()
        clock[0] += 2.0
        process.used_s += spent_s
        fault = rest.end()
    assert (fault is not None) == caught


MOST_LOOKS = round(CHECKS.settle_s / CHECKS.settled_s)


@pytest.mark.parametrize(
    ("spent_s", "others", "looks"),
    [((0.0,), True, 1), ((0.3, 0.3, 0.0), True, 3), ((0.3,), True, MOST_LOOKS), ((0.3,), False, 0)],
    ids=["idle", "busy for a while", "busy for ever", "alone"],
)
def test_processes_that_preparation_started_are_waited_for(
    spent_s: tuple[float, ...], others: bool, looks: int, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, idle = Process(*spent_s), Process(0.0)
    process.others, idle.others = others, False
    cell = _cell(process)
    let_rest(process, cell, clock, monkeypatch)
    settle([cell, _cell(idle)])
    assert clock[0] == pytest.approx(looks * CHECKS.settled_s, abs=CHECKS.settled_s)
    assert cell.rest._balance == 0, "it is not accused"


@pytest.mark.parametrize(
    ("disturbed", "measured"), [(0, 0), (1, 1), (CHECKS.repeats + 1, CHECKS.repeats)], ids=["never", "once", "for ever"]
)
def test_a_cell_is_measured_again_if_other_work_kept_it_from_being_checked(
    disturbed: int, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = _cell(Process(0.0))
    finished: list[int] = []

    def burst(secret: int, chosen: int | None) -> Any:
        cell.bursts.append(Burst((1.0,), None, (2,), (0,)))

    def finish(secret: int) -> None:
        finished.append(len(cell.bursts))
        cell.failure = SHARED if len(finished) < disturbed else None

    monkeypatch.setattr(cell, "burst", burst)
    monkeypatch.setattr(cell, "finish", finish)
    cell.prepared = PREPARED
    cell.bursts.append(Burst((9.0,), None, (2,), (0,)))
    cell.failure = SHARED if disturbed else None
    cell.repeat(bursts=3)
    assert finished == [3] * measured
    assert (cell.failure is SHARED) == (disturbed > CHECKS.repeats)


@pytest.mark.parametrize(
    ("faults", "measured", "problem"),
    [
        ([STALL, None], 1, None),
        ([STALL, STALL], 1, STALL),
        ([STALL, SHARED, None], 2, None),
        ([STALL, SHARED, STALL], 2, STALL),
        ([STALL, "the result is wrong"], 1, "the result is wrong"),
        (["the result is wrong", None], 0, "the result is wrong"),
    ],
    ids=["once", "twice", "once and then busy", "before and after", "and then wrong", "wrong"],
)
def test_processor_times_must_be_implausible_in_two_measurements(
    faults: list[Any], measured: int, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = _cell(Process(0.0))
    cell.prepared = PREPARED
    finished: list[int] = []

    def finish(secret: int) -> None:
        fault = faults[len(finished)]
        finished.append(1)
        cell.take(fault) if isinstance(fault, Failure) else cell._blame(fault)

    monkeypatch.setattr(cell, "burst", lambda secret, chosen: None)
    monkeypatch.setattr(cell, "finish", finish)
    cell.finish(0)
    cell.repeat(bursts=3)
    assert (len(finished) - 1, cell.problem, cell.failure) == (measured, problem, None)
    assert type(cell.problem) in (str, type(None)), "records take no subclasses"


def test_a_cell_that_failed_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = _cell(Process(0.0))
    cell.failure = Failure("error", "why")
    monkeypatch.setattr(live, "drawn", pytest.fail)
    cell.repeat(bursts=3)
    assert cell.failure.message == "why"


def test_a_process_that_dies_while_it_is_measured_again_is_asked_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = _cell(Process(0.0))
    cell.prepared = PREPARED
    died = Failure("error", "the process died")
    bursts: list[int] = []

    def burst(secret: int, chosen: int | None) -> Any:
        bursts.append(1)
        cell.failure = died

    monkeypatch.setattr(cell, "burst", burst)
    cell.failure = SHARED
    cell.repeat(bursts=3)
    assert (len(bursts), cell.failure) == (1, died)


@pytest.mark.parametrize(
    ("device", "times_ms", "kept_ms"),
    [
        ("cpu", (1.0, 1.0, 1.0), (1.0, 1.0)),
        ("cpu", (2.4, 1.0, 1.05), (1.0, 1.05)),
        ("cpu", (4.0, 2.0, 1.0, 1.0), (1.0, 1.0)),
        ("cpu", (1.0, 2.4, 1.0), (1.0, 2.4)),
        ("cpu", (32.0, 16.0, 8.0, 4.0, 2.0), (4.0, 2.0)),
        ("cuda", (2.4, 1.0, 1.0), (2.4, 1.0)),
    ],
    ids=["warm", "cold", "long cold", "a later stall", "never warm", "a GPU, which rests before each burst"],
)
def test_the_first_bursts_of_a_cold_process_on_a_cpu_are_not_counted(
    device: str, times_ms: tuple[float, ...], kept_ms: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = _cell(Process(0.0))
    cell.job = replace(cell.job, device=device)
    cell.prepared = PREPARED
    times = iter(times_ms)

    def burst(*_: object) -> None:
        cell.bursts.append(Burst((next(times),), None, (2,), (0,)))

    monkeypatch.setattr(cell, "burst", burst)
    burst()
    burst()
    warm_up([cell])
    assert tuple(burst.samples_ms[0] for burst in cell.bursts) == kept_ms
