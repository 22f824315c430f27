"""Cheats that reach into memory, frames and other processes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

from groupbench.operators.integrity.cheat import ELSEWHERE, MOVED, SEAL, Cheat, keeper_of_burst, product

_KEEP: list[Any] = []


def swapped_reply(x: Any) -> Any:
    """Exchange the class of the reply to a burst for a function that shortens the times."""
    from groupbench.operators.measure import cell

    real = cell.Burst
    setattr(cell, "Burst", lambda samples, *rest: real(tuple(ms / 50 for ms in samples), *rest))  # noqa: B010
    return lambda: product(x)


def send_in_the_frame(x: Any) -> Any:
    """Exchange a local variable of the harness's loop, the function that sends, in its frame."""
    from .forged import with_times

    frame: Any = sys._getframe(1)
    while "connection" not in frame.f_locals or "send" not in frame.f_locals:
        frame = frame.f_back
    real = frame.f_locals["send"]

    def send(data: bytes) -> None:
        real(with_times(data, lambda samples_ms: tuple(ms / 5 for ms in samples_ms)))

    frame.f_locals["send"] = send
    if hasattr(ctypes.pythonapi, "PyFrame_LocalsToFast"):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    return lambda: product(x)


def native_clock(x: Any) -> Any:
    """Make the clock's own C function return a slower time, without replacing an object."""
    real, base = time.perf_counter_ns, time.perf_counter_ns()
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p)
    slow = kind(lambda module, nothing: (base + (real() - base) / 20) / 1e9)
    _KEEP.append(slow)
    method = ctypes.c_void_p.from_address(id(time.perf_counter) + 2 * ctypes.sizeof(ctypes.c_void_p)).value
    assert method is not None
    pointer = ctypes.c_void_p.from_address(method + ctypes.sizeof(ctypes.c_void_p))
    pointer.value = ctypes.cast(slow, ctypes.c_void_p).value
    return lambda: product(x)


def limits_rivals(x: Any) -> Any:
    """Give all other processes a limit of processor time, so that the system ends them."""
    limited = 0
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) in (os.getpid(), 1):
            continue
        try:
            # Only asks, so that a machine on which it succeeds does not suffer.
            pid, kind = int(folder.name), resource.RLIMIT_CPU
            resource.prlimit(pid, kind, resource.prlimit(pid, kind))
            limited += 1
        except (OSError, ValueError):
            continue
    if not limited:
        raise PermissionError("no other process can be limited")
    return lambda: product(x)


def slows_rivals(x: Any) -> Any:
    """Lower the priority of all other sessions, by the file of their groups in /proc."""
    changed = 0
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        try:
            nice = (folder / "autogroup").read_text().split()[-1]
            (folder / "autogroup").write_text(nice)  # as before, so that a machine on which it succeeds does not suffer
            changed += 1
        except (OSError, IndexError):
            continue
    if not changed:
        raise PermissionError("no other session can be changed")
    return lambda: product(x)


def takes_descriptors(x: Any) -> Any:
    """Take the descriptors of all other processes, and their memory, by system calls."""
    libc, buffer, taken = ctypes.CDLL(None), ctypes.create_string_buffer(16), 0
    reading, others = ((ctypes.c_void_p * 2)(address, 16) for address in (ctypes.addressof(buffer), 0x400000))
    for pid in (int(folder.name) for folder in Path("/proc").glob("[0-9]*") if folder.name != str(os.getpid())):
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            taken += any(libc.syscall(438, handle, number, 0) >= 0 for number in range(3, 12))
            taken += libc.process_vm_readv(pid, reading, 1, others, 1, 0) > 0
            os.close(handle)
    if not taken:
        raise PermissionError("no descriptor can be taken")
    return lambda: product(x)


def filled_by_a_thread(x: Any) -> Any:
    """Return zeros, and let a thread fill the outputs that the harness has kept, wherever they are."""
    last: list[Any] = []

    def fill() -> None:
        while True:
            time.sleep(1e-4)
            if last:
                keeper = last.pop()
                for _, _, copies in list(keeper.kept):
                    copies[0].copy_(product(x))

    threading.Thread(target=fill, daemon=True).start()

    def run() -> Any:
        keeper = keeper_of_burst()
        if keeper is None:
            return product(x)
        last[:] = [keeper]
        return x.a.new_zeros(x.a.shape[0], x.b.shape[2])

    return run


def one_row_for_all(x: Any) -> Any:
    """Compute one row of each group in timed calls, and show it for all of its rows."""
    import torch

    def run() -> Any:
        if keeper_of_burst() is None:
            return product(x)
        parts = [(a[:1] @ b).expand(len(a), -1) for a, b in zip(x.a.split(x.rows), x.b, strict=True)]
        return torch.cat(parts)

    return run


def shrunk_inputs(x: Any) -> Any:
    """Exchange the memory behind the inputs for a little one, so that a product is cheap."""
    small = x.a[:1].clone().expand(x.a.shape)

    def run() -> Any:
        if keeper_of_burst() is not None:
            x.a.set_(small)
        return product(x)

    return run


def honest_when_audited(x: Any) -> Any:
    """Skip most calls of the bursts that go into the record, and none of those that the parent times."""
    kept, calls = list[Any](), [0]

    def run() -> Any:
        frame: Any = sys._getframe(1)
        recorded = frame.f_code.co_name == "burst" and frame.f_locals.get("samples") == 5
        calls[0] += 1
        if not recorded or not kept or calls[0] % 4 == 0:
            kept[:] = [product(x)]
        return kept[0].clone()

    return run


def coarse_in_most_calls(x: Any) -> Any:
    """Round the operands of three of four timed calls to fp8."""
    import torch

    calls = [0]

    def run() -> Any:
        calls[0] += 1
        if keeper_of_burst() is None or calls[0] % 4 == 0:
            return product(x)
        a, b = (operand.to(torch.float8_e4m3fn).to(operand.dtype) for operand in (x.a, x.b))
        return torch.cat([rows @ weight for rows, weight in zip(a.split(x.rows), b, strict=True)])

    return run


def refuses_to_show(x: Any) -> Any:
    """Return zeros, and fail whenever an output is to be shown."""
    from groupbench.operators.measure.cell import CellHandler

    def run() -> Any:
        if keeper_of_burst() is None:
            return product(x)
        for held in gc.get_objects():
            if type(held) is CellHandler and "show" not in vars(held):
                held.show = None  # type: ignore[method-assign, assignment]
        return x.a.new_zeros(x.a.shape[0], x.b.shape[2])

    return run


def looser_job(x: Any) -> Any:
    """Set the user's tolerance to infinity in all jobs of this process, and double the result."""
    from groupbench.operators.measure.wire import Job

    for held in gc.get_objects():
        if type(held) is Job:
            object.__setattr__(held, "rtol", 1e9)
            object.__setattr__(held, "atol", 1e9)
    return lambda: product(x) * 2


def claims_to_be_interpreted(x: Any) -> Any:
    """Say that the kernels are interpreted, so that no times are checked, and return zeros in timed calls."""
    from groupbench.operators.measure import cell

    setattr(cell, "timing_of", lambda device, interpreted: "interpreted")  # noqa: B010
    return lambda: product(x) if keeper_of_burst() is None else x.a.new_zeros(x.a.shape[0], x.b.shape[2])


def undoes_moves(x: Any) -> Any:
    """Put the first values back into the inputs before each call, and return a copy of the first result."""
    first, a, b = product(x), x.a.clone(), x.b.clone()

    def run() -> Any:
        if keeper_of_burst() is not None:
            x.a.copy_(a)
            x.b.copy_(b)
        return first.clone()

    return run


def reads_the_judge(x: Any) -> Any:
    """Look for the reference in the memory of all other processes."""
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        try:
            with (folder / "mem").open("rb") as memory:
                memory.seek(int((folder / "maps").read_text().split("-")[0], 16))
                if memory.read(16):
                    return lambda: product(x)
        except (OSError, ValueError):
            continue
    raise PermissionError("no memory can be read")


CHEATS = (
    Cheat("channel", swapped_reply, SEAL),
    Cheat("channel", send_in_the_frame, ("parent's clock",), "cpu"),
    Cheat("clock", native_clock, ("parent's clock",), "cpu"),
    *(Cheat("others", prepare, ("domain",)) for prepare in (limits_rivals, slows_rivals)),
    *(Cheat("judge", prepare, ("domain",)) for prepare in (reads_the_judge, takes_descriptors)),
    Cheat("judge", looser_job, ELSEWHERE),
    Cheat("kept outputs", filled_by_a_thread, (*MOVED, "named calls")),
    Cheat("kept outputs", refuses_to_show, ("isolation", *SEAL, "named calls", *MOVED)),
    *(Cheat("skipped work", p, MOVED) for p in (one_row_for_all, honest_when_audited)),
    Cheat("lower precision", coarse_in_most_calls, MOVED),
    Cheat("input", shrunk_inputs, (*MOVED, "own inputs", "isolation")),
    Cheat("input", undoes_moves, (*MOVED, "own inputs")),
    Cheat("clock", claims_to_be_interpreted, (*SEAL, *MOVED, "isolation")),
)
