"""An expert's first half, act = silu(x @ gate) * (x @ up), as one grouped GEMM with the activation inside.

    gate, up = a[rows of g] @ w[g, :F].T, a[rows of g] @ w[g, F:].T        a [M, H]   w [G, 2F, H]   act [M, F]
    act = gate / (1 + exp(-gate)) * up

The loop over the tiles of all experts is that of flat.py, with another epilogue. The weights are seen as [G, 2, F, H],
so that one TMA box holds BLOCK_F columns of the gate and the same columns of up, and one wgmma multiplies them both. A
tile has the gate on the left and up on the right, and no weights need to be interleaved beforehand. Products stay in
fp32 until they are multiplied. In inference they never leave registers: a separate product would write 2F columns for
another kernel to read, and this kernel writes F. With `save` both are written too, for the backward pass.

If the operands are swapped (few rows per expert, see flat.py), gate and up are two products, because wgmma cannot read
a box of more than 128 bytes per row once it is reshaped: the data would go through registers.

A is not gathered here. Hopper's TMA does not gather rows, and pointers by row would cost the first product more (500
instead of 700 TFLOP/s in kernels that do so) than a permutation at copy bandwidth takes. wgrad needs the rows anyway.

If TMA cannot read the operands, flat.py's fallback computes the products and swiglu.py the activation.

Sources: SonicMoE and Liger-Kernel (SwiGLU inside the first grouped GEMM); the halves of a tile, flat.py's split store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from groupbench.kernels.configs import launch_keywords
from groupbench.kernels.device import INTERPRETER, Device, device_of, fitted
from groupbench.kernels.grouped_gemm import flat
from groupbench.kernels.grouped_gemm.experts import expert_of, expert_tiles, of_groups
from groupbench.kernels.grouped_gemm.flat import store_rows
from groupbench.kernels.grouped_gemm.flat_config import FlatConfig
from groupbench.kernels.grouped_gemm.support import fits, illegal_tile, no_tma, worker_count
from groupbench.kernels.grouped_gemm.tile_order import super_grouped
from groupbench.kernels.grouped_gemm.tuned import configs_in_order, first_legal, tuning_key
from groupbench.kernels.launch import Kept, Launch, Outputs, described
from groupbench.kernels.moe.product import product
from groupbench.kernels.moe.swiglu import swiglu, swiglu_reference
from groupbench.kernels.variants import Variant, by_config, first_that_runs

TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class GateUpConfig:
    """Tile sizes and launch options, as in FlatConfig.

    A tile is block_m x 2 block_f products, and block_m x block_f elements of each matrix that is written.
    """

    block_m: int
    block_f: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    swap: bool = False
    flatten: bool = True
    per_sm: int = 1


CONFIGS = {
    "decode": GateUpConfig(16, 64, 128, num_warps=4, num_stages=4, swap=True),
    "small": GateUpConfig(64, 64, 64, num_warps=4, num_stages=5),
    # 250 registers per thread, including two products of 64 values and their activation; none spills.
    "large": GateUpConfig(128, 128, 64, num_warps=8, num_stages=4),
    "fp32": GateUpConfig(64, 32, 32, num_warps=4, num_stages=3),
    "cpu": GateUpConfig(32, 16, 32, num_warps=4, num_stages=1, group_m=2, flatten=False),
    "cpu_swap": GateUpConfig(16, 16, 32, num_warps=4, num_stages=1, group_m=2, swap=True, flatten=False),
}


def candidates(mean_rows: float) -> list[GateUpConfig]:
    """Return the configs that tuning tries for 16-bit dtypes, by the mean rows of an expert."""
    narrow = [GateUpConfig(64, 64, 64, 4, 5), GateUpConfig(64, 128, 64, 8, 4), GateUpConfig(64, 128, 64, 4, 4)]
    if fits(mean_rows, 16):
        tiles = [(16, 64, 128, 4, 4), (16, 64, 128, 4, 5), (16, 64, 64, 4, 6), (16, 128, 64, 8, 4)]
        return [GateUpConfig(*tile, swap=True) for tile in tiles] + narrow
    pair = GateUpConfig(128, 64, 64, 4, 3, per_sm=2)
    if mean_rows <= 96:
        few = [CONFIGS["decode"], GateUpConfig(32, 64, 128, 4, 4, swap=True)]
        return [*few, *narrow, GateUpConfig(64, 64, 128, 4, 3), pair]
    large = CONFIGS["large"]
    fewer = replace(large, num_stages=3)
    wide = [replace(large, group_m=group_m) for group_m in (4, 8, 16)]
    plain = [replace(config, flatten=False) for config in (large, replace(large, group_m=16), fewer)]
    return [*wide, *plain, fewer, pair, *(narrow if mean_rows <= 600 else [])]


def illegal(config: GateUpConfig, dtype: torch.dtype, device: Device = INTERPRETER) -> str | None:
    """Return why a config cannot be compiled for a GPU with TMA, or None if it can."""
    reason = illegal_tile(config.block_m, 2 * config.block_f, config.block_k, config.num_stages, dtype, device)
    if reason is not None:
        return reason.replace("block_n=", "2 block_f=")
    if config.block_f < 16:
        return f"block_f={config.block_f}: a tile needs at least 16 columns"
    tile = (config.block_m + 2 * config.block_f) * config.block_k
    shared = (device.buffers(config.num_stages) * tile + config.block_m * config.block_f) * dtype.itemsize
    if shared > device.room(config.per_sm):
        return f"{config.num_stages} stages and a tile take {shared} bytes of {device.room(config.per_sm)}"
    return None


def from_flat(config: FlatConfig) -> GateUpConfig:
    """Return the config with the same tile of products; a swapped tile has at least the 64 rows that wgmma needs."""
    block_f = max(config.block_n // 2, 64 if config.swap and config.block_k > 32 else 16)
    return GateUpConfig(
        config.block_m,
        block_f,
        config.block_k,
        config.num_warps,
        config.num_stages,
        config.group_m,
        config.swap,
        config.flatten or config.halves,
        config.per_sm,
    )


def default_config(M: int, G: int, F: int, H: int, dtype: torch.dtype, device: Device) -> GateUpConfig:
    """Return flat.py's own config of the product without activation, or the nearest one that fits the GPU."""
    products = flat.configs_for(M, G, 2 * F, H, dtype, device, nk=True)
    product_config = first_legal([row for row in products if row[0] != "predicted" and not row[1].specialized])
    config = from_flat(product_config)
    if config.swap and config.block_m > 16:  # two swapped products take longer than one straight product of 64 rows
        config = CONFIGS["small"]
    return fitted(config, lambda config: illegal(config, dtype, device), "block_m", "block_f")


def configs_for(
    M: int, G: int, F: int, H: int, dtype: torch.dtype, device: Device
) -> list[tuple[str, GateUpConfig, str | None]]:
    """Return (name, config, why it is illegal here) of this problem's tuned config, if any, and of the default."""

    def legal(config: GateUpConfig) -> str | None:
        return illegal(config, dtype, device)

    default = default_config(M, G, F, H, dtype, device)
    if device.vendor == "cpu" or dtype.itemsize > 2:
        return [("default", default, None)]
    key = tuning_key(M, G, 2 * F, H, dtype, nk=True)
    return configs_in_order("gate_up", key, device, default, legal)


def choose_config(M: int, G: int, F: int, H: int, dtype: torch.dtype, device: Device) -> GateUpConfig:
    """Return this problem's tuned config on this GPU, else the default."""
    return first_legal(configs_for(M, G, F, H, dtype, device))


@triton.jit
def _products(
    a_desc, w_desc, row, g, column, steps,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Return (gate, up) in fp32, each [BLOCK_M, BLOCK_F]."""
    if SWAP:
        gate_t = tl.zeros((BLOCK_F, BLOCK_M), dtype=tl.float32)
        up_t = tl.zeros((BLOCK_F, BLOCK_M), dtype=tl.float32)
        for step in range(steps):
            a = a_desc.load([row, step * BLOCK_K])
            w_gate = w_desc.load([g, 0, column, step * BLOCK_K]).reshape(BLOCK_F, BLOCK_K)
            w_up = w_desc.load([g, 1, column, step * BLOCK_K]).reshape(BLOCK_F, BLOCK_K)
            gate_t = tl.dot(w_gate, a.T, gate_t, input_precision=PRECISION)
            up_t = tl.dot(w_up, a.T, up_t, input_precision=PRECISION)
        gate = gate_t.T
        up = up_t.T
    else:
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_F), dtype=tl.float32)
        for step in range(steps):
            a = a_desc.load([row, step * BLOCK_K])
            w = w_desc.load([g, 0, column, step * BLOCK_K]).reshape(2 * BLOCK_F, BLOCK_K)
            acc = tl.dot(a, w.T, acc, input_precision=PRECISION)
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_F)), (0, 2, 1)))
    return gate, up


@triton.jit
def _gate_up_kernel(
    a_desc,  # [M, H], tiles [BLOCK_M, BLOCK_K]
    w_desc,  # [G, 2, F, H], tiles [1, 2, BLOCK_F, BLOCK_K], of one half with SWAP
    act_desc,  # [M, F], ragged along M, tiles [BLOCK_M, BLOCK_F]
    gate_desc,  # the same for the left and right half of the saved products; read only with SAVE
    up_desc,
    offs_ptr,  # [G]
    F,
    H,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
    FLATTEN: tl.constexpr,
    SAVE: tl.constexpr,
):
    starts, ends, counts, before = expert_tiles(offs_ptr, G, G_POW2, BLOCK_M)
    tiles_m = tl.sum(counts, 0)
    tiles_f = tl.cdiv(F, BLOCK_F)
    steps = tl.cdiv(H, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_f, NUM_PROGRAMS, flatten=FLATTEN):
        tile_m, tile_f = super_grouped(tile, tiles_m, tiles_f, GROUP_M)
        g, start, size, row = expert_of(tile_m, starts, ends, counts, before, G_POW2, BLOCK_M)
        column = tile_f * BLOCK_F
        gate, up = _products(a_desc, w_desc, start + row, g, column, steps, PRECISION, BLOCK_M, BLOCK_F, BLOCK_K, SWAP)
        if SAVE:
            store_rows(gate_desc, start, size, row, column, gate.to(DTYPE), BLOCK_M, BLOCK_F)
            store_rows(up_desc, start, size, row, column, up.to(DTYPE), BLOCK_M, BLOCK_F)
        act = gate / (1 + tl.exp(-gate)) * up
        store_rows(act_desc, start, size, row, column, act.to(DTYPE), BLOCK_M, BLOCK_F)


def gate_up(
    a: Tensor,  # [M, H]
    w: Tensor,  # [G, 2F, H] contiguous: gate, then up
    offs: Tensor,  # [G], int32 or int64 end offsets
    save: bool = False,
    config: GateUpConfig | None = None,
) -> tuple[Tensor, Tensor | None]:  # act [M, F]; with `save` the products [M, 2F]. Rows past offs[-1] are not written
    """Return the activation and, with `save`, the products: for operands that were checked already.

    Allocates and launches. Raises ValueError for a config that is illegal here.
    """
    M, F = a.size(0), w.size(1) // 2
    aligned = (a.data_ptr() | w.data_ptr()) & 15 == 0
    key = (a.shape, a.stride(), w.shape, w.stride(), a.dtype, a.get_device(), offs.dtype, save, aligned, config)
    run = _bound.get(key)
    if run is None:
        if M == 0 or F == 0:
            return a.new_empty(M, F), a.new_empty(M, 2 * F) if save else None
        run = _bound.add(key, _bind(a, w, offs, save, config))
    return run(a, w, offs)


GateUp = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]  # of a, w and offs
_bound: Kept[GateUp] = Kept()


def _bind(a: Tensor, w: Tensor, offs: Tensor, save: bool, config: GateUpConfig | None) -> GateUp:
    """Return `gate_up` for operands like these. Raises ValueError for an illegal config."""
    (M, H), G, F, device = a.shape, w.size(0), w.size(1) // 2, device_of(a.device)
    without_tma = no_tma(F, a=a, w=w)
    if config is not None and without_tma is None:
        if reason := illegal(config, a.dtype, device):
            raise ValueError(f"{config}: {reason}")
        return _bind_tma(a, w, offs, save, config)

    def separately(a: Tensor, w: Tensor, offs: Tensor) -> tuple[Tensor, Tensor | None]:
        both = product(a, w.transpose(1, 2), offs)
        return swiglu(both, offs), both if save else None

    def fused(config: GateUpConfig) -> GateUp:
        return _bind_tma(a, w, offs, save, config)

    variants = [Variant("product, then swiglu", lambda: separately)]
    if without_tma is not None:
        variants.insert(0, Variant("tma", variants[0].prepare, without_tma))
    else:
        configs = configs_for(M, G, F, H, a.dtype, device)
        variants[:0] = by_config("tma, ", configs, fused, (a.dtype, a.device, G, save))
    return first_that_runs("gate_up", variants)


def _bind_tma(
    a: Tensor,  # [M, H]
    w: Tensor,  # [G, 2F, H]
    offs: Tensor,  # [G]
    save: bool,
    config: GateUpConfig,  # legal
) -> GateUp:
    """Return `gate_up` for operands like these, which TMA can read."""
    (M, H), G, F = a.shape, w.size(0), w.size(1) // 2
    programs, dtype, device = worker_count(a.device, config.per_sm), a.dtype, a.device
    a_desc = described(TensorDescriptor.from_tensor, a, [config.block_m, config.block_k])
    # A copy of a descriptor takes any tensor that begins at the same place: w in place of its view.
    block_w = [1, 1 if config.swap else 2, config.block_f, config.block_k]
    w_desc = described(TensorDescriptor.from_tensor, w.view(G, 2, F, H), block_w)
    act_desc, gate_desc, up_desc = (
        Outputs(lambda out: create_ragged_descriptor(out, [config.block_m, config.block_f])) for _ in range(3)
    )
    launch = Launch(
        _gate_up_kernel,
        (programs,),
        **launch_keywords(_gate_up_kernel, config, **of_groups(G), NUM_PROGRAMS=programs, SAVE=save),
        DTYPE=TRITON_DTYPES[dtype],
        PRECISION="ieee",
    )

    def run(a: Tensor, w: Tensor, offs: Tensor) -> tuple[Tensor, Tensor | None]:
        act = torch.empty(M, F, dtype=dtype, device=device)
        if not save:
            if launch.again(a.data_ptr(), w.data_ptr(), act.data_ptr(), offs.data_ptr()):
                return act, None
            launch(a_desc(a), w_desc(w), act_desc(act), None, None, offs, F, H)
            return act, None
        both = torch.empty(M, 2 * F, dtype=dtype, device=device)
        gate, up = gate_desc(both[:, :F]), up_desc(both[:, F:])
        launch(a_desc(a), w_desc(w), act_desc(act), gate, up, offs, F, H)
        return act, both

    return run


def gate_up_reference(a: Tensor, w: Tensor, offs: Tensor, save: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the results of `gate_up` in a's dtype; rows past offs[-1] are zero."""
    both = a.new_zeros(a.size(0), w.size(1))
    start = 0
    for g, end in enumerate(offs.tolist()):
        both[start:end] = a[start:end] @ w[g].T
        start = end
    return swiglu_reference(both), both if save else None
