"""Dataclasses for an operator: facts and plain functions, no base class.

An operator has functions for a shape's inputs and the reference in higher precision, and backends. A backend turns
inputs into a callable. One-time work (packing, compiling, tuning, tables) comes before the callable is returned; work
for every step, including the output's allocation, is inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from groupbench.operators.deferred import torch

if TYPE_CHECKING:
    from groupbench.operators.tolerances import Tolerance
    from groupbench.tracker.tools.traces import TraceStep


@dataclass(frozen=True)
class Target:
    """The device, dtype and mode for a backend; the argument of `unavailable`."""

    device: str  # "cuda" or "cpu"
    dtype: str  # "fp16", "bf16", "fp32"
    interpreted: bool = False  # Triton and Helion kernels run in Triton's interpreter
    capability: tuple[int, int] | None = None  # of the GPU, e.g. (9, 0)


@dataclass(frozen=True)
class Example:
    """Inputs with their shape and dtype. Not a tuple, because TritonBench would cast the tensors in one."""

    shape: Any
    dtype: str
    inputs: Any


KINDS = ("torch", "triton", "helion")


def runs_everywhere(target: Target) -> None:
    """Return None: the backend runs everywhere."""


@dataclass(frozen=True)
class Placement:
    """A batch of inputs, with the same planted inputs of one row of the output as others."""

    inputs: Any
    row: int  # of the output; of its first dimension
    rows: int  # of the output in all


Run = Callable[[], Any]  # the output, a tensor; a tuple of them where the reference names several


@dataclass(frozen=True)
class Backend:
    """One way to compute an operator.

    Attributes:
        name: As users type it: `--only name`; printable, without a comma.
        prepare: Inputs -> callable without arguments that returns the operator's output, freshly allocated. It is
            called with new values in the same inputs; a copy of one in another layout is made by relayout.laid_out.
        source: Description, and the origin of the idea.
        kind: "torch" (timed for real on any device), "triton" or "helion" (interpreted without a GPU).
        unavailable: Why it cannot run on a target, or None; asked before anything is made.
        operator: Name of its operator; only a plugin needs to set it.
        prepare_bwd, prepare_fwd_bwd: `prepare` for the operator's modes bwd and fwd_bwd, or None.
        tolerance: Row of the tolerance table, if not that of the output's dtype; {dtype} in it stands for that dtype.
        packages: Distributions, by their pip names, whose code it runs; its records name their versions.
        only_as_baseline: Measured by default only on shapes that it is the baseline of.
    """

    name: str
    prepare: Callable[[Any], Run]
    source: str
    kind: str = "torch"
    unavailable: Callable[[Target], str | None] = runs_everywhere
    operator: str = ""
    tolerance: str | None = None
    prepare_bwd: Callable[[Any], Run] | None = None
    prepare_fwd_bwd: Callable[[Any], Run] | None = None
    packages: tuple[str, ...] = ()
    only_as_baseline: bool = False


@dataclass(frozen=True)
class Backward:
    """The mode bwd of an operator: all gradients, from the tensors saved by the forward pass, which is not timed.

    The fields are those of the operator. `reference` returns the gradients by name, such as {"dA": ..., "dB": ...}; the
    callable made by a backend's `prepare_bwd` returns them in that order, as described by `returns`. In mode fwd_bwd,
    which times both passes, the output comes first.
    """

    make_inputs: Callable[[Any, str, str, int], Any]
    reference: Callable[[Any], Mapping[str, torch.Tensor]]
    flops: Callable[[Any], int]
    min_bytes: Callable[[Any, str], int]
    suites: Mapping[str, tuple[Any, ...]]
    returns: str
    moves: tuple[str, ...] = ()
    reroute: Callable[[Any, Any, int], bool] | None = None
    placements: Callable[[Any], Iterator[Placement]] | None = None
    nonfinite: bool = False
    output_dtype: Callable[[str], str] | None = None  # if not the operator's


@dataclass(frozen=True)
class Operator:
    """One benchmarked operation: facts and functions.

    Attributes:
        suites: Name -> shapes; the first one is the default.
        parse_shape: Canonical text or the `--shapes` spelling -> shape; raises ValueError with the accepted form. A
            shape's `str` is its canonical text, its `dims` are its sizes by name.
        make_inputs: (shape, dtype name, device, seed) -> inputs, passed to `prepare` and `reference`; annotated to
            return a dataclass with a comment on each field (see contract.py).
        reference: Inputs -> output in fp32 or better; a dict of outputs if backends return a tuple of them.
        returns: Description of the result of a backend's callable: sizes, and the dtype if it is not the inputs'.
        flops, min_bytes: Of a shape (and dtype): rows in use only; each input read and each output written once; 0
            unknown.
        output_dtype: Dtype name of a cell -> that of its output, which selects the tolerance.
        decode: Output -> its values as a tensor [M, N], or a dict like the reference's, for an output in another form;
            raises TypeError.
        from_tritonbench: The example inputs of TritonBench's operator of that name -> Example, or None.
        on_trace: (shape, a step of a routing trace) -> the shape with that step's rows; None without routing. Raises
            ValueError for a shape that cannot be routed.
        moves: Names of the inputs that get new values between calls (`a`, `x.weights`); all that hold floating-point
            values if empty. Tensors saved by the forward pass do not change in a mode that takes them.
        reroute: (shape, inputs, seed) -> whether the routing of the inputs was replaced, in place, by another of as
            many rows; None without routing.
        placements: Inputs -> batches with the same planted row of the output, for the metric batch_invariant, or None.
        nonfinite: Whether NaN and infinity in the inputs give those of the reference, at the same places.
        backward: The mode bwd, or None if there is only the forward pass.
        forward_backward: The mode fwd_bwd, a training step, or None.
        suite_baselines: Suite -> the baseline of its shapes, if not `baseline`.
        tolerances: Additional rows for the tolerance table.
        takes: (name, meaning) of the arguments of backends, if `make_inputs` is not annotated with a class.
    """

    name: str
    backends: tuple[Backend, ...]
    baseline: str
    suites: Mapping[str, tuple[Any, ...]]
    parse_shape: Callable[[str], Any]
    make_inputs: Callable[[Any, str, str, int], Any]
    reference: Callable[[Any], torch.Tensor | Mapping[str, torch.Tensor]]
    flops: Callable[[Any], int]
    min_bytes: Callable[[Any, str], int]
    returns: str
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")
    shapes_help: str = ""
    output_dtype: Callable[[str], str] = lambda dtype: dtype
    decode: Callable[[Any], Any] | None = None
    from_tritonbench: Callable[..., Example] | None = None
    on_trace: Callable[[Any, TraceStep], Any] | None = None
    moves: tuple[str, ...] = ()
    reroute: Callable[[Any, Any, int], bool] | None = None
    placements: Callable[[Any], Iterator[Placement]] | None = None
    nonfinite: bool = False
    backward: Backward | None = None
    forward_backward: Backward | None = None
    suite_baselines: Mapping[str, str] = field(default_factory=dict)
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    takes: tuple[tuple[str, str], ...] = ()

    @property
    def modes(self) -> tuple[str, ...]:
        further = {"bwd": self.backward, "fwd_bwd": self.forward_backward}
        return ("fwd", *(mode for mode, measured in further.items() if measured is not None))

    def in_mode(self, mode: str) -> Operator:
        """Return the operator for one mode. Raises KeyError for an unknown mode."""
        if mode == "fwd":
            return self
        measured = {"bwd": self.backward, "fwd_bwd": self.forward_backward}.get(mode)
        if measured is None:
            raise KeyError(mode)
        facts = {field.name: getattr(measured, field.name) for field in fields(measured)}
        facts |= {
            "backends": tuple(_in_mode(backend, mode, self.modes) for backend in self.backends),
            "output_dtype": measured.output_dtype or self.output_dtype,
        }
        return replace(self, from_tritonbench=None, suite_baselines={}, **facts)

    def baseline_of(self, shape: Any) -> str:
        """Return the baseline's name for a shape, the backend speed-ups are relative to."""
        for suite, name in self.suite_baselines.items():
            if str(shape) in map(str, self.suites[suite]):
                return name
        return self.baseline

    def is_default(self, backend: str, shape: Any) -> bool:
        """Return whether a backend is measured on a shape if the user names no backends."""
        return not self.backend(backend).only_as_baseline or backend == self.baseline_of(shape)

    def backend(self, name: str) -> Backend:
        """Return a backend by name. Raises KeyError."""
        for backend in self.backends:
            if backend.name == name:
                return backend
        raise KeyError(name)

    def with_backends(self, more: tuple[Backend, ...]) -> Operator:
        """Return the operator with further backends, which replace namesakes."""
        by_name = {backend.name: backend for backend in (*self.backends, *more)}
        return replace(self, backends=tuple(by_name.values()))


def _in_mode(backend: Backend, mode: str, modes: tuple[str, ...]) -> Backend:
    """Return the backend in a mode. If it lacks the mode, the reason names the operator's other mode with gradients."""
    prepares = {"bwd": backend.prepare_bwd, "fwd_bwd": backend.prepare_fwd_bwd}
    prepare = prepares.pop(mode)
    if prepare is not None:
        return replace(backend, prepare=prepare)
    has = [other for other, prepare in prepares.items() if prepare is not None and other in modes]
    if has:
        lacks = f"{backend.name} has no mode {mode} by itself; --mode {has[0]} measures its backward"
    else:
        lacks = f"{backend.name} has no {'backward' if mode == 'bwd' else 'mode fwd_bwd'}"
    return replace(backend, unavailable=lambda target: lacks)
