"""Capture kernels of an MoE layer once, and replay them with other routing, as serving engines do."""

from __future__ import annotations

import pytest
import torch

from groupbench.kernels.moe.layer import moe_layer_reference
from groupbench.kernels.moe.permute import permute_reference, permute_rows
from groupbench.kernels.ops import moe_layer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: CUDA graphs. No GPU")


@pytest.mark.parametrize("tokens", [3, 500], ids=["one_launch", "many_choices"])
def test_moe_layer(tokens, replays):
    torch.manual_seed(0)
    G, k, H, F = 16, 4, 256, 128
    x = torch.randn(tokens, H, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(tokens, k, device="cuda", dtype=torch.bfloat16)
    w_gate_up, w_down = (
        (torch.randn(G, rows, columns, device="cuda") * columns**-0.5).to(torch.bfloat16)
        for rows, columns in ((2 * F, H), (H, F))
    )
    routings = [torch.randint(-1, G, (tokens, k), device="cuda") for _ in range(3)]
    routings.append(torch.full_like(routings[0], -1))  # no choice has a row
    ids = routings[0].clone()
    with torch.no_grad():
        outputs = replays(
            lambda: moe_layer(x, ids, weights, w_gate_up, w_down), lambda turn: ids.copy_(routings[turn]), 4
        )
        for out, routing in zip(outputs, routings, strict=True):
            expected = moe_layer_reference(x.double(), routing, weights.double(), w_gate_up.double(), w_down.double())
            error = (out.double() - expected).square().mean().sqrt()
            assert error <= 1e-2 * expected.square().mean().sqrt()


def test_permutation_of_many_tokens(replays):
    torch.manual_seed(0)
    T, k, G, H = 4099, 8, 64, 2048
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
    routings = [torch.randint(-1, top, (T, k), device="cuda") for top in (G, 2, 8 * G)]
    ids = routings[0].clone()
    outputs = replays(lambda: permute_rows(x, ids, G)[0], lambda turn: ids.copy_(routings[turn]), 3)
    for rows, routing in zip(outputs, routings, strict=True):
        expected, routed = permute_reference(x, routing, G)
        held = int(routed.offs[-1])
        assert torch.equal(rows[:held], expected[:held])
