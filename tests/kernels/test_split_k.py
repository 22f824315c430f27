"""Test three ways to add split-K partials, the config rule, and the slots; Helion's kernel with one worker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from grouped import matrix
from hypothesis import given
from hypothesis import strategies as st

from groupbench.kernels.device import KNOWN
from groupbench.kernels.split_k import helion_barrier, slots, tiled
from groupbench.kernels.split_k.problem import MAX_SIZE, split_k_reference
from groupbench.kernels.split_k.tiled import SplitKConfig

SMALL = SplitKConfig(16, 16, 16, splits=1, num_stages=1)
PREPARE = {
    "fixup": tiled.prepare_fixup,
    "two_launches": tiled.prepare_two_launches,
    "atomic": tiled.prepare_atomic,
}


@dataclass(frozen=True)
class Product:
    name: str
    M: int
    N: int
    K: int
    a: str = "rows"  # "columns": stored as [K, M]; "strided": every second column of a wider matrix
    b: str = "columns"  # "rows": stored as [K, N]; "strided"
    config: SplitKConfig | None = None


PRODUCTS = (
    Product("seed", 16, 16, 4096),
    Product("one_element", 1, 1, 1),
    Product("one_row", 1, 45, 300),
    Product("one_column", 23, 1, 300),
    Product("one_block_of_k", 16, 16, 64),
    Product("primes", 7, 13, 101),
    Product("primes_by_rows", 17, 37, 1009, b="rows"),
    Product("a_by_columns", 33, 19, 331, a="columns"),
    Product("both_the_other_way", 33, 19, 331, a="columns", b="rows"),
    Product("strided", 9, 21, 203, a="strided", b="strided"),
    Product("no_rows", 0, 5, 64),
    Product("no_columns", 5, 0, 64),
    Product("no_k", 5, 3, 0),
    Product("several_tiles", 70, 100, 203),
    Product("one_split", 20, 40, 203, config=SMALL),
    Product("one_step", 20, 40, 203, config=replace(SMALL, splits=7)),
    Product("a_block_each", 20, 40, 208, config=replace(SMALL, splits=13)),
    Product("splits_in_chunks", 20, 40, 1203, config=replace(SMALL, block_m=64, block_n=64, splits=7)),
    Product("odd_splits", 20, 20, 300, config=replace(SMALL, splits=19)),
    Product("streamed", 20, 40, 203, config=replace(SMALL, splits=3, streamed=True)),
    Product("streamed_by_blocks", 20, 40, 208, "rows", "rows", replace(SMALL, splits=13, streamed=True)),
    Product("one_row_of_a_tile", 65, 33, 203, config=replace(SMALL, block_m=64, block_n=32, splits=5)),
)


def operands(product: Product, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    a = matrix(product.M, product.K, product.a, dtype)
    return a, matrix(product.K, product.N, product.b, dtype)


@pytest.fixture(params=PREPARE.values(), ids=PREPARE)
def prepare(request):
    return request.param


@pytest.mark.pairwise
@pytest.mark.parametrize("product", PRODUCTS, ids=[product.name for product in PRODUCTS])
def test_matches_the_reference(prepare, product, dtype, device, check_run):
    a, b = operands(product, dtype, device)
    check_run(prepare(a, b, product.config), split_k_reference(a, b, 3), dtype)


@pytest.mark.parametrize("name", ["seed", "splits_in_chunks", "streamed", "several_tiles"])
@pytest.mark.parametrize("way", ["fixup", "two_launches"])
def test_runs_agree_to_the_bit(way, name, device, poisoned):
    """They agree after the workspace's memory has changed too: slots are empty again, and none is read unwritten."""
    product = next(product for product in PRODUCTS if product.name == name)
    run = PREPARE[way](*operands(product, torch.float32, device), product.config)
    first = run()
    with poisoned():
        assert all(torch.equal(first, run()) for _ in range(2))
    assert first.data_ptr() != run().data_ptr()


@pytest.mark.parametrize("product", PRODUCTS[:14], ids=[product.name for product in PRODUCTS[:14]])
def test_a_call_leaves_all_slots_empty(product, device):
    """Otherwise the adders of the next call would read old values as partials, if programs run at once."""
    a, b = operands(product, torch.float32, device)
    made, full = [], torch.full
    with mock.patch.object(torch, "full", lambda *args, **kwargs: made.append(full(*args, **kwargs)) or made[-1]):
        run = tiled.prepare_fixup(a, b, product.config)
    run()
    assert len(made) == (a.numel() > 0 and b.numel() > 0)
    assert all((slot == slots.EMPTY.value).all() for slot in made)


def test_reads_its_inputs_on_every_call(prepare, device):
    a, b = operands(PRODUCTS[0], torch.float32, device)
    run = prepare(a, b)
    before = run()
    a.mul_(2)
    assert torch.equal(run(), before * 2) or prepare is tiled.prepare_atomic


def test_a_nan_stays_in_its_row(prepare, device):
    a, b = operands(replace(PRODUCTS[0], M=20), torch.float16, device)
    a[17, 999] = float("nan")
    bad = prepare(a, b)().isnan()
    assert bad[17].all()
    assert bad.sum() == b.size(1)


def in_order(order, run):
    """Return the output of a call whose programs run in the order `order`."""
    from triton.runtime.interpreter import interpreter_builder

    ids, set_grid_idx = iter(order), interpreter_builder.set_grid_idx
    with mock.patch.object(interpreter_builder, "set_grid_idx", lambda x, y, z: set_grid_idx(x, next(ids), z)):
        out = run()
    assert next(ids, None) is None, "not all programs ran"
    return out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs programs in any order")
def test_the_fixups_sum_does_not_depend_on_the_order_of_programs(device):
    """The adder is the last program of its tile; the others may run in any order."""
    config = replace(SMALL, splits=7)
    a, b = operands(Product("", 16, 16, 203), torch.float32, device)
    orders = [[*range(5, -1, -1), 6], [*torch.randperm(6).tolist(), 6]]
    fixup, atomic = tiled.prepare_fixup(a, b, config), tiled.prepare_atomic(a, b, config)
    expected = fixup()
    assert all(torch.equal(in_order(order, fixup), expected) for order in orders)
    assert not torch.equal(in_order(orders[0], atomic), atomic()), "atomics add in the order of arrival"


@pytest.mark.parametrize("bits", [-1, 0x7FFFFFFF, 0x7FC00000, -0x400000], ids=hex)
def test_a_nan_with_the_bits_of_an_empty_slot_arrives(bits, device):
    """The hardware may produce any NaN; an adder must not wait for ever if one has the bits of EMPTY."""
    a, b = operands(Product("", 16, 16, 256), torch.float32, device)
    a[3, 100] = torch.tensor(bits, dtype=torch.int32).view(torch.float32).to(device)
    assert a[3, 100].isnan()
    out = tiled.prepare_fixup(a, b, replace(SMALL, splits=4))()
    assert out[3].isnan().all()
    assert out.isnan().sum() == 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs a single program in the interpreter")
def test_the_last_stretch_of_a_very_long_k(device):
    """The product of the most splits and the blocks of K is just below 2**31. Each operand is one element."""
    from triton.runtime.interpreter import interpreter_builder

    K = 1 << 25
    config = replace(SMALL, splits=tiled.legal_splits(tiled.MAX_SPLITS, K, SMALL.block_k))
    assert tiled.illegal(config, K, torch.float32) is None
    assert "1 to 1023" in tiled.illegal(replace(config, splits=1024), K, torch.float32)
    a, b = torch.ones(1, 1).expand(1, K), torch.ones(1, 1).expand(K, 1)
    partials = torch.zeros(config.splits, 16, 16)
    constants = tiled.kernel_constants(config, 1, K, tiled.LEAVE.value, compiled=False)

    def last_alone(x: int, y: int, z: int) -> None:
        interpreter_builder.grid_idx = (x, config.splits - 1, z)

    with mock.patch.object(interpreter_builder, "set_grid_idx", last_alone):
        tiled._split_k_kernel[(1, 1)](
            a, b, torch.empty(1, 1), partials.view(torch.int32), 1, 1, K, *a.stride(), *b.stride(), **constants
        )
    blocks = K // config.block_k
    assert partials[-1, 0, 0] == (blocks - blocks * (config.splits - 1) // config.splits) * config.block_k
    assert partials.count_nonzero() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: (a.double(), b.double()), "not one of"),
        (lambda a, b: (a[:, :1].expand(-1, 2**31 - 1), b[:1].expand(2**31 - 1, -1)), "M, N and K up to"),
        (lambda a, b: (a, b.float()), "one dtype"),
        (lambda a, b: (a, b[1:]), r"expected a \[M, K\]"),
        (lambda a, b: (a[0], b), r"expected a \[M, K\]"),
    ],
    ids=["fp64", "too_long", "mixed_dtypes", "other_k", "a_vector"],
)
def test_refuses_operands_it_cannot_multiply(prepare, change, message, device):
    with pytest.raises(ValueError, match=message):
        prepare(*change(*operands(PRODUCTS[0], torch.float16, device)))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"splits": 14}, "1 to 13 for 13 blocks"), ({"splits": 0}, "1 to 13"), ({"adders": 2}, "adders=2"),
     ({"splits": 13, "adders": 3}, "adders=3"), ({"adders": 0}, "adders=0"), ({"block_m": 8}, "block_m=8"),
     ({"block_k": 48}, "block_k=48")],
    ids=str,
)  # fmt: skip
def test_refuses_configs_that_cannot_run(prepare, change, message, device):
    a, b = operands(Product("", 16, 16, 208), torch.float16, device)
    with pytest.raises(ValueError, match=message):
        prepare(a, b, replace(SMALL, **change))


SIZES = st.integers(1, 1 << 17)


LONG = st.integers(1 << 26, MAX_SIZE)


@given(M=st.integers(1, 300), N=SIZES, K=SIZES | LONG, dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_the_rule_gives_legal_configs_that_fill_the_gpu(M, N, K, dtype):
    config = tiled.choose_config(M, N, K, dtype, sms=132)
    assert tiled.illegal(config, K, dtype) is None
    tiles, blocks = tiled.tile_count(M, N, config), -(-K // config.block_k)
    at_once = 132 * (2 if config.streamed else 1)
    assert config.splits == 1 or tiles * config.splits <= at_once, "adders wait for programs that cannot start"
    assert blocks * config.splits < 2**31
    most = min(blocks, tiled.MAX_SPLITS, (2**31 - 1) // blocks)
    assert config.splits == most or 10 * tiles * (config.splits + 1) > 9 * at_once
    assert tiled.illegal(tiled.interpreter_config(M, K), K, dtype) is None


HELION = (
    Product("seed", 16, 16, 4096),
    Product("primes_by_rows", 7, 13, 101, b="rows"),
    Product("several_tiles", 70, 100, 203),
)
"""The next test has that no dimension of one element reaches Helion."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the barrier runs with all its programs")
@pytest.mark.parametrize("product", HELION, ids=[product.name for product in HELION])
def test_helions_stages_with_one_worker(product, device, poisoned, check):
    """A grid of one program passes its barrier in the interpreter too, so both stages can be checked here."""
    import helion

    a, b = operands(product, torch.float16, device)
    config = helion_barrier.default_config(product.M, product.N, product.K, a.dtype, KNOWN["sm_90"])
    arguments = helion_barrier.without_ones(a, b)
    compiled = helion_barrier.split_k_matmul_barrier.bind(arguments).compile_config(config)
    with mock.patch.object(helion.runtime, "get_num_sm", lambda *args, **kwargs: 1), poisoned():
        out = compiled(*arguments)[: product.M, : product.N]
    check(out, split_k_reference(a, b), torch.float16)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 1, 1), (1, 4, 1), (3, 4, 1), (1, 4, 5), (3, 4, 5)], ids=str)
def test_no_dimension_of_one_element_reaches_helion(sizes, device):
    M, N, K = sizes
    a, b = torch.randn(M, K, device=device), torch.randn(K, N, device=device)
    wide_a, wide_b = helion_barrier.without_ones(a, b)
    assert min(*wide_a.shape, *wide_b.shape) > 1
    assert torch.equal((wide_a @ wide_b)[:M, :N], a @ b)
    b[0, 0] = float("inf")
    wide_a, wide_b = helion_barrier.without_ones(a, b)
    assert torch.equal((wide_a @ wide_b)[:M, :N], a @ b)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a grid barrier")
def test_helions_barrier_is_refused_without_a_gpu(device):
    with pytest.raises(ValueError, match="cannot be interpreted"):
        helion_barrier.prepare_barrier(*operands(PRODUCTS[0], torch.float16, device))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: Helion's barrier and CUDA graphs. No GPU")
@pytest.mark.parametrize("product", PRODUCTS[:14], ids=[product.name for product in PRODUCTS[:14]])
def test_helions_barrier(product, dtype, device, check_run):
    a, b = operands(product, dtype, device)
    run = helion_barrier.prepare_barrier(a, b)
    out = check_run(run, split_k_reference(a, b), dtype)
    assert torch.equal(out, run())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: streams side by side. No GPU")
@pytest.mark.parametrize("rows", [16, 64], ids=["stream", "tiled"])
def test_callables_on_two_streams_share_no_slots(rows, device):
    a, b = operands(Product("", rows, 16, 65536), torch.bfloat16, device)
    with mock.patch.object(torch, "full", side_effect=torch.full) as full:
        runs = [tiled.prepare_fixup(a, b) for _ in range(2)]
    assert full.call_count == 2
    expected = runs[0]()
    streams = [torch.cuda.Stream() for _ in runs]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(200):
        for run, stream in zip(runs, streams, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(run())
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outputs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: Helion's barrier and CUDA graphs. No GPU")
@pytest.mark.parametrize("way", ["fixup", "two_launches"])
def test_replays_of_a_graph_agree_to_the_bit(way, device, replays):
    run = PREPARE[way](*operands(Product("", 16, 16, 131072), torch.float32, device))
    expected = run()
    assert all(torch.equal(out, expected) for out in replays(run, lambda turn: None, 50))
