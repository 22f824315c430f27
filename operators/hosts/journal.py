"""What the process that runs TritonBench tells its parent, a line of JSON at a time."""

from __future__ import annotations

from pathlib import Path

import msgspec

from groupbench.operators.measure.protocol import Protocol
from groupbench.tracker.record import Accuracy, Cell, Code, Kernel, Latency, Status


class Finished(msgspec.Struct, frozen=True):
    """A cell that an earlier process dealt with: TritonBench's metrics (pickled), or the text of what went wrong."""

    input_id: int
    backend: str
    metrics: bytes | None
    message: str | None


class Setup(msgspec.Struct, frozen=True):
    """What the child must know beyond TritonBench's own flags.

    own     the operator is ours, not TritonBench's of that name
    mode    fwd, or bwd or fwd_bwd where the operator is ours and has it
    alone   no other operator is asked for, which could have the backends that this one lacks
    lists   print these of the operator (operators, backends, metrics), and measure nothing
    """

    op: str
    own: bool = False
    mode: str = "fwd"
    alone: bool = True
    lists: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    seed: int = 0
    protocol: Protocol = Protocol()
    journal: str = ""
    finished: tuple[Finished, ...] = ()


class Event(msgspec.Struct, frozen=True):
    """A cell begins (`begun`), or is done (`cell`); neither where one with a record already has been run again.

    left      inputs behind this one
    strays    backends that were asked for and that this operator has not, told before the first cell
    refused   why nothing more is measured: the last that is told
    """

    input_id: int = -1
    backend: str = ""
    left: int = 0
    strays: tuple[str, ...] | None = None
    refused: str | None = None
    baseline: bool = False
    begun: Cell | None = None
    cell: Cell | None = None
    status: Status = "ok"
    message: str | None = None
    latency: Latency | None = None
    accuracy: Accuracy | None = None
    kernels: tuple[Kernel, ...] = ()
    code: tuple[Code, ...] = ()
    duration_s: float | None = None
    metrics: bytes | None = None


def tell(setup: Setup, event: Event) -> None:
    """Add an event to the journal."""
    with Path(setup.journal).open("ab") as file:
        file.write(msgspec.json.encode(event) + b"\n")
