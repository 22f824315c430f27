"""Row softmax, and its gradient, with a cluster of SMs for each row, in CUDA C++: row_softmax's backend `cuda_cluster`.

    y[m, n]  = exp(x[m, n] - max_n x[m, n]) / sum_n exp(...)            x, y, dy, dx [M, N]
    dx[m, n] = y[m, n] * (dy[m, n] - sum_n y[m, n] dy[m, n])

A row is read once if it stays on the SM until its sum is known. Up to eight programs share a row. Each warp writes its
maximum and sum into the shared memory of all programs: the row's are known after one barrier.

    forward    most of a program's part is in shared memory, the rest in registers. So an SM has two programs, and one
               reads while the other one computes or writes: 0.97 of a copy's speed in rows of 128 KiB. A single program
               with the row in registers reaches 0.92, and so does one that reads its next row while it computes.
    backward   y and dy are in the registers of one program on each SM

A thread has pieces of 16 bytes. A row must consist of whole pieces. Sums are in fp32, in one order.

The kernels are in softmax_cluster.cu. Without a GPU, tests compile them but cannot run them. After QuACK's softmax
(Dao-AILab), which reduces over clusters too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from groupbench.kernels.attention.softmax import require_rows
from groupbench.kernels.cuda_source import CudaKernel, compile_cuda, why_not_nvrtc
from groupbench.kernels.device import device_of
from groupbench.kernels.hopper_source import instructions

PIECE = 16  # bytes
PROGRAMS = range(1, 9)  # of a cluster


@dataclass(frozen=True)
class Parts:
    """The places that hold a program's part of a row, of each operand.

    Attributes:
        threads: Of a program, at most.
        pieces: That a thread keeps in registers, at most.
        chunks: In shared memory, at most.
        step: Pieces of each thread in a chunk.
    """

    threads: int
    pieces: int
    chunks: int = 0
    step: int = 1

    @property
    def most(self) -> int:
        """Return how many pieces a program can take."""
        return self.threads * (self.pieces + self.chunks * self.step)

    @property
    def shared_bytes(self) -> int:
        """Return the size of the chunks."""
        return self.threads * self.chunks * self.step * PIECE

    def fitted(self, count: int) -> Parts:
        """Return the parts for as many pieces: fewer threads, chunks and registers."""
        each = self.step if self.chunks else self.pieces
        threads = min(self.threads, -(-count // (each * 32)) * 32)
        chunks = min(self.chunks, -(-count // (threads * self.step)))
        return replace(self, threads=threads, chunks=chunks, pieces=max(0, -(-count // threads) - chunks * self.step))


# Measured on an H200. Forward, two programs share an SM: each has 112 KiB of shared memory, and 64 registers for each
# thread. Chunks of 8 and 32 KiB were within 1 %. Backward, half of the registers hold the row.
FORWARD = Parts(threads=512, pieces=8, chunks=7, step=2)
BACKWARD = Parts(threads=1024, pieces=4)
PARTS = {1: FORWARD, 2: BACKWARD}  # by the number of operands
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # by number in the source


def unsuitable(*operands: Tensor) -> str | None:  # [M, N] each
    """Return why the kernels cannot take these rows, or None if they can."""
    x = operands[0]
    row_bytes, most = x.size(1) * x.element_size(), PROGRAMS[-1] * PARTS[len(operands)].most * PIECE
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
    first, parts, count = operands[0], PARTS[len(operands)], len(operands)
    M, pieces = first.size(0), first.size(1) * first.element_size() // PIECE
    if not M or not pieces:
        return lambda: torch.empty_like(first)
    programs = next(number for number in PROGRAMS if pieces <= number * parts.most)
    parts = parts.fitted(-(-pieces // programs))
    named = constants(first.dtype, programs, parts)
    kernel = _kernel(name, named, parts.shared_bytes, torch.cuda.current_device())
    launch = kernel.bind(M * programs, parts.threads, [*operands, None, pieces], (*range(count + 1),))

    def run() -> Tensor:
        out = torch.empty_like(first)
        launch(*[operand.data_ptr() for operand in operands], out.data_ptr())
        return out

    return run


def constants(dtype: torch.dtype, programs: int, parts: Parts) -> tuple[tuple[str, int], ...]:
    """Return the constants of the source, by name."""
    sizes = {"THREADS": parts.threads, "PIECES": parts.pieces, "CHUNKS": parts.chunks, "STEP": parts.step}
    return (("ELEMENT", DTYPES.index(dtype)), ("PROGRAMS", programs), *sizes.items())


def source() -> str:
    """Return the kernels' source, without its constants: CHUNKS is 0 in the backward kernel alone."""
    return instructions(()) + Path(__file__).with_name("softmax_cluster.cu").read_text()


@cache
def _kernel(name: str, named: tuple[tuple[str, int], ...], shared_bytes: int, device: int) -> CudaKernel:
    code = compile_cuda(source(), dict(named), device_of(torch.device("cuda", device)).arch)
    return CudaKernel(code, name, shared_bytes)
