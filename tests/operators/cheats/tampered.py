"""Cheats that tamper with the judgement, the harness or other processes, whether or not they do the work."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import Any

from groupbench.operators.integrity.cheat import ELSEWHERE, MOVED, SEAL, Cheat, product


def stopped_moves(x: Any) -> Any:
    """Stop the object that moves the inputs, and return a copy of an earlier result."""
    from groupbench.operators.measure import moves

    out, calls = product(x), [0]

    def run() -> Any:
        calls[0] += 1
        if calls[0] > 3:
            for held in gc.get_objects():
                if type(held) is moves.Moves:
                    held.set(None)
                    held.advance = lambda: None  # type: ignore[method-assign]
        return out.clone()

    return run


def patched_torch(x: Any) -> Any:
    """Return ones, and replace the torch functions that the comparison calls."""
    import torch

    torch.where = lambda *args, **named: torch.zeros_like(args[2])  # type: ignore[assignment]
    torch.isnan = lambda tensor: torch.zeros(tensor.shape, dtype=torch.bool)  # type: ignore[assignment]
    ones = torch.ones(x.a.shape[0], x.b.shape[2], dtype=x.a.dtype, device=x.a.device)
    return lambda: ones.clone()


def patched_tolerance(x: Any) -> Any:
    """Return one and a half times the product, and loosen every tolerance."""
    from groupbench.operators import tolerances

    for name in tolerances.TOLERANCES:
        tolerances.TOLERANCES[name] = tolerances.Tolerance(1e9, 1e9, 1e9)
    return lambda: product(x) * 1.5


def reference_by_frames(x: Any) -> Any:
    """Take the reference out of a caller's frame."""
    frame: Any = sys._getframe(1)
    while frame is not None and "reference" not in frame.f_locals:
        frame = frame.f_back
    reference = frame.f_locals["reference"].to(x.a.dtype)
    return lambda: reference.clone()


def reference_by_gc(x: Any) -> Any:
    """Take a tensor of the output's shape from the garbage collector."""
    import torch

    shape = (x.a.shape[0], x.b.shape[2])
    tensors = [held for held in gc.get_objects() if isinstance(held, torch.Tensor) and tuple(held.shape) == shape]
    reference = next(held for held in tensors if held is not x.a).to(x.a.dtype)
    return lambda: reference.clone()


def patched_kernel(x: Any) -> Any:
    """Exchange torch's kernel that copies tensors, and compute when the harness copies the output."""
    import warnings

    import torch

    pending: list[Any] = []
    library = torch.library.Library("aten", "IMPL")

    def clone(tensor: Any, *, memory_format: Any = None) -> Any:
        is_output = bool(pending) and tensor.data_ptr() == pending[0].data_ptr()
        if is_output:
            pending.clear()
        return torch.add(product(x) if is_output else tensor, 0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("clone", clone, x.a.device.type.upper())

    def run() -> Any:
        pending[:] = [x.a.new_zeros(x.a.shape[0], x.b.shape[2])]
        return pending[0]

    run.library = library  # type: ignore[attr-defined]
    return run


def dispatch_left_on(x: Any) -> Any:
    """Leave a dispatch mode on, which then sees the harness's own operations."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    Spy().__enter__()
    return lambda: product(x)


def zero_world(x: Any) -> Any:
    """Set the inputs to zero, so that a result of zero is right."""
    zeros = x.a.new_zeros(x.a.shape[0], x.b.shape[2])

    def run() -> Any:
        x.a.zero_()
        return zeros.clone()

    return run


def stops_warden(x: Any) -> Any:
    """Stop the process that ends this one, so that the run waits for it forever, and die."""
    calls = [0]

    def run() -> Any:
        calls[0] += 1
        if calls[0] == 4:
            os.kill(os.getppid(), signal.SIGSTOP)
            os._exit(os.EX_OK)
        return product(x)

    return run


CHEATS = (
    Cheat("judge", stopped_moves, ("moved inputs", "seal")),
    *(Cheat("judge", prepare, (*ELSEWHERE, "seal")) for prepare in (patched_torch, patched_tolerance)),
    Cheat("judge", zero_world, ("own inputs", *ELSEWHERE)),
    Cheat("frames", reference_by_frames, ("isolation",)),
    Cheat("gc", reference_by_gc, ("isolation", *ELSEWHERE, "moved inputs")),
    Cheat("dispatch mode", dispatch_left_on, SEAL),
    Cheat("dispatch mode", patched_kernel, (*MOVED, "seal", "parent's clock")),
    Cheat("isolation", stops_warden, ("isolation", "domain", *MOVED)),
)
