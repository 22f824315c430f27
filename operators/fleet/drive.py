"""Run a night on a fleet: send batches and yield their records. Local processes, Dask and SLURM share an interface.

Only the client writes records. A batch that comes back twice is delivered once. If a batch does not come back, its
cells are recorded with the reason: `error` if two workers tried it, `skipped` if no worker was left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from typing import Protocol

from groupbench.operators import executor
from groupbench.operators.errors import GroupbenchError
from groupbench.operators.executor import Machine, Progress
from groupbench.operators.fleet.batch import Batch, Card
from groupbench.operators.measure.texts import one_line
from groupbench.tracker.facts.record import Environment, Record, Status


class WorkerDied(GroupbenchError):
    """Two workers died while they had the batch; the message names them."""


class NotReached(GroupbenchError):
    """No worker has begun the batch: the budget is spent, or the scheduler or the workers are gone."""


class Fleet(Protocol):
    """An engine that measures batches somewhere.

    cards   the cards to measure on, if they are known in advance; the engine assigns the batches to them
    submit  return a future of the records for every batch, in order; it raises WorkerDied, NotReached, GroupbenchError
    close   release everything; with `at_once`, without waiting for running batches
    """

    @property
    def cards(self) -> Sequence[Card]: ...

    def submit(self, work: Sequence[Batch]) -> list[Future[list[Record]]]: ...

    def close(self, at_once: bool = False) -> None: ...


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
    return [executor.unmeasured(job, machine, batch.run, status, message) for job in batch.jobs]


def _where(environment: Environment) -> str:
    return " ".join(filter(None, (environment.host, environment.gpu_uuid))) or environment.device
