"""Compare routing, permutation and unpermutation with plain Python and torch, and with each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import named, rarely
from grouped import NO_GPU
from torch import Tensor

from groupbench.kernels.moe import helion_permute, permute, permute_fused, routing


@dataclass(frozen=True)
class Routed:
    T: int
    k: int
    G: int
    H: int = 45  # few values, since Helion compiles for each H and k
    only: tuple[int, ...] = ()  # the ids that occur; () is all of -1..G
    ids: torch.dtype = torch.int64


CASES = {
    "empty_experts": Routed(19, 2, 6, only=(1, 4)),
    "one_owner": Routed(33, 1, 4, H=40, only=(2,)),
    "one_token": Routed(1, 3, 4),
    "one_choice": Routed(1, 1, 1, H=40, only=(0,)),
    "one_column": Routed(5, 2, 3, H=1),
    "no_token": Routed(0, 2, 3),
    "nothing_has_a_row": Routed(7, 2, 3, only=(-1, 3)),
    "one_expert": Routed(37, 1, 1, H=40),
    "odd_sizes": Routed(23, 3, 5),
    "int32_ids": Routed(23, 3, 5, ids=torch.int32),
    "wider_than_a_block": Routed(5, 2, 3, H=1100),
    "one_choice_past_a_block": Routed(129, 1, 3, H=40),
    "more_than_a_chunk": Routed(86, 12, 9),
    "many_experts": Routed(40, 2, 300),
    "many_choices": Routed(21, 9, 5),
}
WAYS: dict[str, SimpleNamespace] = {
    "triton": SimpleNamespace(permute=permute.prepare_permute, unpermute=permute.prepare_unpermute),
    "helion": SimpleNamespace(
        permute=helion_permute.prepare_helion_permute, unpermute=helion_permute.prepare_helion_unpermute
    ),
}
# Helion compiles for a second for each k, H and dtype.
WITH_HELION = ("empty_experts", "no_token", "nothing_has_a_row", "one_column")
each_case = pytest.mark.parametrize("case_", CASES.values(), ids=CASES)
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def ids_of(case: Routed) -> Tensor:
    torch.manual_seed(1)
    only = torch.tensor(case.only or range(-1, case.G + 1))
    return only[torch.randint(len(only), (case.T, case.k))].to(case.ids)


def routed_by_hand(ids: Tensor, G: int) -> tuple[list[int], dict[int, int]]:
    """Return (offs, row by flat choice), computed expert by expert and choice by choice."""
    flat, offs, rows = ids.flatten().tolist(), [], {}
    for g in range(G):
        for choice, expert in enumerate(flat):
            if expert == g:
                rows[choice] = len(rows)
        offs.append(len(rows))
    return offs, rows


def check_routing(actual: routing.Routing, ids: Tensor, G: int) -> dict[int, int]:
    """Compare with the routing by hand, and return its rows."""
    offs, rows = routed_by_hand(ids, G)
    assert {x.dtype for x in (actual.offs, actual.position, actual.source)} == {torch.int32}
    assert actual.offs.tolist() == offs
    assert actual.position.shape == ids.shape
    assert actual.position.flatten().tolist() == [rows.get(choice, -1) for choice in range(ids.numel())]
    assert actual.source.tolist()[: len(rows)] == sorted(rows, key=rows.__getitem__)
    return rows


@each_case
@pytest.mark.parametrize("route", [routing.route, routing.route_reference], ids=["triton", "reference"])
def test_rows_are_sorted_by_expert_then_choice(case_, route, device) -> None:
    ids = ids_of(case_)
    check_routing(route(ids.to(device), case_.G), ids, case_.G)


def test_an_id_past_32_bits_has_no_row(device: torch.device) -> None:
    ids = torch.tensor([[2**32, 0], [2**32 + 1, -(2**32)], [-2, 9]], device=device)
    assert routing.route(ids, 2).position.tolist() == [[-1, 0], [-1, -1], [-1, -1]]


TRIPS = {f"{name}-{key}": (case, way) for name, case in CASES.items() for key, way in WAYS.items()}
FURTHER = [name for name in TRIPS if name.endswith("helion") and not name.startswith(WITH_HELION)]


@pytest.mark.pairwise
@pytest.mark.parametrize(("case_", "way"), named(TRIPS, *FURTHER))
@pytest.mark.parametrize("dtype_", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_round_trip(case_, way, dtype_, device, poisoned, check) -> None:
    """Rows have their tokens' bits, and sums of weighted rows come back, from memory with NaN around the rows."""
    ids = ids_of(case_)
    offs, rows = routed_by_hand(ids, case_.G)
    x = torch.randn(case_.T, case_.H).to(dtype_)
    weights = torch.rand(case_.T, case_.k).to(dtype_)
    weights.view(-1)[[choice for choice in range(weights.numel()) if choice not in rows]] = float("nan")
    x, ids, weights = x.to(device), ids.to(device), weights.to(device)
    with poisoned():
        y, actual_offs, position = way.permute(x, ids, case_.G)()
    assert actual_offs.tolist() == offs
    assert y.shape == (case_.T * case_.k, case_.H)
    for choice, row in rows.items():
        assert torch.equal(y[row], x[choice // case_.k])

    values = torch.full_like(y, float("nan"))
    values[: len(rows)] = torch.randn(len(rows), case_.H).to(device, dtype_)
    run = way.unpermute(values, position, weights)
    with poisoned():
        out, again = run(), run()
    expected = torch.zeros(case_.T, case_.H, dtype=torch.float64, device=device)
    for choice, row in rows.items():
        expected[choice // case_.k] += values[row].double() * weights.flatten()[choice].double()
    check(out, expected, dtype_)
    assert torch.equal(out, again)


@each_way
def test_takes_views(way: SimpleNamespace, device, check) -> None:
    torch.manual_seed(0)
    x = torch.randn(24, 13, device=device).t()[:, ::2]  # [13, 12]
    ids = torch.randint(-1, 4, (3, 13), device=device).t()
    weights = torch.rand(3, 13, device=device).t()
    y, offs, position = way.permute(x, ids, 4)()
    expected, routed = permute.permute_reference(x, ids, 4)
    assert torch.equal(position, routed.position)
    rows = int(offs[-1])
    assert torch.equal(y[:rows], expected[:rows])
    y = torch.full((y.size(0), 20), float("nan"), device=device)[:, 3:15]
    y[:rows] = expected[:rows]
    strided = position.repeat_interleave(2, 1)[:, ::2]
    combined = permute.combine_reference(expected.double(), position, weights)
    for of in (position, strided):
        check(way.unpermute(y, of, weights)(), combined, torch.float32)
    assert torch.equal(permute.spread_rows(x, strided)[:rows], expected[:rows])


def test_counts_of_more_blocks_than_a_program_sums_at_a_time(device, monkeypatch) -> None:
    monkeypatch.setattr(routing, "SCANNED", (2, 4))
    ids = torch.randint(-1, 5, (700, 1))
    check_routing(routing.route(ids.to(device), 5), ids, 5)


@pytest.mark.parametrize("early", [0, 2, 9])
@pytest.mark.parametrize("splits", [1, 3])
def test_rows_read_early_are_those_read_late(early: int, splits: int, device: torch.device) -> None:
    """A token's first columns may be read before or after its positions; there are more blocks than programs."""
    x, ids = torch.randn(5, 45, device=device), torch.randint(-1, 3, (5, 2), device=device)
    expected, routed = permute.permute_reference(x, ids, 3)
    out = torch.zeros_like(expected)
    permute._spread_kernel[(5, splits)](
        x, routed.position, out, 45, early, *x.stride(), 45, K=2, BLOCK_H=8, SPLITS=splits, CHAINED=False
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_program_sums_block_after_block(splits: int, weighted: bool, device: torch.device, check: Callable) -> None:
    y, ids = torch.randn(10, 45, device=device), torch.randint(-1, 3, (5, 2), device=device)
    weights = torch.rand(5, 2, device=device) if weighted else None
    position = routing.route_reference(ids, 3).position
    out = permute.combine_rows(y, position, weights, permute.RowConfig(8, 4, splits))
    check(out, permute.combine_reference(y.double(), position, weights), torch.float32)


@pytest.mark.pairwise
@pytest.mark.parametrize("name", [name for name, case_ in CASES.items() if case_.T])  # else it is not launched
@pytest.mark.parametrize("tokens", [8, *rarely(1)])
def test_placed_and_copied_in_one_launch(tokens: int, name: str, device, poisoned) -> None:
    case_ = CASES[name]
    ids = ids_of(case_)
    x = torch.randn(case_.T, 2 * case_.H, device=device)[:, ::2]
    config = permute_fused.TokensConfig(tokens, block_h=1 << (case_.H - 1).bit_length(), num_warps=4)
    with poisoned():
        y, actual = permute_fused.place_and_spread(x, ids.to(device), case_.G, config)
    for choice, row in check_routing(actual, ids, case_.G).items():
        assert torch.equal(y[row], x[choice // case_.k])


@pytest.mark.parametrize("early", [0, 2, 9])
def test_programs_that_wait_for_ids_and_that_do_not_read_the_same(early: int, device: torch.device) -> None:
    x, ids = torch.randn(13, 12, device=device), torch.randint(-1, 3, (13, 3), device=device)
    expected, routed = permute.permute_reference(x, ids, 3)
    before, totals = routing.count_before(ids, 3, 12)
    out, position = torch.zeros_like(expected), torch.empty_like(routed.position)
    permute_fused._place_and_spread_kernel[(4,)](
        ids, before, totals, x, torch.empty_like(routed.offs), position, torch.empty_like(routed.source), out, 13, 12,
        early, *x.stride(), G=3, BINS=routing.bins_of(3), K=3, CHOICES=4, TOKENS=4, BLOCK_H=16, CHAINED=False,
    )  # fmt: skip
    assert torch.equal(position, routed.position)
    assert torch.equal(out, expected)


def test_many_tokens_are_placed_and_copied_in_one_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permute_fused, "LEAST_TOKENS", 1)
    monkeypatch.setattr(permute_fused, "ROW_BYTES", (16, 8192))
    monkeypatch.setattr(permute, "route", None)
    x, ids = torch.randn(21, 48, device=device), torch.randint(-1, 5, (21, 4), device=device)
    expected, routed = permute.permute_reference(x, ids, 4)
    y, offs, position = permute.prepare_permute(x, ids, 4)()
    assert torch.equal(offs, routed.offs)
    assert torch.equal(position, routed.position)
    assert torch.equal(y[: int(offs[-1])], expected[: int(offs[-1])])


def test_which_permutations_are_placed_and_copied_in_one_launch() -> None:
    def chosen(T: int, k: int, G: int, H: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        return permute_fused.choose_tokens(torch.empty(T, H, dtype=dtype, device="meta"), k, G)

    assert chosen(4096, 8, 128, 2048) == permute_fused.TokensConfig(8, 2048, 8)
    assert chosen(8192, 4, 32, 2880) == permute_fused.TokensConfig(8, 4096, 4)
    assert chosen(8192, 6, 256, 1024, torch.float32) == permute_fused.TokensConfig(8, 1024, 8)
    assert chosen(4095, 8, 128, 2048) is chosen(8192, 2, 8, 4096) is None
    assert chosen(8192, 9, 128, 2048) is chosen(8192, 8, 257, 2048) is None
    assert all(chosen(8192, 8, 128, H) is None for H in (0, 1024, 2040, 7168))
    wide = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    assert permute_fused.choose_tokens(wide[:, :2048], 8, 128) is not None
    assert permute_fused.choose_tokens(wide[:, ::2], 8, 128) is None


@NO_GPU
@pytest.mark.parametrize("k, G, H", [(8, 128, 2048), (4, 32, 2880), (6, 64, 2048), (2, 8, 4096), (1, 8, 7168)])
@pytest.mark.parametrize("only", ["all", "few"])
def test_round_trip_of_many_tokens(k: int, G: int, H: int, only: str, poisoned: Callable, check: Callable) -> None:
    T = 8193
    torch.manual_seed(0)
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, G if only == "all" else 8 * G, (T, k), device="cuda")
    weights = torch.rand(T, k, device="cuda").masked_fill(ids >= G, float("nan"))
    expected, routed = permute.permute_reference(x, ids, G)
    rows = int(routed.offs[-1])
    with poisoned():
        y, offs, position = permute.prepare_permute(x, ids, G)()
    assert torch.equal(offs, routed.offs)
    assert torch.equal(position, routed.position)
    assert torch.equal(y[:rows], expected[:rows])
    y[rows:] = float("nan")
    run = permute.prepare_unpermute(y, position, weights)
    with poisoned():
        out, again = run(), run()
    assert torch.equal(out, again)
    check(out, permute.combine_reference(y.float(), position, weights).double(), torch.bfloat16)


def test_ids_are_read_at_every_call(device: torch.device) -> None:
    ids = torch.tensor([[0], [1], [1]], device=device)
    x = torch.arange(3.0, device=device)[:, None].expand(-1, 16).contiguous()
    run = permute.prepare_permute(x, ids, 2)
    assert run()[0][:, 0].tolist() == [0, 1, 2]
    ids.copy_(torch.tensor([[1], [0], [-1]]))
    rows, offs, _ = run()
    assert rows[:2, 0].tolist() == [1, 0]
    assert offs.tolist() == [1, 2]


def test_launches_that_overlap_read_what_was_written_before_them(device: torch.device) -> None:
    """Rows, ids and the allocator's memory change between calls, without a wait between them."""
    rounds, T = (50, 3000) if device.type == "cuda" else (2, 280)
    x, ids = torch.empty(T, 24, device=device), torch.empty(T, 2, dtype=torch.int64, device=device)
    run = permute.prepare_permute(x, ids, 5)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(rounds):
        x.normal_()
        ids.random_(-1, 6)
        rows, _, position = run()
        held = position >= 0
        copied = rows[position.clamp_min(0).long()]
        wrong += (held & ((ids < 0) | (ids >= 5))).sum() + (held[:, :, None] & (copied != x[:, None])).sum()
    assert wrong.item() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's operations read tensors too, in another way")
def test_nothing_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Tensor) -> None:
        raise AssertionError("read on the host")

    ids, x = torch.randint(0, 4, (9, 2)), torch.randn(9, 16)
    run = permute.prepare_permute(x, ids, 4)
    y, _, position = run()
    back = permute.prepare_unpermute(y, position, torch.rand(9, 2))
    for name in ("tolist", "item", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    run()
    back()


def test_helion_uses_int64_for_far_offsets(device: torch.device, monkeypatch) -> None:
    """Helion chooses by the sizes of inputs alone, and ignores strides and the output."""
    wide = torch.empty(2**20, 4096, dtype=torch.float16, device="meta")
    assert helion_permute.reach(wide[:, :64]) == (2**20 - 1) * 4096 + 63
    x, ids = torch.randn(7, 24, device=device), torch.randint(-1, 4, (7, 2), device=device)
    expected, routed = permute.permute_reference(x, ids, 4)
    monkeypatch.setattr(helion_permute, "reach", lambda x: 2**31)
    for name in ("spread", "combine"):  # the kernels with int32 indices
        monkeypatch.setattr(helion_permute, name, None)
    y, _, position = helion_permute.prepare_helion_permute(x, ids, 4)()
    rows = int(routed.offs[-1])
    assert torch.equal(y[:rows], expected[:rows])
    out = helion_permute.prepare_helion_unpermute(y, position, torch.ones(7, 2, device=device))()
    torch.testing.assert_close(out, permute.combine_reference(expected, position, None))
    config = helion_permute.default_config(7, 24, 4, device)
    bound = helion_permute.combine_wide.bind((y, position.long(), torch.ones(7, 2, device=device)))
    counts = [line for line in bound.to_triton_code(config).splitlines() if line.strip().startswith("indices_")]
    assert counts
    assert all("tl.int64" in line for line in counts)


@each_way
def test_refuses_operands_that_do_not_fit(way: SimpleNamespace, device: torch.device) -> None:
    x, ids = torch.randn(4, 8, device=device), torch.zeros(4, 2, dtype=torch.int64, device=device)
    position, weights = torch.zeros(4, 2, dtype=torch.int32, device=device), torch.rand(4, 2, device=device)
    many = x[:1].expand(2**26, -1), ids[:1, :1].expand(2**26, -1)
    for refused, operands, message in (
        (way.permute, (x[:3], ids, 2), "a row for each token"),
        (way.permute, (x, ids.float(), 2), "int32 or int64"),
        (way.permute, (*many, 4096), "experts: counts of 128 choices each pass 2"),
        (way.permute, (x, ids, 0), "experts"),
        (way.unpermute, (x, position.long(), weights), "position"),
        (way.unpermute, (x, position, torch.rand(4, 3, device=device)), "weights"),
        (way.unpermute, (x, position, weights.int()), "float dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            refused(*operands)
    for rows in (x, x[:0]):
        with pytest.raises(ValueError, match=rf"position holds 4, and y \[rows, H\] has {len(rows)} rows"):
            way.unpermute(rows, position + 4, weights)
    without_rows = way.unpermute(x[:0], position - 1, weights)()
    assert torch.equal(without_rows, torch.zeros_like(x))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("H", [1, 45, 768, 2048, 2880, 4096, 7168, 100_000])
def test_blocks_of_columns_for_many_tokens_and_for_few(H: int, itemsize: int) -> None:
    for rows in (1, 2, 5, 8, 300, 100_000):
        config = permute.choose_config(8192, H, itemsize, rows)
        assert config.block_h & (config.block_h - 1) == 0
        assert 1 <= config.num_warps <= 16
        assert config.splits == 1
        assert rows * config.block_h * itemsize <= permute.IN_FLIGHT or config.block_h == 1
    one = permute.choose_config(8192, H, itemsize)
    assert permute.choose_config(8192, H, itemsize, vectors=4).num_warps == max(one.num_warps // 2, 1)
    assert one.block_h >= min(H, permute.MOST_BYTES // itemsize)
    few = permute.choose_config(64, H, itemsize)
    assert few.splits == -(-H // few.block_h)
    assert H < 1024 or few.splits * few.block_h <= 1.15 * H


@NO_GPU
def test_a_graph_follows_later_ids(replays):
    torch.manual_seed(0)
    T, k, G, H = 4099, 8, 64, 2048
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
    routings = [torch.randint(-1, top, (T, k), device="cuda") for top in (G, 2, 8 * G)]
    ids = routings[0].clone()
    outputs = replays(lambda: permute.permute_rows(x, ids, G)[0], lambda turn: ids.copy_(routings[turn]), 3)
    for rows, taken in zip(outputs, routings, strict=True):
        expected, routed = permute.permute_reference(x, taken, G)
        held = int(routed.offs[-1])
        assert torch.equal(rows[:held], expected[:held])
