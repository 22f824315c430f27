"""The profiled process: prepare a cell and make one call while ncu looks. Started by profiler.py."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from groupbench.operators.measure import folders, warden
from groupbench.operators.measure.confine import confine
from groupbench.operators.measure.deferred import torch

WARM_UPS = 2
"""Calls before the profiled one: they compile, tune and allocate."""


def main(folder: Path, caches: Path) -> None:
    """Make one call of the job in `folder` while ncu looks. Compiled code is kept in `caches`."""
    warden.die_with_parent()
    # Not ncu: CUDA writes into /proc of this process, and a process may only write into its own.
    confine((folder, caches), folders.layered(), profiled=True)
    # torch starts threads, and only later ones are confined.
    from groupbench.operators.measure.profiler import JOB
    from groupbench.operators.registry import get_backend, get_operator

    (name, plugins, mode), packed = pickle.loads((folder / JOB).read_bytes())  # noqa: S301 - written by profiler.py
    operator = get_operator(name, plugins).in_mode(mode)
    job = pickle.loads(packed)  # noqa: S301 - its shape may be of a class that a plugin defines
    inputs = operator.make_inputs(job.shape_of(operator), job.dtype, job.device, job.seed)
    run = get_backend(operator, job.backend).prepare(inputs)
    for _ in range(WARM_UPS):
        run()
    if job.device != "cuda":  # without a GPU, only the way here can be tested
        return
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
