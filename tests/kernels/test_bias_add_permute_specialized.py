"""Test which groups the specialised fused kernel takes, and on a Hopper GPU that it matches the plain one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from grouped import NO_HOPPER
from torch import Tensor

from groupbench.kernels.bias_add_permute import fused_specialized
from groupbench.kernels.bias_add_permute.fused import CONFIGS, prepare_fused
from groupbench.kernels.bias_add_permute.fused_specialized import LEAST_TILES, prepare_specialized, unsuitable
from groupbench.kernels.bias_add_permute.problem import OPS, Group, bias_add_permute_reference
from groupbench.kernels.device import INTERPRETER, KNOWN

Sizes = tuple[tuple[int, int, int], tuple[int, int], int]

# sizes of each group: (M0, M1, M2), (N0, N1), K
CASES: dict[str, list[Sizes]] = {
    "one_group": [((2, 2, 256), (2, 128), 128)],
    "unlike_groups": [((2, 3, 256), (4, 128), 256), ((4, 4, 128), (8, 256), 64), ((1, 3, 512), (1, 128), 192)],
    "empty_group_first": [((0, 4, 256), (2, 128), 64), ((2, 2, 256), (2, 128), 128)],
    "empty_group_between": [((2, 2, 256), (2, 128), 192), ((2, 2, 256), (2, 0), 64), ((1, 1, 256), (1, 128), 256)],
    "empty_group_last": [((2, 2, 256), (2, 128), 64), ((2, 2, 0), (2, 128), 64)],
    "columns_across_n0": [((2, 2, 256), (2, 192), 64), ((2, 1, 256), (5, 24), 64)],
    "rows_across_m1": [((2, 2, 64), (2, 192), 64), ((3, 5, 8), (3, 40), 40), ((1, 1, 264), (5, 24), 136)],
    "one_block_of_rows": [((1, 1, 8), (1, 24), 8), ((1, 1, 8), (2, 40), 256)],
    "one_column": [((2, 3, 128), (1, 1), 72)],
    "one_past_a_tile": [((1, 1, 136), (1, 129), 72)],
    "more_groups_than_programs": [((1, 1 + g % 3, 64), (1 + g % 4, 64), 8 + 8 * (g % 32)) for g in range(200)],
    "many_sweeps": [((8, 8, 256), (3 + g, 128), 64 * (4 - g)) for g in range(4)] * 3,
    "long_rows": [((4, 4, 256), (64, 128), 64), ((4, 16, 256), (1, 128), 256), ((2, 2, 256), (64, 128), 128)],
}  # fmt: skip


def make(sizes: list[Sizes], op: str, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> list[Group]:
    """Return groups whose rows start at multiples of 16 bytes, with NaN between the rows."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(0)

    def values(rows: int, columns: int) -> Tensor:
        wide = torch.full((rows, -(-columns // 8) * 8), float("nan"), device=device, dtype=dtype)
        wide[:, :columns] = torch.randn(rows, columns, generator=generator, device=device, dtype=dtype)
        return wide[:, :columns]

    groups = []
    for m, n, K in sizes:
        M, N = prod(m), prod(n)
        e = None if op == "none" else values(M, N)
        groups.append(Group(values(M, K), values(N, K), values(1, N)[0], e, m, n))
    return groups


@NO_HOPPER
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference_and_equals_the_plain_kernel(
    name: str, op: str, check: Callable[..., None], poisoned: Any
) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        groups = make(CASES[name], op, dtype)
        run = prepare_specialized(groups, op)
        with poisoned():
            outputs = run()
        plain = prepare_fused(groups, op, CONFIGS["none" if op == "none" else "operand"])()
        for out, same, right in zip(outputs, plain, bias_add_permute_reference(groups, op), strict=True):
            assert out.is_contiguous()
            check(out, right, dtype)
            assert torch.equal(out, same)
        with poisoned():
            again = [run() for _ in range(5)]
        assert all(torch.equal(x, y) for more in again for x, y in zip(more, outputs, strict=True))


@NO_HOPPER
def test_a_bias_of_any_stride(check: Callable[..., None], poisoned: Any) -> None:
    groups = make(CASES["unlike_groups"], "add")
    changed = [
        replace(groups[0], d=groups[0].d[:1].expand(512)),
        replace(groups[1], d=groups[1].d.repeat_interleave(3)[::3]),
        groups[2],
    ]
    with poisoned():
        outputs = prepare_specialized(changed, "add")()
    for out, right in zip(outputs, bias_add_permute_reference(changed, "add"), strict=True):
        check(out, right, torch.bfloat16)


@NO_HOPPER
@pytest.mark.parametrize("op", OPS)
def test_in_a_graph_and_on_any_stream(op: str) -> None:
    """Each replay reads the operands and counts sweeps from zero again."""
    groups = make(CASES["many_sweeps"], op)
    run = prepare_specialized(groups, op)
    expected = run()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results.append(run())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        for out in captured:
            out.fill_(float("nan"))
        graph.replay()
        results.append(tuple(out.clone() for out in captured))
    assert all(torch.equal(x, y) for outputs in results for x, y in zip(outputs, expected, strict=True))
    groups[0].a.mul_(2)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(captured, run(), strict=True))
    assert not torch.equal(captured[0], expected[0])


@NO_HOPPER
def test_takes_groups_with_enough_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_specialized(groups: list[Group], op: str) -> Callable[[], str]:
        return lambda: "specialized"

    monkeypatch.setattr(fused_specialized, "prepare_specialized", of_specialized)
    groups = make([((8, 8, 256), (16, 128), 64)], "none")
    assert prepare_fused(groups, "none")() == "specialized"
    assert isinstance(prepare_fused(groups, "none", CONFIGS["none"])(), tuple)
    assert isinstance(prepare_fused(make(CASES["one_group"], "none"), "none")(), tuple)


def test_reports_why_it_cannot_take_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {"meta": KNOWN["sm_90"], "cpu": INTERPRETER}
    monkeypatch.setattr(fused_specialized, "device_of", lambda device: gpus[device.type])
    monkeypatch.setattr(fused_specialized, "worker_count", lambda device: 132)
    large: Sizes = ((8, 8, 256), (16, 128), 64)

    def why_not(*sizes: Sizes, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> str | None:
        return unsuitable(make(list(sizes), "mul", dtype, device))

    assert why_not(large) is None
    assert why_not(large, ((0, 1, 3), (1, 3), 3), ((1, 1, 264), (5, 24), 256)) is None
    assert "16-bit" in str(why_not(large, dtype=torch.float32))
    assert "TMA" in str(why_not(large, ((1, 1, 8), (1, 8), 0)))
    assert "M2" in str(why_not(large, ((1, 1, 12), (1, 8), 8)))
    assert "K is longer" in str(why_not(large, ((1, 1, 8), (1, 8), 264)))
    assert f"{LEAST_TILES} tiles" in str(why_not(((2, 8, 256), (8, 128), 64)))
    assert "interpreter" in str(why_not(((1, 1, 8), (1, 8), 8), device="cpu"))
    for arch in ("sm_100", "gfx942"):
        gpus["meta"] = KNOWN[arch]
        assert f"Hopper's, and this GPU is {arch}" in str(why_not(large))
