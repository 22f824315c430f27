"""Send outputs from a backend's process to the judging process, through CUDA's IPC handles or a file.

The description of the tensors is plain data, whose types are checked. Nothing from a backend's process is unpickled.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from groupbench.operators.measure.arrays import tensor_of
from groupbench.operators.measure.deferred import Tensor, torch


class Part(msgspec.Struct, frozen=True):
    """One tensor: dtype without `torch.`, sizes, and location, either a file offset or a CUDA handle."""

    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    handle: tuple[int, bytes, int, int, bytes, int, bytes, bool] | None = None
    start: int = 0  # offset of the tensor in the handle's memory, in bytes


class Sent(msgspec.Struct, frozen=True):
    """An output, as one process describes it to another. `form` is tensor, tuple or list."""

    form: str
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(math.prod(part.shape) for part in self.parts)


def plain_parts(out: Any, device: str) -> tuple[str, list[Tensor]]:
    """Return (form, tensors) for a backend's output.

    Raises TypeError for anything but materialised, strided tensors on the device, alone or in a tuple or list. Tensor
    subclasses are rejected, since they could defer the work until the output is read.
    """
    if type(out) is torch.Tensor:
        return "tensor", [_plain(out, device)]
    if isinstance(out, (tuple, list)):
        # The `__iter__` of a subclass could compute.
        elements = list.__iter__(out) if isinstance(out, list) else tuple.__iter__(out)
        parts = [tensor_of(part) for part in elements]
        if all(isinstance(part, torch.Tensor) for part in parts):
            return "list" if isinstance(out, list) else "tuple", [_plain(part, device) for part in parts]
    elif not isinstance(out, torch.Tensor) and (array := tensor_of(out)) is not None:
        return "tensor", [_plain(array, device)]
    raise TypeError(f"the backend returned {_kind(out)}, not a tensor")


def _kind(out: Any) -> str:
    name = type(out).__name__
    return f"{name}, a class of its own" if isinstance(out, torch.Tensor) and type(out) is not torch.Tensor else name


def _plain(value: Any, device: str) -> Tensor:
    if type(value) is not torch.Tensor:
        raise TypeError(f"the backend returned {_kind(value)}, not a tensor")
    # Another object for the same memory: an attribute of this one, such as a `clone` of its own, could compute.
    part: Tensor = torch.Tensor.detach(value)
    lazy = part.is_conj() or part.is_neg() or torch._C._functorch.is_functorch_wrapped_tensor(part)
    if part.layout != torch.strided or lazy:
        raise TypeError("the backend returned a tensor whose values are not in memory")
    if part.device.type != device:
        raise TypeError(f"the backend returned a tensor on {part.device.type}, not on {device}")
    if part.numel() and not part.untyped_storage().data_ptr():
        raise TypeError("the backend returned a tensor without memory")
    return part


def send(form: str, parts: Sequence[Tensor], file: int) -> Sent:
    """Make tensors readable by another process: by CUDA's IPC handles if possible, else in the file.

    Args:
        file: Descriptor of the file, which grows as needed; tensors begin at multiples of 64 bytes.

    Tensors sent by handle must stay alive until the other process has read them.
    """
    if all(part.is_cuda for part in parts):
        try:
            return Sent(form, tuple(map(_by_handle, parts)))
        except RuntimeError:  # no CUDA IPC in this container, or memory that cannot be shared
            pass
    places, end = list[Part](), 0
    for part in parts:
        places.append(Part(_name(part), tuple(part.shape), end))
        end += -(-part.numel() * part.element_size() // 64) * 64
    if end:
        os.ftruncate(file, max(end, os.fstat(file).st_size))
        with mmap.mmap(file, end) as memory:
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            for part, place in zip(parts, places, strict=True):
                flat = _memory(part)
                whole[place.offset : place.offset + len(flat)].copy_(flat)
            del whole
    return Sent(form, tuple(places))


def sums(outputs: Sequence[Sequence[Tensor]]) -> tuple[int, ...]:
    """Return a number for each output, known only to a process with the computed output.

    It is a hash in host memory, and a sum in a GPU's. Small changes within the tolerance could give an output any sum.
    """
    if not any(part.is_cuda for parts in outputs for part in parts):
        return tuple(map(_hashed, outputs))
    totals = [torch.stack([_words(part).sum() for part in parts]).sum() for parts in outputs if parts]
    return tuple(map(int, torch.stack(totals).tolist())) if totals else (0,) * len(outputs)


def _hashed(parts: Sequence[Tensor]) -> int:
    state = hashlib.sha256()
    for part in parts:
        state.update(_memory(part).numpy().data)
    return int.from_bytes(state.digest()[:7], "big")  # a number of 64 bits, with its sign


def _words(part: Tensor) -> Tensor:
    """Return a tensor's value memory as integers, 8 bytes each if there is no rest."""
    memory = _memory(part)
    return memory if len(memory) % 8 else memory.view(torch.int64)


def _memory(part: Tensor) -> Tensor:
    """Return a tensor's value memory as bytes."""
    if not part.numel():  # from NumPy, its strides may not allow a view
        return torch.zeros(0, dtype=torch.uint8, device=part.device)
    return part.detach().contiguous().reshape(-1).view(torch.uint8)


def _by_handle(part: Tensor) -> Part:
    if not part.numel():
        return Part(_name(part), tuple(part.shape))
    part = part.detach().contiguous()
    handle = part.untyped_storage()._share_cuda_()
    start = int(part.storage_offset()) * part.element_size()
    return Part(_name(part), tuple(part.shape), handle=tuple(handle), start=start)


def arranged(form: str, tensors: list[Tensor]) -> Any:
    """Return the tensors in a form of `plain_parts`."""
    if form == "tensor" and len(tensors) == 1:
        return tensors[0]
    return tensors if form == "list" else tuple(tensors)


def _name(part: Tensor) -> str:
    return str(part.dtype).removeprefix("torch.")
