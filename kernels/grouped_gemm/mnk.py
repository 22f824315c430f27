"""Product lists, each group with its own M, N and K: the parts mnk_*.py share.

    c_g = a_g @ b_g        a_g [M_g, K_g]   b_g [K_g, N_g]   c_g [M_g, N_g]     g = 0..G-1

Every matrix may be anywhere in memory, so a kernel finds it through a table on the device. The outputs are views into
one buffer, each at a multiple of 16 bytes. The table omits groups without an output, and those with K = 0, whose output
is zero.

The problem is the one in Triton's tutorial 08-grouped-gemm; pointer.py has the tutorial's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from groupbench.kernels.device import device_of
from groupbench.kernels.grouped_gemm.support import TMA_BYTES, require_runnable, require_tensors
from groupbench.kernels.grouped_gemm.tuned import tuning_key

Launcher = Callable[[Tensor], None]  # computes all groups of a table into the buffer of the outputs


def require_lists(group_a: Sequence[Tensor], group_b: Sequence[Tensor]) -> None:
    """Raise ValueError or TypeError unless the groups can be multiplied here by one kernel."""
    if not group_a or len(group_a) != len(group_b):
        raise ValueError(f"need as many A as B and at least one, got {len(group_a)} and {len(group_b)}")
    for g, (a, b) in enumerate(zip(group_a, group_b, strict=True)):
        require_tensors(**{f"group_a[{g}]": a, f"group_b[{g}]": b})
        if a.ndim != 2 or b.ndim != 2 or a.size(1) != b.size(0):
            raise ValueError(f"group {g}: cannot multiply {tuple(a.shape)} by {tuple(b.shape)}")
    require_runnable(*group_a, *group_b)


def unit_dim(matrices: Sequence[Tensor]) -> int | None:
    """Return the dimension along which all matrices have unit stride, 1 before 0; None if strides differ."""
    # The stride of a dimension of one element is never used, so its value does not matter.
    fits = (dim for dim in (1, 0) if all(x.stride(dim) == 1 or x.size(dim) <= 1 for x in matrices))
    return next(fits, None)


def leading(x: Tensor, unit: int) -> int:
    """Return the stride along the dimension other than `unit`, a valid one if there is nothing to step over."""
    step = TMA_BYTES // x.element_size()
    return x.stride(1 - unit) if x.size(1 - unit) > 1 else -(-x.size(unit) // step) * step


def busy(group_a: Sequence[Tensor], group_b: Sequence[Tensor]) -> list[int]:
    """Return the groups with something to compute, those with most steps per tile first."""
    working = [g for g, (a, b) in enumerate(zip(group_a, group_b, strict=True)) if a.numel() and b.numel()]
    return sorted(working, key=lambda g: -group_a[g].size(1))


def why_not_tma(group_a: Sequence[Tensor], group_b: Sequence[Tensor]) -> str | None:
    """Return why TMA cannot read the groups with something to compute, or None if it can."""
    if not device_of(group_a[0].device).tma:
        return "this GPU has no TMA"
    for name, group in (("A", group_a), ("B", group_b)):
        matrices = [group[g] for g in busy(group_a, group_b)]
        unit = unit_dim(matrices)
        if unit is None:
            return f"the matrices {name} have unit strides along different dimensions"
        for x in matrices:
            if x.data_ptr() % TMA_BYTES or leading(x, unit) * x.element_size() % TMA_BYTES:
                return f"an address or a stride of a matrix {name} is not a multiple of {TMA_BYTES} bytes"
    return None


def offsets_of(group_a: Sequence[Tensor], group_b: Sequence[Tensor]) -> list[int]:
    """Return where each group's output starts in the buffer, in elements, and the buffer size."""
    step = TMA_BYTES // group_a[0].element_size()
    sizes = (-(-a.size(0) * b.size(1) // step) * step for a, b in zip(group_a, group_b, strict=True))
    return [0, *accumulate(sizes)]


def with_outputs(
    group_a: Sequence[Tensor], group_b: Sequence[Tensor], launch: Launcher | None
) -> Callable[[], tuple[Tensor, ...]]:  # G of [M_g, N_g]
    """Return a callable to allocate the outputs and call `launch`, if any group has something to compute."""
    offsets = offsets_of(group_a, group_b)
    shapes = [(a.size(0), b.size(1)) for a, b in zip(group_a, group_b, strict=True)]
    zero = [g for g, a in enumerate(group_a) if a.size(1) == 0]
    like = group_a[0]
    dtype, device = like.dtype, like.device

    def run() -> tuple[Tensor, ...]:
        out = torch.empty(offsets[-1], dtype=dtype, device=device)
        if launch is not None:
            launch(out)
        outputs = tuple(
            out.as_strided(shape, (shape[1], 1), start) for shape, start in zip(shapes, offsets, strict=False)
        )
        for g in zero:
            outputs[g].zero_()
        return outputs

    return run


def config_key(group_a: Sequence[Tensor], group_b: Sequence[Tensor]) -> str:
    """Return a problem's key in tuned-config files: all groups' rows, the largest N and K."""
    M, N = sum(a.size(0) for a in group_a), max(b.size(1) for b in group_b)
    nk = group_b[0].stride(0) == 1 != group_b[0].stride(1)
    return tuning_key(M, len(group_a), N, max(a.size(1) for a in group_a), group_a[0].dtype, nk)


def multiply_lists_reference(group_a: Sequence[Tensor], group_b: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return all groups' products in a wider dtype."""
    from groupbench.kernels.grouped_gemm.reference import reference_list

    return tuple(reference_list(group_a, group_b))
