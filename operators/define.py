"""Define an operator with plain functions: one for inputs with named sizes, a reference, and backends.

    @operator(shapes={"smoke": ["M=3,N=100"], "rows": ["M=4096,N=4096", "M=128,N=131072"]})
    def row_log_softmax(M, N, dtype, device):
        return torch.randn(M, N, dtype=dtype, device=device)

    @row_log_softmax.reference
    def exact(x):
        return torch.log_softmax(x, -1)

    @row_log_softmax.backend
    def torch_log_softmax(x):
        return torch.log_softmax(x, -1)

`tritonbench --plugin FILE.py --op row_log_softmax` measures it. The defaults follow from these functions: a shape's
text from the names of the sizes, the bytes from inputs and output, tolerances from the dtype. The reference gets its
inputs in fp32 (fp64 for fp32).
"""

from __future__ import annotations

import dataclasses
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from groupbench.operators.dtypes import BYTES, torch_dtype
from groupbench.operators.measure.arrays import elements, is_numpy, is_tensor, memory_of, numpy_of, tensor_of
from groupbench.operators.measure.given import named_arrays
from groupbench.operators.named_sizes import NamedSizes, Shape, Sizes
from groupbench.operators.operator import Backend, Operator, Run, Target
from groupbench.operators.tolerances import Tolerance

F = TypeVar("F", bound=Callable[..., Any])
CONTEXT = ("dtype", "device", "seed")
"""Parameters of the function that makes inputs, other than sizes."""

WIDER = {"float16": "float32", "bfloat16": "float32", "float32": "float64"}
"""The dtype in which the reference gets its inputs; fp32 for all others, including fp8."""


class Definition:
    """A function decorated with `operator`: an operator, completed by methods."""

    def __init__(
        self,
        make: Callable[..., Any],
        shapes: Mapping[str, Iterable[Shape]],
        name: str,
        dtypes: tuple[str, ...],
        **facts: Any,
    ) -> None:
        self._make, self.name, self.dtypes, self._facts = make, name, dtypes, facts
        parameters = inspect.signature(make).parameters
        self._context = [word for word in CONTEXT if word in parameters]
        self.sizes = NamedSizes(name, {word: each for word, each in parameters.items() if word not in CONTEXT})
        self._reference: Callable[..., Any] | None = None
        self._backends: dict[str, Backend] = {}
        self._baseline = ""
        self._bytes: dict[tuple[str, str], int] = {}
        self.suites = {suite: tuple(map(self.sizes.shape, some)) for suite, some in shapes.items()}

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    def __call__(self, *_: object) -> None:
        """Raise TypeError: a backend called a function of this name, which the operator has replaced."""
        raise TypeError(
            f"{self.name} is the operator here: rename it, or import the module of the function {self.name}"
        )

    def reference(self, function: F) -> F:
        """Name the reference function for the right output. It gets the inputs in higher precision."""
        self._reference = function
        return function

    def backend(self, function: Any = None, **facts: Any) -> Any:
        """Add a function from inputs to output. The whole function is timed.

        Use it as a decorator, with or without arguments, or call it with a function. The first backend is the baseline.

        name         name of the backend [the function's]
        kind         torch, triton or helion
        baseline     make this backend the baseline of the speed-up
        source       description in one line [the function's docstring]
        unavailable  function of a Target: the reason why the backend cannot run on it, or None
        tolerance    row of the tolerance table [that of the dtype]
        """
        return self._added(function, facts, lambda f: lambda inputs: _bound(f, inputs))

    def prepare(self, function: Any = None, **facts: Any) -> Any:
        """Add a function from inputs to a callable. Only the callable is timed.

        The callable has no arguments and returns the output. The arguments of `prepare` are the same as `backend`'s.
        """
        return self._added(function, facts, lambda f: lambda inputs: _bound(f, inputs)())

    def _added(self, function: Any, facts: dict[str, Any], prepare: Callable[[Any], Callable[[Any], Run]]) -> Any:
        if function is None:
            return lambda f: self._added(f, facts, prepare)
        baseline = facts.pop("baseline", False)
        name = facts.pop("name", None) or getattr(function, "__name__", "")
        about = (inspect.getdoc(function) or "").partition("\n")[0]
        source = facts.pop("source", None) or about or getattr(function, "__module__", "")
        facts.setdefault("unavailable", lambda target: None)
        facts["unavailable"] = _also(self._elsewhere, facts["unavailable"])
        if name in self._backends:
            raise ValueError(f"{self.name} has two backends {name!r}")
        self._backends[name] = Backend(name, prepare(function), source, operator=self.name, **facts)
        self._baseline = name if baseline or not self._baseline else self._baseline
        self.__dict__.pop("operator", None)
        return function

    def _elsewhere(self, target: Target) -> str | None:
        if target.device == "cpu" or "device" in self._context:
            return None
        return f"{self.name} makes its inputs on the CPU, since it takes no device: --device cpu measures it"

    @cached_property
    def operator(self) -> Operator:
        """The operator in the hosts' form. Raises ValueError without a reference."""
        if self._reference is None:
            raise ValueError(f"{self.name} has no reference: name one by @{self.name}.reference")
        facts = self._facts
        return Operator(
            name=self.name,
            backends=tuple(self._backends.values()),
            baseline=self._baseline,
            suites=self.suites,
            parse_shape=self.sizes.parse,
            make_inputs=self.make_inputs,
            reference=self._exact,
            flops=self._flops,
            min_bytes=self._least_bytes,
            returns=self.returns,
            dtypes=self.dtypes,
            shapes_help=self.sizes.help,
            output_dtype=lambda dtype: facts["output"] or dtype,
            moves=facts["moves"],
            tolerances=facts["tolerances"],
            takes=tuple((name, "") for name in self._names()),
        )

    @property
    def returns(self) -> str:
        about = (inspect.getdoc(self._reference) or "").partition("\n")[0] if self._reference else ""
        return about or f"the output of {getattr(self._reference, '__name__', 'its reference')}"

    # --- inputs and output ---

    def make_inputs(self, shape: Sizes, dtype: str, device: str, seed: int) -> Any:
        """Return the inputs, each under the reference's parameter name.

        Seeds the global generators in torch, NumPy and Python first; `seed` is for any other generator.
        """
        seed_generators(seed)
        return self._named(self._call(shape, dtype, device, seed))

    def _call(self, shape: Sizes, dtype: str, device: str, seed: int) -> Any:
        context = {"dtype": self._dtype(dtype), "device": device, "seed": seed}
        try:
            return self._make(**dict(shape.values), **{word: context[word] for word in self._context})
        except TypeError as error:
            if f"Cannot interpret '{context['dtype']}' as a data type" not in str(error):
                raise
            hint = f"write `dtype: np.dtype` in the parameters of {self._make.__name__} to get NumPy's dtype"
            raise TypeError(f"NumPy does not take {context['dtype']}; {hint}") from error

    def _dtype(self, name: str) -> Any:
        """Return torch's dtype; NumPy's dtype, or the name, if the parameter is annotated as such."""
        annotation = self._make.__annotations__.get("dtype")
        wanted = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
        if wanted == "str":
            return name
        if wanted in ("np.dtype", "numpy.dtype") or getattr(annotation, "__module__", "").startswith("numpy"):
            return numpy_of(name)
        return torch_dtype(name)

    def _names(self, count: int | None = None) -> list[str]:
        """Return the input names: the reference's parameters."""
        assert self._reference is not None
        try:
            parameters = inspect.signature(self._reference).parameters.values()
            names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        except ValueError:  # a function in C may not say
            names = []
        wanted = len(names) if count is None else count
        return names[:wanted] + [f"x{number}" for number in range(len(names), wanted)]

    def _named(self, made: Any) -> Any:
        by_name = dict(made) if isinstance(made, Mapping) else None
        if by_name is None:
            parts = made if isinstance(made, tuple) and not hasattr(made, "_fields") else (made,)
            by_name = dict(zip(self._names(len(parts)), parts, strict=True))
        cls = dataclasses.make_dataclass("Inputs", list(by_name))
        inputs = cls(**by_name)
        inputs._by_keyword = isinstance(made, Mapping)
        return inputs

    def _exact(self, inputs: Any) -> Any:
        """Return the reference's output: a tensor, or several tensors by name."""
        out = self._returned(inputs)
        return {name: _exact_part(part) for name, part in out.items()} if isinstance(out, dict) else _exact_part(out)

    def _returned(self, inputs: Any) -> Any:
        """Return what the reference returns, several outputs by name."""
        assert self._reference is not None
        out = _bound(self._reference, inputs, widened)()
        if isinstance(out, Mapping):
            return dict(out)
        if isinstance(out, (tuple, list)):
            return {f"output {number}": part for number, part in enumerate(out)}
        return out

    # --- operations and bytes ---

    def _flops(self, shape: Sizes) -> int:
        flops = self._facts["flops"]
        return _of_sizes(flops, shape) if flops else 0

    def _least_bytes(self, shape: Sizes, dtype: str) -> int:
        """Return `min_bytes`, or each input's and output's bytes once; 0 if these cannot be determined."""
        if self._facts["min_bytes"]:
            return _of_sizes(self._facts["min_bytes"], shape, dtype=dtype)
        key = (shape.text, dtype)
        if key not in self._bytes:
            try:
                self._bytes[key] = self._counted_bytes(shape, dtype)
            except Exception:  # the function reads values, but tensors on torch's device "meta" hold no values
                self._bytes[key] = 0
        return self._bytes[key]

    def _counted_bytes(self, shape: Sizes, dtype: str) -> int:
        """Count tensors on torch's device "meta", or NumPy arrays. Arrays are counted without importing torch."""
        inputs = self._named(self._call(shape, dtype, "meta", 0))
        read: dict[Any, int] = {}
        for name, array in named_arrays(inputs):
            address, size = memory_of(array)
            read[address or name] = size
        out = self._returned(inputs)
        each = out.values() if isinstance(out, dict) else [out]
        size = BYTES[self._facts["output"] or dtype]
        return sum(read.values()) + sum(elements(part) * (_integer_size(part) or size) for part in each)


def operator(
    shapes: Iterable[Shape] | Mapping[str, Iterable[Shape]],
    *,
    name: str | None = None,
    dtypes: str | Sequence[str] | None = None,
    output: str | None = None,
    flops: Callable[..., int] | None = None,
    min_bytes: Callable[..., int] | None = None,
    tolerances: Mapping[str, Tolerance] | None = None,
    moves: Iterable[str] = (),
) -> Callable[[Callable[..., Any]], Definition]:
    """Define an operator by decorating the function for inputs.

    The function's parameters are the sizes, which are ints unless their default has another type. It may also take
    `dtype` (torch's, or NumPy's if annotated `np.dtype`), `device` and `seed`. It returns a tensor, a tuple or a dict;
    NumPy arrays work like tensors. An operator whose function takes no `device` runs only on a CPU.

    Args:
        shapes: Shapes such as `M=8,N=100`, in one suite or in several by name; a CPU measures suite `smoke` by default.
        name: Name of the operator [the function's].
        dtypes: Dtypes to measure [bf16, fp16 and fp32 if the function takes a dtype, otherwise fp32].
        output: Dtype of the output: fp32, int64, bool, ... [the cell's, or the reference's for integers, which have to
            be equal bit by bit].
        flops: Function of the sizes in its signature: operations of a call, for TFLOP/s.
        min_bytes: Function of the sizes and `dtype`: bytes of a call [inputs and output, each once].
        tolerances: By dtype, instead of those in operators/tolerances.py.
        moves: Names of the inputs that get new values between calls [all with floating-point values].

    Raises ValueError for an invalid shape.
    """
    suites = shapes if isinstance(shapes, Mapping) else {"default": shapes}

    def define(make: Callable[..., Any]) -> Definition:
        usual = ("bf16", "fp16", "fp32") if "dtype" in inspect.signature(make).parameters else ("fp32",)
        return Definition(
            make,
            suites,
            name or make.__name__,
            (dtypes,) if isinstance(dtypes, str) else tuple(dtypes or usual),
            output=output,
            flops=flops,
            min_bytes=min_bytes,
            tolerances=dict(tolerances or {}),
            moves=tuple(moves),
        )

    return define


def _bound(function: Callable[..., Any], inputs: Any, change: Callable[[Any], Any] = lambda value: value) -> Run:
    """Bind the inputs to the function. Dict inputs are passed by name."""
    by_name = {field.name: change(getattr(inputs, field.name)) for field in dataclasses.fields(inputs)}
    if inputs._by_keyword:
        return lambda: function(**by_name)
    values = tuple(by_name.values())
    return lambda: function(*values)


def _exact_part(out: Any) -> Any:
    tensor = tensor_of(out)
    if tensor is None:
        raise TypeError(f"the reference returned {type(out).__name__}, neither a tensor nor a NumPy array")
    return tensor.double() if tensor.is_complex() else tensor


def _integer_size(out: Any) -> int:
    """Return the bytes of an element of an integer tensor or array; 0 for any other dtype."""
    return int(out.itemsize) if re.match(r"(torch\.)?(u?int|bool)", str(out.dtype)) else 0


def _also(first: Callable[[Target], str | None], second: Callable[[Target], str | None]) -> Any:
    return lambda target: first(target) or second(target)


def _of_sizes(function: Callable[..., int], shape: Sizes, **more: Any) -> int:
    values = dict(shape.values) | more
    return int(function(**{word: values[word] for word in inspect.signature(function).parameters if word in values}))


def seed_generators(seed: int) -> None:
    """Seed Python's random generator, and those in torch and NumPy if imported."""
    random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def widened(value: Any) -> Any:
    """Return `value` with all floating-point tensors and arrays, at any depth, in higher precision."""
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(map(widened, value))
    if isinstance(value, dict):
        return {name: widened(part) for name, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: widened(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if is_numpy(value):
        return value.astype(WIDER[value.dtype.name]) if value.dtype.name in WIDER else value
    if not is_tensor(value) or not value.is_floating_point() or str(value.dtype) == "torch.float64":
        return value
    wider = WIDER.get(str(value.dtype).removeprefix("torch."), "float32")
    return value.to(getattr(sys.modules["torch"], wider))
