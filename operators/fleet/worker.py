"""A Dask worker on each GPU of this host: `python -m groupbench.operators.fleet.worker tcp://SCHEDULER:8786`.

Each sees its own GPU alone, takes one batch at a time, and has resources by which batches find it: GPU=1, one named
like its model, and one like itself. This process holds the GPUs' locks for as long as it runs, so that no night of the
host's own measures beside it. A worker that dies is started again; when the scheduler goes, all end, for a service
manager to start them again.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import signal
import sys
from typing import Any

from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.operators.fleet import local
from groupbench.operators.fleet.batch import Card
from groupbench.operators.fleet.dask import GPU, check_address
from groupbench.operators.fleet.local import Slot
from groupbench.operators.sizes import counted
from groupbench.tracker.exits import ExitCode

PRELOAD = "groupbench.operators.fleet.worker"
"""Imported by a worker before it takes a batch: `dask_setup` looks at the card and the code."""


def worker_name(card: Card) -> str:
    """What the scheduler knows it by: the same after it was started again."""
    return f"{platform.node() or 'host'}-{card.name.replace(' ', '-')}"


def dask_setup(worker: Any) -> None:
    """On a worker, once: what the first client asks is found out before it asks."""
    from groupbench.operators.fleet import batch

    batch.code()


def options(slot: Slot, card: Card) -> dict[str, Any]:
    """Of one worker's nanny."""
    return {
        "nthreads": 1,
        "name": worker_name(card),
        "resources": {GPU: 1, card.hardware: 1, worker_name(card): 1},
        "env": dict(slot.variables),
        "memory_limit": None,  # a cell has its own limit, and Dask's would end the worker for what a cell holds
        "preload": [PRELOAD],
    }


async def serve(address: str, found: list[tuple[Slot, Card]]) -> None:
    """Workers until the scheduler goes or this is told to end. Raises UsageError if no scheduler answers."""
    import dask
    from distributed import Nanny

    # A worker starts a cell's processes, which a daemon may not.
    dask.config.set({"distributed.worker.daemon": False})
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    nannies: list[Any] = []
    try:
        try:
            nannies = list(await asyncio.gather(*(_start(Nanny(address, **options(*one))) for one in found)))
        except (OSError, TimeoutError) as error:
            raise UsageError(f"no Dask scheduler answers at {address}: {error or type(error).__name__}") from error
        print(f"groupbench: {counted(len(nannies), 'worker')} at {address}", flush=True)
        finished = [asyncio.create_task(nanny.finished()) for nanny in nannies]
        await asyncio.wait([asyncio.create_task(ended.wait()), *finished], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await asyncio.gather(*(nanny.close(timeout=5) for nanny in nannies), return_exceptions=True)


async def _start(nanny: Any) -> Any:
    return await asyncio.wait_for(nanny, 120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m groupbench.operators.fleet.worker", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("scheduler", help="address of the scheduler, such as tcp://head:8786")
    parser.add_argument("--gpus", help="which GPUs, a worker each [all]; on a CPU, 0,1 tries two workers out [0]")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    given = parser.parse_args()
    try:
        check_address(given.scheduler)
        asyncio.run(serve(given.scheduler, local.look(given.gpus, given.device)))
    except ModuleNotFoundError as error:
        print(f"groupbench: {error.name} is not installed: pip install 'groupbench[dask]'", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    except GroupbenchError as error:
        print(f"groupbench: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
