"""Measure with TritonBench as the host: TritonBench's flags, inputs and table, with our backends added, and a record
for every cell.

One process runs TritonBench for one operator. If it dies or hangs, the current cell is recorded with that status, and a
new process continues with the remaining cells.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from groupbench.operators import executor, plan
from groupbench.operators.errors import Incomplete, UsageError
from groupbench.operators.executor import Machine
from groupbench.operators.flags import MODES
from groupbench.operators.hosts.journal import Event, Finished, Setup
from groupbench.operators.measure import machine_code
from groupbench.operators.measure.channel import NOTICE_S, warn_of_wait
from groupbench.operators.measure.fingerprint import fingerprints
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.measure.selection import default_dtypes, select_mode
from groupbench.operators.measure.texts import storable
from groupbench.operators.measure.warden import has_ended, kill_group
from groupbench.operators.registry import CATALOG, get_operator, has_operator
from groupbench.operators.session import Session
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.measured_tree import add_measured_folders
from groupbench.tracker.facts.record import SCHEMA, Record, Run, Status
from groupbench.tracker.text.scratch import Scratch
from groupbench.tracker.text.wording import counted

log = logging.getLogger(__name__)

NEEDS_CUDA = ("grouped_gemm",)  # uses CUDA at import (10b14473), so on a CPU only our operator can run
HOST_POLL_S = 0.2
IMPORT_S = 300  # time limit for starting and for making the inputs, even with a shorter --timeout

OUR_TIMING = ("protocol", "bursts", "samples", "idle", "seed")

CHECKS_LESS = (
    "groupbench: TritonBench reuses the inputs and its own timer, so fewer cheats are detected than with "
    "--host builtin (docs/explanation/integrity.md)"
)

SLOW = (
    "groupbench: TritonBench's grouped_gemm rests five times for a second in each cell, so a cell takes more than five "
    "seconds; --num-inputs, --input-id and --only choose fewer, and --host builtin does not rest so long"
)

IN_TWO = "measure each side in a run of its own"
UNSUPPORTED = {
    "--isolate": "each operator has a process of its own already",
    "--side-a": IN_TWO,
    "--side-b": IN_TWO,
    "--devices": "CUDA_VISIBLE_DEVICES chooses the GPU",
    "--shard-by-inputs": "CUDA_VISIBLE_DEVICES chooses the GPU",
    "--op-collection": "name the operators by --op",
    "--ci": "name the operators by --op",
}
"""Flags with which TritonBench measures without writing records, and the alternative to each."""


def measure(options: dict[str, Any], device: str, session: Session) -> int:
    """Run every operator of `--op` under TritonBench. Returns the exit code."""
    options = _understood(options, device)
    setups = [(setup, _arguments(setup, options, device)) for setup in _setups(options, device)]
    machine = executor.probe(device)
    spec = importlib.util.find_spec("tritonbench")
    session.shows_table = False
    session.quiet = True  # TritonBench has a bar of its own
    session.open(f"TritonBench host ({Path(spec.origin).parent if spec and spec.origin else ''})", machine.environment)
    if device == "cuda" and "grouped_gemm" in options["ops"]:
        print(SLOW, file=sys.stderr)
    print(CHECKS_LESS, file=sys.stderr, flush=True)
    failures: list[str] = []
    code = session.collect(lambda run, progress: _records(setups, machine, run, session.timeout_s, failures), 0)
    for failure in failures:
        print(f"tritonbench: {storable(failure)}", file=sys.stderr)
    return ExitCode.INCOMPLETE if failures and code == ExitCode.OK else code


def show(op: str, lists: tuple[str, ...], plugins: tuple[str, ...]) -> None:
    """Print lists of one of TritonBench's operators. Raises UsageError for an unknown operator."""
    with Scratch("tritonbench") as folder:
        follower = _start(folder, Setup(op=op, lists=lists, plugins=plugins), [], IMPORT_S)
        refused = [event.refused for event in follower.events() if event.refused]
    if refused or follower.code:
        raise UsageError(f"{op}: {refused[0] if refused else _ended(follower)}")


def _understood(options: dict[str, Any], device: str) -> dict[str, Any]:
    """Translate the options for TritonBench. Raises UsageError for those that `_check_understood` refuses."""
    rest = [text for text in options["rest"] if text not in MODES]
    ops = tuple(dict.fromkeys(options["ops"]))
    _check_understood(options, rest, ops, device)
    ids = sorted({plan.integer(text) for text in options["input_id"]})  # it iterates over the inputs once, in order
    modes = [mode for flag, mode in MODES.items() if flag in options["rest"]]
    mode = modes[-1] if modes else options["mode"]
    return options | {"ops": ops, "rest": rest, "mode": mode, "input_id": tuple(map(str, ids))}


def _check_understood(options: dict[str, Any], rest: list[str], ops: tuple[str, ...], device: str) -> None:
    """Raise UsageError for options that TritonBench would ignore or not survive."""
    for flag in (text.split("=")[0] for text in rest):
        if flag in UNSUPPORTED:
            raise UsageError(f"{flag} cannot be combined with records: {UNSUPPORTED[flag]}")
    if options["cudagraph"] and device == "cpu":
        raise UsageError("--cudagraph needs a GPU: a CPU has no CUDA graphs")
    for flag in ("output", "output_json"):
        if options[flag] and len(ops) > 1:
            flag = flag.replace("_", "-")
            raise UsageError(f"--{flag} takes one operator on TritonBench; --output-dir FOLDER writes a file for each")
    if len(options["input_id"]) > 1 and options["num_inputs"] is not None:
        raise UsageError("--num-inputs must be at least 1, with at most one --input-id")


def _records(
    setups: list[tuple[Setup, list[str]]], machine: Machine, run: Run, timeout_s: float, failures: list[str]
) -> Iterator[Record]:
    """Yield the records of all operators. Appends to `failures` why an operator could not be measured.

    `failures` also gets backends that no operator has, and the operators that an interrupt left. Raises Incomplete or
    UsageError if no operator could be measured.
    """
    caught: list[Incomplete | UsageError] = []
    strays: dict[str, set[str]] = {}  # of the operators measured so far
    measured = False
    for number, (setup, arguments) in enumerate(setups):
        try:
            for record in _operator_records(setup, arguments, machine, run, timeout_s, strays):
                measured = True
                yield record
        except (Incomplete, UsageError) as failure:
            caught.append(type(failure)(f"{setup.op}: {failure}"))
        except KeyboardInterrupt as interrupt:
            later = ", ".join(setup.op for setup, _ in setups[number + 1 :])
            failures += [*map(str, caught), f"interrupted: {setup.op}: {interrupt}"]
            failures += [f"not started: {later}"] if later else []
            raise
    nowhere = set.intersection(*strays.values()) if len(strays) == len(setups) > 1 else set()
    for name in sorted(nowhere):
        caught.append(UsageError(f"none of the selected operators has a backend {name!r}"))
    if caught and not measured:
        raise type(caught[0])("; ".join(map(str, caught)))
    failures += map(str, caught)


def _setups(options: dict[str, Any], device: str) -> list[Setup]:
    """Return each child's setup, beyond TritonBench's flags. Raises UsageError for an unknown suite or shape."""
    plugins = tuple(options["plugins"])
    is_ours = {op: has_operator(op, plugins) and _is_own(op, options, device) for op in options["ops"]}
    for op, is_own in is_ours.items():
        if options["suites"] and not is_own:
            raise UsageError(f"{op} is not an operator of groupbench: --suite works only with those")
        option = next((name for name in OUR_TIMING if name in options["on_command_line"]), None)
        if option and not is_own:
            raise UsageError(
                f"--{option} works only with groupbench's operators; {op} is TritonBench's here, timed by its flags "
                "(--warmup, --rep, ...)" + (": add --suite or --host builtin" if has_operator(op) else "")
            )
    alone = len(is_ours) == 1
    # The backends of TritonBench's operators are unknown until these are imported.
    named = plan.named(tuple(is_ours), options["only"], options["skip"], plugins) if all(is_ours.values()) else {}
    return [
        _own_setup(op, options, device, *named.get(op, ((), ())), alone=alone)
        if is_own
        else Setup(op=op, plugins=plugins, alone=alone)
        for op, is_own in is_ours.items()
    ]


def _own_setup(
    op: str, options: dict[str, Any], device: str, only: tuple[str, ...], skip: tuple[str, ...], alone: bool
) -> Setup:
    plugins = tuple(options["plugins"])
    selection = plan.Selection(
        operator=op,
        suites=options["suites"],
        shapes=tuple(options["shapes"]),
        mode=options["mode"],
        only=only,
        skip=skip,
        plugins=plugins,
    )
    plan.jobs(selection, device, interpreted=device == "cpu")  # raises UsageError for an unknown suite or shape
    timing = {"idle_s": options["idle"], "cudagraph": options["cudagraph"]}
    return Setup(
        op=op,
        own=True,
        mode=options["mode"],
        alone=alone,
        plugins=plugins,
        shapes=tuple(
            map(str, plan.shapes_of(select_mode(get_operator(op, plugins), options["mode"]), selection, device))
        ),
        seed=options["seed"],
        protocol=Protocol(options["protocol"], options["bursts"], options["samples"], **timing),
    )


def _is_own(op: str, options: dict[str, Any], device: str) -> bool:
    """Return whether our operator runs, rather than TritonBench's operator of that name with our backends added.

    TritonBench's runs by default, on TritonBench's inputs and with TritonBench's timing, and our backends appear in the
    table. Ours runs if TritonBench's cannot: for our suites or shapes, for mode bwd, on a CPU if the operator needs a
    GPU, and on inputs our backends do not support.
    """
    if op not in CATALOG and _is_theirs(op):
        raise UsageError(f"TritonBench has an operator {op} too: rename the plugin's operator, or add --host builtin")
    if options["suites"] or any("=" in shape for shape in options["shapes"]):
        return True
    operator = get_operator(op, options.get("plugins", ()))
    if operator.from_tritonbench is None or (device == "cpu" and op in NEEDS_CUDA):
        return True
    if options["mode"] in operator.modes[1:]:  # its grouped_gemm has only the forward pass
        return True
    return not _is_theirs(op)


def _is_theirs(op: str) -> bool:
    """Return whether TritonBench has an operator of that name."""
    spec = importlib.util.find_spec("tritonbench")
    folders = spec.submodule_search_locations if spec else None
    return any((Path(folder) / "operators" / op).is_dir() for folder in folders or ())


def _arguments(setup: Setup, options: dict[str, Any], device: str) -> list[str]:
    """Return TritonBench's command line."""
    is_own = setup.own
    arguments = ["--op", setup.op, "--device", device, "--mode", options["mode"]]
    usual = default_dtypes(get_operator(setup.op, setup.plugins), device) if is_own and device == "cpu" else ()
    precision = options["precision"] or usual
    if is_own and (lacking := set(precision or get_operator(setup.op, setup.plugins).dtypes[:1]) & {"fp64"}):
        raise UsageError(f"TritonBench has no precision {lacking.pop()}: add --host builtin")
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
    flags = ("--csv",) if is_own else ("--csv", "--cudagraph")
    arguments += [flag for flag in flags if options[flag.strip("-")]]
    if options["shapes"] and not is_own:
        arguments += ["--shapes", *options["shapes"]]
    return [*arguments, *options["rest"]]


def _operator_records(
    setup: Setup, arguments: list[str], machine: Machine, run: Run, timeout_s: float, strays: dict[str, set[str]]
) -> Iterator[Record]:
    """Yield the records of one operator, with a new process after each that dies. `strays` gets unknown backends."""
    finished: list[Finished] = []
    with Scratch("tritonbench") as folder:
        for attempt in itertools.count():
            part = folder / str(attempt)
            part.mkdir()
            follower = _start(part, msgspec.structs.replace(setup, finished=tuple(finished)), arguments, timeout_s)
            try:
                for event in follower.events():
                    if event.strays is not None:
                        strays[setup.op] = set(event.strays)
                    if event.cell is not None:
                        finished.append(Finished(event.input_id, event.backend, event.metrics, event.message))
                        yield _record(event, machine, run)
            except KeyboardInterrupt:
                follower.kill()
                if follower.current is not None:
                    yield _lost(follower.current, machine, run, "skipped", "interrupted before it was measured")
                raise KeyboardInterrupt(follower.left()) from None
            except BaseException:
                follower.kill()
                raise
            broken = follower.current
            if broken is None or follower.refused:
                _check_end(follower, len(finished), setup.op)
                return
            status, message = follower.epitaph()
            finished.append(Finished(broken.input_id, broken.backend, None, message))
            yield _lost(broken, machine, run, status, message)


def _check_end(follower: _Follower, cells: int, op: str) -> None:
    """Raise Incomplete or UsageError unless TritonBench measured everything; `cells` is the number of finished ones."""
    if follower.timed_out:
        raise Incomplete(f"TritonBench hung between cells; it was ended after {cells} of them")
    done = f"after {counted(cells, 'cell')}" if cells else "before it measured anything"
    if follower.code and not cells:
        raise UsageError(follower.refused or f"{_ended(follower)} {done}")
    if follower.refused:
        raise Incomplete(f"TritonBench ended {done}: {follower.refused}")
    if follower.code:
        raise Incomplete(f"{_ended(follower)} {done}")
    if not cells:
        raise Incomplete(
            f"TritonBench measured nothing: none of the selected backends of {op} is installed, "
            "unless its messages above give another reason"
        )


def _ended(follower: _Follower) -> str:
    return f"TritonBench ended with exit code {follower.code}"


def _start(folder: Path, setup: Setup, arguments: list[str], timeout_s: float) -> _Follower:
    """Start a child process, with the files in an empty folder."""
    journal, setup_file = folder / "journal.jsonl", folder / "setup.json"
    setup_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(setup, journal=str(journal))))
    module = "groupbench.operators.hosts.tritonbench_adapter"
    return _Follower([sys.executable, "-m", module, str(setup_file), *arguments], journal, timeout_s)


def _lost(event: Event, machine: Machine, run: Run, status: Status, message: str) -> Record:
    """Return the record of an unfinished cell."""
    return _record(msgspec.structs.replace(event, cell=event.begun, status=status, message=message), machine, run)


def _record(event: Event, machine: Machine, run: Run) -> Record:
    assert event.cell is not None
    kernels = machine_code.described(event.kernels, event.code)
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
        kernels=kernels,
        duration_s=event.duration_s,
        metrics=machine_code.metrics_of(kernels),
        loaded=None if event.seen is None else fingerprints().of(*event.seen),
    )


class _Follower:
    """A child process that runs TritonBench, and the journal it writes."""

    def __init__(self, command: list[str], journal: Path, timeout_s: float) -> None:
        self.journal = journal
        self.timeout_s = timeout_s
        self.timed_out = False
        self.current: Event | None = None  # begun and not finished
        self.last: Event | None = None
        self.refused: str | None = None
        self._process = subprocess.Popen(command, start_new_session=True, env=add_measured_folders(os.environ))

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def events(self) -> Iterator[Event]:
        """Yield events as the child writes them, until it ends. Kills it after too long without an event."""
        position, last, warned = 0, time.monotonic(), 0.0
        while True:
            ended = self._process.returncode is not None or has_ended(self._process.pid)
            text = self.journal.read_bytes()[position:] if self.journal.exists() else b""
            whole, _, _ = text.rpartition(b"\n")
            for line in whole.split(b"\n") if whole else ():
                event = msgspec.json.decode(line, type=Event)
                self.current = event if event.begun is not None else None
                self.last = event if event.backend else self.last
                self.refused = event.refused or self.refused
                last = time.monotonic()
                yield event
            position += len(whole) + 1 if whole else 0
            if ended:
                self.kill()
                return
            patience = self.timeout_s if self.current else max(self.timeout_s, IMPORT_S)
            waited_s = time.monotonic() - last
            if self.current is not None and waited_s > NOTICE_S and warned < last:
                warned = last
                cell = f"{self.current.backend}, input {self.current.input_id}"
                warn_of_wait(log, cell, waited_s, self.timeout_s)
            if waited_s > patience:
                self.timed_out = True
                self.kill()
            time.sleep(HOST_POLL_S)

    def left(self) -> str:
        """Return, as text, the inputs that an interrupt now leaves unmeasured."""
        if self.last is None:
            return "nothing was measured"
        return f"input {self.last.input_id} was not finished, and {counted(self.last.left, 'input')} not started"

    def epitaph(self) -> tuple[Status, str]:
        if self.timed_out:
            return "timeout", f"no answer within {self.timeout_s:g} s"
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return ("oom" if code == -signal.SIGKILL else "error"), f"TritonBench's process died ({how}) at this cell"

    def kill(self) -> None:
        """Kill the process and its group, whose number is not another's before the process is reaped."""
        if self._process.returncode is None:
            kill_group(self._process.pid)
            self._process.wait(30)
