"""Messages between the launcher and the process running TritonBench: the setup, and events as JSON lines."""

from __future__ import annotations

from pathlib import Path

import msgspec

from groupbench.operators.measure.loaded import Seen
from groupbench.operators.measure.protocol import Protocol
from groupbench.tracker.facts.record import Accuracy, Cell, Code, Kernel, Latency, Status


class Finished(msgspec.Struct, frozen=True):
    """A cell that an earlier process completed: TritonBench's metrics, pickled, or the error message."""

    input_id: int
    backend: str
    metrics: bytes | None
    message: str | None


class Setup(msgspec.Struct, frozen=True):
    """The child's settings in addition to TritonBench's own flags.

    Attributes:
        own: The operator is ours, not TritonBench's of that name.
        mode: Fwd; also bwd or fwd_bwd if the operator is ours and has that mode.
        alone: This is the only selected operator, so a backend that it lacks is an error.
        lists: Print these facts about the operator (operators, backends, metrics) and measure nothing.
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
    """A cell began (`begun`) or finished (`cell`). Neither is set for a cell with a record that ran again.

    Attributes:
        left: Number of inputs after this one.
        strays: Selected backends that this operator lacks, sent before the first cell.
        refused: Why nothing more is measured; the last event.
        seen: Files and libraries that the process has loaded so far.
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
    seen: Seen | None = None


def send(setup: Setup, event: Event) -> None:
    """Add an event to the journal."""
    with Path(setup.journal).open("ab") as file:
        file.write(msgspec.json.encode(event) + b"\n")
