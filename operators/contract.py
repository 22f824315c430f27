"""Describe the arguments and the result of an operator's backends from the operator's declarations.

The fields come from the class annotated as `make_inputs`' result; the comment on each line explains them.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from groupbench.operators.operator import Operator

NOTE = "Letters are the sizes of a shape. Unless noted, tensors are on the device and have the cell's dtype."
FIELD = re.compile(r"^    (\w+): [^#]+?(?:  # (.*))?$", re.MULTILINE)


def lines(operator: Operator) -> Iterator[str]:
    """Yield, for each mode, a line on the result of `prepare(x)` and one for each x field."""
    described = None
    for mode in operator.modes:
        measured = operator.in_mode(mode)
        if operator.takes:
            names = ", ".join(name for name, _ in operator.takes)
            yield f"  a backend({names}) returns {measured.returns}"
            continue
        yield f"  prepare{'' if mode == 'fwd' else f'_{mode}'}(x): a callable that returns {measured.returns}"
        inputs = inputs_class(measured.make_inputs)
        if inputs is described:
            yield "    x is the same"
            continue
        described = inputs
        for name, about in fields(inputs, "x."):
            yield f"    {name}: {about}"


def inputs_class(make_inputs: Callable[..., Any]) -> type:
    """Return an operator's inputs class."""
    function: Any = make_inputs.func if isinstance(make_inputs, partial) else make_inputs
    inputs = function.__globals__[function.__annotations__["return"]]
    assert isinstance(inputs, type)
    return inputs


def fields(inputs: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, comment) for each dataclass field, nested ones included."""
    comments = dict(FIELD.findall(inspect.getsource(inputs)))
    for field in dataclasses.fields(inputs):
        of = vars(inspect.getmodule(inputs)).get(str(field.type))
        if isinstance(of, type) and dataclasses.is_dataclass(of):
            yield from fields(of, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", comments.get(field.name, "")
