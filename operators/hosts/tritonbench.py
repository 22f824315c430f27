"""TritonBench as the host: its flags, its inputs, its table, our backends beside its own, and a record of every cell.

One process runs TritonBench for one operator. When it dies or hangs, the cell it was at gets its status, and a new
process goes on with the rest; finished cells are not measured again.
"""

from __future__ import annotations

import importlib.util
import itertools
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from groupbench.operators import executor, plan
from groupbench.operators.errors import Incomplete, UsageError
from groupbench.operators.executor import Machine
from groupbench.operators.hosts.journal import Event, Finished, Setup
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.measure.selection import default_dtypes
from groupbench.operators.measure.worker import kill_group, kill_left
from groupbench.operators.registry import get_operator, operator_names
from groupbench.operators.session import Session
from groupbench.operators.sizes import counted
from groupbench.tracker.record import SCHEMA, Record, Run

OWN_PREFIX = "groupbench_"
NEEDS_CUDA = ("grouped_gemm",)  # asks CUDA at import (10b14473), so that on a CPU there is ours alone
POLL_S = 0.2
IMPORT_S = 300  # what starting, and making the inputs, may take however short --timeout is


def is_installed() -> bool:
    return importlib.util.find_spec("tritonbench") is not None


def measure(options: dict[str, Any], device: str, session: Session) -> int:
    """Run every operator of `--op` under TritonBench. Returns the exit code."""
    setups = [(_setup(op, options, device), _arguments(op, options, device)) for op in options["ops"]]
    machine = executor.probe(device)
    spec = importlib.util.find_spec("tritonbench")
    session.shows_table = False
    session.quiet = True  # TritonBench has a bar of its own
    session.open(f"TritonBench host ({Path(spec.origin).parent if spec and spec.origin else ''})", machine.environment)
    return session.collect(lambda run, progress: _records(setups, machine, run, session.timeout_s), 0)


def _records(setups: list[tuple[Setup, list[str]]], machine: Machine, run: Run, timeout_s: float) -> Iterator[Record]:
    """Of all operators: what one could not be measured for is told when the others have been."""
    failures: list[Incomplete | UsageError] = []
    for setup, arguments in setups:
        try:
            yield from _operator_records(setup, arguments, machine, run, timeout_s)
        except (Incomplete, UsageError) as failure:
            failures.append(failure)
    if failures:
        raise type(failures[0])("; ".join(map(str, failures)))


def _setup(op: str, options: dict[str, Any], device: str) -> Setup:
    """What the child must know beyond TritonBench's own flags. Raises UsageError for what does not exist."""
    plugins = tuple(options["plugins"])
    if op not in operator_names():
        if options["suites"]:
            raise UsageError(f"{op} is not an operator of groupbench: --suite is of those that are")
        return Setup(op=op, own=None, plugins=plugins)
    operator = get_operator(op, plugins)
    if not _is_own(op, options, device):
        return Setup(op=op, own=None, plugins=plugins)
    selection = plan.Selection(
        operator=op,
        suites=options["suites"],
        shapes=tuple(options["shapes"]),
        mode=options["mode"],
        only=options["only"],
        skip=options["skip"],
        plugins=plugins,
    )
    plan.jobs(selection, device, interpreted=device == "cpu")  # complains of what does not exist
    return Setup(
        op=OWN_PREFIX + op,
        own=op,
        mode=options["mode"],
        plugins=plugins,
        shapes=tuple(plan.shapes_of(operator.in_mode(options["mode"]), selection, device)),
        seed=options["seed"],
        protocol=Protocol(options["protocol"], options["bursts"], options["samples"], idle_s=options["idle"]),
    )


def _is_own(op: str, options: dict[str, Any], device: str) -> bool:
    """Whether our operator runs rather than TritonBench's namesake with our backends added.

    Where both have an operator of a name, TritonBench's runs, on its inputs, by its measure, and our backends stand in
    its table. Ours runs where TritonBench's cannot give what is asked for: a suite or a shape of ours, mode bwd, a CPU
    where its operator needs a GPU, inputs that our backends do not know.
    """
    if options["suites"] or any("=" in shape for shape in options["shapes"]):
        return True
    operator = get_operator(op)
    if operator.from_tritonbench is None or (device == "cpu" and op in NEEDS_CUDA):
        return True
    if options["mode"] in operator.modes[1:]:  # its grouped_gemm has the forward alone
        return True
    spec = importlib.util.find_spec("tritonbench")
    folders = spec.submodule_search_locations if spec else None
    return not any((Path(folder) / "operators" / op).is_dir() for folder in folders or ())


def _cpu_dtypes(op: str) -> tuple[str, ...]:
    return default_dtypes(get_operator(op), "cpu") if op in operator_names() else ("fp16",)


def _arguments(op: str, options: dict[str, Any], device: str) -> list[str]:
    """TritonBench's command line."""
    own = op in operator_names() and _is_own(op, options, device)
    arguments = ["--op", (OWN_PREFIX if own else "") + op, "--device", device, "--mode", options["mode"]]
    precision = options["precision"] or (_cpu_dtypes(op) if device == "cpu" else ())
    if len(precision) > 1:
        raise UsageError("TritonBench takes one --precision at a time")
    texts = {
        "--precision": ",".join(precision),
        "--only": ",".join(options["only"]),
        "--skip": ",".join(options["skip"]),
        "--metrics": ",".join(options["metrics"]),
        "--input-id": ",".join(options["input_id"]),
        "--num-inputs": options["num_inputs"],
        "--baseline": options["baseline"],
        "--rtol": options["rtol"],
        "--atol": options["atol"],
        "--output": options["output"],
        "--output-json": options["output_json"],
    }
    for flag, value in texts.items():
        if value not in (None, ""):
            arguments += [flag, str(value)]
    arguments += [flag for flag in ("--csv", "--cudagraph") if options[flag.strip("-")]]
    if options["shapes"] and not own:
        arguments += ["--shapes", *options["shapes"]]
    return [*arguments, *options["rest"]]


def _operator_records(
    setup: Setup, arguments: list[str], machine: Machine, run: Run, timeout_s: float
) -> Iterator[Record]:
    """Records of one operator's cells, over as many processes as it takes."""
    finished: list[Finished] = []
    with tempfile.TemporaryDirectory(prefix="groupbench-tritonbench-") as folder:
        for attempt in itertools.count():
            journal = Path(folder) / f"journal-{attempt}.jsonl"
            setup_file = Path(folder) / f"setup-{attempt}.json"
            setup_file.write_bytes(
                msgspec.json.encode(msgspec.structs.replace(setup, journal=str(journal), finished=tuple(finished)))
            )
            command = [
                sys.executable,
                "-m",
                "groupbench.operators.hosts.tritonbench_adapter",
                str(setup_file),
                *arguments,
            ]
            follower = _Follower(command, journal, timeout_s)
            try:
                for event in follower.events():
                    if event.cell is not None:
                        finished.append(Finished(event.input_id, event.backend, event.metrics, event.message))
                        yield _record(event, machine, run)
            except BaseException:
                follower.kill()
                raise
            broken = follower.current
            if broken is None:
                if follower.timed_out:
                    raise Incomplete(f"TritonBench was silent between cells; ended after {len(finished)} of them")
                if follower.code and not finished:
                    raise UsageError(f"TritonBench ended with exit code {follower.code} before it measured anything")
                if follower.code:
                    done = counted(len(finished), "cell")
                    raise Incomplete(f"TritonBench ended with exit code {follower.code} after {done}")
                if not finished:
                    raise Incomplete(
                        f"TritonBench measured nothing: no backend of {setup.op} that was asked for is installed here, "
                        "or it has no such input, unless its messages say otherwise"
                    )
                return
            status, message = follower.epitaph()
            finished.append(Finished(broken.input_id, broken.backend, None, message))
            yield _record(
                msgspec.structs.replace(broken, cell=broken.begun, status=status, message=message), machine, run
            )


def _record(event: Event, machine: Machine, run: Run) -> Record:
    assert event.cell is not None
    return Record(
        schema=SCHEMA,
        run=run,
        environment=machine.environment,
        cell=event.cell,
        status=event.status,
        message=event.message,
        baseline=event.baseline,
        latency=event.latency,
        accuracy=event.accuracy,
        kernels=event.kernels,
        duration_s=event.duration_s,
    )


class _Follower:
    """A child that runs TritonBench, and the journal it writes."""

    def __init__(self, command: list[str], journal: Path, timeout_s: float) -> None:
        self.journal = journal
        self.timeout_s = timeout_s
        self.timed_out = False
        self.current: Event | None = None  # begun and not finished
        self._process = subprocess.Popen(command, start_new_session=True)

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def events(self) -> Iterator[Event]:
        """As they are written, until the child has ended; it is ended here when it says nothing for too long."""
        position, last = 0, time.monotonic()
        while True:
            ended = self._process.poll() is not None
            text = self.journal.read_bytes()[position:] if self.journal.exists() else b""
            whole, _, _ = text.rpartition(b"\n")
            for line in whole.split(b"\n") if whole else ():
                event = msgspec.json.decode(line, type=Event)
                self.current = event if event.begun is not None else None
                last = time.monotonic()
                yield event
            position += len(whole) + 1 if whole else 0
            if ended:
                kill_left(self._process.pid)
                return
            patience = self.timeout_s if self.current else max(self.timeout_s, IMPORT_S)
            if time.monotonic() - last > patience:
                self.timed_out = True
                self.kill()
            time.sleep(POLL_S)

    def epitaph(self) -> tuple[str, str]:
        if self.timed_out:
            return "timeout", f"no answer within {self.timeout_s:g} s"
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return ("oom" if code == -signal.SIGKILL else "error"), f"TritonBench's process died ({how}) at this cell"

    def kill(self) -> None:
        kill_group(self._process.pid)
        self._process.wait(30)
