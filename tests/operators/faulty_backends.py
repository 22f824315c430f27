"""Backends with every kind of fault, as a plugin: `--plugin faulty_backends.BACKENDS`."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from groupbench.operators.catalog.grouped_gemm import prepare_torch_loop
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Backend


def crashes(inputs):
    os.kill(os.getpid(), 11)


def exits(inputs):
    os._exit(7)


def aborts(inputs):
    """Abort in a nested call, after printing much."""

    def run():
        print("a long story " * 100, "and its end", flush=True)
        return torch_calls(os.abort)

    return run


def torch_calls(function):
    """Call a function through a library, so that the library's frames are above its own."""
    from torch.utils._pytree import tree_map

    return tree_map(lambda _: function(), [0])


def start_children():
    """Start a program whose arguments name the fork server, and a copy of this process with its open files."""
    subprocess.Popen(["sleep", f"4242.{os.getppid()}"])
    if os.fork() == 0:
        time.sleep(4242)


def leaves_children(inputs):
    start_children()
    return prepare_torch_loop(inputs)


def dies_with_children(inputs):
    start_children()
    os._exit(7)


def hangs(inputs):
    def run():
        time.sleep(3600)

    return run


def raises(inputs):
    raise RuntimeError("no such\ninstruction")


def raises_bytes(inputs):
    """Raise an error as for a missing file whose name is not UTF-8."""
    raise RuntimeError(f"cannot open {os.fsdecode(b'caf' + bytes([0xE9]))}: \0")


def eats_memory(inputs):
    import torch

    return lambda: torch.empty(1 << 50, dtype=torch.uint8)


def hoards(inputs):
    """Keeps 8 GiB."""
    kept = [bytearray(b"x") * (64 << 20) for _ in range(128)]
    right = prepare_torch_loop(inputs)
    return lambda: right() * bool(kept)


def forks_hoarders(inputs):
    """Starts 32 processes in sessions of their own that keep 128 MiB each, and waits to be stopped.

    The memory is checked rarely on a machine with many processes, and the rest of the cell takes less time.
    """
    for _ in range(32):
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            kept = bytearray(b"x") * (128 << 20)
            os.write(write, kept[:1])
            time.sleep(600)
            os._exit(0)
        os.read(read, 1)
    time.sleep(60)
    return prepare_torch_loop(inputs)


def compiles_in_processes(inputs):
    """Does nothing wrong. A kernel's compiler may use a pool of processes."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()
    return prepare_torch_loop(inputs)


def half(inputs):
    """Write only the first half of the rows."""
    right = prepare_torch_loop(inputs)

    def run():
        out = inputs.a.new_empty(inputs.a.shape[0], inputs.b.shape[2])
        rows = out.shape[0] // 2
        out[:rows] = right()[:rows]
        return out

    return run


def one_percent(inputs):
    right = prepare_torch_loop(inputs)
    return lambda: right() * 1.01


def flaky(inputs):
    """Compute right results that differ in a few bits from call to call."""
    right = prepare_torch_loop(inputs)
    calls = iter(range(10**9))

    def run():
        out = right()
        out[0, 0] *= 1 + 2**-10 * (next(calls) % 2)
        return out

    return run


def goes_stale(inputs):
    """Compute right results until it is timed, like a kernel that does not reset its counters."""
    right = prepare_torch_loop(inputs)
    calls = iter(range(10**9))
    return lambda: right() * (1 if next(calls) < 5 else 3)


def overwrites(inputs):
    """Compute a right result and overwrite an input."""
    right = prepare_torch_loop(inputs)

    def run():
        out = right()
        inputs.a.zero_()
        return out

    return run


def overwrites_later(inputs):
    """Compute right results, but overwrite an input with NaN when it is timed."""
    right = prepare_torch_loop(inputs)

    def run():
        out = right()
        if sys._getframe(1).f_code.co_name == "burst":
            inputs.b.fill_(float("nan"))
        return out

    return run


def returns_an_input(inputs):
    return lambda: inputs.a


def captured_otherwise(inputs):
    """Compute right results when it is called, but not in a captured graph."""
    import torch

    right = prepare_torch_loop(inputs)
    return lambda: right() * (3 if torch.cuda.is_current_stream_capturing() else 1)


def wrong_shape(inputs):
    return lambda: inputs.a.new_zeros(3)


def returns_nothing(inputs):
    return lambda: None


def not_here(inputs):
    raise Unavailable("needs a flux\ncapacitor")


def not_here_at_all(inputs):
    raise Unavailable


FAULTS = [
    value
    for value in list(globals().values())
    if inspect.isfunction(value)
    and value.__module__ == __name__
    and [*inspect.signature(value).parameters] == ["inputs"]
]
BACKENDS = tuple(Backend(fault.__name__, fault, "a test", operator="grouped_gemm") for fault in FAULTS)


def crashes_once(inputs):
    """Compute any problem, but die at one of 17 rows."""
    if inputs.a.shape[0] == 17:
        os._exit(7)
    return prepare_torch_loop(inputs)


def cannot_say(target):
    raise KeyError("no such\nGPU")


def gives_up(target):
    sys.exit(0)


REASONS = {
    "cannot_say": cannot_say,
    "gives_up": gives_up,
    "says_bytes": lambda target: os.fsdecode(b"caf\xe9"),
    "says_a_number": lambda target: 5,
    "says_nothing": lambda target: "",
    "says_a_blank": lambda target: " ",
    "says_its_process": lambda target: str(os.getpid()),
    "ends_its_process": lambda target: os._exit(7),
}
CANNOT_SAY = tuple(
    Backend(name, prepare_torch_loop, "a test", unavailable=reason, operator="grouped_gemm")
    for name, reason in REASONS.items()
)


def forges_elsewhere(inputs):
    """Be honest in the process that checks, and shorten the times in those that are timed."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "reload":
        frame = frame.f_back
    if frame is not None:
        from cheats.forged import relay_bursts

        relay_bursts(lambda samples: tuple(0.1 * ms for ms in samples))
    return prepare_torch_loop(inputs)


ELSEWHERE = Backend("forges_elsewhere", forges_elsewhere, "a test", operator="grouped_gemm")
ONCE = Backend("crashes_once", crashes_once, "a test", operator="grouped_gemm")


def crash_last():
    """Return a plugin's backends: the one that crashes is the last of its operator."""
    return [Backend("crashes", crashes, "a test", operator="grouped_gemm")]


def off_in_tritonbench():
    """Register a backend with wrong results in TritonBench's own operators, through TritonBench's own --plugin."""
    from tritonbench.operators.jagged_sum import operator as jagged_sum
    from tritonbench.operators.sum import operator as sums
    from tritonbench.utils.triton_op import register_benchmark

    for name, module in (("sum", sums), ("jagged_sum", jagged_sum)):
        register_benchmark(name, "off", cls=module.Operator)(lambda self, x, *rest: lambda: _off(x))


def _off(x):
    import torch

    return torch.zeros(()) if x.dim() == 1 else torch.zeros(x.shape[0], x.shape[2])


def does_not_load():
    raise RuntimeError(os.fsdecode(b"caf\xe9"))


def chatty(inputs=None):
    """Print wherever it can: as a plugin, when it is prepared and when it runs."""
    print("plugin")
    if inputs is None:
        return [Backend("chatty", chatty, "a test", operator="grouped_gemm")]
    os.write(1, b'{"value": "not an answer"}\n')
    right = prepare_torch_loop(inputs)

    def run():
        print("run", flush=True)
        return right()

    return run


def adds_in_place(inputs):
    return lambda: inputs.x.add_(inputs.y)


def adds(inputs):
    return lambda: inputs.x + inputs.y


ADDERS = tuple(Backend(add.__name__, add, "a test", operator="vector_add") for add in (adds_in_place, adds))


def says_threads(inputs):
    import torch

    raise RuntimeError(f"{torch.get_num_threads()} threads")


THREADS = Backend("says_threads", says_threads, "a test", operator="vector_add")


def reads_routing(inputs):
    """Read the routing in each call."""
    import torch

    def run():
        parts = inputs.a.tensor_split(inputs.offs[:-1].tolist())
        return torch.cat([rows @ b for rows, b in zip(parts, inputs.b, strict=True)])

    return run


def dies_rerouted(inputs):
    """End the process in a call with another routing."""
    right, before = prepare_torch_loop(inputs), inputs.offs.clone()
    return lambda: right() if inputs.offs.equal(before) else os._exit(7)


ROUTED = tuple(Backend(f.__name__, f, "a test", operator="grouped_gemm") for f in (reads_routing, dies_rerouted))
