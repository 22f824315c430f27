"""Run a Dask worker on each GPU of this host: `python -m groupbench.operators.fleet.worker tcp://SCHEDULER:8786`.

Each worker sees only one GPU and takes one batch at a time. Batches find it by resources: GPU=1, one named like the
model, and one named like the worker. This process holds the GPUs' locks while it runs, so no nightly run of this host
measures at the same time. A worker that dies is restarted. When the scheduler ends, all workers end, and a service
manager can start them again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import signal
import sys
from typing import Any

from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.operators.fleet import local, slots
from groupbench.operators.fleet.batch import Card
from groupbench.operators.fleet.dask import GPU, check_address
from groupbench.operators.fleet.slots import Slot
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.text.wording import counted
from groupbench.tracker.tools import logs

log = logging.getLogger(__name__)

PRELOAD = "groupbench.operators.fleet.worker"
"""Module that a worker imports before it takes a batch, for `dask_setup`."""

SLOT = "GROUPBENCH_SLOT"
"""Environment variable with a worker's device and processors."""

WORKER_START_S = 120.0
"""Seconds for a worker to start and to reach the scheduler."""


def worker_name(card: Card, suffix: str = "") -> str:
    """Return the scheduler's name of a worker, which a restart does not change."""
    return f"{platform.node() or 'host'}-{card.name.replace(' ', '-')}{suffix}"


def dask_setup(worker: Any) -> None:
    """Prepare the process as a local fleet's, and compute the digest of the code. Dask calls this on each worker."""
    from groupbench.operators.fleet import batch

    logs.configure(0)
    device, processors = json.loads(os.environ[SLOT])
    slots.prepare_process(Slot("", device, {}, tuple(processors)))
    batch.code()


def options(slot: Slot, card: Card, suffix: str = "") -> dict[str, Any]:
    """Return the options of one worker's nanny."""
    name = worker_name(card, suffix)
    return {
        "nthreads": 1,
        "name": name,
        "resources": {GPU: 1, card.hardware: 1, name: 1},
        "env": {**slot.variables, SLOT: json.dumps([slot.device, slot.processors])},
        "memory_limit": None,  # cells have their own limit; Dask's would end the worker for a cell's memory
        "preload": [PRELOAD],
    }


async def serve(address: str, cards: list[tuple[Slot, Card]], security: Any = None, suffix: str = "") -> None:
    """Run the workers until the scheduler or this process is stopped.

    Args:
        security: Dask's keys, if the scheduler needs them.
        suffix: End of the workers' names, which tells workers of one host apart.

    Raises UsageError if no scheduler answers, or if it has workers of these names.
    """
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
            await asyncio.wait_for(
                _check_names(address, [worker_name(card, suffix) for _, card in cards], security), 15
            )
            log.info("waiting up to %g s for %d workers to start", WORKER_START_S, len(cards))
            starting = (Nanny(address, security=security, **options(*one, suffix)) for one in cards)
            nannies = list(await asyncio.gather(*(asyncio.wait_for(nanny, WORKER_START_S) for nanny in starting)))
        except (OSError, TimeoutError) as error:
            raise UsageError(f"no Dask scheduler answers at {address}: {error or type(error).__name__}") from error
        except RuntimeError as error:
            raise GroupbenchError(f"a worker does not start: {error.__cause__ or error}") from error
        print(f"groupbench: {counted(len(nannies), 'worker')} at {address}", flush=True)
        finished = [asyncio.create_task(nanny.finished()) for nanny in nannies]
        await asyncio.wait([asyncio.create_task(ended.wait()), *finished], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await asyncio.gather(*(nanny.close(timeout=5) for nanny in nannies), return_exceptions=True)


async def _check_names(address: str, names: list[str], security: Any) -> None:
    """Raise UsageError if the scheduler has a worker of one of these names: it would refuse another."""
    from distributed.core import rpc

    arguments = security.get_connection_args("worker") if security else None
    async with rpc(address, connection_args=arguments) as scheduler:
        known = {facts["name"] for facts in (await scheduler.identity())["workers"].values()}
    if taken := known.intersection(names):
        raise UsageError(
            f"{address} already has a worker {min(taken)}: stop that one on {platform.node()}, or choose others with "
            "--gpus"
        )


def run_job(address: str, device: str, security: Any) -> None:
    """Run this host's workers in a job of a cluster until the scheduler ends."""
    logs.configure(0)
    job = os.environ.get("SLURM_JOB_ID") or str(os.getpid())
    asyncio.run(serve(address, local.look(None, device), security, f"-{job}"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m groupbench.operators.fleet.worker", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("scheduler", help="address of the scheduler, such as tcp://head:8786")
    parser.add_argument(
        "--gpus", help="GPUs, with a worker on each [all]; on a CPU, 0,1 starts two workers as a trial [0]"
    )
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="show what the workers wait for; -vv: more")
    arguments = parser.parse_args()
    logs.configure(arguments.verbose)
    try:
        if arguments.gpus and arguments.gpus != "all":
            slots.numbered(arguments.gpus)  # first: the address needs Dask, which takes a second to import
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
