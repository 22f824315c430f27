"""Requests and replies between the parent and the processes that measure and judge: data of declared types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from groupbench.operators.measure import moves
from groupbench.operators.measure.costs import CHEAP
from groupbench.operators.measure.exchange import Sent
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.operator import Operator
from groupbench.tracker.facts.record import Code, Kernel, Telemetry, Timing

Time = Annotated[float, msgspec.Meta(gt=0)]
"""A possible reading of a clock: neither a negative one nor NaN could be compared with others."""


@dataclass(frozen=True)
class Job:
    """One cell to measure, small enough to send to a process anywhere.

    Attributes:
        shape: The shape's canonical text.
        problem: The shape itself; None if only its text is known.
    """

    operator: str
    backend: str
    shape: str
    dtype: str
    device: str
    mode: str = "fwd"
    seed: int = 0
    interpreted: bool = False
    protocol: Protocol = field(default_factory=Protocol)
    rtol: float | None = None
    atol: float | None = None
    plugins: tuple[str, ...] = ()
    costs: tuple[str, ...] = CHEAP  # costs to measure in addition to latency and accuracy
    problem: Any = field(default=None, compare=False)

    def shape_of(self, operator: Operator) -> Any:
        """Return the shape. Raises ValueError if it is not one of a suite, and the operator does not read the text."""
        if self.problem is not None:
            return self.problem
        for shape in (shape for suite in operator.suites.values() for shape in suite):
            if str(shape) == self.shape:
                return shape
        return operator.parse_shape(self.shape)


@dataclass(frozen=True)
class HeldTo:
    """Backend facts for the judge.

    Attributes:
        row: Row of the tolerance table; None for that of its dtype.
        home: Plugins that the judge imports to get the operator.
    """

    row: str | None
    home: tuple[str, ...]


class Prepared(msgspec.Struct, frozen=True):
    """The reply to `prepare`: all results except latency and accuracy.

    Attributes:
        sent: The output of the second of two calls on poisoned memory, followed by that of the first if they differ.
    """

    timing: Timing
    prepare_ms: Time
    enqueue_ms: Time | None
    kernels: tuple[Kernel, ...]
    sent: Sent
    repeatable: bool
    problem: str | None = None  # a change by the backend to its inputs or to the harness
    code: tuple[Code, ...] = ()  # of the kernels
    metrics: dict[str, float] = {}  # costs of preparing, by metric
    copies: tuple[moves.Copied, ...] = ()  # of inputs, refreshed after each move
    fresh: bool = True  # outputs that are held at once have memory of their own
    variables: dict[str, str | None] = {}  # of the environment, changed by its plugin


class Burst(msgspec.Struct, frozen=True):
    """The reply to `burst` and `witness`.

    Attributes:
        steps: For each timed call whose output was kept, the number of steps that its inputs had moved.
        sums: For each of these outputs, the sum of its bits.

    Both are named before the parent chooses the outputs that `show` is to return.
    """

    samples_ms: tuple[Time, ...]
    telemetry: Telemetry | None = None
    steps: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    problem: str | None = None
    enqueue_ms: Time | None = None  # host time to launch a call, on a GPU


class Paced(msgspec.Struct, frozen=True):
    """The judge's reply to `pace`: a burst's cost without the calls, by all clocks, and torch's threads.

    Attributes:
        run_ms: Processor time of the thread that would make the calls; it waits for nothing.
    """

    wall_ms: float
    processor_ms: float
    threads: int
    run_ms: float = 0.0


class Failure(msgspec.Struct, frozen=True):
    """The reply to a request that failed. The cell cannot be used afterwards.

    Attributes:
        status: None of these is good news: a backend's process cannot name itself `ok` or `skipped`.
        kind: Class of the exception in the process; "" if the process gave no such answer.
    """

    status: Literal["error", "oom", "unavailable", "timeout", "wrong"]
    message: str
    kind: str = ""


@dataclass(frozen=True)
class Request:
    """A call of a method of a handler (cell.py, judge.py, worker.py).

    The reply is the token, then RETURNED and the method's result, or FAILED and a Failure. It is read as data of the
    type declared by the method, so no process can answer with something else.
    """

    verb: str
    arguments: tuple[Any, ...] = ()
    token: bytes = b""


RETURNED, FAILED = b"+", b"-"


def reply_of(reply: bytes, function: Callable[..., Any]) -> Any:
    """Return the result of a function in another process, or the Failure. Raises msgspec.DecodeError."""
    return (_FAILURE if reply[:1] == FAILED else _decoder(function)).decode(reply[1:])


@cache
def _decoder(function: Callable[..., Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(get_type_hints(function).get("return", Any))


_FAILURE = msgspec.msgpack.Decoder(Failure)
