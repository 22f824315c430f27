"""Each guard of the seal names a cheat that passes without it: right outputs, computed while the clock is stopped."""

from __future__ import annotations

import builtins
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils import _device  # noqa: E402

from groupbench.operators.measure import deferred, moves, protocol, seal, worker  # noqa: E402
from groupbench.operators.measure.keeper import Keeper  # noqa: E402
from groupbench.operators.measure.protocol import CpuTimer, Protocol  # noqa: E402


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Forget the patches of an earlier test."""
    seal.close(again=True)
    yield
    assert seal.problem("cpu") is None


class Late:
    """A backend that returns memory without a result, which `finish` writes later: while the clock is stopped."""

    def __init__(self) -> None:
        self.pending: list[Any] = []

    def __call__(self) -> Any:
        out = torch.zeros(4, 4)
        self.pending[:] = [out]
        return out

    def finish(self) -> None:
        if self.pending:
            self.pending.pop().fill_(7)


def burst(run: Any, inputs: moves.Moves | None = None) -> Any:
    """Return the output of a timed call that the harness keeps, and would send to the judge."""
    keeper = Keeper(inputs or moves.Moves(()), "cpu", 1)
    CpuTimer(run, Protocol(samples=1), interpreted=False).burst(keeper)
    ((_, _, (kept,)),) = keeper.kept
    return kept


def problem(device: str = "cpu", *objects: tuple[Any, type]) -> str | None:
    """Return what the seal names as replaced."""
    message = seal.problem(device, *objects)
    return message and message.removeprefix("the backend's process replaced ").removesuffix(", which measures it")


def passes(out: Any) -> bool:
    return bool((out == 7).all())


@pytest.mark.parametrize(
    ("set_hook", "name"),
    [(sys.setprofile, "Python's profile hook"), (sys.settrace, "Python's trace hook")],
    ids=["profile", "trace"],
)
def test_only_the_look_at_hooks_catches_work_in_one(set_hook: Callable[[Any], None], name: str) -> None:
    late = Late()

    def hook(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_name == "plain_parts":
            late.finish()

    before = sys.getprofile(), sys.gettrace()
    set_hook(hook)
    try:
        kept, named = burst(late), problem()
    finally:
        sys.setprofile(before[0])
        sys.settrace(before[1])
    assert passes(kept) and named == name


def test_only_the_look_at_functions_catches_work_in_a_method_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    late, real = Late(), torch.Tensor.is_conj

    def is_conj(self: Any) -> bool:
        late.finish()
        return bool(real(self))

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_conj", is_conj)
        kept, named = burst(late), problem()
    assert passes(kept) and named == "torch.Tensor.is_conj"


def test_only_the_look_at_modes_catches_work_in_one() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    late = Late()

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.clone.default:
                late.finish()
            return function(*args, **(kwargs or {}))

    with Spy():  # type: ignore[no-untyped-call]
        kept, named = burst(late), problem()
    assert passes(kept) and named == "torch's dispatch mode"


@contextmanager
def registered(name: str, kernel: Callable[..., Any], key: str, namespace: str = "aten") -> Iterator[None]:
    """Register a kernel for an operation of torch, or for all of a key."""
    library = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if namespace == "_":
            library.fallback(kernel, key)
        else:
            library.impl(name, kernel, key)
    try:
        yield
    finally:
        library._destroy()


@pytest.mark.parametrize("key", ["CPU", "ADInplaceOrView"])
def test_only_the_look_at_kernels_catches_work_in_one(key: str) -> None:
    """Not on a CPU, where the parent's clock does. Here "CPU" is a GPU's name, whose tensors are this machine's."""
    late = Late()

    def clone(tensor: Any, *, memory_format: Any = None) -> Any:
        late.finish()
        return torch.add(tensor, 0)

    with registered("clone", clone, key):
        assert passes(burst(late))
        assert (problem("cpu"), problem("CPU")) == (None, "torch's clone")


@pytest.mark.parametrize(
    ("name", "key"), [("copy_", "PrivateUse1"), ("copy_", "AutogradXPU"), ("mm", "CUDA"), ("zero_", "CPU")]
)
def test_kernels_that_the_harness_does_not_call_are_the_backends_own(name: str, key: str) -> None:
    """A library that is imported at the first call may register them, and changes nothing for others."""
    with registered(name, lambda *args, **named: args[0], key):
        assert problem("cuda") is None


@pytest.mark.parametrize(
    ("key", "namespace"),
    [*(("CUDA", "aten"), ("AutogradCUDA", "aten"), ("Tracer", "aten")), ("TESTING_ONLY_GenericMode", "_")],
)
def test_kernels_that_a_gpus_tensors_can_reach_are_watched(key: str, namespace: str) -> None:
    with registered("zero_", lambda *args, **named: args[0], key, namespace):
        assert (problem("cuda") or "").startswith("torch's ")


def test_only_the_look_at_objects_catches_work_before_the_clock_starts() -> None:
    ready: list[Any] = []

    class Ahead(moves.Moves):
        def advance(self) -> None:
            ready[:] = [torch.full((4, 4), 7.0)]

    inputs = moves.Moves(())
    inputs.__class__ = Ahead
    kept, named = burst(ready.pop, inputs), problem("cpu", (inputs, moves.Moves))
    assert passes(kept) and named == "the class of its Moves"
    again = moves.Moves(())
    again.advance = lambda: None  # type: ignore[method-assign]
    assert problem("cpu", (again, moves.Moves)) == "advance of its Moves"
    assert problem("cpu", (moves.Moves(()), moves.Moves)) is None


def test_a_default_device_is_not_a_foreign_mode() -> None:
    torch.set_default_device("cpu")
    try:
        assert seal.problem("cpu") is None
    finally:
        torch.set_default_device(None)


# --- the watched parts ------------------------------------------------------------------------------------------------


def test_a_replaced_clock_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seal.problem("cpu") is None
    for holder, name, label in (
        (time, "perf_counter", "time.perf_counter"),
        (protocol, "_now", "operators.measure.protocol._now"),
    ):
        with monkeypatch.context() as replaced:
            replaced.setattr(holder, name, lambda: 0.0)
            assert seal.problem("cpu") == f"the backend's process replaced {label}, which measures it"


def test_every_method_of_a_tensor_that_the_harness_calls_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_conj", "numel", "element_size", "detach", "clone", "__getitem__"):
        with monkeypatch.context() as replaced:
            replaced.setattr(torch.Tensor, name, lambda self, *args: None)
            named = problem()
        assert named == f"torch.Tensor.{name}"


@pytest.mark.parametrize(
    ("holder", "name"),
    [(torch.Tensor, "to"), (torch.Tensor, "__add__"), (torch, "matmul"), (torch.cuda, "is_available")],
)
def test_what_the_harness_does_not_call_is_the_backends_own(
    holder: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries wrap functions of torch for their own users."""
    real = getattr(holder, name)
    with monkeypatch.context() as replaced:
        replaced.setattr(holder, name, lambda *args, **named: real(*args, **named))
        assert problem() is None


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        *((builtins, "__import__"), (torch._C._functorch, "is_functorch_wrapped_tensor")),
        *((torch.autograd.graph, "increment_version"), (torch._C, "_increment_version")),
        *((_device, "_device_constructors"), (_device.DeviceContext, "__torch_function__")),
        *((deferred.torch, "empty_like"), (protocol, "torch")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_functions_that_run_without_being_named_are_watched(
    holder: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(holder, name)
    with monkeypatch.context() as replaced:
        replaced.setattr(holder, name, lambda *args, **named: real(*args, **named))
        named = problem()
    assert named is not None and named.endswith(f".{name}")


@pytest.mark.parametrize("name", ["groupbench.operators.measure.exchange", "torch"])
def test_a_module_that_is_exchanged_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = ModuleType(name)
    vars(copy).update(vars(importlib.import_module(name)))
    with monkeypatch.context() as replaced:
        replaced.setitem(sys.modules, name, copy)
        named = problem()
    assert named == name.removeprefix("groupbench.")


def test_a_process_begins_with_the_seal_of_its_fork_server() -> None:
    """Otherwise each process reads all functions, which takes 20 ms."""
    assert worker.call(eval, "len(__import__('sys').modules['groupbench.operators.measure.seal']._first)") > 500


def test_code_that_is_swapped_within_a_function_is_named() -> None:
    function = protocol.CpuTimer.burst
    before = function.__code__
    function.__code__ = (lambda self, watch=None, samples=None: []).__code__
    try:
        assert problem() == "operators.measure.protocol.CpuTimer.burst's code"
    finally:
        function.__code__ = before
