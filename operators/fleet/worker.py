"""Run a Dask worker on each GPU of this host: `python -m groupbench.operators.fleet.worker tcp://SCHEDULER:8786`.

Each worker sees only its own GPU and takes one batch at a time. Batches find it by its resources: GPU=1, one named
like its model, and one named like the worker. This process holds the GPUs' locks while it runs, so no nightly run of
this host measures at the same time. A worker that dies is restarted. When the scheduler ends, all workers end, and a
service manager can start them again.
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
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.text.wording import counted

PRELOAD = "groupbench.operators.fleet.worker"
"""Module that a worker imports before it takes a batch, for `dask_setup`."""


def worker_name(card: Card) -> str:
    """Return the scheduler's name of a worker, which a restart does not change."""
    return f"{platform.node() or 'host'}-{card.name.replace(' ', '-')}"


def dask_setup(worker: Any) -> None:
    """Compute the digest of the code before the first client needs it. Dask calls this once on each worker."""
    from groupbench.operators.fleet import batch

    batch.code()


def options(slot: Slot, card: Card) -> dict[str, Any]:
    """Return the options of one worker's nanny."""
    return {
        "nthreads": 1,
        "name": worker_name(card),
        "resources": {GPU: 1, card.hardware: 1, worker_name(card): 1},
        "env": dict(slot.variables),
        "memory_limit": None,  # cells have their own limit; Dask's would end the worker for a cell's memory
        "preload": [PRELOAD],
    }


async def serve(address: str, cards: list[tuple[Slot, Card]]) -> None:
    """Run the workers until the scheduler or this process is stopped. Raises UsageError if no scheduler answers."""
    import dask
    from distributed import Nanny

    # Workers start processes for cells, which daemons may not do.
    dask.config.set({"distributed.worker.daemon": False})
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    nannies: list[Any] = []
    try:
        try:
            nannies = list(await asyncio.gather(*(_start(Nanny(address, **options(*one))) for one in cards)))
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
    parser.add_argument(
        "--gpus", help="GPUs, with a worker on each [all]; on a CPU, 0,1 starts two workers as a trial [0]"
    )
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    arguments = parser.parse_args()
    try:
        if arguments.gpus and arguments.gpus != "all":
            local.numbered(arguments.gpus)  # first: the address needs Dask, which takes a second to import
        check_address(arguments.scheduler)
        asyncio.run(serve(arguments.scheduler, local.look(arguments.gpus, arguments.device)))
    except ModuleNotFoundError as error:
        print(f"groupbench: {error.name} is not installed: pip install 'groupbench[dask]'", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    except GroupbenchError as error:
        print(f"groupbench: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
