"""Run a night on a fleet: queue batches for cards, and yield their records. Local processes, Dask and SLURM share this.

Only the client writes records. If a batch does not come back, the cells are recorded with the reason: `error` if two
workers tried it, `skipped` if no worker was left.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed

from groupbench.operators import executor
from groupbench.operators.errors import GroupbenchError
from groupbench.operators.executor import Machine, Progress
from groupbench.operators.fleet.batch import Batch, Before, Card, Problem, assign
from groupbench.operators.measure.texts import one_line
from groupbench.tracker.facts.record import Environment, Record, Status

log = logging.getLogger(__name__)


class WorkerDied(GroupbenchError):
    """Two workers died while they had the batch; the message names them."""


class NotReached(GroupbenchError):
    """No worker has begun the batch: the budget is spent, or the scheduler or the workers are gone."""


class Fleet(ABC):
    """Cards that take batches from queues. An engine only implements `run_on` and `close`.

    A batch waits in a card's queue. Without cards at the start, all batches wait in one queue, from which the cards
    that join later take them.
    """

    def __init__(
        self, cards: Iterable[Card] = (), history: Mapping[Problem, Before] | None = None, budget_s: float = math.inf
    ) -> None:
        self.cards = list(cards)
        self.history = history or {}
        self._until = time.monotonic() + budget_s
        self._closed = threading.Event()
        self._common: deque[tuple[Batch, Future[list[Record]]]] = deque()
        self._threads: dict[str, threading.Thread] = {}  # by card

    @abstractmethod
    def run_on(self, card: Card, batch: Batch) -> list[Record]:
        """Measure a batch on the card, or on another if the card is gone. Raises WorkerDied, NotReached."""

    @abstractmethod
    def close(self, at_once: bool = False) -> None:
        """Release everything; with `at_once`, without waiting for running batches."""

    def gone(self, card: Card) -> bool:
        """Return whether the card takes no more batches from the common queue."""
        return False

    def submit(self, work: Sequence[Batch]) -> list[Future[list[Record]]]:
        """Return a future of the records for every batch, in order."""
        futures: list[Future[list[Record]]] = [Future() for _ in work]
        if not self.cards:
            self._common.extend(zip(work, futures, strict=True))
            return futures
        queues: list[deque[tuple[Batch, Future[list[Record]]]]] = [deque() for _ in self.cards]
        for place, batch, future in zip(assign(work, self.cards, self.history), work, futures, strict=True):
            queues[place].append((batch, future))
        for card, waiting in zip(self.cards, queues, strict=True):
            self.join(card, waiting)
        return futures

    def join(self, card: Card, queue: deque[tuple[Batch, Future[list[Record]]]] | None = None) -> None:
        """Let a card take batches: from its queue, then from the common one."""
        thread = threading.Thread(target=self._serve, args=(card, queue or deque()), name=card.name, daemon=True)
        self._threads[card.name] = thread
        thread.start()

    def abandon(self, reason: str) -> None:
        """Give up the batches of the common queue."""
        while self._common:
            self._common.popleft()[1].set_exception(NotReached(reason))

    def _serve(self, card: Card, queue: deque[tuple[Batch, Future[list[Record]]]]) -> None:
        while queue or (self._common and not self.gone(card)):
            try:
                batch, future = queue.popleft() if queue else self._common.popleft()
            except IndexError:  # another card took it
                return
            try:
                if time.monotonic() >= self._until:
                    raise NotReached("not begun within the budget")
                log.info("%s: %s with %d cells", card.name, batch, len(batch.jobs))
                future.set_result(self.run_on(card, batch))
            except BaseException as error:
                log.info("%s: %s: %s", card.name, batch, error)
                future.set_exception(error)


def records(fleet: Fleet, work: Sequence[Batch], progress: Progress) -> Iterator[Record]:
    """Yield a record for every job of every batch, in the order in which batches finish, and close the fleet.

    On KeyboardInterrupt, the unfinished cells are yielded as `skipped` before the interrupt is raised.
    """
    waiting: dict[int, Batch] = dict(enumerate(work))
    machine = fleet.cards[0].machine if fleet.cards else None
    left: list[Record] = []
    finished = False
    try:
        numbers = {future: number for number, future in enumerate(fleet.submit(work))}
        for future in as_completed(numbers):
            number = numbers.pop(future)
            batch = waiting[number]
            left = _outcome(future, batch, machine)
            del waiting[number]
            machine = Machine(left[0].environment, None)
            progress.describe(f"{batch} on {_where(left[0].environment)}: preparing")
            progress.advance(len(left))
            while left:
                yield left.pop(0)
        finished = True
    except KeyboardInterrupt:
        yield from left
        for batch in waiting.values():
            yield from instead(batch, machine, "skipped", "interrupted before it was measured")
        raise
    finally:
        fleet.close(at_once=not finished)


def _outcome(future: Future[list[Record]], batch: Batch, machine: Machine | None) -> list[Record]:
    try:
        return future.result()
    except NotReached as error:
        return instead(batch, machine, "skipped", one_line(str(error)))
    except Exception as error:  # an engine's error fails only this batch
        reason = str(error) if isinstance(error, GroupbenchError) else f"{type(error).__name__}: {error}"
        return instead(batch, machine, "error", one_line(reason) or type(error).__name__)


def instead(batch: Batch, machine: Machine | None, status: Status, message: str) -> list[Record]:
    """Return records of a batch's cells that were not measured, with the reason as their message."""
    machine = machine or Machine(Environment(device="cuda" if batch.jobs[0].device == "cuda" else "cpu"), None)
    return [executor.record_of(job, machine, batch.run, status, message) for job in batch.jobs]


def _where(environment: Environment) -> str:
    return " ".join(filter(None, (environment.host, environment.gpu_uuid))) or environment.device
