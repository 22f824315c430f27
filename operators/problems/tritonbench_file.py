"""A file with a TritonBench operator class as an operator: inputs are shapes, benchmarks backends.

    --plugin my_operators/row_sum.py            operator `row_sum`
    --plugin my_operators/softmax/operator.py   operator `softmax`, with the modules in its folder

The file defines `class Operator(BenchmarkOperator)` as for TritonBench (10b14473), which must be installed but need not
know the file. Only the forward pass is measured. A method may prepare input copies before it returns the timed
function, so the inputs keep their values between timed calls.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import CodeType, ModuleType, new_class
from typing import Any

from groupbench.operators.define import seed_generators, widened
from groupbench.operators.errors import Unavailable, UsageError
from groupbench.operators.hosts import has_tritonbench
from groupbench.operators.measure.faults import describe
from groupbench.operators.operator import Backend, Operator, Run, Target
from groupbench.operators.problems.solution import no_interpreted_bf16
from groupbench.operators.tolerances import TOLERANCES, Tolerance

BASE = "BenchmarkOperator"
PRECISIONS = ("bf16", "fp16", "fp32")
NONE_MOVES = ("",)
"""The name of no input."""
LONGEST_SHAPE = 300
"""Characters of an input's name."""


def is_operator_file(path: Path) -> bool:
    """Return whether a Python file defines `class Operator(BenchmarkOperator)`. Does not import it."""
    source = path.read_bytes()
    if BASE.encode() not in source:
        return False
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # its import raises a better error
        return False
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Operator")
    return any(ast.unparse(base).rpartition(".")[2] == BASE for node in classes for base in node.bases)


@dataclass(frozen=True)
class InputShape:
    """One input from `get_input_iter`: number, name, and the elements in all tensors."""

    number: int
    text: str
    elements: int

    @property
    def dims(self) -> dict[str, int]:
        return {}

    def __str__(self) -> str:
        return self.text


class TritonBenchFile:
    """The operator of one file. Hosts measure the `operator`.

    Raises UsageError if TritonBench is not installed, and any error of the file when it is imported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.parent.name if path.stem == "operator" else path.stem
        self._key = f"file_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if not has_tritonbench():
            raise UsageError(
                f"{path} is an operator of TritonBench, which is not installed: pip install 'groupbench[tritonbench]'"
            )
        # TritonBench knows an operator by its module's path. A key of its own keeps it apart from its namesakes.
        package = ModuleType(f"tritonbench.operators.{self._key}")
        package.__path__ = [str(path.parent)]
        sys.modules[package.__name__] = package
        self._class: Any = importlib.import_module(f"{package.__name__}.{path.stem}").Operator
        base = next(cls for cls in self._class.__mro__ if cls.__name__ == BASE)
        self._tritonbench: Any = sys.modules[base.__module__]
        self._benchmarks: dict[str, Any] = dict(self._tritonbench.REGISTERED_BENCHMARKS.get(self._key, {}))
        if not self._benchmarks:
            raise UsageError(f"{path}: no method is decorated with @register_benchmark()")
        baselines = (name for name, benchmark in self._benchmarks.items() if benchmark.baseline)
        self.baseline = next(baselines, next(iter(self._benchmarks)))

    @cached_property
    def operator(self) -> Operator:
        """The operator as the hosts know it. Raises UsageError if the inputs cannot be listed."""
        shapes, dtypes = self._listed
        return Operator(
            name=self.name,
            baseline=self.baseline,
            backends=tuple(map(self._backend, self._benchmarks)),
            suites={"inputs": shapes, "smoke": (min(shapes, key=lambda shape: shape.elements),)},
            parse_shape=self.parse_shape,
            make_inputs=self.make_inputs,
            reference=self.exact,
            flops=lambda shape: 0,
            min_bytes=lambda shape, dtype: 0,
            returns=f"the output of {self.baseline}",
            dtypes=dtypes,
            decode=_comparable,
            moves=NONE_MOVES,
            tolerances={dtype: _loose(dtype) for dtype in dtypes},
            takes=tuple((name, "") for name in self._names()),
        )

    # --- shapes ---

    @cached_property
    def _listed(self) -> tuple[tuple[InputShape, ...], tuple[str, ...]]:
        """All inputs, and the precisions that they can be made in, the file's own first."""
        problem: Exception | None = None
        for device in ("meta", "cpu"):  # a file that reads values needs a device that has them
            try:
                shapes = tuple(self._shapes(device))
                usual = self._precision_of_first(device, None) or "fp32"
                others = [name for name in PRECISIONS if self._precision_of_first(device, name) == name != usual]
            except Exception as error:
                problem = problem or error
                continue
            if not shapes:
                raise UsageError(f"{self.path}: get_input_iter yields no input")
            return shapes, (usual, *others)
        assert problem is not None
        raise UsageError(f"{self.path}: its inputs cannot be listed: {describe(problem)}") from problem

    def _shapes(self, device: str) -> Iterator[InputShape]:
        from groupbench.operators.hosts import foreign
        from groupbench.operators.measure.given import named_tensors

        seen: Counter[str] = Counter()
        op = self._instance(device, None)
        for number, inputs in enumerate(self._inputs(op)):
            text = foreign.shape_text(op.get_x_val(inputs), inputs)[:LONGEST_SHAPE]
            seen[text] += 1
            elements = sum(tensor.numel() for _, tensor in named_tensors(inputs))
            yield InputShape(number, text if seen[text] == 1 else f"{text} #{seen[text]}", elements)

    def _precision_of_first(self, device: str, precision: str | None) -> str | None:
        """Return the dtype of the first input's first floating-point tensor, made in a precision or the file's own."""
        from groupbench.operators.hosts import foreign

        return next((foreign.input_dtype(each) for each in self._inputs(self._instance(device, precision))), None)

    def parse_shape(self, text: str) -> InputShape:
        """Return the input of that name. Raises ValueError."""
        shapes = self._listed[0]
        for shape in shapes:
            if shape.text == text:
                return shape
        raise ValueError(f"shape {text!r} is not one of the {len(shapes)} inputs, such as {shapes[0]}")

    # --- inputs and output ---

    def make_inputs(self, shape: InputShape, dtype: str, device: str, seed: int) -> Any:
        """Return the arguments of the backends. The instance that made them is `_op`: it may hold weights too."""
        op = self._instance(device, None if dtype == self._listed[1][0] else dtype)
        seed_generators(seed)
        arguments = next(islice(self._inputs(op), shape.number, None), None)
        if arguments is None:
            raise UsageError(f"{self.path}: get_input_iter yields no input {shape.number} on {device}")
        by_keyword = isinstance(arguments, dict)
        if not by_keyword:
            arguments = dict(zip(self._names(len(arguments)), arguments, strict=True))
        inputs = make_dataclass("Inputs", list(arguments))(**arguments)
        inputs._op, inputs._by_keyword = op, by_keyword
        return inputs

    def exact(self, inputs: Any) -> Any:
        """Return the baseline's output for inputs in higher precision, or for these if it does not take such."""
        import torch

        with torch.no_grad():
            try:
                out = _flat(_function(inputs, self.baseline, widened)())
            except Exception:  # weights of its own have another dtype, say
                out = _flat(_function(inputs, self.baseline)())
        if isinstance(out, tuple):
            return {f"output {number}": _comparable(part) for number, part in enumerate(out)}
        return _comparable(out)

    def _instance(self, device: str, precision: str | None) -> Any:
        """Return an instance for a device, in a precision or the file's own, without counting inputs."""
        import torch

        attributes = {"__post__init__": lambda self: None, "__module__": self._class.__module__}
        cls = new_class("Operator", (self._class,), exec_body=lambda namespace: namespace.update(attributes))
        arguments, _ = self._tritonbench.get_parser().parse_known_args(["--op", self.name])
        arguments.device, arguments.mode = device, "fwd"
        arguments.precision = precision or self._class.DEFAULT_PRECISION
        manual_seed = torch.manual_seed
        try:
            return cls(arguments, [])
        finally:
            torch.manual_seed = manual_seed  # TritonBench replaces it by one that ignores the seed

    def _inputs(self, op: Any) -> Iterator[Any]:
        """Yield the inputs as TritonBench hands them to backends: on the device and in the precision."""
        import torch

        for number, made in enumerate(op.get_input_iter()):
            op._cur_input_id = number
            on_device = self._tritonbench.input_cast(
                lambda x: isinstance(x, torch.Tensor), lambda x: x.to(op.device), made
            )
            op.example_inputs = on_device if isinstance(on_device, dict) else tuple(on_device)
            self._tritonbench.apply_precision(op, op.tb_args.precision)
            yield op.example_inputs

    def _names(self, count: int | None = None) -> list[str]:
        """Return names of the inputs: the parameters of the baseline's method."""
        parameters = list(inspect.signature(self._method(self.baseline)).parameters.values())[1:]
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        wanted = len(names) if count is None else count
        return names[:wanted] + [f"x{number}" for number in range(len(names), wanted)]

    # --- backends ---

    def _backend(self, name: str) -> Backend:
        benchmark, method = self._benchmarks[name], self._method(name)
        words = " ".join([name, *(benchmark.tags or ())]).lower()
        is_triton = "triton" in words or launches_triton(method)
        kind = "helion" if "helion" in words else "triton" if is_triton else "torch"

        def unavailable(target: Target) -> str | None:
            if not benchmark.enabled:
                return f"{self.path.name} disables it here (enabled=False)"
            return None if kind == "torch" else no_interpreted_bf16(target)

        about = (inspect.getdoc(method) or "").partition("\n")[0]
        return Backend(
            name,
            lambda inputs: _prepared(inputs, name),
            about or f"method {name} of {self.path.name}",
            kind=kind,
            unavailable=unavailable,
            operator=self.name,
        )

    def _method(self, name: str) -> Callable[..., Any]:
        """Return the decorated method as the file defines it."""
        registered = getattr(self._class, name)
        method: Callable[..., Any] = inspect.getclosurevars(registered).nonlocals.get("function", registered)
        return method


def launches_triton(function: Callable[..., Any]) -> bool:
    """Return whether a function reaches a Triton kernel through globals named by it or a helper."""
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if type(item).__module__.startswith("triton.runtime"):
            return True
        waiting += _named_by(item)
    return False


def _named_by(item: Any) -> Iterator[Any]:
    """Yield the objects that a method's class, a class or a function names, if they may lead to a Triton kernel."""
    if isinstance(getattr(item, "__self__", None), type):  # `apply` of an autograd function
        yield item.__self__
    item = getattr(item, "__func__", item)
    if isinstance(item, type):
        if _may_launch(item):
            yield from vars(item).values()
    elif isinstance(code := getattr(item, "__code__", None), CodeType) and _may_launch(item):
        module_names = item.__globals__
        names = list(_names_in(code))
        yield from _closure(item)
        yield from (module_names[name] for name in names if name in module_names)
        modules = [module_names[name] for name in names if isinstance(module_names.get(name), ModuleType)]
        yield from (vars(module)[name] for module in modules for name in names if name in vars(module))


def _closure(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield cell.cell_contents


def _may_launch(item: Any) -> bool:
    """Return whether a function or class belongs to a package whose helpers may launch Triton kernels."""
    package = str(getattr(item, "__module__", "")).partition(".")[0]
    return package not in ("torch", "triton", "numpy") and package not in sys.stdlib_module_names


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _function(inputs: Any, name: str, change: Callable[[Any], Any] = lambda value: value) -> Any:
    """Call a backend's method on the inputs, and return the function to time, or None."""
    values = {field.name: change(getattr(inputs, field.name)) for field in fields(inputs)}
    method = getattr(inputs._op, name)
    return method(**values) if inputs._by_keyword else method(*values.values())


def _prepared(inputs: Any, name: str) -> Run:
    inputs._op._cur_backend_name = name
    try:
        function = _function(inputs, name)
    except NotImplementedError as error:
        raise Unavailable(str(error) or f"{name} raised NotImplementedError") from error
    if function is None:
        raise Unavailable(f"{name} returned None: it does not support these inputs")
    return lambda: _flat(function())


def _flat(out: Any) -> Any:
    """Return an output's tensors: one alone, or a tuple from lists, tuples and dicts."""
    import torch

    if type(out) is torch.Tensor:
        return out
    from torch.utils._pytree import tree_leaves

    tensors = tuple(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
    return tensors[0] if len(tensors) == 1 else tensors or out


def _comparable(out: Any) -> Any:
    """Return tensors in a floating-point dtype that errors can be computed in."""
    if isinstance(out, tuple):
        return tuple(map(_comparable, out))
    if not out.is_floating_point():
        return out.double()
    return out.float() if out.element_size() < 2 else out


def _loose(dtype: str) -> Tolerance:
    """Return the tolerance for a backend with rounding between steps, as in the baseline."""
    from groupbench.operators.hosts.foreign import FAR

    usual = TOLERANCES.get(dtype, TOLERANCES["fp32"])
    return replace(usual, rms=FAR * usual.rms, rtol=FAR * usual.rtol, atol=FAR * usual.atol)
