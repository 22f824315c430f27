"""Cheats that return before the work is done, or that do only a part of it."""

from __future__ import annotations

import builtins
import gc
import queue
import sys
import threading
import types
from typing import Any

from groupbench.operators.integrity.cheat import ELSEWHERE, PLAIN, SEAL, Cheat, keeper_of_burst, product


def lazy_dispatch(x: Any) -> Any:
    """Return a tensor subclass that computes its values when they are read."""
    import torch
    from torch.utils._pytree import tree_map

    shape, dtype = (x.a.shape[0], x.b.shape[2]), x.a.dtype

    class Lazy(torch.Tensor):
        @staticmethod
        def __new__(cls: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=x.a.device)

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            real = lambda value: product(x) if isinstance(value, Lazy) else value  # noqa: E731
            return function(*tree_map(real, args), **tree_map(real, kwargs or {}))

    return lambda: Lazy()


def lazy_list(x: Any) -> Any:
    """Return a list of its own class that computes its only element when it is read."""

    class LateList(list[Any]):
        def __iter__(self) -> Any:
            return iter([product(x)])

    return LateList


def lazy_method(x: Any) -> Any:
    """Compute in a method of all tensors, when the output is read."""
    import torch

    pending: dict[int, Any] = {}
    real = torch.Tensor.is_conj

    def is_conj(self: Any) -> bool:
        if id(self) in pending:
            pending.clear()
            self.copy_(product(x))
        return real(self)

    setattr(torch.Tensor, "is_conj", is_conj)  # noqa: B010

    def run() -> Any:
        out = x.a.new_empty(x.a.shape[0], x.b.shape[2])
        pending[id(out)] = out
        return out

    return run


def lazy_module(x: Any) -> Any:
    """Give the module of torch a class that computes the output when the harness looks up a function there."""
    import torch

    pending: list[Any] = []

    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            if pending and name == "strided":
                pending.pop().copy_(product(x))
            return super().__getattribute__(name)

    def run() -> Any:
        torch.__class__ = Lazy  # type: ignore[assignment]
        out = x.a.new_empty(x.a.shape[0], x.b.shape[2])
        pending[:] = [out]
        return out

    return run


def profile_hook(x: Any) -> Any:
    """Compute slowly in a profiler's hook, when the harness calls its function that keeps the output."""
    pending: list[Any] = []

    def hook(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name in ("plain_parts", "witness") and pending:
            out = pending.pop()
            for _ in range(20):
                out.copy_(product(x))

    sys.setprofile(hook)

    def run() -> Any:
        pending[:] = [x.a.new_empty(x.a.shape[0], x.b.shape[2])]
        for _ in range(1000):  # some 20 us; a sleep would take as long as other work on the machine likes
            pass
        return pending[0]

    return run


def trace_hook(x: Any) -> Any:
    """Compute in a hook for tracing, when the harness calls its function that keeps the output."""
    pending: list[Any] = []

    def hook(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_name == "plain_parts" and pending:
            pending.pop().copy_(product(x))

    sys.settrace(hook)

    def run() -> Any:
        pending[:] = [x.a.new_empty(x.a.shape[0], x.b.shape[2])]
        return pending[0]

    return run


def _late(x: Any) -> tuple[Any, Any]:
    """Return a backend that returns empty memory, and a function that computes if the harness's code calls it."""
    pending: list[Any] = []

    def finish() -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and pending:
            if frame.f_code.co_name == "plain_parts":
                pending.pop().copy_(product(x))
            frame = frame.f_back

    def run() -> Any:
        pending[:] = [x.a.new_empty(x.a.shape[0], x.b.shape[2])]
        return pending[0]

    return run, finish


def collector_hook(x: Any) -> Any:
    """Compute in a callback of the garbage collector, which runs in the function that keeps the output."""
    run, finish = _late(x)
    gc.callbacks.append(lambda phase, info: finish())
    gc.set_threshold(1)
    return run


def import_hook(x: Any) -> Any:
    """Compute when the harness's function that keeps the output imports torch."""
    run, finish = _late(x)
    real = builtins.__import__

    def imported(*args: Any, **named: Any) -> Any:
        finish()
        return real(*args, **named)

    builtins.__import__ = imported
    return run


def lazy_attribute(x: Any) -> Any:
    """Return a plain tensor with methods of its own, which compute when the harness calls them."""

    def run() -> Any:
        out = x.a.new_empty(x.a.shape[0], x.b.shape[2])
        out.detach = out.clone = lambda: product(x)
        return out

    return run


def ahead_of_the_clock(x: Any) -> Any:
    """Compute as soon as the harness has moved the inputs, before its clock starts."""
    from groupbench.operators.measure import moves

    calls, ready = [0], list[Any]()

    class Ahead(moves.Moves):
        def advance(self) -> None:
            super().advance()
            ready[:] = [product(x)]

    def run() -> Any:
        calls[0] += 1
        if calls[0] >= 4:  # the object is made after the first calls
            for held in gc.get_objects():
                if type(held) is moves.Moves:
                    held.__class__ = Ahead
        return ready.pop() if ready else product(x)

    return run


def moves_in_a_wrapper(x: Any) -> Any:
    """Put a wrapper around the object that moves the inputs, which computes before the clock starts."""
    ready = list[Any]()

    class Ahead:
        def __init__(self, real: Any) -> None:
            self.real = real

        def advance(self) -> None:
            self.real.advance()
            ready[:] = [product(x)]

    def run() -> Any:
        keeper = keeper_of_burst()
        if keeper is not None and not isinstance(keeper.inputs, Ahead):
            keeper.inputs = Ahead(keeper.inputs)
        return ready.pop() if ready else product(x)

    return run


def in_the_last_call(x: Any) -> Any:
    """Compute in the last call of a burst, and write the results into the outputs that the harness has kept."""

    def run() -> Any:
        keeper = keeper_of_burst()
        if keeper is None:
            return product(x)
        if keeper.timed < keeper.samples - 1:
            return x.a.new_zeros(x.a.shape[0], x.b.shape[2])
        moves, at = keeper.inputs, keeper.step
        secret = moves._secret
        for step, _, copies in keeper.kept:
            moves.set(secret, step)
            copies[0].copy_(product(x))
        moves.set(secret, at)
        return product(x)

    return run


def finalizer_hook(x: Any) -> Any:
    """Return zeros, and fill the kept outputs when the harness drops one of them."""
    import weakref

    def run() -> Any:
        keeper = keeper_of_burst()
        if keeper is None:
            return product(x)
        out = x.a.new_zeros(x.a.shape[0], x.b.shape[2])
        weakref.finalize(out, lambda: [copies[0].copy_(product(x)) for _, _, copies in keeper.kept[-1:]])
        return out

    return run


def lazy_negative(x: Any) -> Any:
    """Return a view whose negation is deferred until it is read."""
    import torch

    return lambda: torch._neg_view(-product(x))


def on_meta(x: Any) -> Any:
    """Return a tensor on the meta device, which has no values."""
    import torch

    return lambda: torch.empty(x.a.shape[0], x.b.shape[2], dtype=x.a.dtype, device="meta")


def sparse(x: Any) -> Any:
    """Return an empty sparse tensor."""
    import torch

    return lambda: torch.empty(x.a.shape[0], x.b.shape[2], dtype=x.a.dtype, device=x.a.device).to_sparse()


def returns_a_promise(x: Any) -> Any:
    """Return a function that would return the tensor."""
    return lambda: lambda: product(x)


def thread_later(x: Any) -> Any:
    """Let a thread fill the output after it was returned."""
    out = product(x)

    def run() -> Any:
        threading.Thread(target=lambda: out.copy_(product(x)), daemon=True).start()
        return out

    return run


def thread_in_waiting(x: Any) -> Any:
    """Start a thread in preparation, and wake it in each call after three honest ones."""
    out, calls, work = product(x), [0], queue.SimpleQueue[int]()

    def serve() -> None:
        while True:
            work.get()
            out.copy_(product(x))

    threading.Thread(target=serve, daemon=True).start()

    def run() -> Any:
        calls[0] += 1
        if calls[0] <= 3:
            return product(x)
        work.put(0)
        return out

    return run


def coarse_weights(x: Any) -> Any:
    """Round the weights to a few bits."""
    import torch

    return lambda: torch.cat([a @ (b * 16).round().div(16) for a, b in zip(x.a.split(x.rows), x.b, strict=True)])


def half_of_the_sum(x: Any) -> Any:
    """Leave out every 50th term of the sum."""
    import torch

    keep = torch.arange(x.a.shape[1], device=x.a.device) % 50 != 7
    return lambda: torch.cat([a[:, keep] @ b[keep] for a, b in zip(x.a.split(x.rows), x.b, strict=True)])


def part_done(x: Any) -> Any:
    """Write only nine tenths of the rows."""

    def run() -> Any:
        out, whole = x.a.new_empty(x.a.shape[0], x.b.shape[2]), product(x)
        rows = len(out) * 9 // 10
        out[:rows] = whole[:rows]
        return out

    return run


def part_done_after_three(x: Any) -> Any:
    """Return right results three times, and zeros in a tenth of the rows from then on."""
    calls = [0]

    def run() -> Any:
        calls[0] += 1
        out = product(x)
        if calls[0] > 3:
            out[len(out) * 9 // 10 :] = 0
        return out

    return run


def on_the_host(x: Any) -> Any:
    """Return a tensor that is not on the device."""
    return lambda: product(x).cpu()


# --- on a GPU


def side_stream_after_four(x: Any) -> Any:
    """Be honest four times, then compute on a stream that the caller does not wait for."""
    import torch

    stream, calls = torch.cuda.Stream(), [0]

    def run() -> Any:
        calls[0] += 1
        if calls[0] <= 4:
            return product(x)
        with torch.cuda.stream(stream):
            return product(x)

    return run


def side_stream_behind(x: Any) -> Any:
    """Compute into a kept buffer on another stream. It waits for the caller's stream, but not the reverse."""
    import torch

    stream, out = torch.cuda.Stream(), product(x)

    def run() -> Any:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out.copy_(product(x))
        return out

    return run


def other_current_stream(x: Any) -> Any:
    """Make another stream the current one, so that the end is recorded there."""
    import torch

    first, second = torch.cuda.current_stream(), torch.cuda.Stream()

    def run() -> Any:
        with torch.cuda.stream(first):
            out = product(x)
        torch.cuda.set_stream(second)
        return out

    return run


def a_tenth_after_three(x: Any) -> Any:
    """Compute only a tenth of the first group's rows after three honest calls."""
    calls, kept = [0], list[Any]()

    def run() -> Any:
        calls[0] += 1
        if calls[0] <= 3:
            kept[:] = [product(x)]
        rows = x.rows[0] // 10
        kept[0][:rows] = x.a[:rows] @ x.b[0]
        return kept[0].clone()

    return run


CHEATS = (
    *(Cheat("lazy", prepare, PLAIN) for prepare in (lazy_dispatch, lazy_list, lazy_negative, on_meta, sparse)),
    Cheat("lazy", returns_a_promise, PLAIN),
    Cheat("lazy", lazy_method, SEAL),
    Cheat("lazy", lazy_module, SEAL),
    *(Cheat("lazy", prepare, SEAL) for prepare in (profile_hook, trace_hook, import_hook)),
    Cheat("lazy", collector_hook, ("moved inputs", "poisoned memory", *ELSEWHERE)),
    Cheat("lazy", finalizer_hook, ("moved inputs", "poisoned memory", "physics", *ELSEWHERE)),
    Cheat("lazy", lazy_attribute, ("poisoned memory",)),
    Cheat("other times", ahead_of_the_clock, SEAL),
    Cheat("other times", moves_in_a_wrapper, SEAL),
    Cheat("other times", in_the_last_call, ("parent's clock",), "cpu"),
    Cheat("thread", thread_later, ("poisoned memory", "moved inputs", *ELSEWHERE)),
    Cheat("thread", thread_in_waiting, ("moved inputs", "own inputs")),
    Cheat("lower precision", coarse_weights, ELSEWHERE),
    Cheat("skipped work", half_of_the_sum, ELSEWHERE),
    Cheat("skipped work", part_done, ("poisoned memory",)),
    Cheat("skipped work", part_done_after_three, ("moved inputs",)),
    Cheat("skipped work", a_tenth_after_three, ("moved inputs",)),
    Cheat("stream", on_the_host, PLAIN, "cuda"),
    *(
        Cheat("stream", prepare, ("moved inputs", "poisoned memory", "parent's clock", *ELSEWHERE), "cuda")
        for prepare in (side_stream_after_four, side_stream_behind, other_current_stream)
    ),
)
