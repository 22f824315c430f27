"""Detect whether a backend has changed an input or returned one as output.

A backend must not change the inputs: the caller may use them again, and so does the next call. The original contents
are remembered as checksums rather than as a copy, for which a large problem leaves no memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from groupbench.operators.measure.arrays import is_numpy, is_tensor, tensor_of
from groupbench.operators.measure.deferred import Tensor, torch

SUMMED = 1 << 22
"""Number of elements that are summed at once."""
MIXING = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))
"""Constants of SplitMix64 (Steele et al., 2014), which turns positions into weights."""

NAMED_INPUTS = 3
"""Number of inputs that a message names."""


class Given:
    """Checksums over the storages behind an operator's inputs, to detect changes by a backend."""

    def __init__(self, inputs: Any) -> None:
        self._names: dict[int, str] = {}
        self._memory: dict[int, Tensor] = {}
        for name, tensor in named_tensors(inputs):
            if at := _address(tensor):
                self._names.setdefault(at, name)
                self._memory.setdefault(at, tensor)
        self._held = dict(self._names)  # with the addresses of copies
        self._sums = {at: _memory_sums(tensor) for at, tensor in self._memory.items()}

    def is_like(self, other: Given) -> bool:
        """Return whether two inputs have the same values."""
        return list(self._sums.values()) == list(other._sums.values())

    def register(self, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Treat the memory behind these input copies (copy, source) like the inputs'."""
        self._held |= {_address(copy): self._names.get(_address(source), "x") for copy, source in copies}

    def holding(self, outputs: Iterable[Tensor]) -> list[str]:
        """Return the inputs sharing memory with an output, directly or through a copy."""
        held = self._held
        return list(dict.fromkeys(held[at] for out in outputs if out.numel() and (at := _address(out)) in held))

    def misuse(self, returned: Sequence[str] = ()) -> str | None:
        """Return, as text, which inputs a backend has changed or returned; None if it has done neither.

        Args:
            returned: Names of the inputs that share memory with an output.
        """
        changed = [self._names[at] for at, tensor in self._memory.items() if _memory_sums(tensor) != self._sums[at]]
        if changed:
            return f"the backend changed {_inputs(changed)}"
        return f"the output shares memory with {_inputs(returned)}" if returned else None


def named_tensors(inputs: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield ("x.a", tensor) for every tensor or NumPy array in dataclasses, sequences and mappings."""
    pairs = ((name, tensor_of(value)) for name, value in named_arrays(inputs))
    return ((name, tensor) for name, tensor in pairs if tensor is not None)


def named_arrays(inputs: Any) -> Iterator[tuple[str, Any]]:
    """Yield the same names as `named_tensors`, with NumPy arrays unconverted. This does not import torch."""
    return ((name, value) for name, value in named_leaves(inputs) if is_tensor(value) or is_numpy(value))


def named_leaves(inputs: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors, arrays and other values in dataclasses, sequences and mappings, with their names."""
    parts: Iterable[tuple[str, Any]]
    if dataclasses.is_dataclass(inputs) and not isinstance(inputs, type):
        parts = ((f"{name}.{field.name}", getattr(inputs, field.name)) for field in dataclasses.fields(inputs))
    elif isinstance(inputs, Mapping):
        parts = ((f"{name}[{key!r}]", value) for key, value in inputs.items())
    elif isinstance(inputs, (tuple, list)):
        parts = ((f"{name}[{number}]", value) for number, value in enumerate(inputs))
    else:
        yield name or "x", inputs
        return
    for part, value in parts:
        yield from named_leaves(value, part.removeprefix("."))


def place_sums(bits: Tensor) -> list[int]:
    """Return sums over an integer vector, weighted by position, so swapped values are detected too.

    Computed in parts, whose products fit in memory.
    """
    parts = bits.split(SUMMED)
    weights = torch.arange(1, 1 + (len(parts[0]) if parts else 0), device=bits.device)
    for shift, factor in MIXING:
        weights = (weights ^ (weights >> shift)) * factor
    sums: list[int] = torch.stack([(part * weights[: len(part)]).sum() for part in parts]).tolist()
    return sums


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 for a tensor without one, such as a sparse or nested tensor."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # torch has no other way to ask
        return 0


def _memory_sums(tensor: Tensor) -> list[int]:
    """Return a storage's checksums, over 4-byte words and the bytes after the last word."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    words = len(memory) // 4 * 4
    return place_sums(memory[:words].view(torch.int32)) + place_sums(memory[words:])


def _inputs(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_INPUTS} more" if len(names) > NAMED_INPUTS else ""
    return f"its input{'s' if len(names) > 1 else ''} {', '.join(names[:NAMED_INPUTS])}{more}"
