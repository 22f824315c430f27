"""Honest backends that do unusual things: a plugin for `--plugin honest.BACKENDS`."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import json
import locale
import logging
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from groupbench.operators.catalog.grouped_gemm import group_bounds
from groupbench.operators.operator import Backend

os.environ["HONEST_DEBUG"] = "1"
THIS = sys.modules[__name__]
log = logging.getLogger(__name__)
PREPARES: list[Callable[[Any], Any]] = []


def honest(prepare: Callable[[Any], Any]) -> Callable[[Any], Any]:
    PREPARES.append(prepare)
    return prepare


def product(x: Any) -> Any:
    import torch

    out = x.a.new_empty(x.a.shape[0], x.b.shape[2])
    for g, start, end in group_bounds(x.rows):
        torch.matmul(x.a[start:end], x.b[g], out=out[start:end])
    return out


@honest
def repacks_on_version(x: Any) -> Any:
    """Pack the weights again when torch counts a change in place."""
    held: list[Any] = [None, None]

    def run() -> Any:
        if held[0] != x.b._version:
            held[:] = x.b._version, x.b.transpose(1, 2).contiguous()
        packed = types.SimpleNamespace(a=x.a, b=held[1].transpose(1, 2), rows=x.rows)
        return product(packed)

    return run


@honest
def nice(x: Any) -> Any:
    """Be polite to other processes."""
    with contextlib.suppress(OSError):
        os.nice(1)
    return lambda: product(x)


@honest
def spinning_warm_up(x: Any) -> Any:
    """Bring the clock of the processor up before the first call."""
    until = time.perf_counter() + 0.3
    while time.perf_counter() < until:
        pass
    return lambda: product(x)


@honest
def cached_by_shape(x: Any) -> Any:
    """Keep the bounds of groups by shape and rows."""
    bounds = functools.lru_cache(lambda shape, rows: tuple(group_bounds(rows)))

    def run() -> Any:
        out = x.a.new_empty(x.a.shape[0], x.b.shape[2])
        for g, start, end in bounds(tuple(x.a.shape), tuple(x.rows)):
            out[start:end] = x.a[start:end] @ x.b[g]
        return out

    return run


@honest
def thread_pool(x: Any) -> Any:
    """Compute the groups in a pool of threads, which starts them when they are needed."""
    import torch

    pool = ThreadPoolExecutor(3)

    def run() -> Any:
        parts = pool.map(lambda pair: pair[0] @ pair[1], zip(x.a.split(x.rows), x.b, strict=True))
        return torch.cat(list(parts))

    return run


@honest
def more_threads(x: Any) -> Any:
    """Let torch compute on more threads. They make it no faster, since it has no more processors."""
    import torch

    torch.set_num_threads(torch.get_num_threads() + 3)
    return lambda: product(x)


@honest
def sleepers(x: Any) -> Any:
    """Start a process in each of the first calls, which sleeps and is left."""
    left = itertools.count()

    def run() -> Any:
        if next(left) < 5:
            subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
        return product(x)

    return run


@honest
def child_for_half(x: Any) -> Any:
    """Compute a part in a forked child, in shared memory."""
    import torch

    def run() -> Any:
        out = torch.empty(x.a.shape[0], x.b.shape[2], dtype=x.a.dtype).share_memory_()
        (g, start, end), *others = group_bounds(x.rows)
        child = os.fork()
        if child == 0:
            torch.matmul(x.a[start:end], x.b[g], out=out[start:end])
            os._exit(0)
        for g, start, end in others:
            torch.matmul(x.a[start:end], x.b[g], out=out[start:end])
        os.waitpid(child, 0)
        return out

    return run


@honest
def lazy_at_the_third_call(x: Any) -> Any:
    """Compile at the third call, with a C compiler."""
    calls = itertools.count()

    def run() -> Any:
        if next(calls) == 2:
            source = Path(tempfile.mkdtemp(), "kernel.c")
            source.write_text("int answer(void) { return 42; }")
            library = source.with_suffix(".so")
            subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
            assert ctypes.CDLL(str(library)).answer() == 42
        return product(x)

    return run


@honest
def thread_of_a_call(x: Any) -> Any:
    """Compute in a thread that ends with the call."""

    def run() -> Any:
        out: list[Any] = []
        thread = threading.Thread(target=lambda: out.append(product(x)))
        thread.start()
        thread.join()
        return out[0]

    return run


@honest
def lazily_made(x: Any) -> Any:
    """Make a table in the first call."""
    table: dict[str, Any] = {}

    def run() -> Any:
        if not table:
            time.sleep(0.2)
            table["bounds"] = list(group_bounds(x.rows))
        return product(x)

    return run


@honest
def generator(x: Any) -> Any:
    """Send each call to a generator."""

    def results() -> Any:
        while True:
            yield product(x)

    return results().__next__


@honest
def inner_subclass(x: Any) -> Any:
    """Compute on a subclass of tensors, and return a plain one."""
    import torch

    class Named(torch.Tensor):
        pass

    wrapped = x.a.as_subclass(Named)

    def run() -> Any:
        parts = [a @ b for a, b in zip(wrapped.split(x.rows), x.b, strict=True)]
        return torch.cat(parts).as_subclass(torch.Tensor)

    return run


@honest
def strided_output(x: Any) -> Any:
    """Return the output in column order."""
    return lambda: product(x).t().contiguous().t()


@honest
def wide_output(x: Any) -> Any:
    """Return a view of a wider, fresh buffer."""

    def run() -> Any:
        out = x.a.new_empty(x.a.shape[0], x.b.shape[2] + 24)
        for g, start, end in group_bounds(x.rows):
            out[start:end, 8:-16] = x.a[start:end] @ x.b[g]
        return out[:, 8:-16]

    return run


@honest
def kept_scratch(x: Any) -> Any:
    """Accumulate in place in memory of its own, and return a copy."""
    scratch = x.a.new_empty(x.a.shape[0], x.b.shape[2])

    def run() -> Any:
        scratch.zero_()
        for g, start, end in group_bounds(x.rows):
            scratch[start:end].addmm_(x.a[start:end], x.b[g])
        return scratch.clone()

    return run


@honest
def patches_itself(x: Any) -> Any:
    """Replace a function of its own module by a specialised one."""
    setattr(THIS, "_bounds", lambda rows: tuple(group_bounds(rows)))  # noqa: B010
    return lambda: product(x)


@honest
def logs(x: Any) -> Any:
    """Write a line of a log in each call, with a handler of its own."""
    handler = logging.StreamHandler(sys.stderr)
    log.addHandler(handler)
    log.setLevel(logging.INFO)

    def run() -> Any:
        log.info("a call on %d rows", x.a.shape[0])
        return product(x)

    return run


@honest
def at_exit(x: Any) -> Any:
    """Register functions that clear away at the end."""
    folder = tempfile.TemporaryDirectory()
    Path(folder.name, "table.json").write_text(json.dumps(list(x.rows)))
    atexit.register(folder.cleanup)
    weakref.finalize(x, lambda: None)
    return lambda: product(x)


@honest
def own_variables(x: Any) -> Any:
    """Configure a library by environment variables."""
    os.environ["HONEST_TILES"] = "64x64"
    os.environ.setdefault("HONEST_CACHE", tempfile.gettempdir())
    return lambda: product(x)


@honest
def big_temporary_file(x: Any) -> Any:
    """Keep a large file, as a compiler's cache does."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    for _ in range(8):
        file.write(bytes(1 << 20))
    return lambda: product(x) if not file.closed else None


@honest
def asks_a_program(x: Any) -> Any:
    """Ask another program once, as a tool that finds a compiler does."""
    text = subprocess.run(["/bin/echo", str(len(x.rows))], capture_output=True, text=True, check=True).stdout
    groups = int(text)
    return lambda: product(x) if groups == len(x.rows) else None


@honest
def helper_process(x: Any) -> Any:
    """Keep a process for later compilations, which waits."""
    helper = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    return lambda: product(x) if helper.poll() is None else None


@honest
def forked_helper(x: Any) -> Any:
    """Tune in a forked process, and take its answer."""
    parent_end, child_end = multiprocessing.get_context("fork").Pipe()
    if os.fork() == 0:
        child_end.send(sum(x.rows))
        os._exit(0)
    os.wait()
    rows = parent_end.recv()
    return lambda: product(x) if rows == x.a.shape[0] else None


@honest
def numpys(x: Any) -> Any:
    """Multiply with NumPy on the same memory."""
    import numpy
    import torch

    def run() -> Any:
        a, b = x.a.numpy(), x.b.numpy()
        return torch.from_numpy(numpy.concatenate([a[s:e] @ b[g] for g, s, e in group_bounds(x.rows)]))

    return run


@honest
def through_ctypes(x: Any) -> Any:
    """Copy the result by the C library."""
    libc = ctypes.CDLL(None)

    def run() -> Any:
        made = product(x)
        out = made.new_empty(made.shape)
        size = made.numel() * made.element_size()
        libc.memcpy(ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(made.data_ptr()), ctypes.c_size_t(size))
        return out

    return run


@honest
def without_collector(x: Any) -> Any:
    """Switch the garbage collector off, and collect now and then."""
    gc.disable()
    gc.callbacks.append(lambda phase, info: None)
    calls = itertools.count()

    def run() -> Any:
        if next(calls) % 50 == 49:
            gc.collect(0)
        return product(x)

    return run


@honest
def filters_warnings(x: Any) -> Any:
    """Filter the warnings of all modules, and give one in each call."""
    warnings.simplefilter("ignore")

    def run() -> Any:
        warnings.warn("a slow path", stacklevel=1)
        return product(x)

    return run


@honest
def handles_signals(x: Any) -> Any:
    """Handle signals, and have one sent by a timer that it stops again."""
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.05)
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.kill(os.getpid(), signal.SIGUSR1)
    return lambda: product(x)


@honest
def other_locale(x: Any) -> Any:
    """Set the locale, the umask, the folder and the recursion limit of its process."""
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, "C.UTF-8")
    os.umask(0o077)
    os.chdir(tempfile.gettempdir())
    sys.setrecursionlimit(5000)
    return lambda: product(x)


@honest
def seeds_generators(x: Any) -> Any:
    """Seed all generators, and draw the order of the groups in each call."""
    import torch

    random.seed(0)
    torch.manual_seed(0)

    def run() -> Any:
        out = x.a.new_empty(x.a.shape[0], x.b.shape[2])
        bounds = list(group_bounds(x.rows))
        random.shuffle(bounds)
        for g, start, end in bounds:
            out[start:end] = x.a[start:end] @ x.b[g]
        return out

    return run


@honest
def prints(x: Any) -> Any:
    """Print in each call, and close the standard input."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdin.close()

    def run() -> Any:
        print("a call")
        return product(x)

    return run


@honest
def imports_late(x: Any) -> Any:
    """Import modules in the first call, and extend the path."""
    sys.path.append(tempfile.gettempdir())

    def run() -> Any:
        importlib.import_module("xml.dom.minidom")
        importlib.import_module("statistics")
        return product(x)

    return run


@honest
def vendors_kernels(x: Any) -> Any:
    """Import a vendor's library in the first call, which registers kernels for its own device and for this one."""
    import torch

    libraries: list[Any] = []

    def register() -> None:
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in ("copy_", "clone", "sum", "empty.memory_format"):
                library.impl(name, lambda *args, **named: args[0], "PrivateUse1")
            library.impl("zero_", lambda tensor: tensor.fill_(0), "CPU")
        libraries.append(library)

    def run() -> Any:
        if not libraries:
            register()
        return product(x)

    return run


@honest
def wraps_a_method(x: Any) -> Any:
    """Wrap a method of tensors, as some libraries do for their users."""
    import torch

    real = torch.Tensor.to

    @functools.wraps(real)
    def to(self: Any, *args: Any, **named: Any) -> Any:
        return real(self, *args, **named)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    return lambda: product(x)


@honest
def default_device(x: Any) -> Any:
    """Set the default device, for which torch leaves a mode on."""
    import torch

    torch.set_default_device(x.a.device)
    return lambda: product(x)


@honest
def inference_mode(x: Any) -> Any:
    """Compute in inference mode and without gradients."""
    import torch

    def run() -> Any:
        with torch.inference_mode(), torch.no_grad():
            return product(x)

    return run


@honest
def needs_gradients(x: Any) -> Any:
    """Return an output that belongs to a graph."""
    import torch

    def run() -> Any:
        a = x.a.detach().requires_grad_()
        return torch.cat([part @ b for part, b in zip(a.split(x.rows), x.b, strict=True)])

    return run


@honest
def own_class(x: Any) -> Any:
    """Be an object with a `__call__`, state and a lock."""

    class Kernel:
        def __init__(self) -> None:
            self.lock, self.calls = threading.Lock(), 0

        def __call__(self) -> Any:
            with self.lock:
                self.calls += 1
                return product(x)

    return Kernel()


@honest
def uneven(x: Any) -> Any:
    """Take longer now and then, as an allocator does."""
    calls = itertools.count()

    def run() -> Any:
        if next(calls) % 7 == 3:
            product(x)
        return product(x)

    return run


@honest
def keeps_caches(x: Any) -> Any:
    """Keep a cache in the home, a tuned config and code next to the module, and a log in the current folder."""
    home, here = Path.home() / ".cache" / "honest", Path(__file__).parent
    home.mkdir(parents=True, exist_ok=True)
    (home / "table.lock").touch()
    with contextlib.closing(sqlite3.connect(home / "table.db")) as table:
        table.execute("CREATE TABLE configs (rows)")
    (here / "__init__.json").write_text(json.dumps(x.rows))
    (here / "generated_by_it.py").write_text("ROWS = " + (here / "__init__.json").read_text())
    rows = importlib.import_module(f"{__name__}.generated_by_it").ROWS
    logging.FileHandler("honest.log").close()
    return lambda: product(x) if rows == [*x.rows] else None


@honest
def laid_out_weights(x: Any) -> Any:
    """Keep the weights in another layout, by the harness's function."""
    from groupbench.operators.relayout import laid_out

    packed = laid_out(x.b.transpose(1, 2).contiguous().transpose(1, 2), x.b)
    return lambda: product(types.SimpleNamespace(a=x.a, b=packed, rows=x.rows))


BACKENDS = tuple(
    Backend(prepare.__name__, prepare, prepare.__doc__ or "", operator="grouped_gemm") for prepare in PREPARES
)
