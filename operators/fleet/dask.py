"""A fleet of hosts behind a Dask scheduler, with one worker for each GPU. Batches find workers by their resources.

Dask keeps the workers and notices when one dies; this module assigns the batches. A card has one task at a time, so a
dying worker loses one batch. The batch is tried once more, on any worker with the same hardware.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.operators.fleet import batch as batches
from groupbench.operators.fleet.batch import Batch, Before, Card, Problem
from groupbench.operators.fleet.drive import Fleet, NotReached, WorkerDied
from groupbench.operators.measure.environment import interpreted
from groupbench.tracker.facts.record import Record

log = logging.getLogger(__name__)

GPU = "GPU"
"""Resource of which a worker has one and a task takes one."""


@dataclass(frozen=True)
class Times:
    """The tuned numbers of fleets behind a scheduler, in seconds: choices, none of which a measurement depends on."""

    card_wait_s: float = 120.0  # that a batch waits for its card if that is gone, and then for any card of its kind
    scheduler_check_s: float = 2.0  # between two checks, while waiting for a batch, that the scheduler still exists
    log_every_s: float = 60.0  # between two log messages about the same wait


TIMES = Times()

Look = Callable[..., Card]
Measure = Callable[[Batch], list[Record]]


class ScheduledFleet(Fleet):
    """A Dask scheduler's workers, with `client` connected."""

    def __init__(
        self,
        client: Any,
        cards: Sequence[Card] = (),
        *,
        history: Mapping[Problem, Before] | None = None,
        budget_s: float = math.inf,
        measure: Measure = batches.measure,
    ) -> None:
        super().__init__(cards, history, budget_s)
        self.client, self._measure = client, measure
        self._numbers = itertools.count()
        self._missed: set[str] = set()
        self._deserted = False

    def run_on(self, card: Card, batch: Batch) -> list[Record]:
        from distributed import CancelledError
        from distributed.comm.core import CommClosedError

        self._check_connected()
        try:
            return self._try_twice(card, batch)
        except (CancelledError, CommClosedError):  # the connection is lost, even if the client still calls it running
            self._closed.set()
            self._check_connected()
            raise
        except GroupbenchError:
            raise
        except Exception:
            self._check_connected()
            raise

    def _try_twice(self, card: Card, batch: Batch) -> list[Record]:
        """Measure the batch on the chosen card, or on another with the same hardware if the card dies or is gone."""
        from distributed import KilledWorker
        from distributed.scheduler import NoValidWorkerError, NoWorkerError

        # An earlier batch waited in vain for a worker of this kind, so this one need not wait as long.
        if self._deserted and not self.client.run_on_scheduler(_has, model=card.hardware):
            raise NotReached(f"no worker with {card.hardware} is left")
        self._deserted = False
        died: list[str] = []
        for home in (None if self.gone(card) else card, None):
            try:
                return self._ask(batch, card.hardware, home)
            except KilledWorker as error:
                died.append(str(error.last_worker.name))
                self._missed.add(card.name)
                log.info("worker %s died at %s", died[-1], batch)
            except (NoValidWorkerError, NoWorkerError):
                self._missed.add(card.name)
                if home is None:
                    self._deserted = True
                    break
        if len(died) < 2:
            raise NotReached(f"no worker with {card.hardware} is left")
        raise WorkerDied(f"its worker died on {' and then '.join(died)}")

    def _ask(self, batch: Batch, model: str, home: Card | None) -> list[Record]:
        """Submit the batch and wait for it. It is sent by resources, because a restarted worker has a new address."""
        resources = {GPU: 1, model: 1} | ({home.name: 1} if home else {})
        key = f"groupbench-{batch.run.id}-{next(self._numbers)}-{id(self):x}"
        future = self.client.submit(self._measure, batch, key=key, pure=False, resources=resources)
        begun = logged_s = time.monotonic()
        while True:
            try:
                records: list[Record] = future.result(timeout=TIMES.scheduler_check_s)
                return records
            except TimeoutError:
                if future.status == "error":  # a finished batch is only slow to fetch
                    raise future.exception() from None  # its own, also if it failed in this moment
                self._check_connected()  # a message sent while the connection breaks is never answered
                if time.monotonic() >= logged_s + TIMES.log_every_s:
                    logged_s = time.monotonic()
                    place = home.name if home else f"any worker with {model}"
                    log.info("waiting for %s on %s for %.0f s: %s", batch, place, logged_s - begun, future.status)

    def _check_connected(self) -> None:
        """Raise NotReached if the scheduler is gone or `close` was called."""
        if self._closed.is_set() or self.client.status != "running":
            raise NotReached("the scheduler is gone, or the run has ended")

    def gone(self, card: Card) -> bool:
        """Return whether a card's worker is gone. The scheduler is only asked if the card has failed before."""
        return card.name in self._missed and not self.client.run_on_scheduler(_knows, name=card.name)

    def close(self, at_once: bool = False) -> None:
        """Disconnect. Workers stay for the next night; they finish their current batches, whose results are dropped."""
        self._closed.set()
        with contextlib.suppress(Exception):  # the scheduler may be gone
            self.client.close(timeout=5 if at_once else "10s")


class DaskFleet(ScheduledFleet):
    """The workers of a running scheduler that have a card of the requested hardware."""

    def __init__(
        self,
        address: str,
        device: str,
        hardware: str | None = None,
        *,
        plugins: Sequence[str] = (),
        look: Look | None = None,
        patience_s: float = TIMES.card_wait_s,
        **settings: Any,
    ) -> None:
        """Connect, and get the card of every worker.

        Args:
            address: The scheduler, such as tcp://head:8786.
            hardware: Pattern of the GPU's model; None matches any.
            plugins: Modules that each worker must be able to import.
            look: Returns the card of a worker, on which it runs.
            patience_s: Seconds that a batch waits for a worker.
            settings: Those of `ScheduledFleet`.

        Raises UsageError if the scheduler does not answer, without a worker for the device, and if workers have several
        kinds of hardware, different code or a plugin that does not load.
        """
        client = connect(address)
        try:
            client.run_on_scheduler(settle, patience_s=patience_s)
            workers = _for_device(client.run(device_here), device, address)
            cards = client.run(look or card_here, device, workers=workers) if workers else {}
            usable = _usable(cards, hardware, address)
            if plugins:
                names = {worker: card.name for worker, card in cards.items() if card in usable}
                faults = client.run(batches.plugin_fault, plugins, workers=list(names))
                _check_plugins({names[worker]: fault for worker, fault in faults.items()})
        except BaseException:
            client.close()
            raise
        super().__init__(client, usable, **settings)


def check_address(address: str) -> None:
    """Raise UsageError if this cannot be a scheduler's address.

    Dask's Client rejects such an address too, but then hangs when it is closed.
    """
    from distributed.comm.addressing import get_address_host_port

    try:
        host, port = get_address_host_port(address)
        if not host or not 0 < port < 65536:
            raise ValueError(f"port {port} is not 1 to 65535" if host else "the host is missing")
    except (ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{address!r} is not a scheduler's address ({reason}): pass one such as tcp://head:8786"
        ) from error


def connect(address: str) -> Any:
    """Return a client of the scheduler. Raises UsageError."""
    try:
        from distributed import Client

        check_address(address)
    except ModuleNotFoundError:
        raise UsageError("--scheduler needs Dask distributed: pip install 'groupbench[dask]'") from None
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # failures are reported in records
    try:
        return Client(address, timeout="15s", set_as_default=False)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"no Dask scheduler answers at {address}: {reason}; start one with: dask scheduler") from error


def settle(dask_scheduler: Any, patience_s: float) -> None:
    """Make the scheduler report a worker's death at once, and limit the wait for a worker. Runs on the scheduler."""
    dask_scheduler.allowed_failures = 0
    dask_scheduler.no_workers_timeout = patience_s


def _knows(dask_scheduler: Any, name: str) -> bool:
    return name in dask_scheduler.aliases


def _has(dask_scheduler: Any, model: str) -> bool:
    return any(model in worker.resources for worker in dask_scheduler.workers.values())


def device_here() -> str:
    """Return "cuda" or "cpu", the device that a worker was started for. Runs on the worker."""
    return "cpu" if interpreted() else "cuda"


def _for_device(devices: Mapping[str, str], device: str, address: str) -> list[str]:
    """Return the addresses of the workers for the device. Raises UsageError if all workers are for another device."""
    workers = [worker for worker, of in devices.items() if of == device]
    if devices and not workers:
        command = f"python -m groupbench.operators.fleet.worker {address}"
        if device == "cuda":
            raise UsageError(
                f"the workers of {address} are CPUs: --device cpu measures on them; to add GPUs: {command}"
            )
        raise UsageError(
            f"the workers of {address} are GPUs: omit --device cpu to measure on them; to add CPUs: "
            f"{command} --device cpu"
        )
    return workers


def card_here(device: str, dask_worker: Any = None) -> Card:
    """Return the card of a worker, with the scheduler's name of it. Runs on the worker. Raises GroupbenchError."""
    machine = batches.machine_here(device)
    return Card(str(dask_worker.name), machine, batches.code())


def _usable(by_worker: Mapping[str, Card], hardware: str | None, address: str) -> list[Card]:
    """Return the cards of the requested hardware by name. Raises UsageError."""
    cards = sorted(by_worker.values(), key=lambda card: card.name)
    if not cards:
        command = f"python -m groupbench.operators.fleet.worker {address}"
        raise UsageError(f"no worker has joined {address}; on each host, run: {command}")
    kinds = sorted({card.hardware for card in cards})
    cards = [card for card in cards if batches.matches(card.machine.environment, hardware)]
    if not cards:
        raise UsageError(f"--hardware {hardware}: no worker has such a GPU; they have {', '.join(kinds)}")
    kinds = sorted({card.hardware for card in cards})
    if len(kinds) > 1:
        raise UsageError(f"the workers have {', '.join(kinds)}; choose one with --hardware")
    others = [card.name for card in cards if card.code != batches.code()]
    if others:
        raise UsageError(f"different code on worker {_first(others)}; restart the workers from this tree")
    return cards


def _check_plugins(faults: Mapping[str, str | None]) -> None:
    """Raise UsageError for plugins that do not load. `faults` has the reason or None by the worker's name."""
    lacking = sorted(name for name, fault in faults.items() if fault)
    if lacking:
        raise UsageError(
            f"worker {_first(lacking)}: {faults[lacking[0]]}; start workers in the plugin's folder, or install it there"
        )


def _first(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
