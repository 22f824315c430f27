"""Test the rule and the refusals of split-K by registers, and on a GPU its sums and slots. It has no interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from grouped import NO_HOPPER
from hypothesis import given
from hypothesis import strategies as st

from groupbench.kernels.split_k import slots, stream, tiled
from groupbench.kernels.split_k.problem import split_k_reference
from groupbench.kernels.split_k.stream import StreamConfig

SMS = 132
ROWS, SIZES = st.integers(1, 16), st.integers(1, 1 << 17)


@given(M=ROWS, N=SIZES, K=SIZES)
def test_the_rule_gives_legal_configs_that_fill_the_gpu(M, N, K):
    config = stream.choose_stream(M, N, K, SMS)
    assert stream.illegal_stream(config, K) is None
    tiles, blocks = -(-N // config.block_n), -(-K // config.block_k)
    assert config.splits == 1 or tiles * config.splits <= SMS, "adders wait for programs that cannot start"
    assert config.splits == blocks or 10 * tiles * (config.splits + 1) > 9 * SMS
    constants = stream.stream_constants(config, M, N, K)
    assert config.splits == 1 or constants["CHUNK"] * 16 * config.block_n // config.adders >= 4 * constants["POLLED"]


SOME = StreamConfig(16, 64, 4, 4, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"block_n": 64}, "block_n=64"), ({"num_warps": 3}, "num_warps=3"), ({"warp_k": 32}, "warp_k=32"),
     ({"splits": 17}, "splits=17"), ({"splits": 0}, "splits=0"), ({"adders": 3}, "adders=3"),
     ({"adders": 8}, "adders=8"), ({"adders": 0}, "adders=0"),
     ({"splits": 64, "num_warps": 1, "adders": 128}, "adders=128")],
    ids=str,
)  # fmt: skip
def test_reports_which_configs_cannot_run(change, message):
    assert message in stream.illegal_stream(replace(SOME, **change), 4096)
    assert stream.illegal_stream(SOME, 4096) is None


def test_is_unsuitable_for_a_cpu():
    a, b = torch.empty(16, 64, dtype=torch.float16), torch.empty(16, 64, dtype=torch.float16).t()
    assert stream.unsuitable(a, b) == "Gluon has no interpreter"


@dataclass(frozen=True)
class StreamProduct:
    name: str
    M: int
    N: int
    K: int
    config: StreamConfig | None = None
    padding: int = 0  # elements between rows of a and of b, all NaN


PRODUCTS = (
    StreamProduct("seed", 16, 16, 4096),
    StreamProduct("one_row", 1, 4096, 4096),
    StreamProduct("one_column", 5, 1, 304),
    StreamProduct("one_line_of_k", 16, 16, 64),
    StreamProduct("sixteen_of_k", 7, 19, 16),
    StreamProduct("ragged_columns", 16, 1001, 4096),
    StreamProduct("ragged_k", 3, 40, 4112),
    StreamProduct("all_ragged", 13, 45, 2896, padding=8),
    StreamProduct("padded", 16, 64, 1024, padding=24),
    StreamProduct("long", 16, 16, 131072),
    StreamProduct("large", 16, 4096, 4096),
    StreamProduct("large_ragged", 9, 2111, 7184),
    StreamProduct("many_tiles", 16, 9000, 1024),
    StreamProduct("uneven_splits", 16, 32, 4096, StreamConfig(16, 64, 7, 4, 4)),
    StreamProduct("slots_in_chunks", 16, 16, 32768, StreamConfig(16, 64, 128, 4, 1)),
    StreamProduct("a_warp", 16, 64, 1024, StreamConfig(32, 128, 3, 1, 2)),
    StreamProduct("four_elements_each", 2, 16, 32768, StreamConfig(16, 64, 64, 8, 64)),
)


def padded(rows: int, columns: int, padding: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.full((rows, columns + padding), float("nan"), device="cuda", dtype=dtype)
    wide[:, :columns] = torch.randn(rows, columns)
    return wide[:, :columns]


def operands(product: StreamProduct, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    a = padded(product.M, product.K, product.padding, dtype)
    b = padded(product.N, product.K, product.padding, dtype).t()
    assert stream.unsuitable(a, b) is None
    return a, b


@NO_HOPPER
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("product", PRODUCTS, ids=[product.name for product in PRODUCTS])
def test_matches_the_reference_and_itself_to_the_bit(product, kind, poisoned, check):
    a, b = operands(product, kind)
    made, full = [], torch.full
    with mock.patch.object(torch, "full", lambda *args, **kwargs: made.append(full(*args, **kwargs)) or made[-1]):
        run = stream.prepare_stream(a, b, product.config)
    with poisoned():
        first = run()
    check(first, split_k_reference(a, b), kind)
    with poisoned():
        assert all(torch.equal(first, run()) for _ in range(20))
    assert len(made) == 1
    assert (made[0] == slots.EMPTY.value).all(), "a slot is not empty for the next call"


@NO_HOPPER
def test_replays_of_a_graph_agree_to_the_bit(replays):
    run = stream.prepare_stream(*operands(StreamProduct("", 16, 16, 131072), torch.bfloat16))
    expected = run()
    assert all(torch.equal(out, expected) for out in replays(run, lambda turn: None, 50))


@NO_HOPPER
def test_a_nan_stays_in_its_row():
    a, b = operands(StreamProduct("", 14, 16, 4096), torch.bfloat16)
    a[11, 999] = float("nan")
    bad = stream.prepare_stream(a, b)().isnan()
    assert bad[11].all()
    assert bad.sum() == b.size(1)


@NO_HOPPER
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: (a.float(), b.float()), "not 16 bits"),
        (lambda a, b: (a.repeat(2, 1), b), "more than 16"),
        (lambda a, b: (a, b.contiguous()), "contiguous along K"),
        (lambda a, b: (a.t().contiguous().t(), b), "contiguous along K"),
        (lambda a, b: (a[:, 1:-15], b[1:-15]), "multiple of 16"),
        (lambda a, b: (a[:, :-8], b[:-8]), "multiple of 16"),
    ],
    ids=["fp32", "rows", "b_by_rows", "a_by_columns", "odd_address", "odd_k"],
)
def test_operands_it_cannot_take_go_to_the_other_kernel(change, message, check):
    a, b = change(*operands(StreamProduct("", 16, 64, 1024), torch.bfloat16))
    assert message in stream.unsuitable(a, b)
    with mock.patch.object(stream, "prepare_stream", side_effect=AssertionError):
        check(tiled.prepare_fixup(a, b)(), split_k_reference(a, b), a.dtype)
