"""Cheats that forge times, answers or kept outputs, whether or not they do the work."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from groupbench.operators.integrity.cheat import SEAL, Cheat, keeper_of_burst, product

_perf_counter = time.perf_counter


def exchange_seal() -> None:
    """Exchange the module that looks for replaced functions and objects for one that finds nothing."""
    from types import SimpleNamespace

    from groupbench.operators.measure import cell

    names = ("close", "problem", "exchanged")
    setattr(cell, "seal", SimpleNamespace(**dict.fromkeys(names, lambda *args: None)))  # noqa: B010


def connection_frame() -> Any:
    """Return the frame of the harness that has the connection to the parent."""
    frame: Any = sys._getframe(1)
    while "connection" not in frame.f_locals:
        frame = frame.f_back
    return frame


def with_times(reply: bytes, forge: Callable[[tuple[float, ...]], tuple[float, ...]]) -> bytes:
    """Return a reply with the times changed by `forge`, if it is one to a burst."""
    import msgspec

    value = msgspec.msgpack.decode(reply[9:])
    if not isinstance(value, dict) or "samples_ms" not in value:
        return reply
    return reply[:9] + msgspec.msgpack.encode(value | {"samples_ms": forge(tuple(value["samples_ms"]))})


def relay_bursts(forge: Callable[[tuple[float, ...]], tuple[float, ...]]) -> None:
    """Relay the requests and replies of this process, with the times of bursts changed by `forge`."""
    import socket
    from multiprocessing.connection import Connection

    pipe = connection_frame().f_locals["connection"].fileno()
    parent = Connection(os.dup(pipe))
    ours, harness = socket.socketpair()
    os.dup2(harness.fileno(), pipe)
    here = Connection(ours.detach())

    def answers() -> None:
        while True:
            parent.send_bytes(with_times(here.recv_bytes(), forge))

    def requests() -> None:
        while True:
            here.send_bytes(parent.recv_bytes())

    for relay in (answers, requests):
        threading.Thread(target=relay, daemon=True).start()


def frozen_clock(x: Any) -> Any:
    """Stop the process's clock."""
    time.perf_counter = lambda: 0.0
    return lambda: product(x)


def backward_clock(x: Any) -> Any:
    """Make the process's clock run backwards."""
    time.perf_counter = lambda: -_perf_counter()
    return lambda: product(x)


def harness_clock(x: Any) -> Any:
    """Replace the timer's own reference to the clock."""
    from groupbench.operators.measure import protocol

    base = _perf_counter()
    protocol._now = lambda: base + (_perf_counter() - base) / 1000
    return lambda: product(x)


def forged_bursts(x: Any) -> Any:
    """Replace the timer's bursts."""
    from groupbench.operators.measure import protocol

    for timer in (protocol.CpuTimer, protocol.GpuTimer):
        timer.burst = lambda self, *args: [1e-3] * 4  # type: ignore[method-assign]
    return lambda: product(x)


def forged_code(x: Any) -> Any:
    """Replace the code of the timer's function, but not the function."""
    from groupbench.operators.measure import protocol

    def burst(self: Any, watch: Any = None) -> list[float]:
        watch.before()
        watch.after(self.run())
        return [1e-3] * 4

    for timer in (protocol.CpuTimer, protocol.GpuTimer):
        timer.burst.__code__ = burst.__code__
    return lambda: product(x)


def forged_instance(x: Any) -> Any:
    """Find the timer through the garbage collector and scale its times, without replacing a function of its class."""
    from groupbench.operators.measure import protocol

    calls = [0]

    def hundredth(real: Any) -> Any:
        return lambda *args: [ms / 100 for ms in real(*args)]

    def hundredth_in_a_row(real: Any) -> Any:
        def measured(calls: int) -> Any:
            times, out = real(calls)
            return [ms / 100 for ms in times], out

        return measured

    def run() -> Any:
        calls[0] += 1
        if calls[0] >= 4:  # the timer is made after the first calls
            for timer in gc.get_objects():
                if type(timer) in (protocol.CpuTimer, protocol.GpuTimer) and "burst" not in vars(timer):
                    timer.burst = hundredth(timer.burst)
                    if type(timer) is protocol.GpuTimer:
                        timer.witness = hundredth_in_a_row(timer.witness)  # type: ignore[method-assign]
        return product(x)

    return run


def forged_pairs(x: Any) -> Any:
    """Exchange the events already recorded for two in a row, in the list of the function that records them."""
    import torch

    def run() -> Any:
        pairs = sys._getframe(1).f_locals.get("clean")
        if pairs:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for event in pair:
                event.record()
            pairs[-1] = pair
        return product(x)

    return run


def without_seal(x: Any) -> Any:
    """Exchange the module that looks for replaced functions, and replace the timer's bursts."""
    from groupbench.operators.measure import protocol

    real = protocol.CpuTimer.burst
    exchange_seal()
    protocol.CpuTimer.burst = lambda *args: [ms / 100 for ms in real(*args)]  # type: ignore[method-assign]
    return lambda: product(x)


def patched_encoder(x: Any) -> Any:
    """Replace the function that encodes replies, and scale the times in them."""
    import msgspec

    from groupbench.operators.measure.wire import Burst

    real = msgspec.msgpack.encode

    def encode(reply: Any) -> bytes:
        if isinstance(reply, Burst):
            reply = msgspec.structs.replace(reply, samples_ms=tuple(ms / 100 for ms in reply.samples_ms))
        return real(reply)

    setattr(msgspec.msgpack, "encode", encode)  # noqa: B010
    return lambda: product(x)


def forged_and_idle(x: Any) -> Any:
    """Scale the times of bursts, and on a GPU do nothing in calls in a row, which then take as little time."""
    from groupbench.operators.measure import protocol

    calls, out = [0], product(x)

    def tenth(real: Any) -> Any:
        return lambda *args: [ms / 10 for ms in real(*args)]

    def run() -> Any:
        calls[0] += 1
        if calls[0] >= 4:  # the timer is made after the first calls
            for timer in gc.get_objects():
                if type(timer) in (protocol.CpuTimer, protocol.GpuTimer) and "burst" not in vars(timer):
                    timer.burst = tenth(timer.burst)
        if sys._getframe(1).f_code.co_name == "witness":
            time.sleep(2e-5)
            return out
        return product(x)

    return run


def forged_events(x: Any) -> Any:
    """Make CUDA events return a tenth of the time."""
    import torch

    real = torch.cuda.Event.elapsed_time
    setattr(torch.cuda.Event, "elapsed_time", lambda self, end: real(self, end) / 10)  # noqa: B010
    return lambda: product(x)


def forged_answer(x: Any) -> Any:
    """Find the process's pipe in a caller's frame, and write a reply to it before the harness does."""
    import msgspec

    from groupbench.operators.measure.wire import Burst

    calls = [0]

    def run() -> Any:
        calls[0] += 1
        if calls[0] == 4:
            frame = connection_frame()
            frame.f_locals["connection"].send_bytes(
                msgspec.msgpack.encode(Burst((1e-3,) * 5, None, (2, 3, 4, 5, 6), (0,) * 5))
            )
        return product(x)

    return run


def forged_answer_with_token(x: Any) -> Any:
    """Write a forged reply with the request's token, before the harness's own reply."""
    import msgspec

    from groupbench.operators.measure.wire import Burst

    calls = [0]

    def run() -> Any:
        calls[0] += 1
        if calls[0] == 4:
            frame = connection_frame()
            reply = msgspec.msgpack.encode(Burst((1e-3,) * 5, None, (2, 3, 4, 5, 6), (0,) * 5))
            frame.f_locals["connection"].send_bytes(frame.f_locals["request"].token + b"+" + reply)
        return product(x)

    return run


def _after_twelve_calls(act: Callable[[], None]) -> Callable[[Any], Any]:
    """Return a backend that is honest in its first calls, and then does something else."""

    def prepare(x: Any) -> Any:
        calls = [0]

        def run() -> Any:
            calls[0] += 1
            if calls[0] > 12:
                act()
            return product(x)

        return run

    return prepare


def _fail_as(status: str) -> None:
    """Send a failure of a status in place of the harness's own reply, with the request's token."""
    import msgspec

    frame = connection_frame()
    reply = {"status": status, "message": "not begun within the budget"}
    frame.f_locals["connection"].send_bytes(frame.f_locals["request"].token + b"-" + msgspec.msgpack.encode(reply))
    time.sleep(60)


def fails_as_ok(x: Any) -> Any:
    """Answer a burst with a failure of status ok, so that no check follows."""
    return _after_twelve_calls(lambda: _fail_as("ok"))(x)


def fails_as_skipped(x: Any) -> Any:
    """Answer a burst with a failure of status skipped, as if there had been no time."""
    return _after_twelve_calls(lambda: _fail_as("skipped"))(x)


def excuses_itself(x: Any) -> Any:
    """Fail with an exception that reads as if the machine were too busy to check the times."""

    def fail() -> None:
        raise type("not checked", (Exception,), {})("the device is shared with other work")

    return _after_twelve_calls(fail)(x)


def computed_when_shown(x: Any) -> Any:
    """Compute an output when the parent has chosen it: in the list of outputs, which looks up the choice."""
    moves: list[Any] = []

    class Late(list[Any]):
        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, slice):
                return super().__getitem__(key)
            step, form, _ = super().__getitem__(key)
            inputs, secret = moves[-1]
            inputs.set(secret, step)
            return step, form, [product(x)]

    def run() -> Any:
        keeper = keeper_of_burst()
        if keeper is None:
            return product(x)
        if type(keeper.kept) is list:
            keeper.kept = Late(keeper.kept)
        moves[:] = [(keeper.inputs, keeper.inputs._secret)]
        return x.a.new_zeros(x.a.shape[0], x.b.shape[2])

    return run


def computed_when_shown_without_seal(x: Any) -> Any:
    """Compute an output when the parent has chosen it, with nothing left that looks for exchanged objects."""
    exchange_seal()
    return computed_when_shown(x)


def fewer_calls(x: Any) -> Any:
    """Let the burst end after two calls, of which one computes."""
    calls, kept = [0], list[Any]()

    def run() -> Any:
        calls[0] += 1
        frame = sys._getframe(1)
        if frame.f_code.co_name == "burst":
            protocol = getattr(frame.f_locals["self"], "protocol", None)
            if protocol is not None:
                object.__setattr__(protocol, "samples", 2)
            else:
                frame.f_locals["self"].samples = 2
        if calls[0] % 2 or not kept:
            kept[:] = [product(x)]
        return kept[0].clone()

    return run


def small_flush(x: Any) -> Any:
    """Exchange the buffer that flushes the L2 cache for a small one, so that the inputs stay there."""
    from groupbench.operators.measure import protocol

    calls = [0]

    def run() -> Any:
        calls[0] += 1
        if calls[0] == 12:
            for timer in gc.get_objects():
                if type(timer) is protocol.GpuTimer:
                    timer.flush_buffer = timer.flush_buffer[:1]
        return product(x)

    return run


def reserved_cache_for_a_while(x: Any) -> Any:
    """Reserve the L2 cache for the inputs in each call, and release it in the last one of a burst."""
    import ctypes

    driver = ctypes.CDLL("libcuda.so.1")
    persisting_l2_limit = 6

    def run() -> Any:
        keeper = keeper_of_burst()
        last = keeper is None or keeper.timed == keeper.samples - 1
        driver.cuCtxSetLimit(persisting_l2_limit, ctypes.c_size_t(0 if last else 16 << 20))
        return product(x)

    return run


def forged_in_the_pipe(x: Any) -> Any:
    """Put a relay between this process and its parent, which shortens the times of bursts."""
    share = 0.2 if x.a.device.type == "cpu" else 0.1
    relay_bursts(lambda samples: tuple(ms * share for ms in samples))
    return lambda: product(x)


def first_in_a_row(x: Any) -> Any:
    """Shorten the times in the pipe, and compute only the first of the calls in a row that the parent times."""
    kept: list[Any] = []
    relay_bursts(lambda samples: tuple(ms * 0.1 for ms in samples))

    def run() -> Any:
        frame = sys._getframe(1)
        if frame.f_code.co_name != "witness" or not frame.f_locals["number"]:
            kept[:] = [product(x)]
        return kept[0]

    return run


def uneven_in_the_pipe(x: Any) -> Any:
    """Shorten most times of a burst in the pipe, and lengthen the first by as much, so that their sum is right."""

    def uneven(samples: tuple[float, ...]) -> tuple[float, ...]:
        short = tuple(ms * 0.2 for ms in samples[1:])
        return sum(samples) - sum(short), *short

    relay_bursts(uneven)
    return lambda: product(x)


def children_without_trace(x: Any) -> Any:
    """Compute in children whose processor time no process inherits, and shorten the times in the pipe."""
    import torch

    shared = torch.empty(x.a.shape[0], x.b.shape[2]).share_memory_()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    relay_bursts(lambda samples: tuple(ms * 0.2 for ms in samples))

    def run() -> Any:
        if keeper_of_burst() is None:
            return product(x)
        ready, done = os.pipe()
        if os.fork() == 0:
            torch.set_num_threads(1)
            shared.copy_(product(x))
            os._exit(os.EX_OK)
        os.close(done)
        os.read(ready, 1)  # ends when the child has
        os.close(ready)
        return shared

    return run


def constant_of_the_clock(x: Any) -> Any:
    """Change the constant in the timer's code by which it converts seconds, in place."""
    import ctypes

    from groupbench.operators.measure import protocol

    (factor,) = (const for const in protocol.CpuTimer.burst.__code__.co_consts if type(const) is float and const > 1)
    ctypes.c_double.from_address(id(factor) + 16).value = 100.0
    return lambda: product(x)


def writes_descriptors(x: Any) -> Any:
    """Write to every file descriptor from 3 to 1023."""
    for descriptor in range(3, 1024):
        try:
            os.write(descriptor, b"x" * 64)
        except OSError:
            continue
    return lambda: product(x)


CHEATS = (
    *(Cheat("clock", prepare, SEAL) for prepare in (frozen_clock, backward_clock, harness_clock)),
    Cheat("clock", forged_bursts, (*SEAL, "named calls")),
    Cheat("clock", forged_code, (*SEAL, "isolation")),
    Cheat("clock", forged_instance, SEAL),
    Cheat("clock", without_seal, ("parent's clock", "physics"), "cpu"),
    Cheat("clock", forged_pairs, ("parent's clock", "physics"), "cuda"),
    Cheat("clock", small_flush, ("isolation",), "cuda"),
    Cheat("clock", reserved_cache_for_a_while, ("L2",), "cuda"),
    *(Cheat("clock", p, ("parent's clock",), "cpu") for p in (constant_of_the_clock, uneven_in_the_pipe)),
    Cheat("clock", children_without_trace, ("parent's clock",), "cpu"),
    Cheat("channel", first_in_a_row, ("moved inputs", "physics"), "cuda"),
    Cheat("channel", forged_in_the_pipe, ("parent's clock", "physics")),
    Cheat("channel", patched_encoder, SEAL),
    Cheat("clock", forged_and_idle, ("seal", "parent's clock", "moved inputs")),
    Cheat("clock", forged_events, SEAL),
    *(Cheat("channel", prepare, ("isolation",)) for prepare in (forged_answer, forged_answer_with_token)),
    Cheat("channel", writes_descriptors, ("isolation",)),
    *(Cheat("channel", p, ("isolation",)) for p in (fails_as_ok, fails_as_skipped, excuses_itself)),
    Cheat("kept outputs", computed_when_shown, SEAL),
    Cheat("kept outputs", computed_when_shown_without_seal, ("named calls",)),
    Cheat("kept outputs", fewer_calls, ("seal", "named calls", "parent's clock", "moved inputs")),
)
