"""lockstep.py's counter, and numbers shared by kernels in lockstep, in Triton and in CUDA C++."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

LEAD = 4  # steps between a program's arrival and its wait, so that the counter's latency is hidden
ARRIVALS = 1 << 14  # that each program adds to the counter in a launch; it waits no more often
POLLS = 32  # about 1 us each; then another kernel occupies an SM


def arrivals(device: torch.device, programs: int) -> Tensor:
    """Return a device's launch counter for so many programs, [1], int64.

    While a CUDA graph is captured, it belongs to the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int64, device=device)
    return _counter(torch.cuda.current_device() if device.index is None else device.index, programs)


@cache
def _counter(index: int, programs: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=torch.device("cuda", index))
