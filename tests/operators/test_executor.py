"""Cells end to end through their processes: a cell's faults do not reach other cells."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from measured import CPU, RUN, measure

from groupbench.operators import executor
from groupbench.operators.catalog.shapes import parse
from groupbench.operators.errors import GroupbenchError
from groupbench.operators.executor import Machine, Progress
from groupbench.operators.measure import channel, machine_code, servers, witness, worker
from groupbench.operators.measure.costs import Costs
from groupbench.operators.measure.exchange import Sent
from groupbench.operators.measure.judge import OutputJudgement
from groupbench.operators.measure.live import Live
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.measure.wire import Burst, Job, Prepared
from groupbench.operators.registry import get_operator
from groupbench.tracker.facts.record import Accuracy, Code, Environment, Kernel, Record, decode, encode

pytestmark = pytest.mark.usefixtures("unaudited")
FAST = Protocol(bursts=2, samples=2)
SINGLE, EVEN = "G=1,M_g=17,N=32,K=48", "G=2,M_g=16,N=64,K=64"
TIMEOUT_S = 300.0
NOTHING = Sent("tensor", ())


def job(backend: str, shape: str = EVEN, **fields: object) -> Job:
    facts = {"dtype": "fp16", "device": "cpu", "protocol": FAST, "plugins": ("faulty_backends.BACKENDS",)}
    return Job("grouped_gemm", backend, shape, **(facts | fields))


# backend -> (status, message)
FAULTS = {
    "crashes": (
        "error",
        r"^the process died \(signal SIGSEGV\) during prepare or the first calls, "
        r"at \S*faulty_backends.py:\d+ in crashes$",
    ),
    "aborts": (
        "error",
        r"SIGABRT\) during .*, at \S*faulty_backends.py:\d+ in <lambda>; "
        r"it last wrote: \.\.\. (a|long|story) .* and its end$",
    ),
    "leaves_children": ("ok", None),
    "dies_with_children": ("error", r"the process died \(exit code 7\) during prepare or the first calls$"),
    "raises": ("error", r"^RuntimeError: no such / instruction, at \S*faulty_backends.py:\d+ in raises$"),
    "raises_bytes": (
        "error",
        r"^RuntimeError: cannot open caf\\udce9: \\x00, at \S*faulty_backends.py:\d+ in raises_bytes$",
    ),
    "eats_memory": ("oom", r"can't allocate memory"),
    "half": ("wrong", r"^50 % of the output was never written, the first at \[16, 0\]$"),
    "one_percent": ("wrong", r"relative RMS error 0\.01"),
    "flaky": ("ok", None),
    "goes_stale": ("wrong", r"^in a timed call: relative RMS error 2 "),
    "overwrites": ("wrong", r"^the backend changed its input a$"),
    "overwrites_later": ("wrong", r"^after its timed runs: the backend changed its input b$"),
    "returns_an_input": ("wrong", r"^the output shares memory with its input a$"),
    "wrong_shape": ("error", r"ValueError: the backend returned shape \[3\], expected \[32, 64\]"),
    "returns_nothing": ("error", r"TypeError: the backend returned NoneType"),
    "not_here": ("unavailable", r"^needs a flux / capacitor$"),
    "not_here_at_all": ("unavailable", r"^its `prepare` gives no reason$"),
    "torch_loop": ("ok", None),
    "torch_grouped_mm": ("ok", None),
}


@pytest.fixture(scope="module")
def records(faulty: str) -> dict[str, Record]:
    """Measure every fault but the one that hangs in one run, with healthy backends last."""
    return {record.cell.backend: record for record in measure([job(name) for name in FAULTS])}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_has_its_status_and_the_others_go_on(name: str, records: dict[str, Record]) -> None:
    status, message = FAULTS[name]
    record = records[name]
    assert record.status == status, record.message
    assert (record.message is None) == (message is None)
    if message:
        assert re.search(message, record.message or "")
    assert decode(encode(record)) == record


def test_no_process_outlives_its_cell(records: dict[str, Record]) -> None:
    """Processes started by a backend end too: they would take memory and time from the next cells, and hold pipes."""
    marker = f"4242.{servers.CELLS.pid}".encode()
    assert not [process for process in Path("/proc").glob("[0-9]*") if marker in _words(process)]


def _words(process: Path) -> list[bytes]:
    with contextlib.suppress(OSError):  # the process may have ended
        return (process / "cmdline").read_bytes().split(b"\0")
    return []


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("hoards", r"^MemoryError, at \S*faulty_backends.py:\d+ in (<listcomp>|hoards)$"),
        (
            "forks_hoarders",
            r"^killed during prepare or the first calls, .*; it last wrote: "
            r"out of memory: its processes used \d\.\d GiB of \d\.\d \(GROUPBENCH_MEMORY_GIB\)$",
        ),
    ],
)
def test_a_cell_that_uses_too_much_memory_is_stopped_alone(
    faulty: str, monkeypatch: pytest.MonkeyPatch, backend: str, message: str
) -> None:
    # CUDA's libraries alone need more than 0.5 GiB. The backends keep 4 and 8 GiB.
    monkeypatch.setenv("GROUPBENCH_MEMORY_GIB", "3.0" if torch.cuda.is_available() else "0.5")
    hoarder, neighbour = measure([job(backend), job("torch_loop")], timeout_s=300)
    assert (hoarder.status, neighbour.status) == ("oom", "ok"), hoarder.message
    assert re.search(message, hoarder.message or ""), hoarder.message


def test_a_backend_may_compile_in_processes(faulty: str) -> None:
    (record,) = measure([job("compiles_in_processes")], timeout_s=300)
    assert record.status == "ok", record.message


def test_a_cell_that_ran_has_its_latency_and_accuracy(records: dict[str, Record]) -> None:
    for name in ("torch_loop", "torch_grouped_mm", "flaky", "half"):
        latency, accuracy = records[name].latency, records[name].accuracy
        assert latency.timing == "cpu"
        assert [len(burst) for burst in latency.bursts_ms] == [2, 2]
        assert latency.prepare_ms
        assert accuracy.repeatable == (name != "flaky")
    stale = records["goes_stale"].accuracy
    assert (stale.rms, stale.repeatable) == (pytest.approx(2, rel=0.01), False)
    assert not any(records[name].latency or records[name].accuracy for name in ("crashes", "raises", "not_here"))


def test_a_record_names_the_whole_cell(records: dict[str, Record]) -> None:
    record = records["torch_loop"]
    assert record.baseline and not records["torch_grouped_mm"].baseline
    assert (record.cell.shape, record.cell.protocol, record.cell.flops) == (EVEN, "cooled", 2 * 32 * 64 * 64)
    assert record.cell.dims == {"G": 2, "M": 32, "N": 64, "K": 64}
    assert (record.run, record.environment) == (RUN, CPU.environment) and record.duration_s > 0


def test_a_mode_has_its_own_backends_and_counts() -> None:
    ok, lacking = measure([job(name, mode="bwd", plugins=()) for name in ("torch_loop", "triton_pointer")])
    assert (ok.status, ok.cell.mode, ok.cell.flops) == ("ok", "bwd", 2 * 2 * 32 * 64 * 64)
    assert ok.cell.min_bytes == get_operator("grouped_gemm").in_mode("bwd").min_bytes(parse(EVEN), "fp16")
    assert (lacking.status, lacking.message) == ("unavailable", "triton_pointer has no backward")


def test_a_hang_is_a_timeout_and_the_next_problem_is_measured(
    faulty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the answer that never comes is waited for less than others, which a busy machine can delay."""
    send = worker.Worker.send
    hanging: list[worker.Worker] = []

    def impatient(self: worker.Worker, request: executor.Request) -> None:
        if request.verb == "adopt" and request.arguments[0].backend == "hangs":
            hanging.append(self)
        self.timeout_s = 2.0 if request.verb == "prepare" and self in hanging else TIMEOUT_S
        send(self, request)

    monkeypatch.setattr(worker.Worker, "send", impatient)
    monkeypatch.setattr(worker, "NOTICE_S", 0.1)
    monkeypatch.setattr(channel, "REPORT_EVERY_S", 0.2)
    records = measure([job("torch_loop"), job("hangs"), job("torch_loop", SINGLE)])
    assert re.search(r"/hangs \S*: no answer for \d+ s; it fails after 2 s \(--timeout\)", capsys.readouterr().err)
    assert [r.status for r in records] == ["ok", "timeout", "ok"]
    place = r"\S*faulty_backends\.py:\d+ in run"
    assert re.fullmatch(f"no answer within 2 s during prepare or the first calls, at {place}", records[1].message)


def test_a_backend_whose_process_died_works_for_the_next_problem(faulty: str) -> None:
    plugins = ("faulty_backends.ONCE",)
    records = measure([job("crashes_once", shape, plugins=plugins) for shape in (EVEN, SINGLE, "G=1,M_g=3,N=4,K=4")])
    assert [r.status for r in records] == ["ok", "error", "ok"]
    assert "exit code 7" in (records[1].message or "")


def test_an_interrupt_keeps_the_finished_and_names_the_rest_skipped(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [(name, shape) for shape in (EVEN, SINGLE) for name in ("torch_loop", "torch_grouped_mm")]
    jobs = [job(name, shape, plugins=()) for name, shape in cells]
    original = Scripted.ask

    def interrupted(self: Scripted, request: executor.Request) -> object:
        if len(records) == 2:
            raise KeyboardInterrupt
        return original(self, request)

    monkeypatch.setattr(Scripted, "ask", interrupted)
    records: list[Record] = []
    with pytest.raises(KeyboardInterrupt):
        records.extend(executor.execute(jobs, CPU, RUN, TIMEOUT_S, Progress()))
    assert [(r.cell.backend, r.cell.shape) for r in records] == cells
    assert [(r.status, bool(r.message)) for r in records] == [("ok", False)] * 2 + [("skipped", True)] * 2


# --- without processes ------------------------------------------------------------------------------------------------


class Scripted:
    """A substitute for a worker that logs its requests and replies like a healthy cell."""

    log: list[tuple[str, str]]
    started: list[Scripted]
    answer: Burst | None = None  # to all bursts

    def __init__(self, device: str, timeout_s: float, caches: Path | None) -> None:
        self.backend = self.path = ""
        self.samples = FAST.samples
        self.retired, self.printed = False, ""
        Scripted.started.append(self)

    def send(self, request: executor.Request) -> None:
        if request.verb == "adopt":
            (job,) = request.arguments
            self.backend, self.samples = job.backend, job.protocol.samples

    def receive(self) -> object:
        return "loaded"

    def ask(self, request: executor.Request) -> object:
        Scripted.log.append((request.verb, self.backend))
        match request.verb:
            case "prepare" if self.backend == "raises":
                return executor.Failure("error", "why")
            case "prepare":
                timing = "interpreted" if self.backend.startswith("triton") else "cpu"
                return Prepared(timing, 1.0, None, (), NOTHING, repeatable=True)  # type: ignore[arg-type]
            case "burst" if Scripted.answer is not None:
                return Scripted.answer
            case "burst":
                calls = 1 if self.backend.startswith("triton") else request.arguments[1] or self.samples
                return Burst((0.05,) * calls, None, steps=tuple(range(2, calls + 2)), sums=(0,) * calls)
            case "show":
                return NOTHING
            case "loaded":
                return (), ()
            case "costs":
                return Costs({})
        return None

    def has_started_others(self) -> bool:
        return False

    def processor_s(self) -> float:
        return 0.0

    def thread_s(self) -> tuple[float, float]:
        return 0.0, 0.0

    def keep_on_processors(self) -> None: ...

    def begin_log(self) -> None: ...

    def kill(self) -> None:
        self.retired = True

    def close(self) -> None: ...


class ScriptedJudge:
    """A substitute for the process that judges; it accepts everything."""

    over = False

    def __init__(self, device: str, timeout_s: float) -> None: ...

    def ask(self, request: executor.Request) -> object:
        if request.verb == "compare":
            return OutputJudgement(Accuracy(rms=0.0), None)
        return False if request.verb == "can_reroute" else None

    def kill(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Scripted]]:
    Scripted.log, Scripted.started = [], []
    monkeypatch.setattr(executor, "Worker", Scripted)
    monkeypatch.setattr("groupbench.operators.measure.worker.Judge", ScriptedJudge)
    monkeypatch.setattr(witness, "audit", lambda ask, pace, ms, gauge: ask(1) and None)
    yield Scripted


def test_bursts_take_turns_each_round_starting_one_further(scripted: type[Scripted]) -> None:
    names = ["torch_loop", "torch_grouped_mm", "helion_jagged"]
    measure([job(name, plugins=(), protocol=Protocol(bursts=4)) for name in names])
    order = [name for verb, name in scripted.log if verb == "burst"]
    a, b, c = names
    assert order == [a, b, c, b, c, a, c, a, b, a, b, c, *names]  # the last are audits
    assert [name for verb, name in scripted.log if verb == "prepare"] == names


def test_timed_calls_are_judged(scripted: type[Scripted]) -> None:
    measure([job(name, plugins=()) for name in ("torch_loop", "helion_jagged")])
    bursts = [entry for entry in scripted.log if entry[0] in ("burst", "show")]
    assert bursts[:2] == [("burst", "torch_loop"), ("show", "torch_loop")]
    assert scripted.log.count(("show", "helion_jagged")) == FAST.bursts * FAST.samples + 1  # in the audit


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: graphs. They are CUDA's")
def test_the_graph_that_was_timed_is_checked_again(faulty: str) -> None:
    """The check reads the output of the last replay, not that of a further call."""
    graph = Protocol(bursts=2, samples=2, cudagraph=True)
    machine = executor.probe("cuda")
    jobs = [job(name, device="cuda", protocol=graph) for name in ("torch_loop", "captured_otherwise")]
    right, other = measure(jobs, 60.0, machine)
    assert right.status == "ok", right.message
    assert other.status == "wrong"
    assert re.search("^in a timed call: relative RMS error 2 ", other.message or "")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Burst((0.01, 0.02), None, (2, 3), (0, 0)), None),
        (Burst((0.01,), None, (2,), (0,)), "1 times are reported for 2 calls"),
        (Burst((0.01, 0.02, 0.02), None, (2, 3), (0, 0)), "3 times are reported for 2 calls"),
        (Burst((0.01, 0.02), None, (2,), (0,)), "the outputs of 1 timed calls were kept, and not of 2"),
        (Burst((0.01, 0.02), None, (2, 3), (0,)), "its answer to burst names a timed call twice, or none"),
        (Burst((0.01, 0.02), None, (2, 1 << 40), (0, 0)), "names a timed call that it was not asked for"),
    ],
    ids=["all", "a call less", "a call more", "an output less", "a sum less", "a step that no call can have made"],
)
def test_a_burst_has_all_calls_and_outputs(
    answer: Burst, message: str | None, scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted, "answer", answer)
    monkeypatch.setattr(witness, "audit", lambda ask, pace, ms, gauge: None)
    monkeypatch.setattr(Live, "audit", lambda cell: None)
    monkeypatch.setattr(witness, "too_long", lambda samples_ms, took_s: None)
    (record,) = measure([job("torch_loop", plugins=())])
    assert (record.message is None) if message is None else (message in (record.message or "")), record.message


def test_a_backend_cannot_choose_the_kind_of_its_times(scripted: type[Scripted]) -> None:
    (record,) = measure([job("triton_pointer", plugins=())])
    assert record.message == "its answer to prepare names a time of another kind: interpreted"


def test_an_interpreted_backend_has_one_burst(scripted: type[Scripted]) -> None:
    (record,) = measure([job("triton_pointer", plugins=(), interpreted=True, protocol=Protocol(bursts=4))])
    assert len(record.latency.bursts_ms) == 1


def test_the_power_at_rest_is_measured_once_per_run(scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge measures it, since the records of all backends have it."""
    judged: list[float] = []
    original, original_judge = Scripted.ask, ScriptedJudge.ask

    def ask(self: Scripted, request: executor.Request) -> object:
        return Costs({"energy_j": 1.0, "idle_w": 5.0}) if request.verb == "costs" else original(self, request)

    def ask_judge(self: ScriptedJudge, request: executor.Request) -> object:
        if request.verb != "idle_watts":
            return original_judge(self, request)
        judged.append(71.0 + len(judged))
        return judged[-1]

    monkeypatch.setattr(Scripted, "ask", ask)
    monkeypatch.setattr(ScriptedJudge, "ask", ask_judge)
    cells = [("torch_loop", EVEN), ("torch_grouped_mm", EVEN), ("torch_loop", SINGLE)]
    records = measure([job(name, shape, plugins=(), costs=("energy",)) for name, shape in cells])
    assert judged == [71.0]
    assert [record.metrics["idle_w"] for record in records] == [71.0] * 3


def test_the_lowest_host_time_of_all_bursts_is_recorded(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    host_ms = itertools.chain([0.09, 0.03, 0.05, 0.04], itertools.repeat(0.01))  # those of the audit do not count
    original = Scripted.ask

    def ask(self: Scripted, request: executor.Request) -> object:
        reply = original(self, request)
        return msgspec.structs.replace(reply, enqueue_ms=next(host_ms)) if isinstance(reply, Burst) else reply

    monkeypatch.setattr(Scripted, "ask", ask)
    (record,) = measure([job("torch_loop", plugins=(), protocol=Protocol(bursts=4))])
    assert record.latency.enqueue_ms == 0.03


def test_kernels_are_analysed_during_the_last_checks_of_all_cells(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, verbs, ask = threading.Barrier(3), [], Scripted.ask

    def described(kernels: Sequence[Kernel], code: Sequence[Code]) -> tuple[Kernel, ...]:
        both.wait(TIMEOUT_S)
        return (Kernel(name="analysed"),)

    def answer(self: Scripted, request: executor.Request) -> object:
        verbs.append(request.verb)
        if request.verb == "restore" and verbs.count("restore") == 1:
            both.wait(TIMEOUT_S)  # the analyses of both cells have begun
        reply = ask(self, request)
        code = (Code(hash="h"),)
        return msgspec.structs.replace(reply, code=code) if isinstance(reply, Prepared) else reply

    monkeypatch.setattr(Scripted, "ask", answer)
    monkeypatch.setattr(machine_code, "described", described)
    records = measure([job(name, plugins=()) for name in ("torch_loop", "torch_grouped_mm")])
    assert [kernel.name for record in records for kernel in record.kernels] == ["analysed"] * 2


def test_the_first_result_of_a_new_process_is_timed_before_any_burst(faulty: str) -> None:
    described: list[str] = []
    jobs = [job(name, costs=("cold",)) for name in ("torch_loop", "raises")]
    jobs += [job("torch_loop", SINGLE, costs=("memory",))]
    records = list(executor.execute(jobs, CPU, RUN, TIMEOUT_S, Progress(describe=described.append)))
    assert [record.status for record in records] == ["ok", "error", "ok"]
    first = records[0].metrics
    assert 0 < first["cold_prepare_ms"] <= first["first_result_ms"]
    assert not any("first_result_ms" in record.metrics for record in records[1:])
    place = next(number for number, text in enumerate(described) if "first results" in text)
    assert not any("burst" in text for text in described[:place])


def test_a_backend_keeps_its_process_over_problems(scripted: type[Scripted]) -> None:
    measure([job("torch_loop", shape, plugins=()) for shape in (EVEN, SINGLE)])
    assert len(scripted.started) == 1
    assert scripted.log.count(("unload", "torch_loop")) == 2


def test_processes_start_in_parallel_and_outside_the_time_of_cells(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet distributes shapes by the time they took."""
    sent: list[str] = []

    def send(self: Scripted, request: executor.Request) -> None:
        sent.append(request.verb)
        time.sleep(0.5 * (request.verb == "adopt"))

    monkeypatch.setattr(Scripted, "send", send)
    records = measure([job(name, plugins=()) for name in ("torch_loop", "torch_grouped_mm")])
    assert sent[:4] == ["adopt", "adopt", "load", "load"]
    assert all(record.duration_s is not None and record.duration_s < 0.4 for record in records)


def test_a_process_that_cannot_start_is_asked_no_more(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(Scripted, "send", lambda self, request: sent.append(request.verb))
    monkeypatch.setattr(Scripted, "receive", lambda self: executor.Failure("error", "no such module"))
    (record,) = measure([job("torch_loop", plugins=())])
    assert (record.status, record.message) == ("error", "no such module")
    assert sent == ["adopt"]


def test_a_failed_cell_costs_its_backend_the_process(faulty: str, scripted: type[Scripted]) -> None:
    measure([job("raises", shape) for shape in (EVEN, SINGLE)])
    assert [process.retired for process in scripted.started] == [True, True]


def test_unavailable_starts_no_process_and_is_progress(scripted: type[Scripted]) -> None:
    done: list[float] = []
    bf16 = job("triton_pointer", plugins=(), dtype="bf16", interpreted=True)
    (record,) = executor.execute([bf16], CPU, RUN, 1, Progress(advance=done.append))
    assert (record.status, scripted.started, sum(done)) == ("unavailable", [], 1)
    assert "fp16" in (record.message or "")


REASONS = {
    "cannot_say": r"its `unavailable` raised KeyError: 'no such\nGPU'",
    "gives_up": "its `unavailable` raised SystemExit: 0",
    "says_bytes": r"caf\udce9",
    "says_a_number": "5",
    "says_nothing": None,
    "says_a_blank": "its `unavailable` gives no reason",
}


@pytest.mark.parametrize(("name", "message"), REASONS.items(), ids=REASONS)
def test_a_backend_that_cannot_say_whether_it_runs_does_not(
    name: str, message: str | None, faulty: str, scripted: type[Scripted]
) -> None:
    records = measure([job(name, plugins=("faulty_backends.CANNOT_SAY",)) for name in (name, "torch_loop")])
    assert [record.status for record in records] == ["unavailable" if message else "ok", "ok"]
    assert records[0].message == message
    assert decode(encode(records[0])) == records[0]


def test_a_plugin_is_asked_in_another_process_and_once_for_all_shapes(faulty: str, scripted: type[Scripted]) -> None:
    """Each question has a process, whose id is the answer."""
    cells = [("says_its_process", EVEN), ("ends_its_process", EVEN), ("says_its_process", SINGLE)]
    named, ended, again = measure([job(*cell, plugins=("faulty_backends.CANNOT_SAY",)) for cell in cells])
    assert {record.status for record in (named, ended, again)} == {"unavailable"}
    assert named.message.isdigit() and named.message == again.message != str(os.getpid())
    assert ended.message is not None
    assert ended.message.startswith("its `unavailable` ended its process: the process died (exit code 7)")


def test_rows_of_a_problem_are_in_the_order_of_its_jobs(faulty: str, scripted: type[Scripted]) -> None:
    """A backend that cannot run is known before the baseline is measured, but its row does not come first."""
    names = ["gives_up", "torch_loop", "cannot_say", "torch_grouped_mm", "says_a_number"]
    done: list[float] = []
    jobs = [job(name, plugins=("faulty_backends.CANNOT_SAY",)) for name in names]
    small = Machine(Environment(device="cpu", memory_mib=1000), None)  # a process at a time
    for machine in (CPU, small):
        records = list(executor.execute(jobs, machine, RUN, TIMEOUT_S, Progress(advance=done.append)))
        assert [record.cell.backend for record in records] == names
    assert sum(done) == pytest.approx(2 * len(names))


def test_no_memory_for_two_means_one_at_a_time(scripted: type[Scripted]) -> None:
    names = ["torch_loop", "torch_grouped_mm"]
    jobs = [job(name, plugins=(), protocol=Protocol(bursts=2)) for name in names]
    measure(jobs, machine=Machine(Environment(device="cpu", memory_mib=1000), None))
    assert [name for verb, name in scripted.log if verb == "burst"] == [names[0]] * 3 + [names[1]] * 3  # with the audit


SHAPE = "G=1,M_g=8192,N=8192,K=8192"  # 384 MiB in fp16
SIZES = {
    "unknown": (None, 1),
    "less than one": (100, 1),
    # 0.8 of it, less six problems for the one that is checked, over 2.5 problems and 1500 MiB each
    "an H100": (81_000, int((0.8 * 81_000 - 6 * 384) / (2.5 * 384 + 1500))),
    "a small one": (16_000, int((0.8 * 16_000 - 6 * 384) / (2.5 * 384 + 1500))),
}


@pytest.mark.parametrize(("memory_mib", "size"), SIZES.values(), ids=SIZES)
def test_as_many_at_once_as_fit_in_memory(memory_mib: int | None, size: int) -> None:
    one = job("torch_loop", SHAPE, dtype="fp16", device="cuda")
    assert executor._batch_size(one, Environment(device="cuda", gpu_memory_mib=memory_mib, memory_mib=1)) == size
    two = job("torch_loop", SHAPE, dtype="fp16")
    assert executor._batch_size(two, Environment(device="cpu", memory_mib=memory_mib)) == size


def test_probe_reports_a_missing_gpu() -> None:
    assert executor.probe("cpu").environment.device == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(GroupbenchError, match=r"^--device cuda: torch finds no CUDA GPU here; use --device cpu "):
            executor.probe("cuda")
