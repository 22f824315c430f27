"""Pass something other than a tensor in place of each tensor, to every public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from groupbench.kernels import elementwise, outer_k
from groupbench.kernels.bias_add_permute.problem import Group
from groupbench.kernels.grouped_gemm import contiguous, flat, fp8, pointer, quantize, wgrad
from groupbench.kernels.grouped_gemm.helion_jagged import prepare_helion_jagged
from groupbench.kernels.grouped_gemm.helion_persistent import prepare_helion_persistent
from groupbench.kernels.grouped_gemm.helion_wgrad import prepare_helion_wgrad
from groupbench.kernels.grouped_gemm.helion_worklist import prepare_helion_worklist
from groupbench.kernels.moe import helion_permute, permute, routing
from groupbench.kernels.ops import moe_layer
from groupbench.kernels.split_k import helion_barrier, tiled


def x(*sizes: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype)


OFFS, IDS = torch.tensor([3, 8], dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int64)
GROUPED, PRODUCT = (x(8, 16), x(2, 16, 32), OFFS), (x(8, 16), x(16, 32))
GRADIENT, POSITION = (x(8, 16), x(8, 32), OFFS), torch.zeros(4, 2, dtype=torch.int32)
FP8 = (x(8, 16).to(fp8.E4M3), x(8).float(), x(2, 32, 16).to(fp8.E4M3), x(2, 32).float(), OFFS)
# Each function with operands that it takes.
ENTRIES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "flat": (flat.prepare_flat, GROUPED),
    "contiguous": (contiguous.prepare_contiguous, (x(8, 16), x(2, 32, 16), OFFS)),
    "helion_jagged": (prepare_helion_jagged, GROUPED),
    "helion_persistent": (prepare_helion_persistent, GROUPED),
    "helion_worklist": (prepare_helion_worklist, GROUPED),
    "wgrad": (wgrad.prepare_wgrad, GRADIENT),
    "helion_wgrad": (prepare_helion_wgrad, GRADIENT),
    "pointer": (lambda a, b: pointer.prepare_pointer([a], [b]), PRODUCT),
    "fp8": (fp8.prepare_fp8, FP8),
    "quantize": (lambda x: quantize.prepare_quantize(x, False), (x(8, 16),)),
    "split_k_fixup": (tiled.prepare_fixup, PRODUCT),
    "split_k_two_launches": (tiled.prepare_two_launches, PRODUCT),
    "split_k_atomic": (tiled.prepare_atomic, PRODUCT),
    "split_k_barrier": (helion_barrier.prepare_barrier, PRODUCT),
    "outer_k": (outer_k.prepare_outer_k, PRODUCT),
    "add": (elementwise.prepare_add, (x(8), x(8))),
    "group": (lambda a, b, d, e: Group(a, b, d, e, (2, 2, 2), (2, 16)), (x(8, 16), x(32, 16), x(32), x(8, 32))),
    "route": (lambda ids: routing.route(ids, 2), (IDS,)),
    "permute": (lambda x, ids: permute.prepare_permute(x, ids, 2), (x(4, 8), IDS)),
    "helion_permute": (lambda x, ids: helion_permute.prepare_helion_permute(x, ids, 2), (x(4, 8), IDS)),
    "unpermute": (permute.prepare_unpermute, (x(8, 8), POSITION, x(4, 2))),
    "helion_unpermute": (helion_permute.prepare_helion_unpermute, (x(8, 8), POSITION, x(4, 2))),
    "moe_layer": (moe_layer, (x(4, 8), IDS, x(4, 2), x(2, 32, 8), x(2, 8, 16))),
}
PLACES = [(name, place) for name, (_, operands) in ENTRIES.items() for place in range(len(operands))]


@pytest.mark.parametrize(("name", "place"), PLACES, ids=[f"{name}-{place}" for name, place in PLACES])
def test_refuses_operands_that_are_not_tensors(name: str, place: int, device: torch.device) -> None:
    entry, operands = ENTRIES[name]
    operands = tuple(operand.to(device) for operand in operands)
    for wrong, called in ((operands[place].tolist(), "list"), (None, "NoneType"), (x(2).numpy(), "ndarray")):
        if wrong is None and name == "group":
            continue  # e may be None
        with pytest.raises(TypeError, match=f"must be a torch.Tensor, got {called}"):
            entry(*operands[:place], wrong, *operands[place + 1 :])


@pytest.mark.parametrize(("name", "place"), PLACES, ids=[f"{name}-{place}" for name, place in PLACES])
def test_refuses_a_number_instead_of_a_matrix(name: str, place: int, device: torch.device) -> None:
    entry, operands = ENTRIES[name]
    operands = tuple(operand.to(device) for operand in operands)
    number = torch.zeros((), dtype=operands[place].dtype, device=device)
    if name == "add":  # which broadcasts
        assert entry(*operands[:place], number, *operands[place + 1 :])().shape == (8,)
        return
    with pytest.raises(ValueError, match=r"\(\)|\[\]"):  # its shape
        entry(*operands[:place], number, *operands[place + 1 :])
