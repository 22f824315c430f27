"""A definition from FlashInfer-Bench or SOL-ExecBench as an operator: workloads are shapes, solutions backends.

    --plugin rmsnorm/definition.json             with workload.jsonl and solution*.json in its folder (SOL-ExecBench)
    --plugin data/definitions/gemm/gemm_n4.json  with data/workloads/**/gemm_n4.jsonl and data/solutions/** (FlashInfer)

Formats: FlashInfer Trace (https://bench.flashinfer.ai, flashinfer-bench 40e6ca7) and SOL-ExecBench (8d2237d), which
adds computed axes, and inputs made by a function of the reference. The reference gets floating-point inputs in fp32.
Tolerances are those of this package, not of the workload.
"""

from __future__ import annotations

import ast
import json
import linecache
import math
import operator as arithmetic
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, make_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from groupbench.operators.deferred import torch
from groupbench.operators.errors import UsageError
from groupbench.operators.operator import Backend, Operator, Run
from groupbench.operators.problems.solution import Solution, read_solutions, solution_backend
from groupbench.tracker.facts.record import UNREADABLE

NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8"}
"""This package's names of dtypes. Dtypes not listed keep their own."""

INTEGER_LIMITS = {"int8": 128, "int16": 1024, "int32": 1024, "int64": 1024}
"""Limit n of random integers, which are drawn from [-n, n) as in flashinfer-bench."""

OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: arithmetic.add,
    ast.Sub: arithmetic.sub,
    ast.Mult: arithmetic.mul,
    ast.Div: arithmetic.floordiv,
    ast.FloorDiv: arithmetic.floordiv,
    ast.Mod: arithmetic.mod,
    ast.Pow: arithmetic.pow,
    ast.USub: arithmetic.neg,
    ast.UAdd: arithmetic.pos,
}


class Axis(msgspec.Struct, frozen=True):
    type: Literal["const", "var", "expr"]
    value: int | None = None
    expression: str | None = None


class Spec(msgspec.Struct, frozen=True):
    """One input or output. `shape` holds the axes' names, or None for a Python number."""

    dtype: str
    shape: tuple[str, ...] | None = None


class Input(msgspec.Struct, frozen=True, omit_defaults=True):
    """The source of one input of a workload."""

    type: Literal["random", "scalar", "safetensors", "custom"]
    value: int | float | bool | None = None
    path: str | None = None
    tensor_key: str | None = None


class Workload(msgspec.Struct, frozen=True):
    axes: dict[str, int]
    inputs: dict[str, Input]
    uuid: str


class WorkloadEntry(msgspec.Struct, frozen=True):
    """A line of a workload file: a trace without a result in FlashInfer, the workload itself in SOL-ExecBench."""

    workload: Workload | None = None
    definition: str | None = None


class DefinitionFile(msgspec.Struct, frozen=True):
    """The fields of a definition's file."""

    name: str
    axes: dict[str, Axis]
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]
    reference: str
    custom_inputs_entrypoint: str | None = None
    description: str | None = None


@dataclass(frozen=True)
class Shape:
    """A workload as a shape; the text has the variable axes' sizes and the uuid."""

    workload: Workload

    @property
    def dims(self) -> dict[str, int]:
        return dict(self.workload.axes)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        sizes = [f"{name}={value}" for name, value in self.workload.axes.items()]
        return ",".join([*sizes, f"workload={self.workload.uuid}"])


class PublishedProblem:
    """One definition with workloads. Hosts measure the `operator`.

    Raises UsageError if a file cannot be read, or the definition has no workloads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = _decoded(path, DefinitionFile)
        self.root = next((parent.parent for parent in path.parents if parent.name == "definitions"), path.parent)
        self.workloads = tuple(self._read_workloads())
        if not self.workloads:
            raise UsageError(f"{path}: {self.file.name} has no workloads")

    @cached_property
    def operator(self) -> Operator:
        solutions = [s for s in read_solutions(self._solution_files()) if s.definition == self.file.name]
        name = self.file.name
        return Operator(
            name=name,
            baseline="reference",
            backends=(
                Backend("reference", self._prepare_reference, "the definition's reference", operator=name),
                *(solution_backend(solution) for solution in solutions),
            ),
            suites=self._suites(),
            parse_shape=self.parse_shape,
            make_inputs=self.make_inputs,
            reference=self.exact,
            flops=lambda shape: 0,
            min_bytes=self.min_bytes,
            returns=", ".join(f"{key} [{', '.join(spec.shape or ())}]" for key, spec in self.file.outputs.items()),
            dtypes=(self._dtype(),),
            output_dtype=lambda dtype: dtype,
            decode=self.decode,
            takes=tuple((key, "") for key in self.file.inputs),
        )

    # --- files ---

    def _read_workloads(self) -> list[Workload]:
        workloads: list[Workload] = []
        for file in self._workload_files():
            for number, line in enumerate(file.read_bytes().splitlines(), 1):
                if line.strip():
                    try:
                        entry = msgspec.json.decode(line, type=WorkloadEntry)
                        workload = entry.workload or msgspec.json.decode(line, type=Workload)
                    except UNREADABLE as error:
                        raise UsageError(f"{file}: line {number}: {error}") from error
                    if entry.definition in (None, self.file.name):
                        workloads.append(workload)
        return workloads

    def _workload_files(self) -> list[Path]:
        if self.root == self.path.parent:
            return sorted(self.path.parent.glob("workload*.jsonl"))
        return sorted((self.root / "workloads").rglob(f"{self.file.name}.jsonl"))

    def _solution_files(self) -> list[Path]:
        if self.root == self.path.parent:
            return sorted(self.path.parent.glob("solution*.json"))
        return sorted((self.root / "solutions").rglob("*.json"))

    def _suites(self) -> dict[str, tuple[Shape, ...]]:
        shapes = tuple(map(Shape, self.workloads))
        return {"workloads": shapes, "smoke": (min(shapes, key=lambda s: math.prod(s.workload.axes.values())),)}

    # --- the operator's functions ---

    def parse_shape(self, text: str) -> Shape:
        """Return the workload with this text, this uuid prefix, or these axes if unique. Raises ValueError."""
        shapes = [Shape(workload) for workload in self.workloads]
        for fits in (
            lambda s: str(s) == text,
            lambda s: len(text) > 3 and s.workload.uuid.startswith(text.removeprefix("workload=")),
            lambda s: str(s).rpartition(",workload=")[0] == text,
        ):
            matching = [shape for shape in shapes if fits(shape)]
            if len(matching) == 1:
                return matching[0]
        raise ValueError(f"shape {text!r} does not match one of the {len(shapes)} workloads, such as {shapes[0]}")

    def make_inputs(self, shape: Shape, dtype: str, device: str, seed: int) -> Any:
        """Make the workload's inputs, each under a name. Raises UsageError if safetensors is not installed."""
        torch.manual_seed(seed)
        axes, sources = self._axes(shape), shape.workload.inputs
        made = self._custom_inputs(axes, sources, device)
        for name, spec in self.file.inputs.items():
            source = sources.get(name, Input("random"))
            if source.type == "scalar":
                made[name] = source.value
            elif source.type == "safetensors":
                made[name] = self._loaded(source).to(device)
            elif source.type == "random":
                made[name] = _random([axes[axis] for axis in spec.shape or ()], spec.dtype, device)
        inputs = make_dataclass("Inputs", list(self.file.inputs))(**{name: made[name] for name in self.file.inputs})
        inputs._outputs = {  # sizes, dtypes and device of the outputs passed in destination-passing style
            name: ([axes[axis] for axis in spec.shape or ()], getattr(torch, spec.dtype), device)
            for name, spec in self.file.outputs.items()
        }
        return inputs

    def _custom_inputs(self, axes: Mapping[str, int], sources: Mapping[str, Input], device: str) -> dict[str, Any]:
        """Return the inputs that a function of the reference makes; none if the workload does not ask for it."""
        if not any(source.type == "custom" for source in sources.values()):
            return {}
        scalars = {name: source.value for name, source in sources.items() if source.type == "scalar"}
        entry = self._code[self.file.custom_inputs_entrypoint or ""]
        return dict(entry({**axes, **scalars}, torch.device(device)))

    def exact(self, inputs: Any) -> Any:
        """Return the reference's outputs for inputs in fp32, with integers as they are."""
        run = self._code["run"]
        values = [getattr(inputs, name) for name in self.file.inputs]
        try:
            out = run(*map(_wide, values))
        except (RuntimeError, AssertionError, TypeError):  # it requires a dtype
            out = run(*values)
        outputs = dict(zip(self.file.outputs, as_outputs(out, list(self.file.outputs)), strict=True))
        parts = {name: self._comparable(_tensor(part)) for name, part in outputs.items()}
        return parts if len(parts) > 1 else next(iter(parts.values()))

    def decode(self, out: Any) -> Any:
        """Check the dtypes of a backend's outputs and return these for the comparison. Raises TypeError."""
        parts = out if isinstance(out, (tuple, list)) else [out]
        if len(parts) != len(self.file.outputs):
            names = self.file.outputs
            raise TypeError(f"the backend returned {len(parts)}, expected {len(names)} outputs: {', '.join(names)}")
        outputs = []
        for (name, spec), part in zip(self.file.outputs.items(), parts, strict=True):
            if str(part.dtype) != f"torch.{spec.dtype}":
                raise TypeError(f"the backend returned {name} in {part.dtype}, expected torch.{spec.dtype}")
            outputs.append(self._comparable(part))
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def min_bytes(self, shape: Shape, dtype: str) -> int:
        axes, total = self._axes(shape), 0
        for spec in (*self.file.inputs.values(), *self.file.outputs.values()):
            if spec.shape is not None:
                total += math.prod(axes[axis] for axis in spec.shape) * int(getattr(torch, spec.dtype).itemsize)
        return total

    def _prepare_reference(self, inputs: Any) -> Run:
        run, names = self._code["run"], list(self.file.outputs)
        values = [getattr(inputs, name) for name in self.file.inputs]

        def call() -> Any:
            outputs = as_outputs(run(*values), names)
            return outputs[0] if len(outputs) == 1 else tuple(outputs)

        return call

    @staticmethod
    def _comparable(part: Any) -> Any:
        """Return an output in a dtype that the comparison can compute in."""
        return part.float() if part.is_floating_point() and part.element_size() < 2 else part

    @cached_property
    def _code(self) -> dict[str, Any]:
        """The names that the reference's source defines. Tracebacks show the lines."""
        name = f"{self.path}#reference"
        linecache.cache[name] = (len(self.file.reference), None, self.file.reference.splitlines(keepends=True), name)
        names: dict[str, Any] = {"__name__": f"reference_of_{self.file.name}"}
        # The user chose to run this Python code, like that of a backend.
        exec(compile(self.file.reference, name, "exec"), names)  # noqa: S102
        if "run" not in names:
            raise UsageError(f"{self.path}: the reference has no function `run`")
        return names

    def _axes(self, shape: Shape) -> dict[str, int]:
        axes = {name: axis.value for name, axis in self.file.axes.items() if axis.value is not None}
        axes |= shape.workload.axes
        for name, axis in self.file.axes.items():
            if axis.expression is not None:
                axes[name] = evaluated(axis.expression, axes)
        return axes

    def _dtype(self) -> str:
        """Return the precision of the cell: the first floating-point dtype of the outputs, else of the inputs."""
        specs = [*self.file.outputs.values(), *self.file.inputs.values()]
        floats = [spec.dtype for spec in specs if spec.dtype in NAMES]
        return NAMES[floats[0]] if floats else "fp32"

    def _loaded(self, source: Input) -> Any:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise UsageError(f"{self.path}: its inputs are safetensors files: pip install safetensors") from error
        with safe_open(str(self._blob(source.path or "")), framework="pt") as file:
            return file.get_tensor(source.tensor_key)

    def _blob(self, path: str) -> Path:
        """Return a file of inputs, next to the definition, or in the folder of traces. Raises UsageError."""
        traces = os.environ.get(TRACES)
        places = [self.root / path, *([Path(traces) / path] if traces else [])]
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            looked = f"nor in {TRACES}={traces}" if traces else f"set {TRACES} to the folder of the traces"
            raise UsageError(f"{self.path}: its inputs {path} are not in {self.root}; {looked}")
        return file


TRACES = "FLASHINFER_TRACE_DIR"
"""The variable with the folder of FlashInfer's traces, to which paths of SOL-ExecBench's workloads are relative."""


def evaluated(expression: str, axes: Mapping[str, int]) -> int:
    """Return the value of an axis that is computed from others. Raises UsageError if it is not arithmetic of them."""

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and node.id in axes:
            return axes[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.operand))
        raise UsageError(f"axis {expression!r} is not arithmetic of {', '.join(axes)}")

    try:
        return int(value(ast.parse(expression, mode="eval")))
    except (SyntaxError, ArithmeticError) as error:
        raise UsageError(f"axis {expression!r}: {error}") from error


def as_outputs(out: Any, names: list[str]) -> list[Any]:
    """Return the outputs of a `run` in the order of the definition. Raises TypeError if their number differs."""
    if isinstance(out, Mapping):
        return [out[name] for name in names]
    parts = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(parts) != len(names):
        raise TypeError(f"returned {len(parts)}, expected {len(names)} outputs: {', '.join(names)}")
    return parts


def read_json(path: Path) -> PublishedProblem | list[Backend]:
    """Return the problem of a definition's file, or the backend of a solution's file. Raises UsageError."""
    try:
        keys = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {error}") from error
    if isinstance(keys, dict) and "sources" in keys:
        return [solution_backend(_decoded(path, Solution))]
    if isinstance(keys, dict) and "reference" in keys:
        return PublishedProblem(path)
    raise UsageError(f"{path} is neither a definition (reference, axes) nor a solution (sources, spec)")


def _decoded(path: Path, kind: type) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNREADABLE) as error:
        raise UsageError(f"{path}: {error}") from error


def _random(sizes: list[int], dtype: str, device: str) -> Any:
    """Draw a tensor as flashinfer-bench does: normal values, those of 8 bits within 2, integers within their limits."""
    kind = getattr(torch, dtype, None)
    if kind is None:
        raise UsageError(f"torch has no dtype {dtype}")
    if dtype == "bool":
        return torch.randint(0, 2, sizes, device=device, dtype=kind)
    if dtype in INTEGER_LIMITS:
        return torch.randint(-INTEGER_LIMITS[dtype], INTEGER_LIMITS[dtype], sizes, device=device, dtype=kind)
    if kind.itemsize < 2:
        return torch.randn(sizes, device=device).clamp_(-2, 2).to(kind)
    return torch.randn(sizes, device=device, dtype=kind)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _tensor(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)
