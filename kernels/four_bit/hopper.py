"""Grouped GEMM with four-bit weights for Hopper, in CUDA C++: backend `cuda`.

    out[start_g:end_g] = a[start_g:end_g] @ w[g].T + bias[g]      a [M, K]   w [G, N, K] in layout.py   out [M, N]

The operands are swapped, out.T = w @ a.T, for few and for many rows per expert. The left operand comes from registers:
groups with four warps each make the weights' values there, from codes in shared memory, and write nothing back. One
thread loads: weights by plain bulk copies, since they are stored block by block, and activations by TMA.

With many rows per expert, a tile has 64 to 256 activation rows, so few instructions per product make values. wgmma
multiplies a K block while the next one's values are made.

With few rows, memory limits the kernel. Four to six groups of warps on an SM, of one program or several, hide each
other's waits. For up to 32 rows, products are mma's: a wgmma with values from registers takes about 40 cycles even for
eight rows. Boxes with eight rows load only the rows in the tile. Programs take blocks of weights in rounds and end
together; all read neighbouring blocks, so the activations stay in L2.

Sums are added along K in one order, whatever the tile and the instruction, so a row's result depends neither on the
other rows nor on the config; a test on Hopper compares the bits. So no group is split along K. Integers with fp8
activations, and scales per 128 along K, scale each group's sums and add them, in one order too.

Source: FlashInfer and Marlin for weights stored in the operand's order; the PTX manual for its layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor

from groupbench.kernels.cuda_source import CudaKernel, compile_cuda, tensor_map, why_not_nvrtc
from groupbench.kernels.device import device_of
from groupbench.kernels.four_bit.formats import Weights
from groupbench.kernels.four_bit.hopper_config import MOST_FEW, HopperConfig, choose_config, groups_that_fit, illegal
from groupbench.kernels.four_bit.layout import BLOCK_N, Blocks, block_k, lay_out
from groupbench.kernels.four_bit.product import require_w4
from groupbench.kernels.grouped_gemm.cluster_tiles import ragged_map
from groupbench.kernels.grouped_gemm.quantize import E4M3
from groupbench.kernels.grouped_gemm.support import no_tma
from groupbench.kernels.hopper_source import instructions, products_of_values

MOST_GROUPS = 1024
MOST_BY_MMA = 32  # rows of bf16 activations whose products are mma's


def unsuitable(a: Tensor, w: Weights) -> str | None:
    """Return why the kernel cannot take these operands, or None if it can; fp8 also needs `lay_out` to accept them."""
    if a.device.type != "cuda" or not device_of(a.device).hopper:
        return "the kernel needs a Hopper GPU"
    if a.dtype not in (torch.bfloat16, E4M3):
        return f"the kernel multiplies bf16 or {E4M3}, not {a.dtype}"
    if w.G > MOST_GROUPS:
        return f"{w.G} groups are more than {MOST_GROUPS}"
    if w.N % 8:
        return f"a row of the output, N={w.N}, is not a multiple of 16 bytes"
    return no_tma(16, a=a) or why_not_nvrtc()


def source(rows: int) -> str:
    """Return the kernel's CUDA C++ for a number of rows per tile."""
    files = (Path(__file__).with_name(name).read_text() for name in ("values.cuh", "four_bit.cu"))
    return instructions(()) + products_of_values(rows) + "".join(files)


def _by_stage(config: HopperConfig, w: Blocks) -> bool:
    """Return whether one access loads a stage's activations: mma takes them, and K ends with a block."""
    return config.rows <= MOST_BY_MMA and not w.fp8 and w.K % block_k(w.fp8) == 0


def constants(
    config: HopperConfig, w: Blocks, token_scales: int, bias: bool, offsets: torch.dtype
) -> dict[str, object]:
    """Return the kernel's constants, by name."""
    return {
        "A8": int(w.fp8),
        "IS_FP8": int(w.fp8),
        "IS_BF16": 1,
        "FLOATING": int(w.fmt.floating),
        "ZEROS": int(w.fmt.zero_point),
        "GROUPS": w.groups,
        "ROWS": config.rows,
        "BLOCKS": config.blocks,
        "WORKERS": config.workers,
        "DEPTH": config.depth,
        "BY_STAGE": int(_by_stage(config, w)),
        "STAGES": config.stages,
        "THREADS": config.threads,
        "MOST_FEW": MOST_FEW,
        "BY_MMA": MOST_BY_MMA,
        "PER_SM": config.per_sm,
        "GROUP_M": config.group_m,
        "BIAS": int(bias),
        "TOKEN_SCALES": token_scales,
        "OFFSET": "int" if offsets == torch.int32 else "long long",
        "MOST_GROUPS": groups_that_fit(w.G),
    }


@cache
def _cubin(rows: int, named: tuple[tuple[str, object], ...]) -> bytes:
    return compile_cuda(source(rows), dict(named), "sm_90a")


@cache
def _kernel(rows: int, named: tuple[tuple[str, object], ...], shared: int, device: int) -> CudaKernel:
    return CudaKernel(_cubin(rows, named), "four_bit_kernel", shared)


def prepare_hopper(
    a: Tensor,  # [M, K] in bf16, or e4m3 with scale_a
    scale_a: Tensor | None,  # [M] fp32, or [M, ceil(K / 128)] with strides 1, M
    w: Weights,  # [G, N, K]
    offs: Tensor,  # [G], int32 or int64 end offsets
    bias: Tensor | None = None,  # [G, N] bf16
    config: HopperConfig | None = None,
) -> Callable[[], Tensor]:  # [M, N] in bf16; rows past offs[-1] are zero
    """Check the operands and lay the weights out; the returned callable allocates the output and launches once.

    The callable reads `offs` on the device, so it follows later changes to them. Raises ValueError for operands
    or a config the kernel cannot take.
    """
    require_w4(a, scale_a, w, offs, bias)
    if reason := unsuitable(a, w):
        raise ValueError(reason)
    run = bind_hopper(a, scale_a, lay_out(w, a.dtype == E4M3), offs, bias, config)
    return lambda: run(a, scale_a, offs)


def bind_hopper(
    a: Tensor, scale_a: Tensor | None, w: Blocks, offs: Tensor, bias: Tensor | None, config: HopperConfig | None = None
) -> Callable[[Tensor, Tensor | None, Tensor], Tensor]:  # of a, scale_a and offs
    """Do as `prepare_hopper` for checked operands, and weights already laid out.

    The callable takes activations and offsets like these.
    """
    (M, K), N, device = a.shape, w.N, device_of(a.device)
    if bias is not None and bias.dtype != torch.bfloat16:
        raise ValueError(f"expected a bias of bf16, got {bias.dtype}")
    by_block = scale_a is not None and scale_a.ndim == 2
    if scale_a is not None and by_block and scale_a.stride(1) != M and scale_a.size(1) > 1:
        raise ValueError("scales of every 128 of K need strides 1, M")
    if M == 0:
        return lambda a, scale_a, offs: torch.zeros(M, N, dtype=torch.bfloat16, device=a.device)
    config = config or choose_config(M, w, by_block, device)
    if reason := illegal(config, w, by_block, device):
        raise ValueError(f"{config}: {reason}")
    named = constants(config, w, 0 if scale_a is None else scale_a.ndim, bias is not None, offs.dtype)
    multiply = _kernel(config.rows, tuple(named.items()), config.dynamic_bytes(w), torch.cuda.current_device())
    step = block_k(w.fp8)
    if _by_stage(config, w):
        a_map = tensor_map(a, [step, M, K // step], [a.stride(0), step], [step, 8, config.depth])
    else:
        a_map = tensor_map(a, [K, M], [a.stride(0)], [step, config.rows if config.rows > MOST_FEW else 8])
    some = torch.empty(64, dtype=torch.bfloat16, device=a.device)
    out_map = ragged_map(some, N, N, [64, min(config.rows, 16)])  # each call moves it to its output
    columns = BLOCK_N * (1 if config.rows <= MOST_FEW else config.workers * config.blocks)
    tiles = (triton.cdiv(M, config.rows) + min(w.G, M)) * triton.cdiv(N, columns)
    grid = min(tiles, config.per_sm * device.sms)
    arguments = [
        a_map, out_map, None, w.blocks, w.factors, bias, scale_a, w.table, offs, w.G, M, M, N, w.blocks.size(2),
    ]  # fmt: skip
    moving = (0, 1, 2, *((6,) if scale_a is not None else ()), 8)
    launch = multiply.bind(grid, config.threads, arguments, moving)
    place = a.device
    kept = (w.blocks, w.factors, bias, w.table)  # the launch holds addresses alone

    def run(a: Tensor, scale_a: Tensor | None, offs: Tensor) -> Tensor:
        out = torch.empty(M, N, dtype=torch.bfloat16, device=place)
        scaled = [scale_a.data_ptr()] if scale_a is not None else []
        launch(a.data_ptr(), out.data_ptr(), out.data_ptr(), *scaled, offs.data_ptr())
        assert kept
        return out

    return run
