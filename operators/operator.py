"""What an operator is: facts and plain functions, no base class.

An operator knows how to make inputs of a shape, the same maths in higher precision, and its backends. A backend
turns inputs into a callable; whatever a caller does once (packing, compiling, tuning, tables) it does before
returning the callable, and whatever a caller pays for on every step (allocating the output included) inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from groupbench.operators.catalog.trace import Step
    from groupbench.operators.tolerances import Tolerance


@dataclass(frozen=True)
class Target:
    """Where and on what a backend is asked to run; all that `unavailable` may look at."""

    device: str  # "cuda" or "cpu"
    dtype: str  # "fp16", "bf16", "fp32"
    interpreted: bool = False  # Triton and Helion kernels run in Triton's interpreter
    capability: tuple[int, int] | None = None  # of the GPU, e.g. (9, 0)


@dataclass(frozen=True)
class Example:
    """Inputs with what they are of. Opaque on purpose: TritonBench would walk into a tuple and cast what it finds."""

    shape: Any
    dtype: str
    inputs: Any


KINDS = ("torch", "triton", "helion")

Run = Callable[[], Any]  # the output, a tensor; a tuple of them where the reference names several


@dataclass(frozen=True)
class Backend:
    """One way to compute an operator.

    name         as users type it: `--only name`; printable, without a comma
    prepare      inputs -> callable without arguments that returns the operator's output, freshly allocated. It is
                 called with new values in the same inputs; a copy of one in another layout is made by relayout.laid_out
    source       what it is, and where the idea is from
    kind         "torch" (timed for real on any device), "triton" or "helion" (interpreted without a GPU)
    unavailable  why it cannot run on a target, or None; asked before anything is made
    operator     which operator it belongs to; only a plugin needs to say
    prepare_bwd, prepare_fwd_bwd  the same of the operator's modes bwd and fwd_bwd, None where it has none
    tolerance    the row of the tolerance table it is held to, where that is not its output's dtype, which {dtype} is
    packages     distributions, as pip names them, whose versions its records name: what runs is theirs
    """

    name: str
    prepare: Callable[[Any], Run]
    source: str
    kind: str = "torch"
    unavailable: Callable[[Target], str | None] = field(default=lambda target: None)
    operator: str = ""
    tolerance: str | None = None
    prepare_bwd: Callable[[Any], Run] | None = None
    prepare_fwd_bwd: Callable[[Any], Run] | None = None
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backward:
    """What an operator's mode bwd measures: all gradients, given what the forward has saved. The forward is not timed.

    Fields are as the operator's own. `reference` gives a gradient by name, such as {"dA": ..., "dB": ...}; a backend's
    `prepare_bwd` makes a callable that returns them in that order, as `returns` tells. Of mode fwd_bwd, which times
    both, the output is first.
    """

    make_inputs: Callable[[Any, str, str, int], Any]
    reference: Callable[[Any], Mapping[str, torch.Tensor]]
    flops: Callable[[Any], int]
    min_bytes: Callable[[Any, str], int]
    suites: Mapping[str, tuple[Any, ...]]
    returns: str
    moves: tuple[str, ...] = ()
    reroute: Callable[[Any, Any, int], bool] | None = None


@dataclass(frozen=True)
class Operator:
    """Facts and functions of one benchmarked operation.

    suites       name -> shapes; the first one is the default
    parse_shape  canonical text or the `--shapes` spelling -> shape; raises ValueError, saying what it takes. A shape's
                 `str` is its canonical text, its `dims` are its sizes by name
    make_inputs  (shape, dtype name, device, seed) -> inputs, handed to `prepare` and `reference`; annotated to return a
                 dataclass with a comment beside each field (see contract.py)
    reference    inputs -> output in fp32 or better; several by name, where backends return a tuple of them
    returns      what a backend's callable returns, in words: sizes, and the dtype where it is not the inputs'
    flops, min_bytes  of a shape (and dtype); real rows only, each input read once, each output written once; 0 unknown
    output_dtype  dtype name of a cell -> that of its output; by it the tolerance is chosen
    decode        output -> the values it stands for, [M, N] (several where the reference has several), where it is no
                  such tensor itself; raises TypeError
    from_tritonbench  the example inputs of TritonBench's operator of that name -> Example; None where it has none
    on_trace      (shape, a step of a routing trace) -> the shape with that step's rows; None where there is no routing.
                  Raises ValueError where the shape takes none
    moves         names of the inputs that get new values between calls (`a`, `x.weights`); all that hold floating-point
                  values if empty. What a forward has saved does not move in a mode that is given it
    reroute       (shape, inputs, seed) -> whether the inputs have another routing now, of as many rows, written in
                  place; None where there is no routing
    backward      what mode bwd measures; None where there is the forward alone
    forward_backward  what mode fwd_bwd measures, a training step; None where it has no such mode
    tolerances    rows of its own for the tolerance table
    takes         (name, what it is) of the arguments that backends take, where `make_inputs` says no class of inputs
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
    on_trace: Callable[[Any, Step], Any] | None = None
    moves: tuple[str, ...] = ()
    reroute: Callable[[Any, Any, int], bool] | None = None
    backward: Backward | None = None
    forward_backward: Backward | None = None
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    takes: tuple[tuple[str, str], ...] = ()

    @property
    def modes(self) -> tuple[str, ...]:
        further = {"bwd": self.backward, "fwd_bwd": self.forward_backward}
        return ("fwd", *(mode for mode, measured in further.items() if measured is not None))

    def in_mode(self, mode: str) -> Operator:
        """The operator that a mode measures, one like any other. Raises KeyError for a mode it does not have."""
        if mode == "fwd":
            return self
        measured = {"bwd": self.backward, "fwd_bwd": self.forward_backward}.get(mode)
        if measured is None:
            raise KeyError(mode)
        return replace(
            self,
            backends=tuple(_in_mode(backend, mode, self.modes) for backend in self.backends),
            make_inputs=measured.make_inputs,
            reference=measured.reference,
            flops=measured.flops,
            min_bytes=measured.min_bytes,
            suites=measured.suites,
            returns=measured.returns,
            moves=measured.moves,
            reroute=measured.reroute,
            from_tritonbench=None,
        )

    def backend(self, name: str) -> Backend:
        """The backend of that name. Raises KeyError."""
        for backend in self.backends:
            if backend.name == name:
                return backend
        raise KeyError(name)

    def with_backends(self, more: tuple[Backend, ...]) -> Operator:
        """The same operator with further backends, which take their namesakes' places."""
        found = {backend.name: backend for backend in (*self.backends, *more)}
        return replace(self, backends=tuple(found.values()))


def _in_mode(backend: Backend, mode: str, modes: tuple[str, ...]) -> Backend:
    """The backend in a mode; where it has none such, its reason names the operator's other mode with gradients."""
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
