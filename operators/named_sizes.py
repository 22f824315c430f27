"""Parse shapes with named sizes, such as `M=8,N=100`, by a function's parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from groupbench.operators.sizes import whole, within

Size: TypeAlias = int | float | str
"""One size of a shape; a bool is an int."""
Shape: TypeAlias = str | Mapping[str, Size]
"""A shape as users write it: `M=8,N=100`, or a mapping of the sizes."""

LARGEST_SIZE = 2**62

ALL_DEFAULTS = "default"
"""Text of a shape in which every size has its default."""


@dataclass(frozen=True)
class Sizes:
    """One shape: the canonical text, and all sizes by name, including defaults."""

    text: str
    values: tuple[tuple[str, Size], ...]

    @property
    def dims(self) -> dict[str, int]:
        return {name: int(value) for name, value in self.values if isinstance(value, int)}

    def __str__(self) -> str:
        return self.text


class NamedSizes:
    """An operator's sizes.

    operator    the operator's name
    parameters  by name; a size with a default may be omitted
    """

    def __init__(self, operator: str, parameters: Mapping[str, inspect.Parameter]) -> None:
        self._operator, self._parameters = operator, parameters

    @property
    def help(self) -> str:
        """The shape text's form; optional sizes are in parentheses."""
        parts = [
            f"{name}=.." if parameter.default is parameter.empty else f"({name}={_text(parameter.default)})"
            for name, parameter in self._parameters.items()
        ]
        return ",".join(parts)

    def shape(self, shape: Shape) -> Sizes:
        """Return a shape as users write it in canonical form. Raises ValueError."""
        if isinstance(shape, str):
            return self.parse(shape)
        return self.parse(",".join(f"{name}={_text(value)}" for name, value in shape.items()) or ALL_DEFAULTS)

    def parse(self, text: str) -> Sizes:
        """Parse a shape such as `M=8,N=100`, or `8,100` in parameter order. Raises ValueError."""
        try:
            parts = [part.strip() for part in text.split(",")]
            if text.strip() == ALL_DEFAULTS:
                pairs = []
            elif "=" in text:
                pairs = [part.partition("=")[::2] for part in parts]
            else:
                pairs = list(zip(self._parameters, parts, strict=False))
                if len(parts) > len(pairs):
                    raise ValueError(f"{len(parts)} sizes are too many")
            if len(dict(pairs)) < len(pairs):
                raise ValueError("a size is given twice")
            return self._of({name: self._value(name, value) for name, value in pairs})
        except ValueError as error:
            raise ValueError(f"shape {text!r}: {error}. A shape is {self.help}") from error

    def _of(self, sizes: Mapping[str, Size]) -> Sizes:
        if unknown := [name for name in sizes if name not in self._parameters]:
            raise ValueError(f"{self._operator} has no size {unknown[0]!r}")
        values: dict[str, Size] = {}
        texts = []
        for name, parameter in self._parameters.items():
            if name not in sizes and parameter.default is parameter.empty:
                raise ValueError(f"it needs {name}")
            values[name] = sizes.get(name, parameter.default)
            if values[name] != parameter.default:
                texts.append(f"{name}={_text(values[name])}")
        return Sizes(",".join(texts) or ALL_DEFAULTS, tuple(values.items()))

    def _value(self, name: str, text: str) -> Size:
        """Parse a size to the default's type, or to an int without a default. Raises ValueError.

        An int may be negative only if the size has a default, as in `dim=-1`. Others count rows, columns, ...
        """
        default = self._parameters[name].default if name in self._parameters else inspect.Parameter.empty
        if isinstance(default, bool):
            if text.lower() not in ("true", "false", "0", "1"):
                raise ValueError(f"{name}={text} is neither true nor false")
            return text.lower() in ("true", "1")
        if isinstance(default, str):
            return text
        if isinstance(default, float):
            if not math.isfinite(float(text)):
                raise ValueError(f"{name}={text} is not a finite number")
            return float(text)
        return within(name, whole(name, text), LARGEST_SIZE, 0 if default is inspect.Parameter.empty else -LARGEST_SIZE)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
