"""Test the flat kernel with specialised warps: its order of tiles, when it runs and, on Hopper, its results."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from groupbench.kernels.device import KNOWN, device_of
from groupbench.kernels.grouped_gemm import flat
from groupbench.kernels.grouped_gemm.lockstep_counter import ARRIVALS, arrivals
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference
from groupbench.kernels.grouped_gemm.tile_order import serpentine
from groupbench.kernels.moe import gate_up

SPECIALIZED = flat.CONFIGS["specialized"]
TALLER = replace(SPECIALIZED, block_m=192, num_stages=3)
HOPPER = torch.cuda.is_available() and device_of(torch.device("cuda")).hopper
needs_hopper = pytest.mark.skipif(not HOPPER, reason="NOT TESTED: the specialized bf16 kernel. No Hopper GPU")
NARROWER = flat.CONFIGS["specialized_192"]
EACH = pytest.mark.parametrize("config", [SPECIALIZED, TALLER, NARROWER], ids=["128x256", "192x256", "192x192"])


# --- order of tiles ---------------------------------------------------------------------------------------------------


@triton.jit
def _walk(out_ptr, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    for tile in range(tiles_m * tiles_n):
        tile_m, tile_n = serpentine(tile, tiles_m, tiles_n, GROUP_M)
        tl.store(out_ptr + tile, tile_m * tiles_n + tile_n)


def walked(tiles_m: int, tiles_n: int, group_m: int) -> list[tuple[int, int]]:
    """Return (tile row, tile column) in the order of the kernel."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = torch.full((tiles_m * tiles_n,), -1, dtype=torch.int32, device=device)
    _walk[(1,)](out, tiles_m, tiles_n, GROUP_M=group_m)
    return [divmod(tile, tiles_n) for tile in out.tolist()]


@given(st.integers(1, 12), st.integers(1, 5), st.sampled_from([1, 2, 3, 8]))
def test_every_tile_is_visited_once(tiles_m, tiles_n, group_m):
    order = walked(tiles_m, tiles_n, group_m)
    assert sorted(order) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]
    # Neighbours share a row block or a column, but for the step from one block to the next.
    assert all(abs(here[1] - there[1]) <= 1 for here, there in itertools.pairwise(order))


def test_the_order_matches_its_drawing():
    there = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    back = [(2, 2), (3, 2), (2, 1), (3, 1), (2, 0), (3, 0)]
    assert walked(4, 3, 2) == there + back


def test_blocks_of_rows_are_as_equal_as_possible():
    """Twenty-two rows are two blocks of eleven, not one of sixteen and one of six."""
    first_column = [m for m, n in walked(22, 2, 16)[:11]]
    assert first_column == list(range(11))


# --- when it runs -----------------------------------------------------------------------------------------------------


def kinds(M: int, G: int, N: int, K: int, arch: str = "sm_90", of: torch.dtype = torch.bfloat16) -> list[str]:
    """Return the kernel of each config of an untuned problem, the preferred one first."""
    configs = flat.configs_for(M, G, N, K, of, replace(KNOWN[arch], name="untuned"), nk=True)
    return ["specialized" if config.specialized else "plain" for _, config, _ in configs]


def test_products_of_many_waves_prefer_it_and_fall_back():
    assert kinds(32768, 8, 4096, 7000) == ["specialized", "plain"]
    assert kinds(32768, 8, 4096, 7000, of=torch.float16) == ["specialized", "plain"]


@pytest.mark.parametrize(
    ("M", "G", "N", "arch", "of"),
    [
        (32768, 8, 4096, "sm_80", torch.bfloat16),
        (32768, 8, 4096, "sm_100", torch.bfloat16),
        (32768, 8, 4096, "sm_90", torch.float32),
        (8192, 8, 4096, "sm_90", torch.bfloat16),  # four waves
        (8192, 128, 65536, "sm_90", torch.bfloat16),  # 64 rows an expert
    ],
    ids=["ampere", "blackwell", "fp32", "few_waves", "few_rows"],
)
def test_other_products_keep_the_plain_kernel(M, G, N, arch, of):
    assert kinds(M, G, N, 7000, arch, of) == ["plain"]


def test_experts_whose_weights_take_longer_to_read_than_to_multiply_keep_the_plain_kernel():
    problem, of, h100 = (65536, 256, 4096, 7168), torch.bfloat16, replace(KNOWN["sm_90"], name="untuned")
    h200 = replace(h100, gb_per_s=4917)
    unknown = replace(h100, gb_per_s=0)
    preferred = [flat.configs_for(*problem, of, gpu, nk=True)[0][1].specialized for gpu in (h100, h200, unknown)]
    assert preferred == [False, True, False]


def test_gate_up_derives_its_config_from_the_plain_kernel():
    of = torch.bfloat16
    hopper = replace(KNOWN["sm_90"], name="untuned")
    chosen = gate_up.default_config(65536, 8, 4096, 7000, of, hopper)
    assert chosen == gate_up.from_flat(flat.default_config(65536, 8, of, hopper))


@pytest.mark.parametrize(("N", "columns"), [(2880, 192), (4096, 256), (5760, 256), (2304, 256)])
def test_tiles_of_192_columns_are_for_sizes_that_leave_wider_ones_mostly_empty(N, columns):
    hopper = replace(KNOWN["sm_90"], name="untuned")
    assert flat.choose_config(65536, 8, N, 7000, torch.bfloat16, hopper, nk=True).block_n == columns


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"block_m": 256}, "128 x 256 x 64"),
        ({"num_stages": 3}, "in 4 stages"),
        ({"num_warps": 8}, "groups of 4 warps"),
        ({"per_sm": 2}, "one program per SM"),
        ({"swap": True}, "no swap"),
        ({"halves": True}, "no swap"),
        ({"lockstep": 3}, "lockstep must be 0, or at least 4"),
    ],
)
def test_illegal_configs_have_a_reason(change, text):
    reason = flat.illegal(replace(SPECIALIZED, **change), torch.bfloat16)
    assert reason is not None
    assert text in reason


def test_only_hopper_and_16_bits_are_legal():
    assert "sm_80" in str(flat.illegal(SPECIALIZED, torch.bfloat16, KNOWN["sm_80"]))
    assert "float32" in str(flat.illegal(SPECIALIZED, torch.float32, KNOWN["sm_90"]))
    assert flat.illegal(SPECIALIZED, torch.float16, KNOWN["sm_90"]) is None


def preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    configs_for = flat.configs_for
    monkeypatch.setattr(flat, "configs_for", lambda *problem: [("first", SPECIALIZED, None), *configs_for(*problem)])


@pytest.mark.skipif(HOPPER, reason="it runs")
def test_the_plain_kernel_runs_without_a_hopper(make_case, make_inputs, check, monkeypatch):
    a, b, offs = make_inputs(make_case("two", (21, 40)), torch.float16)
    with pytest.raises(ValueError, match=r"Hopper|interpreter"):
        flat.prepare_flat(a, b, offs, SPECIALIZED)
    preferred(monkeypatch)
    check(flat.prepare_flat(a, b, offs)(), grouped_gemm_reference(a, b, offs), torch.float16)


def test_another_triton_without_this_gluon_takes_the_plain_kernel(make_case, make_inputs, check, monkeypatch):
    a, b, offs = make_inputs(make_case("two", (21, 40)), torch.float16)
    monkeypatch.delattr("groupbench.kernels.grouped_gemm.flat_specialized", raising=False)
    monkeypatch.delitem(sys.modules, "groupbench.kernels.grouped_gemm.flat_specialized", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.language.nvidia.hopper", None)
    with pytest.raises(ValueError, match="Gluon differs"):
        flat.prepare_flat(a, b, offs, SPECIALIZED)
    preferred(monkeypatch)
    check(flat.prepare_flat(a, b, offs)(), grouped_gemm_reference(a, b, offs), torch.float16)


def test_the_plain_kernel_takes_more_groups(make_case, make_inputs, check, monkeypatch):
    a, b, offs = make_inputs(make_case("many", (1,) * 257, n=16, k=32), torch.float16)
    with pytest.raises(ValueError, match="257 groups"):
        flat.prepare_flat(a, b, offs, SPECIALIZED)
    preferred(monkeypatch)
    check(flat.prepare_flat(a, b, offs)(), grouped_gemm_reference(a, b, offs), torch.float16)


# --- on a Hopper GPU --------------------------------------------------------------------------------------------------


@needs_hopper
@EACH
@pytest.mark.parametrize("weights", ["rows", "columns", "shared"])
@pytest.mark.parametrize(
    ("rows", "n", "k", "tail"),
    [
        ((0, 300, 0, 129, 1, 128, 64, 193), 704, 1096, 5),  # tiles that end in M, N and K; more turns than stages
        ((0, 0, 0), 304, 256, 40),
        ((5,) * 200, 264, 128, 0),
        ((70_000,), 136, 48, 0),  # many tiles of one step
        ((128 * 40,), 256, 4096, 0),
        ((192 * 44, 192 * 22), 1024, 512, 0),  # two full waves of the taller tile: none is cut
        ((128 * 66 + 1,), 512, 192, 3),  # a last wave of two tiles, one with a single row
        ((400, 0, 77), 576, 320, 1),  # whole tiles of 192 columns
        ((400, 0, 77), 456, 320, 1),  # a last tile of 192 columns with part of its side
    ],
    ids=["ragged", "no_rows", "many_groups", "one_step", "even", "full_waves", "cut_wave", "columns", "side"],
)
def test_results(config, weights, rows, n, k, tail, make_case, make_inputs, check_calls):
    a, b, offs = make_inputs(make_case("case", rows, n=n, k=k, weights=weights, tail=tail), torch.bfloat16)
    expected = grouped_gemm_reference(a, b, offs)
    for lockstep in (0, 4, 16):
        check_calls(flat.prepare_flat(a, b, offs, replace(config, lockstep=lockstep)), expected, torch.bfloat16)


@needs_hopper
@EACH
def test_every_expert_reads_its_own_weights_at_the_tails(config, make_case, make_inputs, check):
    """NaN in the next expert's weights and rows must not leak through tiles that overhang in N, K and M."""
    a, b, offs = make_inputs(make_case("two", (150, 140), n=200, k=104), torch.float16)
    expected = grouped_gemm_reference(a, b, offs)[:150]
    b[1] = float("nan")
    a[150:] = float("nan")
    out = flat.prepare_flat(a, b, offs, config)()
    check(out[:150], expected, torch.float16)
    assert out[150:].isnan().all()


@needs_hopper
@EACH
def test_offsets_are_read_on_the_device_at_every_call(config, make_case, make_inputs, poisoned, check):
    a, b, offs = make_inputs(make_case("three", (4000, 2400, 3600), n=512, k=640), torch.float16)
    run = flat.prepare_flat(a, b, offs, config)
    for ends in ((4000, 6400, 10000), (0, 0, 10000), (10000, 10000, 10000), (1, 2, 3), (0, 0, 0)):
        offs.copy_(torch.tensor(ends))
        with poisoned():
            out = run()
        check(out[: ends[-1]], grouped_gemm_reference(a, b, offs)[: ends[-1]], torch.float16)
        assert (out[ends[-1] :] == 0).all()


def counter() -> Tensor:
    return arrivals(torch.device("cuda"), device_of(torch.device("cuda")).sms)


def launch() -> int:
    """Return the arrivals of all programs in one launch."""
    return ARRIVALS * device_of(torch.device("cuda")).sms


@needs_hopper
@EACH
def test_every_launch_adds_the_same_to_the_counter(config, make_case, make_inputs):
    """Later launches find their start in the sum of the earlier ones."""
    before = int(counter())
    assert before % launch() == 0
    for count, rows in enumerate(((9000, 0, 31), (5,), (0, 1), (4000,) * 8), 1):
        a, b, offs = make_inputs(make_case("case", rows, n=2048, k=512), torch.bfloat16)
        flat.prepare_flat(a, b, offs, config)()
        assert int(counter()) == before + count * launch()


@needs_hopper
@EACH
def test_a_counter_of_any_value_ends_no_launch_and_changes_no_result(config, make_case, make_inputs):
    """Launches that overlap share the counter; an aborted one leaves any value."""
    a, b, offs = make_inputs(make_case("case", (4000,) * 8, n=2048, k=512), torch.bfloat16)
    run = flat.prepare_flat(a, b, offs, config)
    expected = run()
    before = int(counter())
    try:
        for value in (-1, 1, launch() - 1, 2**62, -(2**62)):
            counter().fill_(value)
            assert torch.equal(run(), expected)
    finally:
        counter().fill_(before)


@needs_hopper
def test_launches_on_two_streams_do_not_wait_for_each_other(make_case, make_inputs):
    a, b, offs = make_inputs(make_case("case", (4000,) * 8, n=2048, k=512), torch.bfloat16)
    run = flat.prepare_flat(a, b, offs, SPECIALIZED)
    expected = run()
    outputs: list[Tensor] = []
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(run())
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outputs)


@needs_hopper
def test_the_counter_of_a_graph_belongs_to_the_graph(make_case, make_inputs):
    a, b, offs = make_inputs(make_case("case", (4000,) * 8, n=2048, k=512), torch.bfloat16)
    expected = flat.prepare_flat(a, b, offs, SPECIALIZED)()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flat.prepare_flat(a, b, offs, SPECIALIZED, trusted=True)()
    before = int(counter())
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, expected)
    assert int(counter()) == before
