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
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.measure.selection import default_dtypes, select_mode
from groupbench.operators.measure.texts import storable
from groupbench.operators.measure.warden import kill_group, kill_left
from groupbench.operators.registry import CATALOG, get_operator, has_operator
from groupbench.operators.session import Session
from groupbench.operators.sizes import counted
from groupbench.tracker.exits import ExitCode
from groupbench.tracker.record import SCHEMA, Record, Run, Status
from groupbench.tracker.text.scratch import Scratch

NEEDS_CUDA = ("grouped_gemm",)  # asks CUDA at import (10b14473), so that on a CPU there is ours alone
POLL_S = 0.2
IMPORT_S = 300  # what starting, and making the inputs, may take however short --timeout is

OUR_TIMING = ("protocol", "bursts", "samples", "idle", "seed")

CHECKS_LESS = (
    "groupbench: TritonBench keeps the same inputs and its own clock, so fewer cheats show than with --host builtin "
    "(docs/explanation/integrity.md)"
)

IN_TWO = "measure what differs in two runs"
LEAVES = {
    "--isolate": "each operator has a process of its own already",
    "--side-a": IN_TWO,
    "--side-b": IN_TWO,
    "--devices": "CUDA_VISIBLE_DEVICES chooses the GPU",
    "--shard-by-inputs": "CUDA_VISIBLE_DEVICES chooses the GPU",
    "--op-collection": "name the operators by --op",
    "--ci": "name the operators by --op",
}
"""TritonBench's flags by which it measures where there is no record of it, and what to do."""


def measure(options: dict[str, Any], device: str, session: Session) -> int:
    """Run every operator of `--op` under TritonBench. Returns the exit code."""
    options = _understood(options, device)
    setups = [(setup, _arguments(setup, options, device)) for setup in _setups(options, device)]
    machine = executor.probe(device)
    spec = importlib.util.find_spec("tritonbench")
    session.shows_table = False
    session.quiet = True  # TritonBench has a bar of its own
    session.open(f"TritonBench host ({Path(spec.origin).parent if spec and spec.origin else ''})", machine.environment)
    print(CHECKS_LESS, file=sys.stderr, flush=True)
    failures: list[str] = []
    code = session.collect(lambda run, progress: _records(setups, machine, run, session.timeout_s, failures), 0)
    for failure in failures:
        print(f"tritonbench: {storable(failure)}", file=sys.stderr)
    return ExitCode.INCOMPLETE if failures and code == ExitCode.OK else code


def show(op: str, lists: tuple[str, ...], plugins: tuple[str, ...]) -> None:
    """Print what there is of an operator of TritonBench's. Raises UsageError where there is none."""
    with Scratch("tritonbench") as folder:
        follower = _start(folder, Setup(op=op, lists=lists, plugins=plugins), [], IMPORT_S)
        refused = [event.refused for event in follower.events() if event.refused]
    if refused or follower.code:
        raise UsageError(f"{op}: {refused[0] if refused else _ended(follower)}")


def _understood(options: dict[str, Any], device: str) -> dict[str, Any]:
    """The options as TritonBench is to have them. Raises UsageError for what would be passed over, or end it."""
    rest = [text for text in options["rest"] if text not in MODES]
    for flag in (text.split("=")[0] for text in rest):
        if flag in LEAVES:
            raise UsageError(f"{flag} does not go with records: {LEAVES[flag]}")
    if options["cudagraph"] and device == "cpu":
        raise UsageError("--cudagraph: there are no CUDA graphs on a CPU")
    ops = tuple(dict.fromkeys(options["ops"]))
    for flag in ("output", "output_json"):
        if options[flag] and len(ops) > 1:
            flag = flag.replace("_", "-")
            raise UsageError(f"--{flag} is one operator's on TritonBench; --output-dir FOLDER has a file for each")
    if len(options["input_id"]) > 1 and options["num_inputs"] is not None:
        raise UsageError("--num-inputs is at least 1 and goes with at most one --input-id")
    ids = sorted({plan.integer(text) for text in options["input_id"]})  # it goes through the inputs once, forwards
    modes = [mode for flag, mode in MODES.items() if flag in options["rest"]]
    mode = modes[-1] if modes else options["mode"]
    return options | {"ops": ops, "rest": rest, "mode": mode, "input_id": tuple(map(str, ids))}


def _records(
    setups: list[tuple[Setup, list[str]]], machine: Machine, run: Run, timeout_s: float, failures: list[str]
) -> Iterator[Record]:
    """Of all operators. What one could not be measured for goes to `failures`, and is raised where none was measured.

    So does a backend that no operator has, and what an interrupt left.
    """
    caught: list[Incomplete | UsageError] = []
    strays: dict[str, set[str]] = {}  # of operators that came so far
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
            failures += [f"not begun: {later}"] if later else []
            raise
    nowhere = set.intersection(*strays.values()) if len(strays) == len(setups) > 1 else set()
    for name in sorted(nowhere):
        caught.append(UsageError(f"no operator that was asked for has a backend {name!r}"))
    if caught and not measured:
        raise type(caught[0])("; ".join(map(str, caught)))
    failures += map(str, caught)


def _setups(options: dict[str, Any], device: str) -> list[Setup]:
    """What each child must know beyond TritonBench's own flags. Raises UsageError for what does not exist."""
    plugins = tuple(options["plugins"])
    own = {op: has_operator(op, plugins) and _is_own(op, options, device) for op in options["ops"]}
    for op, is_own in own.items():
        if options["suites"] and not is_own:
            raise UsageError(f"{op} is not an operator of groupbench: --suite is of those that are")
        given = next((name for name in OUR_TIMING if name in options["given"]), None)
        if given and not is_own:
            raise UsageError(
                f"--{given} is of groupbench's own operators, and {op} is TritonBench's here, which times by its own "
                "flags (--warmup, --rep, ...)" + (": add --suite or --host builtin" if has_operator(op) else "")
            )
    alone = len(own) == 1
    # What TritonBench's operators have is known when they are imported.
    named = plan.named(tuple(own), options["only"], options["skip"], plugins) if all(own.values()) else {}
    return [
        _own_setup(op, options, device, *named.get(op, ((), ())), alone=alone)
        if is_own
        else Setup(op=op, plugins=plugins, alone=alone)
        for op, is_own in own.items()
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
    plan.jobs(selection, device, interpreted=device == "cpu")  # complains of what does not exist
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
    """Whether our operator runs rather than TritonBench's namesake with our backends added.

    Where both have an operator of a name, TritonBench's runs, on its inputs, by its measure, and our backends stand in
    its table. Ours runs where TritonBench's cannot give what is asked for: a suite or a shape of ours, mode bwd, a CPU
    where its operator needs a GPU, inputs that our backends do not know.
    """
    if op not in CATALOG and _is_theirs(op):
        raise UsageError(
            f"{op} is TritonBench's operator too: give the plugin's another name, or measure it by --host builtin"
        )
    if options["suites"] or any("=" in shape for shape in options["shapes"]):
        return True
    operator = get_operator(op, options.get("plugins", ()))
    if operator.from_tritonbench is None or (device == "cpu" and op in NEEDS_CUDA):
        return True
    if options["mode"] in operator.modes[1:]:  # its grouped_gemm has the forward alone
        return True
    return not _is_theirs(op)


def _is_theirs(op: str) -> bool:
    """Whether TritonBench has an operator of that name."""
    spec = importlib.util.find_spec("tritonbench")
    folders = spec.submodule_search_locations if spec else None
    return any((Path(folder) / "operators" / op).is_dir() for folder in folders or ())


def _arguments(setup: Setup, options: dict[str, Any], device: str) -> list[str]:
    """TritonBench's command line."""
    own = setup.own
    arguments = ["--op", setup.op, "--device", device, "--mode", options["mode"]]
    usual = default_dtypes(get_operator(setup.op, setup.plugins), device) if own and device == "cpu" else ()
    precision = options["precision"] or usual
    if own and (lacking := set(precision or get_operator(setup.op, setup.plugins).dtypes[:1]) & {"fp64"}):
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
    flags = ("--csv",) if own else ("--csv", "--cudagraph")
    arguments += [flag for flag in flags if options[flag.strip("-")]]
    if options["shapes"] and not own:
        arguments += ["--shapes", *options["shapes"]]
    return [*arguments, *options["rest"]]


def _operator_records(
    setup: Setup, arguments: list[str], machine: Machine, run: Run, timeout_s: float, strays: dict[str, set[str]]
) -> Iterator[Record]:
    """Records of one operator's cells, over as many processes as it takes; backends that it has not go to `strays`."""
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
                if follower.timed_out:
                    raise Incomplete(f"TritonBench was silent between cells; ended after {len(finished)} of them")
                done = f"after {counted(len(finished), 'cell')}" if finished else "before it measured anything"
                if follower.code and not finished:
                    raise UsageError(follower.refused or f"{_ended(follower)} {done}")
                if follower.refused:
                    raise Incomplete(f"TritonBench ended {done}: {follower.refused}")
                if follower.code:
                    raise Incomplete(f"{_ended(follower)} {done}")
                if not finished:
                    raise Incomplete(
                        f"TritonBench measured nothing: no backend of {setup.op} that was asked for is installed here, "
                        "unless its messages say otherwise"
                    )
                return
            status, message = follower.epitaph()
            finished.append(Finished(broken.input_id, broken.backend, None, message))
            yield _lost(broken, machine, run, status, message)


def _ended(follower: _Follower) -> str:
    return f"TritonBench ended with exit code {follower.code}"


def _start(folder: Path, setup: Setup, arguments: list[str], timeout_s: float) -> _Follower:
    """A child, with its files in an empty folder."""
    journal, setup_file = folder / "journal.jsonl", folder / "setup.json"
    setup_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(setup, journal=str(journal))))
    module = "groupbench.operators.hosts.tritonbench_adapter"
    return _Follower([sys.executable, "-m", module, str(setup_file), *arguments], journal, timeout_s)


def _lost(event: Event, machine: Machine, run: Run, status: Status, message: str) -> Record:
    """The record of a cell that had begun."""
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
        code=event.code,
        duration_s=event.duration_s,
        metrics=machine_code.metrics_of(kernels),
    )


class _Follower:
    """A child that runs TritonBench, and the journal it writes."""

    def __init__(self, command: list[str], journal: Path, timeout_s: float) -> None:
        self.journal = journal
        self.timeout_s = timeout_s
        self.timed_out = False
        self.current: Event | None = None  # begun and not finished
        self.last: Event | None = None
        self.refused: str | None = None
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
                self.last = event if event.backend else self.last
                self.refused = event.refused or self.refused
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

    def left(self) -> str:
        """What an interrupt here leaves."""
        if self.last is None:
            return "nothing was measured"
        return f"input {self.last.input_id} was not finished, and {counted(self.last.left, 'input')} not begun"

    def epitaph(self) -> tuple[Status, str]:
        if self.timed_out:
            return "timeout", f"no answer within {self.timeout_s:g} s"
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return ("oom" if code == -signal.SIGKILL else "error"), f"TritonBench's process died ({how}) at this cell"

    def kill(self) -> None:
        kill_group(self._process.pid)
        self._process.wait(30)
