"""Capture kernels that read sizes on the GPU once, and replay them with other routing, as serving engines do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from groupbench.kernels.grouped_gemm import (
    flat,
    fp8,
    helion_jagged,
    helion_persistent,
    helion_wgrad,
    helion_worklist,
    quantize,
)
from groupbench.kernels.grouped_gemm import wgrad as triton_wgrad
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference, grouped_gemm_wgrad_reference
from groupbench.kernels.moe.layer import moe_layer_reference
from groupbench.kernels.moe.permute import permute_reference, permute_rows
from groupbench.kernels.ops import moe_layer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: CUDA graphs. No GPU")

ROWS, N, K = 700, 320, 256
ROUTINGS = (  # rows of each of four experts; the rest of ROWS belongs to no expert
    (100, 0, 300, 1),
    (0, 0, 0, 0),
    (175, 175, 175, 175),
    (0, 700, 0, 0),
    (129, 127, 0, 64),
)
DECODE = ((1, 0, 3, 2), (0, 8, 0, 0), (0, 0, 0, 0), (2, 2, 2, 2))


def replays(run: Callable[[], Tensor | tuple[Tensor, ...]], change: Callable[[int], None], turns: int) -> list[Tensor]:
    """Return the outputs of a graph that is captured at the first routing and replayed for each."""
    change(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    outputs = []
    for turn in range(turns):
        change(turn)
        graph.replay()
        outputs.append(out.clone())
    return outputs


def ends(rows: tuple[int, ...]) -> Tensor:
    return torch.tensor(rows).cumsum(0).to("cuda", torch.int32)


@pytest.mark.parametrize("routings", [ROUTINGS, DECODE], ids=["rows", "decode"])
@pytest.mark.parametrize(
    "prepare",
    [
        flat.prepare_flat,
        helion_jagged.prepare_helion_jagged,
        helion_persistent.prepare_helion_persistent,
        helion_worklist.prepare_helion_worklist,
    ],
)
@pytest.mark.parametrize("nk", [False, True], ids=["kn", "nk"])
def test_forward(prepare, routings, nk, check):
    torch.manual_seed(0)
    a = torch.randn(max(map(sum, routings)), K, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4, N, K, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    b = b if nk else b.contiguous()
    offs = ends(routings[0])
    outputs = replays(prepare(a, b, offs), lambda turn: offs.copy_(ends(routings[turn])), len(routings))
    for out, rows in zip(outputs, routings, strict=True):
        check(out, grouped_gemm_reference(a, b, ends(rows)), torch.bfloat16)


@pytest.mark.parametrize(("block_m", "block_n", "stages"), [(128, 256, 4), (192, 256, 3), (192, 192, 4)])
def test_specialized(block_m, block_n, stages, check):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("NOT TESTED: the specialized bf16 kernel in CUDA graphs. No Hopper GPU")
    config = replace(flat.CONFIGS["specialized"], block_m=block_m, block_n=block_n, num_stages=stages)
    test_forward(partial(flat.prepare_flat, config=config), ROUTINGS, True, check)


@pytest.mark.parametrize("kind", ["triton", "helion"])
def test_gradient_of_the_weights(kind, check):
    torch.manual_seed(0)
    a, dc = (torch.randn(ROWS, width, device="cuda", dtype=torch.bfloat16) for width in (K, N))
    offs = ends(ROUTINGS[0])
    if kind == "triton":
        run = triton_wgrad.prepare_wgrad(a, dc, offs, False)
    else:
        run = helion_wgrad.prepare_helion_wgrad(a, dc, offs, False)
    outputs = replays(run, lambda turn: offs.copy_(ends(ROUTINGS[turn])), len(ROUTINGS))
    for out, rows in zip(outputs, ROUTINGS, strict=True):
        check(out, grouped_gemm_wgrad_reference(a, dc, ends(rows)), torch.bfloat16)


@pytest.mark.parametrize(
    ("mode", "config"),
    list(itertools.product(fp8.MODES, (None, fp8.SPECIALIZED))),
    ids=lambda value: value if isinstance(value, str) else "chosen" if value is None else "specialised",
)
def test_fp8(mode, config, check):
    if config is not None and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("NOT TESTED: the specialised fp8 kernel in CUDA graphs. No Hopper GPU")
    torch.manual_seed(0)
    a, b = torch.randn(ROWS, K, device="cuda"), torch.randn(4, N, K, device="cuda")
    if mode == fp8.BLOCKWISE:
        q_a, scale_a = quantize.quantize_blocks_reference(a)
        parts = [quantize.quantize_weight_blocks_reference(matrix) for matrix in b]
    else:
        q_a, scale_a = quantize.quantize_rows_reference(a)
        parts = [quantize.quantize_rows_reference(matrix) for matrix in b]
    q_b, scale_b = (torch.stack(list(part)) for part in zip(*parts, strict=True))
    offs = ends(ROUTINGS[0])
    run = fp8.prepare_fp8(q_a, scale_a, q_b, scale_b, offs, fast_accum=mode == fp8.ROWWISE_FAST, config=config)
    outputs = replays(run, lambda turn: offs.copy_(ends(ROUTINGS[turn])), len(ROUTINGS))
    for out, rows in zip(outputs, ROUTINGS, strict=True):
        expected = fp8.grouped_gemm_fp8_reference(q_a, scale_a, q_b, scale_b, ends(rows))
        check(out, expected, torch.bfloat16)


@pytest.mark.parametrize("tokens", [3, 500], ids=["one_launch", "many_choices"])
def test_moe_layer(tokens, check):
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


def test_permutation_of_many_tokens():
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
