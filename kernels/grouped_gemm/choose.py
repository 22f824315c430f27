"""Choose a product's kernel, once for each problem class, and bind the launch.

A problem class is the device, the dtypes, and the operands' shapes and strides. The choice is between the flat kernel
(which has tiles for decoding) and the cluster kernel. It follows

    1. the files of choices (`configs/choice_<gpu>.json` and the user's, see tuned.py), by `tuning_key`
    2. else the shorter predicted time (predict.py)

A bound launch has its descriptors made and its kernel compiled. Later calls with the same class only pass addresses.
Both add in the same order, so a choice does not change any result bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from groupbench.kernels.device import Device, device_of
from groupbench.kernels.grouped_gemm.support import fits, interpreted, stored_weights, unsupported
from groupbench.kernels.grouped_gemm.tuned import tuned_config, tuning_key
from groupbench.kernels.launch import Kept

FLAT, CLUSTER = "flat", "cluster"
PRODUCT, GRADIENT = "choice", "choice_wgrad"
"""The files of choices: for products of rows, and for gradients of weights."""

CHECK = "GROUPBENCH_CHECK_OFFSETS"
_checking = os.environ.get(CHECK, "0") not in ("", "0")


Bound = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A launch that takes operands of one problem class. It reads their addresses alone, so a transposed view will do."""

_bound: Kept[Bound] = Kept()


def unfit(a: Tensor, b: Tensor, offs: Tensor | None, out_dtype: torch.dtype | None = None) -> str | None:
    """Return why groupbench's kernels cannot compute a grouped product, from facts known without values, or None."""
    dims = (a.dim(), b.dim())
    if dims not in ((2, 3), (2, 2)):
        return f"operands of {dims[0]} and {dims[1]} dimensions: the kernels take (2, 3) and (2, 2)"
    if offs is None:
        return "without offs"
    if a.dtype != b.dtype:
        return f"a is {a.dtype} and b is {b.dtype}"
    if out_dtype is not None and out_dtype != a.dtype:
        return f"out_dtype={out_dtype} of {a.dtype} operands"
    if not a.device == b.device == offs.device:
        return "operands on several devices"
    if reason := on_runnable_device(a) or unsupported(a.dtype, a.device.type == "cpu"):
        return reason
    if offs.dtype not in (torch.int32, torch.int64) or offs.dim() != 1:
        return f"offs of {offs.dtype} and {offs.dim()} dimensions"
    fits = b.size(0) == (offs.size(0) if b.dim() == 3 else a.size(1)) and (b.dim() == 2 or a.size(1) == b.size(1))
    return None if fits else f"shapes {tuple(a.shape)} and {tuple(b.shape)} with {tuple(offs.shape)} offsets"


def on_runnable_device(x: Tensor) -> str | None:
    """Return why no kernel runs on a tensor's device, or None if one does."""
    if x.device.type not in ("cpu", "cuda"):
        return f"tensors on {x.device.type}"
    if x.device.type == "cpu" and not _interpreted():
        return "CPU tensors, without Triton's interpreter (TRITON_INTERPRET=1)"
    return None


@torch.compiler.assume_constant_result
def _interpreted() -> bool:
    return interpreted()


def readable(x: Tensor) -> Tensor:
    """Return x without lazy bits, or a copy of it if it has no rows in memory, as the gradient of a sum."""
    if x.is_neg():
        x = x.resolve_neg()
    strides = x.stride()
    if x.dim() == 2 and ((strides[1] != 1 and strides[0] != 1) or 0 in strides):
        return x.contiguous()
    return x


def product(a: Tensor, b: Tensor, offs: Tensor, zero_rest: bool = True) -> Tensor:
    """Return a [M, K] @ b [G, K, N] by row groups, for operands that are `readable` and not `unfit`.

    Rows past offs[-1] are zero with `zero_rest`, else not written.
    """
    if _checking:
        assert_offsets(offs, a.size(0))
    key = _key(a, b, offs, zero_rest)
    bound = _bound.get(key)
    if bound is None:
        bound = _bind(key, a, b, offs, zero_rest)
    return bound(a, b, offs)


class Launches:
    """The launches of a model that trains, for one problem class: c = a [M, K] @ b [G, K, N], and the gradients.

    Each is bound when it is first used. The gradient dc has c's shape and dtype, so only its strides can differ from
    one call to the next. A saved operand may return with other strides too, as from the CPU.
    """

    def __init__(self, key: Hashable, a: Tensor, b: Tensor, offs: Tensor) -> None:
        self.nk = stored_nk(b)
        self._of_a: dict[Hashable, Bound] = {}
        self._of_b: dict[Hashable, Bound] = {}
        self.product: Bound = product_of_any
        if readable(a) is a and readable(b) is b and _dense(offs) is offs:
            self.product = _bound.get(key) or _bind(key, a, b, offs, True)

    def gradient_of_a(self, dc: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        """Return dc [M, N] @ b.T by row groups, [M, K]."""
        strides = dc.stride(), b.stride(), b.dtype
        launch = None if _off_16_bytes(dc, b) else self._of_a.get(strides)
        if launch is not None:
            return launch(dc, b, offs)
        b = b.transpose(1, 2)
        if self.product is product_of_any or readable(dc) is not dc or _off_16_bytes(dc, b):
            return product_of_any(dc, b, offs)
        key = _key(dc, b, offs, True)
        launch = self._of_a[strides] = _bound.get(key) or _bind(key, dc, b, offs, True)
        return launch(dc, b, offs)

    def gradient_of_b(self, dc: Tensor, a: Tensor, offs: Tensor) -> Tensor:
        """Return a.T @ dc [M, N] by row groups, [G, K, N] with b's layout."""
        strides = dc.stride(), a.stride(), a.dtype
        launch = None if _off_16_bytes(dc, a) else self._of_b.get(strides)
        if launch is not None:
            return launch(a, dc, offs)
        if self.product is product_of_any or readable(dc) is not dc or _off_16_bytes(dc, a):
            return gradient_of_any(a, dc, offs, self.nk)
        key = _gradient_key(a, dc, offs, self.nk)
        launch = self._of_b[strides] = _bound.get(key) or _bind_gradient(key, a, dc, offs, self.nk)
        return launch(a, dc, offs)


_launches: Kept[Launches] = Kept()


def launches_of(a: Tensor, b: Tensor, offs: Tensor) -> Launches:
    """Return the launches for a [M, K] and b [G, K, N], which are not `unfit`."""
    if _checking:
        assert_offsets(offs, a.size(0))
    key = _key(a, b, offs, True)
    return _launches.get(key) or _launches.add(key, Launches(key, a, b, offs))


def launches_again(a: Tensor, b: Tensor, offs: Tensor) -> Launches | None:
    """Return the launches for operands like those of an earlier call, or None without one.

    The operands may be any plain tensors, and nothing else needs to be checked: they are not `unfit`, because the
    earlier ones were not. This is most of a small product's time on the host.
    """
    if _checking or not (a.is_cuda and b.is_cuda and offs.is_cuda):
        return None
    return _launches.get(_key(a, b, offs, True))


def forget() -> None:
    """Choose and bind again in later calls, as after a change of the files of choices."""
    _bound.clear()
    _launches.clear()


def stored_nk(b: Tensor) -> bool:
    """Return whether b [G, K, N] is a view of weights stored as [G, N, K], whose gradient has that layout too."""
    return bool(b.stride(1) == 1 and b.stride(2) != 1)


def _dense(offs: Tensor) -> Tensor:
    return offs if offs.stride(0) == 1 else offs.contiguous()


def _off_16_bytes(x: Tensor, y: Tensor) -> bool:
    """Return whether an address is not a multiple of 16, or a tensor is lazily negated."""
    return (x.data_ptr() | y.data_ptr()) & 15 != 0 or x.is_neg()


def product_of_any(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Return `product` for operands that are not `unfit`."""
    return product(readable(a), readable(b), _dense(offs))


def gradient_of_any(a: Tensor, dc: Tensor, offs: Tensor, nk: bool) -> Tensor:
    """Return `gradient` for operands that are not `unfit`."""
    return gradient(readable(a), readable(dc), _dense(offs), nk)


def _key(a: Tensor, b: Tensor, offs: Tensor, zero_rest: bool) -> Hashable:
    """Return the problem class: all that `unfit` and a kernel's choice depend on, but the kind of device."""
    return (
        a.shape, a.stride(), b.shape, b.stride(), offs.shape, offs.stride(), a.dtype, b.dtype, offs.dtype,
        a.get_device(), b.get_device(), offs.get_device(), a.is_neg() or b.is_neg(),
        (a.data_ptr() | b.data_ptr()) & 15 == 0,  # whether TMA could read both addresses
        zero_rest,
    )  # fmt: skip


def gradient(a: Tensor, dc: Tensor, offs: Tensor, nk: bool) -> Tensor:
    """Return a [M, K].T @ dc [M, N] by row groups, [G, K, N]; with `nk` stored as [G, N, K]."""
    if _checking:
        assert_offsets(offs, a.size(0))
    key = _gradient_key(a, dc, offs, nk)
    bound = _bound.get(key)
    if bound is None:
        bound = _bind_gradient(key, a, dc, offs, nk)
    return bound(a, dc, offs)


def _gradient_key(a: Tensor, dc: Tensor, offs: Tensor, nk: bool) -> Hashable:
    aligned = (a.data_ptr() | dc.data_ptr()) & 15 == 0  # whether TMA could read both
    return a.shape, a.stride(), dc.shape, dc.stride(), a.dtype, offs.dtype, offs.shape, a.get_device(), aligned, nk


def assert_offsets(offs: Tensor, rows: int) -> None:
    """Stop the device unless the offsets do not decrease and stay within the rows. The host does not wait."""
    ends = offs.to(torch.int64)
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    torch._assert_async(((ends >= starts) & (ends <= rows)).all(), "offs must not decrease, from 0 to the rows")


@contextmanager
def check_offsets(enabled: bool = True) -> Iterator[None]:
    """Check offsets on the device in every product within this context, also in captured graphs.

    Wrong offsets then stop the device with an assertion instead of corrupting memory. A check costs a few launches.
    GROUPBENCH_CHECK_OFFSETS=1 enables it for a process.
    """
    global _checking
    before, _checking = _checking, enabled
    try:
        yield
    finally:
        _checking = before


# --- the choice -------------------------------------------------------------------------------------------------------


def choose(M: int, G: int, N: int, K: int, dtype: torch.dtype, nk: bool, device: Device, table: str = PRODUCT) -> str:
    """Return the kernel for a product with operands both kernels can take: FLAT or CLUSTER."""
    fields = tuned_config(table, tuning_key(M, G, N, K, dtype, nk), device)
    if fields is not None and fields.get("kernel") in (FLAT, CLUSTER):
        return str(fields["kernel"])
    if not device.hopper or dtype.itemsize != 2:
        return FLAT
    from groupbench.kernels.grouped_gemm import cluster, cluster_wgrad, flat, wgrad

    if M <= wgrad.SPARSE_ROWS * G if table == GRADIENT else fits(M / G, 64):
        return FLAT
    kernels = (wgrad, cluster_wgrad) if table == GRADIENT else (flat, cluster)
    sizes = (K, N) if table == GRADIENT and not nk else (N, K)
    flat_us, cluster_us = (
        kernel.predicted_us(kernel.choose_config(M, G, N, K, dtype, device, nk=nk), M, G, *sizes, device)
        for kernel in kernels
    )
    return FLAT if flat_us <= cluster_us else CLUSTER


def _bind(key: Hashable, a: Tensor, b: Tensor, offs: Tensor, zero_rest: bool) -> Bound:
    from groupbench.kernels.grouped_gemm.cluster import bind_cluster
    from groupbench.kernels.grouped_gemm.cluster_tiles import unsuitable
    from groupbench.kernels.grouped_gemm.flat import bind_flat

    (M, K), (G, _, N) = a.shape, b.shape
    weights, nk, _ = stored_weights(b)
    chosen = FLAT
    if unsuitable(N, G, a=a, b=weights) is None:
        chosen = choose(M, G, N, K, a.dtype, nk, device_of(a.device))
    bind = bind_cluster if chosen == CLUSTER else bind_flat
    return _bound.add(key, bind(a, b, offs, zero_rest=zero_rest))


def _bind_gradient(key: Hashable, a: Tensor, dc: Tensor, offs: Tensor, nk: bool) -> Bound:
    from groupbench.kernels.grouped_gemm.cluster_tiles import unsuitable
    from groupbench.kernels.grouped_gemm.cluster_wgrad import bind_cluster_wgrad
    from groupbench.kernels.grouped_gemm.wgrad import bind_wgrad

    (M, K), N, G = a.shape, dc.size(1), offs.numel()
    chosen = FLAT
    if unsuitable(K if nk else N, G, a=a, dc=dc) is None and dc.size(1) % 8 == 0 and a.size(1) % 8 == 0:
        chosen = choose(M, G, N, K, a.dtype, nk, device_of(a.device), GRADIENT)
    bind = bind_cluster_wgrad if chosen == CLUSTER else bind_wgrad
    return _bound.add(key, bind(a, dc, offs, nk))
