"""Check the grouped-GEMM kernels' operands: the first step in every `prepare_*`.

Letters, here and in every kernel in this folder:

    G   groups (experts)                 a     [M, K]      rows of all groups, one group after the other
    M   rows of all groups together      b     [G, K, N]   one matrix per group, any strides
    M_g rows of group g                  offs  [G]         end offsets: group g owns rows offs[g-1]..offs[g]

Rows past offs[-1] belong to no group; every backend writes zeros there, like the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from groupbench.kernels.device import INTERPRETER, Device, device_of
from groupbench.kernels.grouped_gemm.lockstep_counter import LEAD

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])  # e.g. (3, 7)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


TMA_BYTES = 16  # the tensor memory accelerator needs addresses and strides that are multiples of this


def interpreted() -> bool:
    """Return whether Triton interprets kernels (TRITON_INTERPRET=1) instead of compiling them."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def unsupported(dtype: torch.dtype, interpreted: bool) -> str | None:
    """Return why the Triton and Helion backends cannot run `dtype`, or None if they can."""
    if dtype not in DTYPES:
        return f"{dtype} is not one of {', '.join(map(str, DTYPES))}"
    if interpreted and dtype == torch.bfloat16:
        # The interpreter stores bf16 as a uint16 bit pattern and multiplies that: wrong by 1e10 (Triton 3.7.1).
        return "Triton's interpreter computes tl.dot in bf16 wrongly; use fp16"
    return None


def illegal_tile(
    block_m: int,
    block_n: int,
    block_k: int,
    num_stages: int = 1,
    dtype: torch.dtype = torch.float16,
    device: Device = INTERPRETER,
) -> str | None:
    """Return why a tile cannot be compiled for a GPU, or None if it can: the one check for launchers and pruners."""
    for name, size in (("block_m", block_m), ("block_n", block_n), ("block_k", block_k)):
        if size < 16 or size & (size - 1):
            return f"{name}={size}: tl.dot needs a power of two, at least 16"
    shared = (block_m + block_n) * block_k * dtype.itemsize * device.buffers(num_stages, dtype.itemsize)
    if shared > device.shared_bytes:
        return f"{num_stages} stages of A and B tiles take {shared} bytes of {device.shared_bytes}"
    return None


def fits(mean_rows: float, rows: int) -> bool:
    """Return whether a tile with this many rows holds nearly every expert, for experts with these rows on average.

    Experts with more rows take a second tile, which reads the weights again. Under balanced routing their rows scatter
    like a Poisson variable's. On an H200 (2026-11-30; 4 to 128 rows per expert, three models), tiles for 1.5 deviations
    above the mean were within 3 % of the fastest.
    """
    return mean_rows + 1.5 * math.sqrt(mean_rows) <= rows


def size_class(mean_rows: float, classes: Sequence[tuple[int, str]], larger: str) -> str:
    """Return the name of the first (rows, name) whose tile `fits` experts with these rows on average, or `larger`."""
    return next((name for rows, name in classes if fits(mean_rows, rows)), larger)


def illegal_roles(lockstep: int, dtype: torch.dtype, device: Device) -> str | None:
    """Return why no warp-specialised kernel with this `lockstep` can be compiled for a GPU, or None."""
    if device.vendor != "cpu" and not device.hopper:
        return f"its instructions are Hopper's, and this GPU is {device.arch}"
    if dtype.itemsize != 2:
        return f"specialized multiplies 16-bit operands, not {dtype}"
    return illegal_lockstep(lockstep)


def illegal_lockstep(lockstep: int) -> str | None:
    """Return why programs cannot wait for each other after this many steps, or None if they can."""
    if lockstep and lockstep < LEAD:
        return f"programs arrive some steps before they wait: lockstep must be 0, or at least {LEAD}"
    return None


def require_tensors(**operands: object) -> None:
    """Raise TypeError with the first non-tensor operand's name: a list or an array would fail later."""
    for name, operand in operands.items():
        if not isinstance(operand, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(operand).__name__}")


def require_runnable(*operands: Tensor) -> None:
    """Raise ValueError unless the operands share one dtype and one device, and the kernels can run on both."""
    for operand in operands:
        require_tensors(**{"every operand": operand})
    first = operands[0]
    for operand in operands[1:]:
        if operand.dtype != first.dtype or operand.device != first.device:
            raise ValueError(
                "operands need one dtype and one device: "
                f"got {first.dtype} on {first.device} and {operand.dtype} on {operand.device}"
            )
    if reason := unsupported(first.dtype, interpreted()):
        raise ValueError(reason)
    require_device(first.device)


def require_device(device: torch.device) -> None:
    """Raise ValueError unless a kernel launched now runs on this device."""
    if device.type == "cpu" and not interpreted():
        raise ValueError("CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported")
    if device.type == "cuda" and device.index != (current := torch.cuda.current_device()):
        raise ValueError(
            f"operands on {device}, and Triton launches on the current device, cuda:{current}: "
            f"call within torch.cuda.device({device.index})"
        )


def group_ends(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]
    offs: Tensor,  # [G], int32 or int64
) -> list[int]:
    """Return the end offsets on the host (one device sync); raise ValueError if shapes and offsets do not fit together.

    Raises TypeError for anything but tensors.
    """
    require_tensors(a=a, b=b, offs=offs)
    if a.ndim != 2 or b.ndim != 3 or a.size(1) != b.size(1):
        raise ValueError(f"expected a [M, K] and b [G, K, N], got {tuple(a.shape)} and {tuple(b.shape)}")
    if offs.ndim != 1 or offs.numel() == 0 or offs.numel() != b.size(0):
        raise ValueError(
            f"offs needs an end offset for each of {b.size(0)} groups, at least one; got {tuple(offs.shape)}"
        )
    if offs.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"offs must be int32 or int64, got {offs.dtype}")
    require_dense(offs)
    ends: list[int] = offs.tolist()
    for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end < start:
            raise ValueError(f"offs must not decrease: offs[{g}] = {end} after {start}")
    if ends[-1] > a.size(0):
        raise ValueError(f"offs[-1] = {ends[-1]} exceeds the {a.size(0)} rows of a")
    return ends


def require_operands(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]
    offs: Tensor,  # [G], int32 or int64
    trusted: bool,  # leave out shapes and offsets, whose check synchronises with the device
) -> None:
    """Raise ValueError or TypeError unless a kernel reading `offs` on the device can run with these operands."""
    require_runnable(a, b)
    if trusted:
        require_dense(offs)
    else:
        group_ends(a, b, offs)


def require_gradient_operands(
    a: Tensor,  # [M, K]
    dc: Tensor,  # [M, N]
    offs: Tensor,  # [G], int32 or int64
    trusted: bool,  # leave out the offsets, whose check synchronises with the device
) -> None:
    """Raise ValueError or TypeError unless a kernel summing over groups' rows can run with these operands."""
    if not trusted:
        require_tensors(a=a, dc=dc, offs=offs)
        group_ends(a, a.new_empty(offs.numel(), *a.shape[-1:], 0), offs)
    require_runnable(a, dc)
    require_dense(offs)
    if dc.ndim != 2 or dc.size(0) != a.size(0):
        raise ValueError(f"expected dc [{a.size(0)}, N] with a row for each of a's, got {tuple(dc.shape)}")


def require_dense(offs: Tensor) -> None:
    """Raise ValueError for offsets with gaps between them, such as a table's column: kernels would read the gaps."""
    if offs.numel() > 1 and offs.stride(0) != 1:
        raise ValueError(f"offs has a stride of {offs.stride(0)}; kernels read [G] in one piece: offs.contiguous()")


def no_tma(columns: int, **operands: Tensor) -> str | None:
    """Return why TMA cannot read these operands or write rows with `columns` such elements, or None if it can."""
    for name, x in operands.items():
        if not device_of(x.device).tma:
            return "this GPU has no TMA"
        if x.stride(-1) != 1:
            return f"{name}'s last dimension does not have stride 1, as TMA requires"
        if x.data_ptr() % TMA_BYTES or any(stride * x.element_size() % TMA_BYTES for stride in x.stride()[:-1]):
            return f"{name}'s address or strides are not multiples of {TMA_BYTES} bytes"
    if any(columns * x.element_size() % TMA_BYTES for x in operands.values()):
        return f"a row of the output is not a multiple of {TMA_BYTES} bytes"
    return None


def stored_weights(b: Tensor) -> tuple[Tensor, bool, bool]:
    """Return b [G, K, N] as (stored weights, whether these are [G, N, K], whether all groups share one matrix)."""
    shared = b.size(0) > 1 and b.stride(0) == 0
    if shared:
        b = b[0].unsqueeze(0)  # b[:1] would keep the stride of 0
    nk = b.stride(1) == 1 and b.stride(2) != 1
    return (b.transpose(1, 2) if nk else b), nk, shared


def gradient_layout(G: int, K: int, N: int, nk: bool) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the shape and strides of the gradient [G, K, N] of weights, stored as [G, N, K] with `nk`."""
    return (G, K, N), (N * K, 1, K) if nk else (N * K, N, 1)


def zero_gradient(G: int, K: int, N: int, nk: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the callable of a, dc and offs for the gradient of weights without elements, or without rows."""
    shape, strides = gradient_layout(G, K, N, nk)
    return lambda a, dc, offs: torch.empty_strided(shape, strides, dtype=a.dtype, device=a.device).zero_()


def past_int32(a: Tensor, b: Tensor) -> bool:
    """Return whether a [M, K] or the output [M, N] has elements past 2**31, so row indices need int64."""
    return a.size(0) * max(a.stride(0), b.size(2)) >= 2**31


def require_within_int32(**operands: Tensor) -> None:
    """Raise ValueError for views whose last element is past 2**31, if all have few elements, as a slice of a stack.

    Helion 1.5 chooses the index type by the element count, and would read elsewhere.
    """
    if any(x.numel() >= 2**31 for x in operands.values()):
        return
    for name, x in operands.items():
        reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        if reach >= 2**31:
            raise ValueError(
                f"{name} {tuple(x.shape)} with strides {x.stride()} reaches element {reach}, and Helion's indices are "
                f"int32: pass {name}.contiguous()"
            )


def without_ones(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a [M, K] and b [G, K, N] with M and N at least two, for Helion's kernels.

    Helion 1.5.0 drops a one-element dimension's index, and the mask no longer fits. A copy of the first row or column
    keeps the dimension; the caller cuts it off.
    """
    if a.size(0) == 1:
        a = a.expand(2, -1)
    if b.size(2) == 1:
        b = b.expand(-1, -1, 2)
    return a, b


def can_chain(device: torch.device) -> bool:
    """Return whether a launch may begin before the previous one's end, and wait for it on the device."""
    return not interpreted() and device_of(device).chains


def worker_count(device: torch.device, per_sm: int = 1) -> int:
    """Return a persistent grid's program count: `per_sm` per SM of a GPU, a few in the interpreter."""
    facts = device_of(device)
    return facts.sms if facts.vendor == "cpu" else per_sm * facts.sms
