"""Test the kernels for lists of products that the operator's smoke shapes do not reach: poison, layouts, Hopper's."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from grouped import NO_HOPPER

from groupbench.kernels.grouped_gemm import cluster_tiles, mnk_cluster, mnk_helion, mnk_tma
from groupbench.kernels.grouped_gemm.mnk import multiply_lists_reference, offsets_of

RAGGED = ((17, 24, 33), (0, 16, 16), (64, 0, 40), (1, 40, 1), (70, 72, 136))  # M, K, N


def operands(sizes, dtype, device, a_rows=True, b_rows=True):
    """Return lists of matrices whose rows (or columns) are padded by NaN to multiples of 16 bytes."""

    def stored(rows, columns):
        whole = torch.full((rows, (columns + 15) // 8 * 8), float("nan"), dtype=dtype, device=device)
        return whole[:, :columns].copy_(torch.randn(rows, columns))

    a = [stored(m, k) if a_rows else stored(k, m).t() for m, k, _ in sizes]
    return a, [stored(k, n) if b_rows else stored(n, k).t() for _, k, n in sizes]


def check_lists(prepare, sizes, dtype, device, poisoned, check, **layout):
    torch.manual_seed(0)
    a, b = operands(sizes, dtype, device, **layout)
    run = prepare(a, b)
    with poisoned():
        outputs = run()
    for out, expected in zip(outputs, multiply_lists_reference(a, b), strict=True):
        check(out, expected, dtype)


@pytest.mark.parametrize("a_rows", [True, False])
@pytest.mark.parametrize("b_rows", [True, False])
def test_tma_reads_no_padding(a_rows, b_rows, dtype, device, poisoned, check):
    check_lists(mnk_tma.prepare_mnk_tma, RAGGED, dtype, device, poisoned, check, a_rows=a_rows, b_rows=b_rows)


def test_helion_reads_any_strides(device, poisoned, check):
    prepare = mnk_helion.prepare_mnk_helion
    check_lists(prepare, RAGGED, torch.float16, device, poisoned, check, b_rows=False)
    check_lists(prepare, ((0, 8, 8), (8, 0, 8)), torch.float16, device, poisoned, check)


def test_outputs_start_at_16_bytes():
    a, b = operands(((3, 5, 7), (1, 1, 1), (2, 2, 8)), torch.float16, "cpu")
    assert offsets_of(a, b) == [0, 24, 32, 48]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a, b: (a, b[:1]), "as many A as B"),
        (lambda a, b: (a, [b[0], b[1].t()]), "group 1: cannot multiply"),
        (lambda a, b: ([a[0], a[1].t()], [b[0], b[1][:5]]), "unit strides along different dimensions"),
        (lambda a, b: ([a[0], a[1].contiguous()], b), "not a multiple of 16 bytes"),
    ],
)
def test_tma_refuses(change, text, device):
    a, b = operands(((16, 16, 16), (5, 7, 9)), torch.float16, device)
    with pytest.raises(ValueError, match=text):
        mnk_tma.prepare_mnk_tma(*change(a, b))


@pytest.mark.parametrize("a_rows", [True, False])
@pytest.mark.parametrize("b_rows", [True, False])
@pytest.mark.parametrize("config", mnk_cluster.candidates(), ids=str)
def test_the_cluster_kernel_loads_what_it_waits_for(config, a_rows, b_rows, monkeypatch):
    boxes = []

    def noted(matrix, sizes, strides, box):
        boxes.append(box)
        return SimpleNamespace(words=range(16))

    monkeypatch.setattr(mnk_cluster, "tensor_map", noted)
    a, b = operands(((100, 200, 300),), torch.float16, "cpu", a_rows, b_rows)
    mnk_cluster.operand_maps(a, b, config)
    step = cluster_tiles.block_k(torch.float16)
    sides, k_is_inner = (config.rows, config.columns), (a_rows, not b_rows)
    for box, side, shares, inner in zip(boxes, sides, reversed(config.tiles_along), k_is_inner, strict=True):
        accesses = 1 if inner else side // cluster_tiles.BOX  # as `Lists::load` of cluster_mnk.cu
        assert box[0] * box[1] * accesses * shares == side * step
        assert box[0] == (step if inner else cluster_tiles.BOX)


@NO_HOPPER
@pytest.mark.parametrize(
    ("config", "a_rows", "b_rows"),
    [
        *((config, True, True) for config in mnk_cluster.candidates()),
        *((mnk_cluster.SQUARE, *layout) for layout in ((True, False), (False, True), (False, False))),
    ],
    ids=str,
)
def test_the_cluster_kernel(config, a_rows, b_rows, device, poisoned, check):
    draw = random.Random(7)
    sizes = (
        *RAGGED,
        (1000, 520, 264),
        *((draw.randint(0, 400), draw.randint(1, 300), draw.randint(1, 300)) for _ in "12345678"),
    )
    prepare = mnk_cluster.prepare_mnk_cluster
    layout = {"a_rows": a_rows, "b_rows": b_rows}
    check_lists(lambda a, b: prepare(a, b, config), sizes, torch.bfloat16, device, poisoned, check, **layout)
