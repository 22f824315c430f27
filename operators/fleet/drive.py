"""A night on a fleet: batches out, records back as they come. Local processes, Dask and SLURM are one interface.

The client alone writes. A batch that comes back twice is delivered once; one that does not come back has its cells
recorded, with the reason: `error` where it was tried on two workers, `skipped` where there was nobody left to try it.
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
from groupbench.tracker.record import Environment, Record, Status


class WorkerDied(GroupbenchError):
    """A batch was given to two workers, and both died of it or with it: says which."""


class NotReached(GroupbenchError):
    """A batch that no worker has begun: the budget is over, the scheduler or the workers are gone."""


class Fleet(Protocol):
    """An engine that measures batches somewhere.

    cards   what it measures on, where that is known beforehand; the engine decides which batch goes where
    submit  a future for every batch, in the batches' order: its records, or WorkerDied, NotReached, GroupbenchError
    close   let go of everything; `at_once` without waiting for what is being measured
    """

    @property
    def cards(self) -> Sequence[Card]: ...

    def submit(self, work: Sequence[Batch]) -> list[Future[list[Record]]]: ...

    def close(self, at_once: bool = False) -> None: ...


def records(fleet: Fleet, work: Sequence[Batch], progress: Progress) -> Iterator[Record]:
    """A record for every job of every batch, a batch at a time as they are finished. Closes the fleet.

    On KeyboardInterrupt the cells that were not finished come out as `skipped`, and then the interrupt is raised.
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
    except Exception as error:  # whatever an engine raises is one batch's fate, and no other's
        said = str(error) if isinstance(error, GroupbenchError) else f"{type(error).__name__}: {error}"
        return instead(batch, machine, "error", one_line(said) or type(error).__name__)


def instead(batch: Batch, machine: Machine | None, status: Status, message: str) -> list[Record]:
    """Records of cells that were not measured, which say why."""
    machine = machine or Machine(Environment(device="cuda" if batch.jobs[0].device == "cuda" else "cpu"), None)
    return [executor.unmeasured(job, machine, batch.run, status, message) for job in batch.jobs]


def _where(environment: Environment) -> str:
    return " ".join(filter(None, (environment.host, environment.gpu_uuid))) or environment.device
