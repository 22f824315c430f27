"""Measure the functions passed to the pytest fixture, in pytest's process, and write their records to a file."""

from __future__ import annotations

import contextlib
import functools
import inspect
import shlex
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from groupbench.operators import table
from groupbench.operators.dtypes import dtype_name
from groupbench.operators.errors import UsageError
from groupbench.operators.measure import compiled, environment
from groupbench.operators.measure.commit import find_commit
from groupbench.operators.measure.fingerprint import fingerprints
from groupbench.operators.measure.given import named_tensors
from groupbench.operators.measure.loaded import watch
from groupbench.operators.measure.protocol import Protocol, cooled_bursts, timing_of
from groupbench.operators.measure.texts import storable
from groupbench.operators.session import check_writable
from groupbench.operators.vet import vetted
from groupbench.tracker.facts import durations
from groupbench.tracker.facts.loaded import ListsOnce
from groupbench.tracker.facts.record import (
    LONGEST_NAME,
    SCHEMA,
    Cell,
    Environment,
    Latency,
    Record,
    Run,
    Status,
    cut,
    encode,
)
from groupbench.tracker.tools import lease


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name as a backend: `Softmax.forward`, `softmax`, or a callable object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    if inspect.isbuiltin(function) and name.startswith("_"):  # torch.softmax is _VariableFunctionsClass.softmax
        name = function.__name__
    return name.replace("<lambda>", "lambda").rpartition("<locals>.")[2]


class PytestSession:
    """One pytest run. Raises UsageError if records cannot be written."""

    def __init__(self, path: Path | None, folder: Path, arguments: Sequence[str]) -> None:
        if path is not None:
            check_writable(path)
        watch()
        self._fingerprints = fingerprints()
        self.path = path
        self.records: list[Record] = []
        self._of_test: list[Record] = []  # of the running test, whose outcome decides their status
        self._run = Run(
            id=uuid.uuid4().hex,
            started=datetime.now(UTC),
            commit=find_commit(None, folder),
            trigger="pytest",
            command=cut(storable(shlex.join(["pytest", *map(str, arguments)]))),
        )
        self._environments: dict[str, Environment] = {}
        self._names: Counter[tuple[str, str, str]] = Counter()
        self._lists_once = ListsOnce()
        self.protocol = Protocol()
        self._leases = contextlib.ExitStack()

    def wait(self, duration: str) -> None:
        """Set how long the first measurement may wait for its device. Raises UsageError."""
        try:
            lease.WAITING.first_s = durations.seconds(duration)
        except ValueError as error:
            raise UsageError(f"--groupbench-wait: {error}") from error

    def close(self) -> None:
        """Release the devices."""
        self._leases.close()

    def measure(
        self, test: str, shape: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Measure a function with these arguments, and keep the record until the test ends."""
        started = time.monotonic()
        tensors = [tensor for _, tensor in named_tensors([*args, kwargs])]
        device = "cuda" if any(tensor.is_cuda for tensor in tensors) else "cpu"
        where = self._environment(device)

        def run() -> Any:
            return function(*args, **kwargs)

        with compiled.watched() as kernels, compiled.interpreted() as launched:
            run()
        floats = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        backend = name_of(function)
        self._names[test, backend, shape] += 1
        number = self._names[test, backend, shape]
        cell = Cell(
            operator=storable(test.replace(",", " "))[-LONGEST_NAME:],
            backend=storable(backend.replace(",", " "))[-LONGEST_NAME:],
            shape=storable(shape if number == 1 else f"{shape} #{number}")[:LONGEST_NAME],
            dtype=(dtype_name(floats[0]) or str(floats[0]).removeprefix("torch.")) if floats else "none",
            host="pytest",
            protocol=self.protocol.label,
        )
        latency = self._latency(run, device, bool(launched))
        record = Record(
            schema=SCHEMA,
            run=self._run,
            environment=where,
            cell=cell,
            status="ok",
            latency=latency,
            kernels=tuple(kernels),
            duration_s=round(time.monotonic() - started, 3),
            loaded=self._fingerprints.of(*watch().loaded()),
        )
        self._of_test.append(record)

    def finish_test(self, status: Status, message: str | None) -> None:
        """Write the ended test's records, with statuses by outcome."""
        ended, self._of_test = self._of_test, []
        for record in map(vetted, ended):
            if status != "ok" and record.status == "ok":
                latency = record.latency if status == "wrong" else None
                record = vetted(msgspec.structs.replace(record, status=status, message=message, latency=latency))
            self.records.append(record)
            if self.path is not None:
                with self.path.open("ab") as file:
                    file.write(encode(self._lists_once(record)))

    def _latency(self, run: Callable[[], Any], device: str, interpreted: bool) -> Latency:
        bursts, enqueue_ms = cooled_bursts(run, self.protocol, device, interpreted)
        return Latency(timing=timing_of(device, interpreted), bursts_ms=tuple(bursts), enqueue_ms=enqueue_ms)

    def _environment(self, device: str) -> Environment:
        """Return the device's environment. The first call takes the lease of the device, until the session ends."""
        if device not in self._environments:
            detected = environment.detect(device)
            try:
                self._leases.enter_context(lease.lease(device, detected.gpu_uuid))
            except lease.Busy as busy:
                pytest.exit(f"groupbench: {busy.message}", returncode=busy.exit_code)
            except lease.LockError as error:
                raise UsageError(error.message) from error
            self._environments[device] = detected
        return self._environments[device]

    def summary(self) -> str:
        """Return the measured cells as a table, and the record file's path."""
        from rich.console import Console

        console = Console(width=200, highlight=False)
        with console.capture() as screen:
            console.print(table.screen_table(self.records, ("latency",), None))
        return screen.get() + (f"records: {self.path}\n" if self.path is not None else "")
