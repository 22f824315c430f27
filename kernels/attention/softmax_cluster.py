"""Row softmax, and its gradient, with a cluster of SMs for each row, in CUDA C++: row_softmax's backend `cuda_cluster`.

    y[m, n]  = exp(x[m, n] - max_n x[m, n]) / sum_n exp(...)            x, y, dy, dx [M, N]
    dx[m, n] = y[m, n] * (dy[m, n] - sum_n y[m, n] dy[m, n])

A row is read once if it stays in registers until its sum is known. Here, up to eight programs share a row, one on each
SM, so rows of up to 512 KiB stay there. Each warp writes its maximum and sum into the shared memory of all programs:
the row's are known after one barrier.

Each thread keeps pieces of 16 bytes, loaded at once. A row must consist of whole pieces. Sums are in fp32, in one
order.

The kernels are in softmax_cluster.cu. Without a GPU, tests compile them but cannot run them. After QuACK's softmax
(Dao-AILab), which reduces over clusters too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from groupbench.kernels.attention.softmax import require_rows
from groupbench.kernels.cuda_source import CudaKernel, compile_cuda, why_not_nvrtc
from groupbench.kernels.device import device_of

PIECE = 16  # bytes
THREADS = 1024  # of a program, at most
PIECES = {1: 8, 2: 4}  # that a thread keeps of each operand, by their number: half of its registers
PROGRAMS = range(1, 9)  # of a cluster
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # by number in the source


def unsuitable(*operands: Tensor) -> str | None:  # [M, N] each
    """Return why the kernels cannot take these rows, or None if they can."""
    x = operands[0]
    row_bytes, most = x.size(1) * x.element_size(), PROGRAMS[-1] * THREADS * PIECES[len(operands)] * PIECE
    if x.device.type != "cuda" or not device_of(x.device).clusters:
        return "the kernel needs a GPU with clusters of SMs"
    if row_bytes % PIECE or any(operand.data_ptr() % PIECE for operand in operands):
        return f"rows are not at multiples of {PIECE} bytes"
    if row_bytes > most:
        return f"rows have {row_bytes} bytes, more than {most}"
    return why_not_nvrtc()


def prepare_softmax_cluster(x: Tensor) -> Callable[[], Tensor]:  # [M, N] contiguous -> [M, N]
    """Compile; the returned callable allocates the output and launches. Raises ValueError for other operands."""
    return _prepare("softmax_kernel", x)


def prepare_softmax_backward_cluster(
    y: Tensor,  # [M, N] contiguous, the output of the forward pass
    dy: Tensor,  # [M, N] contiguous, its gradient
) -> Callable[[], Tensor]:  # [M, N], the gradient of x
    """Compile; the returned callable allocates the gradient and launches. Raises ValueError for other operands."""
    return _prepare("softmax_backward_kernel", y, dy)


def _prepare(name: str, *operands: Tensor) -> Callable[[], Tensor]:
    require_rows(*operands)
    if reason := unsuitable(*operands):
        raise ValueError(reason)
    first, each = operands[0], PIECES[len(operands)]
    M, pieces = first.size(0), first.size(1) * first.element_size() // PIECE
    if not M or not pieces:
        return lambda: torch.empty_like(first)
    programs = next(count for count in PROGRAMS if pieces <= count * THREADS * each)
    threads = min(THREADS, -(-pieces // (programs * each * 32)) * 32)
    kernel = _kernel(name, constants(first.dtype, programs, threads, each), torch.cuda.current_device())
    count = len(operands)
    launch = kernel.bind(M * programs, threads, [*operands, None, pieces], (*range(count + 1),))

    def run() -> Tensor:
        out = torch.empty_like(first)
        launch(*[operand.data_ptr() for operand in operands], out.data_ptr())
        return out

    return run


def constants(dtype: torch.dtype, programs: int, threads: int, pieces: int) -> tuple[tuple[str, int], ...]:
    """Return the constants of the source, by name."""
    sizes = {"PROGRAMS": programs, "THREADS": threads, "PIECES": pieces}
    return (("ELEMENT", DTYPES.index(dtype)), *sizes.items())


@cache
def _kernel(name: str, named: tuple[tuple[str, int], ...], device: int) -> CudaKernel:
    return CudaKernel(cubin(named, device_of(torch.device("cuda", device)).arch), name, 0)


@cache
def cubin(named: tuple[tuple[str, int], ...], arch: str) -> bytes:
    """Return both kernels' machine code."""
    source = Path(__file__).with_name("softmax_cluster.cu").read_text()
    return compile_cuda(source, dict(named), arch)
