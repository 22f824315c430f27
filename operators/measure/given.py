"""The inputs as a backend was given them: has it changed one, or handed one back as its output?

An operator's maths leaves its inputs alone, and so must a backend: a caller has its values for further use, and the
next call of the same callable computes with them. What was there is remembered as sums of its bits, not as a copy, for
which a large problem leaves no memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from groupbench.operators.measure.arrays import tensor_of

if TYPE_CHECKING:
    from torch import Tensor

SUMMED = 1 << 22
"""Elements that are summed at once."""
MIXING = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))
"""Of Steele and others' SplitMix64 (2014): places become weights that add up to no others."""

FEW = 3
"""Inputs that a message names."""


class Given:
    """Sums over the memory of all tensors in an operator's inputs, whatever their strides, each memory once."""

    def __init__(self, inputs: Any) -> None:
        self._names: dict[int, str] = {}
        self._memory: dict[int, Tensor] = {}
        for name, tensor in named_tensors(inputs):
            at = _address(tensor)
            if at and at not in self._names:
                self._names[at], self._memory[at] = name, tensor
        self._sums = {at: _memory_sums(tensor) for at, tensor in self._memory.items()}

    def is_like(self, other: Given) -> bool:
        """Whether two inputs hold the same values."""
        return list(self._sums.values()) == list(other._sums.values())

    def holding(self, outputs: Iterable[Tensor]) -> list[str]:
        """Names of the inputs whose memory any of the outputs lies in."""
        found = {_address(out) for out in outputs}
        return [name for at, name in self._names.items() if at in found]

    def misuse(self, returned: Sequence[str] = ()) -> str | None:
        """What a backend has done to its inputs, of which it has `returned` some, in words; None where nothing."""
        changed = [self._names[at] for at, tensor in self._memory.items() if _memory_sums(tensor) != self._sums[at]]
        if changed:
            return f"the backend changed {_inputs(changed)}"
        return f"the output shares memory with {_inputs(returned)}" if returned else None


def named_tensors(inputs: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """("x.a", tensor) of every tensor in dataclasses, sequences and mappings; an array of NumPy's is one."""
    tensor = tensor_of(inputs)
    if tensor is not None:
        yield name or "x", tensor
        return
    parts: Iterable[tuple[str, Any]] = ()
    if dataclasses.is_dataclass(inputs) and not isinstance(inputs, type):
        parts = ((f"{name}.{field.name}", getattr(inputs, field.name)) for field in dataclasses.fields(inputs))
    elif isinstance(inputs, Mapping):
        parts = ((f"{name}[{key!r}]", value) for key, value in inputs.items())
    elif isinstance(inputs, (tuple, list)):
        parts = ((f"{name}[{number}]", value) for number, value in enumerate(inputs))
    for part, value in parts:
        yield from named_tensors(value, part.removeprefix("."))


def place_sums(bits: Tensor) -> list[int]:
    """Sums of a vector of integers, weighted by place, so that what has changed places is found too.

    By parts, for whose products there is memory.
    """
    import torch

    parts = bits.split(SUMMED)
    weights = torch.arange(1, 1 + (len(parts[0]) if parts else 0), device=bits.device)
    for shift, factor in MIXING:
        weights = (weights ^ (weights >> shift)) * factor
    found: list[int] = torch.stack([(part * weights[: len(part)]).sum() for part in parts]).tolist()
    return found


def _address(tensor: Tensor) -> int:
    """Of what it lies in; 0 where it has no memory of its own, as a sparse or a nested one."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # torch has no other way to ask
        return 0


def _memory_sums(tensor: Tensor) -> list[int]:
    """Of all that a tensor's storage holds, by words of 4 bytes, and the bytes behind the last word."""
    import torch

    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    words = len(memory) // 4 * 4
    return place_sums(memory[:words].view(torch.int32)) + place_sums(memory[words:])


def _inputs(names: Sequence[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return f"its input{'s' if len(names) > 1 else ''} {', '.join(names[:FEW])}{more}"
