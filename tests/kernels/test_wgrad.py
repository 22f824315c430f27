"""Test the gradient of the weights in Triton and in Helion: sums over ragged rows next to other groups' data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import helion
import pytest
import torch
from torch import Tensor

from groupbench.kernels.device import KNOWN
from groupbench.kernels.grouped_gemm import helion_wgrad, wgrad
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_wgrad_reference
from groupbench.kernels.grouped_gemm.tuned import tuned_configs

Prepare = Callable[..., Callable[[], Tensor]]


def prepare_dynamic(a: Tensor, dc: Tensor, offs: Tensor, nk: bool = False) -> Callable[[], Tensor]:
    return wgrad.prepare_wgrad(a, dc, offs, nk, wgrad.CONFIGS["cpu_dynamic"])


IMPLEMENTATIONS: dict[str, Prepare] = {
    "triton": wgrad.prepare_wgrad,
    "triton_dynamic": prepare_dynamic,
    "helion": helion_wgrad.prepare_helion_wgrad,
}
# Those of wgrad_specialized.py have tests of their own: Gluon has no interpreter.
GPU_CONFIGS = [name for name, c in wgrad.CONFIGS.items() if not name.startswith("cpu") and not c.specialized]


@pytest.fixture(params=IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def prepare(request: Any) -> Prepare:
    return request.param


@pytest.fixture
def make_operands(make_inputs: Any) -> Callable[..., tuple[Tensor, Tensor, Tensor, bool]]:
    """Return a function that makes a [M, K], dc [M, N], offs [G] and nk of a case; rows of no group are NaN."""

    def make(case: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, bool]:
        a, b, offs = make_inputs(case, dtype)
        dc = torch.full((a.size(0), b.size(2)), float("nan"), dtype=dtype)
        rows = sum(case.sizes)
        dc[:rows] = torch.randn(rows, b.size(2), generator=torch.Generator().manual_seed(1)).to(dtype)
        return a, dc.to(a.device), offs, case.weights == "columns"

    return make


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name == "fp32" else torch.float16


@pytest.mark.pairwise
@pytest.mark.parametrize("implementation", ["triton", "triton_dynamic"])
def test_triton_matches_the_reference(implementation, case, dtype, make_operands, poisoned, check):
    a, dc, offs, nk = make_operands(case, dtype)
    run = IMPLEMENTATIONS[implementation](a, dc, offs, nk)
    with poisoned():
        out = run()
    check(out, grouped_gemm_wgrad_reference(a, dc, offs), dtype)


def test_helion_matches_the_reference(case, make_operands, poisoned, check, no_tuning):
    a, dc, offs, nk = make_operands(case, torch.float16)
    run = helion_wgrad.prepare_helion_wgrad(a, dc, offs, nk)
    with poisoned():
        out = run()
    check(out, grouped_gemm_wgrad_reference(a, dc, offs), torch.float16)


def test_the_reference_matches_autograd(make_case, make_inputs):
    a, b, offs = (
        x.double() if x.is_floating_point() else x for x in make_inputs(make_case("e", (5, 0, 1)), torch.half)
    )
    dc = torch.randn(6, b.size(2), dtype=torch.float64, device=a.device)
    b.requires_grad_()
    torch.cat([a[:5] @ b[0], a[5:] @ b[2]]).backward(dc)
    torch.testing.assert_close(grouped_gemm_wgrad_reference(a, dc, offs), b.grad)


@pytest.mark.pairwise
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("where", ["a", "dc"])
@pytest.mark.parametrize("columns", [48, 45], ids=["tma", "pointers"])
def test_nan_and_infinity_stay_in_their_group(prepare, columns, where, value, make_case, make_operands, check):
    """A zero in one operand's tail does not hide a NaN in the other's: 0 * NaN is NaN."""
    a, dc, offs, _ = make_operands(make_case("three", (21, 5, 40), n=columns, k=columns), torch.float16)
    good = grouped_gemm_wgrad_reference(a, dc, offs)
    (a if where == "a" else dc)[21:26] = value
    out = prepare(a, dc, offs)()
    check(out[[0, 2]], good[[0, 2]], torch.float16)
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("nk", [False, True], ids=["kn", "nk"])
def test_gradients_have_the_layout_of_the_weights(prepare, nk, make_case, make_operands, poisoned, check):
    a, dc, offs, _ = make_operands(make_case("uneven", (33, 0, 1, 40), n=56, k=72), torch.float16)
    run = prepare(a, dc, offs, nk)
    with poisoned():
        out = run()
    assert out.shape == (4, 72, 56)
    assert out.stride() == ((72 * 56, 1, 72) if nk else (72 * 56, 56, 1))
    check(out, grouped_gemm_wgrad_reference(a, dc, offs), torch.float16)


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_every_config_is_right(name, make_case, make_operands, poisoned, check, monkeypatch):
    monkeypatch.setattr(wgrad, "TRITON", (3, 8))  # with which every config is legal
    a, dc, offs, _ = make_operands(make_case("ragged", (129, 0, 30, 1), n=144, k=200, tail=3), dtype_of(name))
    run = wgrad.prepare_wgrad(a, dc, offs, config=wgrad.CONFIGS[name])
    with poisoned():
        out = run()
    check(out, grouped_gemm_wgrad_reference(a, dc, offs), dtype_of(name))


@pytest.mark.parametrize("name", ["large", pytest.param("small", marks=pytest.mark.exhaustive), "fp32"])
def test_every_helion_config_is_right(name, make_case, make_operands, poisoned, check):
    dtype = torch.float32 if name == "fp32" else torch.float16
    a, dc, offs, _ = make_operands(make_case("ragged", (129, 0, 30, 1), n=144, k=200, tail=3), dtype)
    run = helion_wgrad.prepare_helion_wgrad(a, dc, offs, config=getattr(helion_wgrad.CHOICES, name))
    with poisoned():
        out = run()
    check(out, grouped_gemm_wgrad_reference(a, dc, offs), dtype)


def test_offsets_are_read_on_the_device_at_every_call(prepare, make_case, make_operands, poisoned, check):
    a, dc, offs, _ = make_operands(make_case("three", (40, 24, 36)), torch.float16)
    run = prepare(a, dc, offs)
    for ends in ((40, 64, 100), (0, 0, 100), (100, 100, 100), (1, 2, 3), (0, 0, 0)):
        offs.copy_(torch.tensor(ends))
        with poisoned():
            out = run()
        check(out, grouped_gemm_wgrad_reference(a, dc, offs), torch.float16)


def test_reads_its_inputs_on_every_call_into_a_new_tensor(prepare, make_case, make_operands):
    a, dc, offs, _ = make_operands(make_case("two", (21, 40)), torch.float16)
    run = prepare(a, dc, offs)
    first, second = run(), run()
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    a.mul_(2)
    assert torch.equal(run(), first * 2)


# --- schedule ---------------------------------------------------------------------------------------------------------

SIZES = {
    "one_group": (5,),
    "descending": (9, 7, 7, 0),
    "ascending": (0, 1, 2, 3),
    "all_alike": (4, 4, 4),
    "all_empty": (0, 0),
    "several_programs": tuple((7 * i) % 41 for i in range(3 * wgrad.RANKED_AT_ONCE + 1)),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("wide", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_groups_are_ranked_by_their_rows(sizes, wide, device):
    G = len(sizes)
    offs = torch.tensor(sizes).cumsum(0).to(device, wide)
    plan = torch.full((1 + G,), -1, dtype=torch.int32, device=device)
    programs = -(-G // wgrad.RANKED_AT_ONCE)
    wgrad._plan_kernel[(programs,)](
        offs, plan, G, 77, G_POW2=wgrad.triton.next_power_of_2(G), MINE=wgrad.RANKED_AT_ONCE
    )
    assert plan[0] == 77
    assert plan[1:].tolist() == sorted(range(G), key=lambda g: (-sizes[g], g))


def test_a_dynamic_schedule_refuses_more_groups_than_it_ranks(make_case, make_operands, monkeypatch):
    monkeypatch.setattr(wgrad, "MOST_RANKED", 2)
    with pytest.raises(ValueError, match="ranks at most 2"):
        prepare_dynamic(*make_operands(make_case("three", (1, 2, 3)), torch.float16))


@pytest.mark.parametrize("G", [1, 8, 256, wgrad.MOST_RANKED + 1])
@pytest.mark.parametrize("mean_rows", [1, 200, 4000])
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_config_chosen_can_run(G, mean_rows, of):
    gpu = replace(KNOWN["sm_90"], name="some other GPU")
    config = wgrad.choose_config(G * mean_rows, G, 4096, 2048, of, gpu, nk=True)
    assert wgrad.illegal(config, of) is None
    assert not (config.dynamic and G > wgrad.MOST_RANKED)


# --- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "n", "pad_a", "nk", "reason"),
    [
        (64, 48, 8, False, None),
        (64, 48, 3, False, "x's address or strides"),
        (64, 45, 0, False, "y's address or strides"),
        (33, 48, 0, False, "x's address or strides"),
        (64, 45, 0, True, "x's address or strides"),
    ],
    ids=["aligned", "odd_stride", "odd_n", "odd_k", "odd_n_by_columns"],
)
def test_pointers_take_over_if_tma_cannot_read(k, n, pad_a, nk, reason, make_case, make_operands, poisoned, check):
    a, dc, offs, _ = make_operands(make_case("tail", (21, 0, 40), n=n, k=k, pad_a=pad_a, tail=5), torch.float16)
    why_not = wgrad.needs_pointers(*((dc, a) if nk else (a, dc)))
    assert why_not is None if reason is None else why_not is not None and reason in why_not
    run = wgrad.prepare_wgrad(a, dc, offs, nk)
    with poisoned():
        out = run()
    check(out, grouped_gemm_wgrad_reference(a, dc, offs), torch.float16)


def test_operands_of_any_strides(prepare, make_case, make_operands, poisoned, check):
    a, dc, offs, _ = make_operands(make_case("two", (21, 40), n=48, k=64), torch.float16)
    by_columns = a.t().contiguous().t(), dc[:, ::2]
    run = prepare(*by_columns, offs)
    with poisoned():
        out = run()
    check(out, grouped_gemm_wgrad_reference(*by_columns, offs), torch.float16)


def test_illegal_configs_have_a_reason():
    large = wgrad.CONFIGS["large"]
    for change, text in (
        ({"block_p": 48}, "block_p=48: tl.dot needs a power of two"),
        ({"block_m": 8}, "block_m=8: tl.dot needs a power of two"),
        ({"num_stages": 5}, "bytes"),
        ({"split_store": False}, "output tile"),
        ({"per_sm": 2}, "output tile"),
    ):
        reason = wgrad.illegal(replace(large, **change), torch.float16)
        assert reason is not None, change
        assert text in reason


@pytest.mark.parametrize(("triton_version", "legal"), [((3, 8), True), ((3, 9), False)], ids=["3.8", "3.9"])
def test_a_dynamic_schedule_shares_memory_up_to_triton_3_8(triton_version, legal, monkeypatch):
    monkeypatch.setattr(wgrad, "TRITON", triton_version)
    config = replace(wgrad.CONFIGS["large"], split_store=False, dynamic=True)
    assert (wgrad.illegal(config, torch.float16) is None) == legal


def test_candidates_are_legal(monkeypatch):
    monkeypatch.setattr(wgrad, "TRITON", (3, 8))  # for a later one, a tuner skips configs that do not fit
    for rows in (1, 64, 65, 5000):
        assert all(wgrad.illegal(config, torch.bfloat16) is None for config in wgrad.candidates(rows)), rows
    assert all(wgrad.illegal(config, dtype_of(name)) is None for name, config in wgrad.CONFIGS.items())


def test_tuned_configs_are_legal(monkeypatch):
    monkeypatch.setattr(wgrad, "TRITON", (3, 6))  # with which they were tuned
    configs = tuned_configs("wgrad", "NVIDIA H100 80GB HBM3")
    assert configs
    for key, values in configs.items():
        assert wgrad.illegal(wgrad.WgradConfig(**values), torch.bfloat16) is None, key


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, dc, offs: (a.double(), dc.double(), offs), "not one of"),
        (lambda a, dc, offs: (a, dc.float(), offs), "one dtype and one device"),
        (lambda a, dc, offs: (a, dc[:-1], offs), "a row for each of a's"),
        (lambda a, dc, offs: (a, dc[0], offs), "a row for each of a's"),
        (lambda a, dc, offs: (a, dc, offs.flip(0)), "must not decrease"),
        (lambda a, dc, offs: (a, dc, offs + 1), "exceeds the"),
        (lambda a, dc, offs: (a, dc, offs.float()), "int32 or int64"),
        (lambda a, dc, offs: (a, dc, offs[:0]), "at least one"),
    ],
    ids=["fp64", "mixed_dtypes", "rows", "one_dimension", "decreasing", "past_the_end", "float_offsets", "no_groups"],
)
def test_refuses_operands_it_cannot_multiply(prepare, change, message, make_case, make_operands):
    a, dc, offs, _ = make_operands(make_case("two", (21, 40)), torch.float16)
    with pytest.raises(ValueError, match=message):
        prepare(*change(a, dc, offs))


# --- Helion -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_helion_takes_offset_tables_of_either_width(table, make_case, make_operands, check):
    a, dc, offs, _ = make_operands(make_case("two", (21, 40)), torch.float16)
    args = (a, dc, torch.cat([offs.new_zeros(1), offs]).to(table))
    config = helion_wgrad.CHOICES.default(a, mean_rows=2048)
    out = helion_wgrad.grouped_gemm_wgrad.bind(args).compile_config(config)(*args)
    check(out, grouped_gemm_wgrad_reference(a, dc, offs), torch.float16)


@pytest.mark.parametrize("blocks", [(16, 64, 32), (64, 16, 16)], ids=str)
def test_helion_takes_any_tile(blocks, make_case, make_operands, poisoned, check):
    a, dc, offs, _ = make_operands(make_case("ragged", (30, 0, 70), n=53, k=45), torch.float16)
    run = helion_wgrad.prepare_helion_wgrad(a, dc, offs, config=helion.Config(block_sizes=list(blocks)))
    with poisoned():
        out = run()
    check(out, grouped_gemm_wgrad_reference(a, dc, offs), torch.float16)
