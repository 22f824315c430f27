"""Our operators and backends as TritonBench's: classes, methods, names in lists."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, new_class
from typing import Any

from groupbench.kernels.device import cuda_capability
from groupbench.operators.dtypes import dtype_name
from groupbench.operators.errors import Unavailable
from groupbench.operators.hosts import foreign
from groupbench.operators.hosts.adapter.internals import (
    NO_PRECISION,
    PACKAGE,
    TritonBenchLatency,
    operator_list,
    triton_op,
)
from groupbench.operators.hosts.journal import Finished, Setup
from groupbench.operators.measure.protocol import cooled_bursts
from groupbench.operators.measure.selection import why_unavailable
from groupbench.operators.operator import Backend, Example, Operator, Target


@dataclass(frozen=True)
class OperatorContext:
    """The attribute `groupbench` on a class for TritonBench, with the methods' settings.

    Attributes:
        ours: Our operator, or the one whose backends are added to TritonBench's; None if we have no such operator.
        metrics: Columns that the operator shows by default.
        finished: Cells that an earlier process completed, by input and backend.
    """

    setup: Setup
    ours: Operator | None
    metrics: tuple[str, ...] = ()
    finished: dict[tuple[int, str], Finished] = field(default_factory=dict)

    @property
    def operator(self) -> Operator:
        assert self.ours is not None
        return self.ours


def add_backends(cls: type, tb_name: str, operator: Operator, shapes: Sequence[str] | None = None) -> None:
    """Register the operator's backends as methods of a TritonBench operator class.

    Args:
        shapes: Shapes that a class of ours measures; their baseline is the class's, and its mode may be bwd. None for a
            class of TritonBench's, which keeps its own methods.
    """
    own = shapes is not None
    baselines = {operator.baseline_of(operator.parse_shape(text)) for text in shapes or ()}
    baseline = baselines.pop() if len(baselines) == 1 else operator.baseline
    for backend in operator.backends:
        if not own and backend.name in triton_op.REGISTERED_BENCHMARKS.get(tb_name, ()):
            continue
        triton_op.register_benchmark(
            operator_name=tb_name,
            func_name=backend.name,
            baseline=own and backend.name == baseline,
            enabled=not own or not backend.only_as_baseline or backend.name == baseline,
            fwd_only=not own,  # ours are prepared for the requested mode
            cls=cls,
        )(_method(operator, backend))


def _target(device: str, dtype: str) -> Target:
    return Target(
        device=device,
        dtype=dtype,
        interpreted=interpreted_here(),
        capability=cuda_capability() if device == "cuda" else None,
    )


def interpreted_here() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def _method(operator: Operator, backend: Backend) -> Any:
    def prepare(self: Any, *example_inputs: Any) -> Any:
        example = example_of(operator, example_inputs)
        reason = why_unavailable(operator, backend.name, _target(self.device, example.dtype))
        if reason is not None:
            raise NotImplementedError(reason)  # TritonBench shows it in the cell and continues
        try:
            return backend.prepare(example.inputs)
        except Unavailable as unavailable:
            raise NotImplementedError(str(unavailable)) from unavailable

    prepare.__name__ = backend.name
    return prepare


class Own(triton_op.BenchmarkOperator):
    """One of our operators as a TritonBench operator, on the selected suites."""

    DEFAULT_METRICS = ["latency", "speedup", "accuracy", "tflops"]  # noqa: RUF012 - TritonBench's spelling
    groupbench: OperatorContext
    mode: Any

    def get_bwd_fn(self, fwd_fn: Any) -> Any:
        """Return the function as it is: in mode bwd our backends prepare the backward pass themselves."""
        return fwd_fn

    def _get_bm_func(self, bm_func_name: str) -> Any:
        """Present mode fwd_bwd as bwd: our function runs both passes, and TritonBench would call it for each."""
        if self.mode != triton_op.Mode.FWD_BWD:
            return super()._get_bm_func(bm_func_name)
        self.mode = triton_op.Mode.BWD
        try:
            return super()._get_bm_func(bm_func_name)
        finally:
            self.mode = triton_op.Mode.FWD_BWD

    def get_input_iter(self) -> Any:
        for text in self.groupbench.setup.shapes:
            yield self.groupbench_inputs(self.groupbench.operator.parse_shape(text))

    def groupbench_inputs(self, shape: Any) -> tuple[Any]:
        """Return the example in a function: TritonBench passes functions through and refuses unknown types."""
        dtype = dtype_of(self)
        example = Example(
            shape, dtype, self.groupbench.operator.make_inputs(shape, dtype, self.device, self.groupbench.setup.seed)
        )
        return (lambda: example,)

    def get_available_num_inputs(self) -> int:
        return len(self.groupbench.setup.shapes)

    def get_x_val(self, example_inputs: Any) -> str:
        return str(example_of(self.groupbench.operator, example_inputs).shape)

    def tflops(self, fn_name: str, example_inputs: Any, metrics: Any) -> float:
        shape = example_of(self.groupbench.operator, example_inputs).shape
        return float(self.groupbench.operator.flops(shape) / metrics.latency / 1e9)

    def accuracy(self, fn: Any, baseline_fn: Any) -> bool:
        """Compare with the reference in higher precision, not with another backend."""
        return self.groupbench_accuracy(fn)[1] is None

    def _measure_latency(self, fn: Any, warmup: Any, rep: Any, repcnt: Any) -> Any:
        """Time cooled bursts and keep outliers. Return None for an interpreted kernel: only the record has the time."""
        protocol = self.groupbench.setup.protocol
        interpreted = interpreted_here() and self.groupbench.operator.backend(self._cur_backend_name).kind != "torch"
        bursts = cooled_bursts(fn, protocol, self.device, interpreted)
        self.groupbench_bursts, self.groupbench_enqueue_ms = bursts
        if interpreted:
            return None
        times = [ms for burst in self.groupbench_bursts for ms in burst]
        return TritonBenchLatency(times, remove_outliers=False)


def own_operator(setup: Setup, operator: Operator) -> type:
    """Return a TritonBench operator class that runs one of our operators on the selected suites."""
    facts = {
        "DEFAULT_PRECISION": operator.dtypes[0],
        "FWD_ONLY": operator.modes == ("fwd",),
        "groupbench": OperatorContext(setup, operator),
    }
    return derived(setup.op, (Own,), facts)


def derived(tb_name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> type:
    """Return a class of these bases. TritonBench finds an operator's name in the class's module path."""
    cls = new_class("Operator", bases, exec_body=lambda namespace: namespace.update(attributes))
    cls.__module__ = f"{PACKAGE}.{tb_name}"
    return cls


def add_operator(tb_name: str, cls: type) -> None:
    """Make `--op tb_name` find the class: a module below tritonbench.operators, and a name in the list of operators."""
    module = ModuleType(f"{PACKAGE}.{tb_name}")
    module.Operator = cls  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    setattr(sys.modules[PACKAGE], tb_name, module)
    listed = operator_list._list_opbench_paths
    # TritonBench takes the last part of each path as an operator's name, and names must be unique.
    operator_list._list_opbench_paths = lambda: [*(path for path in listed() if Path(path).name != tb_name), tb_name]


def example_of(ours: Operator, example_inputs: Any) -> Example:
    """Return the inputs in the form that our backends take; those of TritonBench are converted."""
    if callable(example_inputs[0]):
        made: Example = example_inputs[0]()
        return made
    assert ours.from_tritonbench is not None
    return ours.from_tritonbench(*example_inputs)


def inputs_of(example_inputs: Any) -> Any:
    """Return the inputs that a backend could change: our operator's, or TritonBench's, which all backends share."""
    return example_inputs[0]().inputs if callable(example_inputs[0]) else example_inputs


def dtype_of(op: Any) -> str:
    """Return the operator's precision, or the inputs' dtype. TritonBench has no torch dtype for fp8."""
    precision: str = op.tb_args.precision
    if precision == NO_PRECISION:
        return foreign.input_dtype(op.example_inputs) or precision
    return dtype_name(op.dtype) or precision
