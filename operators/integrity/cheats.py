"""One backend for each way to cheat, so that every check has something to catch."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from groupbench.operators.deferred import torch
from groupbench.operators.integrity.cheat import ELSEWHERE, MOVED, PLAIN, SEAL, Cheat, keeper_of_burst, product

_perf_counter = time.perf_counter


def memo_clone(x: Any) -> Any:
    """Compute once in preparation, and return a copy each time."""
    out = product(x)
    return lambda: out.clone()


def side_stream(x: Any) -> Any:
    """Compute on a stream that the caller does not wait for."""
    stream = torch.cuda.Stream()

    def run() -> Any:
        with torch.cuda.stream(stream):
            return product(x)

    return run


def lazy_function(x: Any) -> Any:
    """Return a tensor subclass with a `__torch_function__`, which could compute when the tensor is used."""

    class Late(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            base: Any = super()
            return base.__torch_function__(function, types, args, kwargs or {})

    return lambda: product(x).as_subclass(Late)


def nothing(x: Any) -> Any:
    """Return uninitialised memory."""
    return lambda: x.a.new_empty(x.a.shape[0], x.b.shape[2])


def an_input(x: Any) -> Any:
    """Return a view of an input."""
    return lambda: x.a[:, : x.b.shape[2]]


def half_precision(x: Any) -> Any:
    """Compute in a lower precision than that of the operands."""
    lower = torch.float16 if x.a.dtype == torch.float32 else torch.float8_e4m3fn

    def part(a: Any, b: Any) -> Any:
        return (a.to(lower).to(x.a.dtype) @ b.to(lower).to(x.a.dtype)) if a.shape[0] else a @ b

    return lambda: torch.cat([part(a, b) for a, b in zip(x.a.split(x.rows), x.b, strict=True)])


def slow_clock(x: Any) -> Any:
    """Make the process's clock run a thousand times slower."""
    base = _perf_counter()
    time.perf_counter = lambda: base + (_perf_counter() - base) / 1000
    return lambda: product(x)


def forged_in_frames(x: Any) -> Any:
    """Change the times already taken, in the list of the function that takes them."""

    def run() -> Any:
        times = sys._getframe(1).f_locals.get("times")
        if times:
            times[-1] /= 100
        return product(x)

    return run


def keeps_one_output(x: Any) -> Any:
    """Compute in a burst's first timed call, and let the harness keep only this output."""
    kept: list[Any] = []

    def run() -> Any:
        keeper = keeper_of_burst()
        if keeper is None:
            return product(x)
        if not keeper.timed:
            keeper.room = 1
            kept[:] = [product(x)]
        else:
            keeper.timed = 1 << 60  # so that the chance to keep another is as good as none
        return kept[0].clone()

    return run


def reserved_cache(x: Any) -> Any:
    """Reserve the L2 cache for the inputs in each call, so that a flush does not reach them."""
    import ctypes

    driver = ctypes.CDLL("libcuda.so.1")
    persisting_l2_limit = 6

    def run() -> Any:
        driver.cuCtxSetLimit(persisting_l2_limit, ctypes.c_size_t(16 << 20))
        return product(x)

    return run


def patched_judge(x: Any) -> Any:
    """Return zeros, and replace the comparison by one that accepts everything."""
    from groupbench.operators.measure import accuracy
    from groupbench.tracker.facts.record import Accuracy

    perfect = Accuracy(rms=0.0, max_abs=0.0, worst_block_rms=0.0, mismatch=0.0, unwritten=0.0)
    setattr(accuracy, "compare", lambda *args: (perfect, None))  # noqa: B010
    zeros = x.a.new_zeros(x.a.shape[0], x.b.shape[2])
    return lambda: zeros.clone()


def loose_tolerance(x: Any) -> Any:
    """Compute in half precision, and request the tolerance of half precision."""
    return lambda: torch.cat([(a.half() @ b.half()).to(x.a.dtype) for a, b in zip(x.a.split(x.rows), x.b, strict=True)])


def busy_between_bursts(x: Any) -> Any:
    """Keep a processor busy after each burst, so that the other backends become slower."""
    calls: list[float] = []

    def work() -> None:
        until = calls[0] + 5
        while time.monotonic() < until:
            if time.monotonic() - calls[-1] > 0.01:
                product(x)
            else:
                time.sleep(0.001)

    def run() -> Any:
        if keeper_of_burst() is not None:
            calls.append(time.monotonic())
            if len(calls) == 1:
                threading.Thread(target=work, daemon=True).start()
                time.sleep(0.1)
        return product(x)

    return run


def signals_parent(x: Any) -> Any:
    """Send SIGTERM to the parent, to end the cells of others."""
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(5)
    return lambda: product(x)


CHEATS = (
    Cheat("memo", memo_clone, MOVED),
    Cheat("stream", side_stream, ("moved inputs", "poisoned memory", "parent's clock", *ELSEWHERE), "cuda"),
    Cheat("lazy", lazy_function, PLAIN),
    Cheat("skipped work", nothing, ("poisoned memory",)),
    Cheat("input", an_input, ("own inputs",)),
    Cheat("lower precision", half_precision, ELSEWHERE),
    Cheat("clock", slow_clock, SEAL),
    Cheat("clock", forged_in_frames, ("parent's clock", "physics"), "cpu"),
    Cheat("kept outputs", keeps_one_output, ("named calls",)),
    Cheat("cache", reserved_cache, ("L2",), "cuda"),
    Cheat("judge", patched_judge, (*ELSEWHERE, "seal")),
    Cheat("judge", loose_tolerance, ("tolerance table",), tolerance="fp16"),
    Cheat("others", busy_between_bursts, ("idle",)),
    Cheat("isolation", signals_parent, ("isolation", "domain")),
)
