"""The profiled process: prepare a cell and make one call while the tool looks. Started by profiler.py."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from groupbench.operators.measure import warden
from groupbench.operators.measure.profiler import JOB, NCU, PROTON_NAME
from groupbench.operators.measure.protocol import FLUSH_BYTES
from groupbench.operators.registry import get_backend, get_operator

WARM_UPS = 2
"""Calls before the profiled one: they compile, tune and allocate."""


def main(tool: str, folder: Path) -> None:
    """Make one call of the job in `folder` while the tool looks."""
    warden.die_with_parent()
    (name, plugins, mode), packed = pickle.loads((folder / JOB).read_bytes())  # noqa: S301 - written by profiler.py
    operator = get_operator(name, plugins).in_mode(mode)
    job = pickle.loads(packed)  # noqa: S301 - its shape may be of a class that a plugin defines
    inputs = operator.make_inputs(job.shape_of(operator), job.dtype, job.device, job.seed)
    run = get_backend(operator, job.backend).prepare(inputs)
    for _ in range(WARM_UPS):
        run()
    if job.device != "cuda":  # without a GPU, only the way here can be tested
        return
    with _counters() if tool == NCU else _proton(folder):
        run()


@contextmanager
def _counters() -> Iterator[None]:
    import torch

    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


@contextmanager
def _proton(folder: Path) -> Iterator[None]:
    """Profile the GPU's work in this context with proton, with a file in `folder`."""
    import torch

    proton = importlib.import_module("triton.profiler")
    torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda").zero_()  # as before each timed call
    torch.cuda.synchronize()
    proton.start(str(folder / PROTON_NAME))
    yield
    torch.cuda.synchronize()
    proton.finalize()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
