"""A fleet of hosts behind a Dask scheduler: one worker a GPU, found by what it says of its card.

Dask keeps the workers and notices when one dies; this says what goes where. A card has one task at a time, so that a
worker that dies takes one batch with it, which is given out again, once, to whichever worker of the kind is there.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.operators.fleet import batch as batches
from groupbench.operators.fleet.batch import Batch, Before, Card, Problem
from groupbench.operators.fleet.drive import NotReached, WorkerDied
from groupbench.operators.measure.environment import interpreted
from groupbench.tracker.record import Record

GPU = "GPU"
"""The resource that a worker has one of, and a task takes."""

PATIENCE_S = 120.0
"""How long a batch waits for its card, and then for any of its kind, once there is none."""

LOOK_S = 2.0
"""How often a batch that is waited for looks whether there still is a scheduler."""


class DaskFleet:
    """The workers of a scheduler that have a card of the hardware asked for."""

    def __init__(
        self,
        address: str,
        device: str,
        hardware: str | None = None,
        *,
        plugins: Sequence[str] = (),
        known: Mapping[Problem, Before] | None = None,
        budget_s: float = math.inf,
        measure: Callable[[Batch], list[Record]] = batches.measure,
        look: Callable[[str], Card] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Connects, and asks every worker for its card.

        Raises UsageError: no scheduler or no worker there, none for the device, of several kinds of hardware, of other
        code, or where a plugin does not load.
        """
        self.known, self._measure = known or {}, measure
        self._until = time.monotonic() + budget_s
        self._numbers = itertools.count()
        self._missed: set[str] = set()
        self._lost = False
        self._deserted = False
        self._queues: list[ThreadPoolExecutor] = []
        self.client = _connect(address)
        try:
            self.client.run_on_scheduler(_settle, patience_s=patience_s)
            workers = _for_device(self.client.run(device_here), device, address)
            found = self.client.run(look or card_here, device, workers=workers) if workers else {}
            self.cards = _usable(found, hardware, address)
            if plugins:
                asked = {worker: card.name for worker, card in found.items() if card in self.cards}
                faults = self.client.run(batches.plugin_fault, plugins, workers=list(asked))
                _check_plugins({asked[worker]: fault for worker, fault in faults.items()})
        except BaseException:
            self.client.close()
            raise
        self._queues = [ThreadPoolExecutor(1, thread_name_prefix=card.name) for card in self.cards]

    def submit(self, work: Sequence[Batch]) -> list[Future[list[Record]]]:
        places = batches.assign(work, self.cards, self.known)
        return [
            self._queues[place].submit(self._run, self.cards[place], b) for place, b in zip(places, work, strict=True)
        ]

    def _run(self, card: Card, batch: Batch) -> list[Record]:
        """The batch on its card, and where that dies, or is gone, on another of its kind."""
        from distributed import KilledWorker
        from distributed.client import CancelledError
        from distributed.scheduler import NoValidWorkerError, NoWorkerError

        if time.monotonic() >= self._until:
            raise NotReached("not begun within the budget")
        self._check_connected()
        died: list[str] = []
        try:
            # One has waited for a worker of the kind and found none: the next need not wait as long.
            if self._deserted and not self.client.run_on_scheduler(_has, model=card.hardware):
                raise NotReached(f"no worker with {card.hardware} is left")
            self._deserted = False
            for home in (None if self._gone(card) else card, None):
                try:
                    return self._ask(batch, card.hardware, home)
                except KilledWorker as error:
                    died.append(str(error.last_worker.name))
                    self._missed.add(card.name)
                except (NoValidWorkerError, NoWorkerError):
                    self._missed.add(card.name)
                    if home is None:
                        self._deserted = True
                        break
        except CancelledError:  # by Dask when the connection is lost
            self._lost = True
            raise NotReached("the scheduler is gone, or the run has ended") from None
        except GroupbenchError:
            raise
        except Exception as error:
            if self.client.status != "running":
                raise NotReached("the scheduler is gone, or the run has ended") from error
            raise
        if len(died) < 2:
            raise NotReached(f"no worker with {card.hardware} is left")
        raise WorkerDied(f"its worker died on {' and then '.join(died)}")

    def _ask(self, batch: Batch, model: str, home: Card | None) -> list[Record]:
        """Wait for the batch. By resources and not by address, which is another once a worker was started again."""
        resources = {GPU: 1, model: 1} | ({home.name: 1} if home else {})
        key = f"groupbench-{batch.run.id}-{next(self._numbers)}-{id(self):x}"
        future = self.client.submit(self._measure, batch, key=key, pure=False, resources=resources)
        while True:
            try:
                return future.result(timeout=LOOK_S)
            except TimeoutError:
                if future.done():  # the batch's own
                    raise
                self._check_connected()  # what is sent while the connection is being lost gets no answer

    def _check_connected(self) -> None:
        """Raises NotReached once the scheduler is gone, or `close` was called."""
        if self._lost or self.client.status != "running":
            raise NotReached("the scheduler is gone, or the run has ended")

    def _gone(self, card: Card) -> bool:
        """Asked of the scheduler only where the card has failed before."""
        return card.name in self._missed and not self.client.run_on_scheduler(_knows, name=card.name)

    def close(self, at_once: bool = False) -> None:
        """Workers stay for the next night; what is being measured is finished by its worker, and forgotten."""
        self._lost = True
        for queue in self._queues:
            queue.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(Exception):  # a scheduler that is gone cannot be told
            self.client.close(timeout=5 if at_once else "10s")


def check_address(address: str) -> None:
    """Raises UsageError for what can be no scheduler's address. Client says so too, and hangs where it is let go."""
    from distributed.comm.addressing import get_address_host_port

    try:
        host, port = get_address_host_port(address)
        if not host or not 0 < port < 65536:
            raise ValueError(f"port {port} is not 1 to 65535" if host else "it names no host")
    except (ValueError, ImportError) as error:
        said = " ".join(str(error).split())
        raise UsageError(f"{address!r} is no scheduler's address ({said}): give one such as tcp://head:8786") from error


def _connect(address: str) -> Any:
    try:
        from distributed import Client

        check_address(address)
    except ModuleNotFoundError:
        raise UsageError("--scheduler needs Dask distributed: pip install 'groupbench[dask]'") from None
    import logging

    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what matters comes as a record's message
    try:
        return Client(address, timeout="15s", set_as_default=False)
    except (OSError, ValueError, ImportError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"no Dask scheduler answers at {address}: {said}; start one by: dask scheduler") from error


def _settle(dask_scheduler: Any, patience_s: float) -> None:
    """On the scheduler: a worker's death is told at once, and nothing waits for ever for one that is gone."""
    dask_scheduler.allowed_failures = 0
    dask_scheduler.no_workers_timeout = patience_s


def _knows(dask_scheduler: Any, name: str) -> bool:
    return name in dask_scheduler.aliases


def _has(dask_scheduler: Any, model: str) -> bool:
    return any(model in worker.resources for worker in dask_scheduler.workers.values())


def device_here() -> str:
    """On a worker: "cuda" or "cpu", whichever it was started for."""
    return "cpu" if interpreted() else "cuda"


def _for_device(found: Mapping[str, str], device: str, address: str) -> list[str]:
    """Addresses of the workers that are for the device; none where none has joined. Raises UsageError."""
    workers = [worker for worker, of in found.items() if of == device]
    if found and not workers:
        command = f"python -m groupbench.operators.fleet.worker {address}"
        if device == "cuda":
            raise UsageError(f"the workers of {address} are CPUs: --device cpu measures on them; for GPUs: {command}")
        raise UsageError(
            f"the workers of {address} are GPUs: leave --device cpu out to measure on them; for CPUs: "
            f"{command} --device cpu"
        )
    return workers


def card_here(device: str, dask_worker: Any = None) -> Card:
    """On a worker: its card, by the name that the scheduler knows it by. Raises GroupbenchError."""
    machine = batches.machine_here(device)
    return Card(str(dask_worker.name), machine, batches.code())


def _usable(found: Mapping[str, Card], hardware: str | None, address: str) -> list[Card]:
    """Raises UsageError."""
    cards = sorted(found.values(), key=lambda card: card.name)
    if not cards:
        command = f"python -m groupbench.operators.fleet.worker {address}"
        raise UsageError(f"no worker has joined {address}; on each host: {command}")
    kinds = sorted({card.hardware for card in cards})
    cards = [card for card in cards if batches.matches(card.machine.environment, hardware)]
    if not cards:
        raise UsageError(f"--hardware {hardware}: the workers have {', '.join(kinds)}")
    kinds = sorted({card.hardware for card in cards})
    if len(kinds) > 1:
        raise UsageError(f"the workers have {', '.join(kinds)}; say by --hardware which of them measure")
    others = [card.name for card in cards if card.code != batches.code()]
    if others:
        raise UsageError(f"worker {_first(others)} runs other code than this; start the workers again from this tree")
    return cards


def _check_plugins(faults: Mapping[str, str | None]) -> None:
    """Of workers by name, why a plugin does not load there. Raises UsageError."""
    lacking = sorted(name for name, fault in faults.items() if fault)
    if lacking:
        raise UsageError(
            f"worker {_first(lacking)}: {faults[lacking[0]]}; start workers in the plugin's folder, or install it there"
        )


def _first(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
