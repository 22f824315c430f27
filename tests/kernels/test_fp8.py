"""Compare the fp8 kernel with the product of the same fp8 values in fp32, in every recipe."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace

import pytest
import torch
from fp8_operands import FIVE, drawn, scaled

from groupbench.kernels.device import KNOWN
from groupbench.kernels.grouped_gemm import fp8, quantize
from groupbench.kernels.grouped_gemm.fp8 import (
    BLOCKWISE,
    ROWWISE,
    ROWWISE_FAST,
    grouped_gemm_fp8_reference,
    prepare_fp8,
)
from groupbench.kernels.grouped_gemm.tuned import problem_key, tuned_configs

# name: rows of each group, N, K, rows past the groups
CASES = {
    "even": ((32, 32), 128, 128, 0),
    "one_group": ((37,), 48, 64, 0),
    "empty_groups": ((0, 20, 0, 0, 15, 0), 48, 64, 0),
    "one_row_groups": ((1, 1, 40, 1), 48, 64, 0),
    "one_group_owns_all": ((0, 0, 90, 0), 48, 64, 0),
    "more_groups_than_workers": ((5, 3, 0, 16, 2, 7, 1, 4, 9), 16, 32, 0),
    "ragged_tails": ((33, 65, 1), 150, 200, 0),
    "k_of_several_blocks": ((5, 33), 130, 400, 0),
    "odd_n_and_k": ((21, 40), 53, 45, 0),
    "n_and_k_of_one": ((18, 9), 1, 1, 0),
    "no_rows": ((0, 0, 0), 48, 64, 0),
    "no_rows_in_groups": ((0, 0), 48, 64, 7),
    "rows_past_the_groups": ((19, 0, 30), 48, 144, 11),
    "pytorchs": ((16,) * 4, 32, 64, 0),
    "pytorchs_empty": ((32, 0, 16, 16), 32, 64, 0),
}
ALL = pytest.mark.parametrize("mode", fp8.MODES)
# Fast accumulation differs only on a GPU.
UNLIKE = pytest.mark.parametrize("mode", fp8.MODES if torch.cuda.is_available() else (ROWWISE, BLOCKWISE))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@UNLIKE
@pytest.mark.parametrize(("sizes", "n", "k", "tail"), CASES.values(), ids=CASES)
def test_matches_the_reference(mode, sizes, n, k, tail, device, poisoned, check):
    x = drawn(sizes, n, k, mode, tail, device)
    run = prepare_fp8(*x, fast_accum=mode == ROWWISE_FAST, out_dtype=torch.float16)
    with poisoned():
        out = run()
    check(out, grouped_gemm_fp8_reference(*x), torch.float16)


@ALL
def test_bf16_and_int64_offsets(mode, device, check):
    *x, offs = drawn((21, 0, 40), 53, 300, mode, 3, device)
    out = prepare_fp8(*x, offs.long(), fast_accum=mode == ROWWISE_FAST)()
    check(out, grouped_gemm_fp8_reference(*x, offs), torch.bfloat16)


def gpu_configs() -> dict[str, tuple[str, fp8.Fp8Config]]:
    """Return all default configs and candidates; without a GPU, only those that differ in the interpreter too."""
    configs = {}
    for mode in fp8.MODES:
        tried = [config for rows in (8, 32, 64, 500, 999) for config in fp8.candidates(mode, rows)]
        for c in [*fp8.CONFIGS[mode].values(), *tried]:
            assert fp8.illegal(c, mode) is None, c
            if c.specialized and not HOPPER:
                continue
            name = f"{mode}_{c.block_m}x{c.block_n}x{c.block_k}{'_swap' * c.swap}{'_split' * c.split_store}"
            if torch.cuda.is_available():
                name += f"_w{c.num_warps}s{c.num_stages}g{c.group_m}p{c.per_sm}{'_flat' * c.flatten}"
                name += "_specialized" * c.specialized
            configs[name] = mode, c
    return configs


@pytest.mark.parametrize(("mode", "config"), gpu_configs().values(), ids=gpu_configs())
def test_every_config_is_right(mode, config, device, poisoned, check):
    x = drawn((20, 0, 1, 70), config.block_n + 10, 144, mode, 2, device)
    run = prepare_fp8(*x, mode == ROWWISE_FAST, torch.float16, config)
    with poisoned():
        out = run()
    check(out, grouped_gemm_fp8_reference(*x), torch.float16)


@UNLIKE
@pytest.mark.parametrize("swap", [False, True], ids=["straight", "swapped"])
def test_each_expert_has_its_own_scales_and_weights(mode, swap, device, check):
    """NaN in the next expert's scales must not leak through tiles that overhang in M, N and K."""
    a, scale_a, b, scale_b, offs = drawn((21, 40), 40, 300, mode, device=device)
    expected = grouped_gemm_fp8_reference(a, scale_a, b, scale_b, offs)
    scale_a[21:] = float("nan")
    scale_b[1] = float("nan")
    config = fp8.CONFIGS[mode]["decode" if swap else "small"]
    out = prepare_fp8(a, scale_a, b, scale_b, offs, mode == ROWWISE_FAST, torch.float16, config)()
    check(out[:21], expected[:21], torch.float16)
    assert out[21:].isnan().all()


@pytest.mark.parametrize("mode", [ROWWISE, BLOCKWISE])
@pytest.mark.parametrize(
    "config",
    [
        None,
        pytest.param(
            fp8.SPECIALIZED,
            marks=pytest.mark.skipif(not HOPPER, reason="NOT TESTED: the specialised fp8 kernel. No Hopper GPU"),
        ),
    ],
    ids=["chosen", "specialised"],
)
def test_scales_of_unlike_sizes(mode, config, device, check):
    """Each row, block of K and block of weights has its own magnitude, so a wrong scale shows."""
    torch.manual_seed(0)
    a = torch.randn(50, 384) * torch.tensor([1.0, 4.0, 0.25]).repeat_interleave(128) * (1 + torch.arange(50.0))[:, None]
    b = torch.randn(2, 260, 384) * torch.tensor([0.5, 1.0, 8.0]).repeat_interleave(128)
    b *= torch.tensor([1.0, 7.0, 0.1]).repeat_interleave(128)[:260, None] * torch.tensor([1.0, 5.0])[:, None, None]
    x = scaled(a / 50, b, (20, 30), mode, device=device)
    out = prepare_fp8(*x, out_dtype=torch.float16, config=config)()
    expected = grouped_gemm_fp8_reference(*x)
    check(out, expected, torch.float16)
    for rows in range(0, 50, 10):
        for columns in (slice(0, 128), slice(128, 256), slice(256, 260)):
            check(out[rows : rows + 10, columns], expected[rows : rows + 10, columns], torch.float16)


@ALL
def test_zeros_and_large_values(mode, device):
    torch.manual_seed(0)
    a, b = torch.randn(33, 160), torch.randn(2, 40, 160)
    a[5] = 0
    a[6] *= 1e15
    b[1] *= 1e15
    x = scaled(a, b, (12, 21), mode, device=device)
    assert x[0].float()[:33].abs().max() == 448
    out = prepare_fp8(*x, fast_accum=mode == ROWWISE_FAST)()
    assert out.isfinite().all()
    assert (out[5] == 0).all()
    expected = grouped_gemm_fp8_reference(*x)
    magnitude = expected.double().square().mean(1, keepdim=True).sqrt()  # unlike from row to row by 1e30
    assert ((out.double() - expected).abs() <= 2e-2 * magnitude).all()


@pytest.mark.parametrize("mode", [ROWWISE, BLOCKWISE])
def test_offsets_are_read_on_the_device_at_every_call(mode, device, poisoned, check):
    *x, offs = drawn((40, 24, 36), 48, 160, mode, device=device)
    run = prepare_fp8(*x, offs, out_dtype=torch.float16)
    last = None
    for ends in ((40, 64, 100), (0, 0, 100), (1, 2, 3), (0, 0, 0)):
        offs.copy_(torch.tensor(ends))
        with poisoned():
            out = run()
        check(out, grouped_gemm_fp8_reference(*x, offs), torch.float16)
        assert last is None or last.data_ptr() != out.data_ptr()
        last = out


def specialized_first(monkeypatch):
    configs_for = fp8.configs_for
    monkeypatch.setattr(
        fp8, "configs_for", lambda *problem: [("default", fp8.SPECIALIZED, None), *configs_for(*problem)]
    )


def unsuitable_weights() -> dict[str, tuple[FIVE, str]]:
    few = drawn((21, 40), 48, 272, ROWWISE, device=DEVICE)
    stretched = torch.empty(2 * 48 * 288 + 16, dtype=quantize.E4M3, device=DEVICE)
    b = stretched.as_strided((2, 48, 272), (48 * 288 + 16, 288, 1)).copy_(few[2])
    many = drawn((1,) * 257, 16, 32, ROWWISE, device=DEVICE)
    return {"many_groups": (many, "257 groups"), "experts_apart": ((*few[:2], b, *few[3:]), "not a multiple of a row")}


@pytest.mark.parametrize("name", ["many_groups", "experts_apart"])
def test_the_plain_kernel_takes_weights_that_the_specialised_cannot(name, check, monkeypatch):
    x, reason = unsuitable_weights()[name]
    with pytest.raises(ValueError, match=reason):
        prepare_fp8(*x, config=fp8.SPECIALIZED)
    specialized_first(monkeypatch)
    check(prepare_fp8(*x, out_dtype=torch.float16)(), grouped_gemm_fp8_reference(*x), torch.float16)


@pytest.mark.skipif(HOPPER, reason="it runs")
@ALL
def test_the_specialised_kernel_needs_a_hopper(mode, check, monkeypatch):
    x = drawn((21, 40), 48, 272, mode, device=DEVICE)
    with pytest.raises(ValueError, match=r"Hopper|interpreter"):
        prepare_fp8(*x, mode == ROWWISE_FAST, config=fp8.SPECIALIZED)
    specialized_first(monkeypatch)
    check(prepare_fp8(*x, mode == ROWWISE_FAST)(), grouped_gemm_fp8_reference(*x), torch.bfloat16)


def test_another_triton_without_this_gluon_takes_the_plain_kernel(check, monkeypatch):
    x = drawn((21, 40), 48, 272, ROWWISE, device=DEVICE)
    monkeypatch.delattr("groupbench.kernels.grouped_gemm.fp8_specialized", raising=False)
    monkeypatch.delitem(sys.modules, "groupbench.kernels.grouped_gemm.fp8_specialized", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    with pytest.raises(ValueError, match="Gluon differs"):
        prepare_fp8(*x, config=fp8.SPECIALIZED)
    specialized_first(monkeypatch)
    check(prepare_fp8(*x)(), grouped_gemm_fp8_reference(*x), torch.bfloat16)


@pytest.mark.skipif(not HOPPER, reason="NOT TESTED: the specialised fp8 kernel. No Hopper GPU")
@ALL
@pytest.mark.parametrize(
    ("sizes", "n", "k", "tail"),
    [
        ((0, 300, 0, 129, 1, 128), 700, 1100, 5),  # tiles that end in M, N and K; more turns than stages
        ((0, 0, 0), 300, 256, 40),
        ((5,) * 200, 257, 128, 0),
        ((20_000,), 130, 45, 0),  # many tiles of one step
        ((128 * 40,), 256, 4096, 0),
    ],
    ids=["ragged", "no_rows_in_groups", "many_groups", "one_step", "even"],
)
def test_the_specialised_kernel(mode, sizes, n, k, tail, check_calls):
    x = drawn(sizes, n, k, mode, tail, DEVICE)
    dtype = torch.bfloat16 if mode == ROWWISE_FAST else torch.float16  # short accumulators show in fp16
    run = prepare_fp8(*x, mode == ROWWISE_FAST, dtype, fp8.SPECIALIZED)
    expected = grouped_gemm_fp8_reference(*x)
    check_calls(run, expected, dtype)


def test_the_reference_matches_scaled_products_by_hand():
    a = torch.tensor([[1.0, 2.0], [4.0, 0.5], [1.0, 1.0]]).to(quantize.E4M3)
    b = torch.tensor([[[1.0, 1.0], [2.0, -1.0]], [[3.0, 0.0], [0.0, 1.0]]]).to(quantize.E4M3)
    offs = torch.tensor([1, 2])
    scale_a, scale_b = torch.tensor([2.0, 10.0, 99.0]), torch.tensor([[1.0, 3.0], [0.5, 2.0]])
    out = grouped_gemm_fp8_reference(a, scale_a, b, scale_b, offs)
    assert out.tolist() == [[6.0, 0.0], [60.0, 10.0], [0.0, 0.0]]
    blocks = grouped_gemm_fp8_reference(a, scale_a[:, None], b, torch.tensor([[[2.0]], [[3.0]]]), offs)
    assert blocks.tolist() == [[12.0, 0.0], [360.0, 15.0], [0.0, 0.0]]


X = drawn((21, 40), 48, 272, ROWWISE, device=DEVICE)
Y = drawn((21, 40), 48, 272, BLOCKWISE, device=DEVICE)
REFUSED = {
    "bf16_operand": ((X[0].bfloat16(), *X[1:]), {}, "float8_e4m3fn with float32"),
    "fp16_scale": ((X[0], X[1].half(), *X[2:]), {}, "float8_e4m3fn with float32"),
    "fp32_output": (X, {"out_dtype": torch.float32}, "out_dtype"),
    "other_k": ((X[0][:, :256], *X[1:]), {}, r"a \[M, K\] and b \[G, N, K\]"),
    "mixed_recipes": ((*X[:3], Y[3], X[4]), {}, "neither rowwise"),
    "too_few_scales": ((X[0], X[1][:-1], *X[2:]), {}, "neither rowwise"),
    "scales_by_rows": ((Y[0], Y[1].contiguous(), *Y[2:]), {}, "stride 1 over rows"),
    "odd_rows": ((X[0].contiguous().view(-1)[: 61 * 271].view(61, 271), X[1], X[2][..., :271], *X[3:]), {}, "a's rows"),
    "fast_blockwise": (Y, {"fast_accum": True}, "no meaning block-wise"),
    "past_a": ((*X[:4], torch.tensor([21, 62], dtype=torch.int32)), {}, "exceeds the 61 rows"),
    "illegal_config": (X, {"config": fp8.Fp8Config(64, 128, 256, 4, 2)}, "promoted every 128"),
}


@pytest.mark.parametrize(("operands", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses(operands, options, message):
    with pytest.raises(ValueError, match=message):
        prepare_fp8(*operands, **options)


@pytest.mark.parametrize(
    ("mode", "change", "text"),
    [
        (ROWWISE_FAST, {"block_m": 48}, "a power of two"),
        (ROWWISE_FAST, {"num_stages": 5}, "bytes"),
        (ROWWISE_FAST, {"split_store": False}, "output tile"),
        (ROWWISE_FAST, {"swap": True}, "stored whole"),
        (ROWWISE_FAST, {"per_sm": 2}, "bytes"),
        (ROWWISE, {"specialized": True}, "128 x 256 x 128"),
        (ROWWISE, {"block_k": 64}, "every 128 of K"),
        (BLOCKWISE, {}, "one scale of the weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_illegal_configs_have_a_reason(mode, change, text):
    assert text in (fp8.illegal(replace(fp8.CONFIGS[ROWWISE_FAST]["plain"], **change), mode) or "")


def test_tuned_configs_are_legal():
    configs = tuned_configs("fp8", "NVIDIA H100 80GB HBM3")
    assert configs
    for key, values in configs.items():
        assert fp8.illegal(fp8.Fp8Config(**values), key.rpartition(",")[2]) is None, key


def test_tuned_configs_are_found(monkeypatch):
    tuned = fp8.Fp8Config(64, 64, 128, 4, 3)
    monkeypatch.setattr(
        "groupbench.kernels.grouped_gemm.tuned.tuned_configs",
        lambda kernel, gpu: {problem_key(1000, 4, 128, 256, ROWWISE): asdict(tuned)},
    )
    gpu = KNOWN["sm_90"]
    assert fp8.choose_config(ROWWISE, 900, 4, 128, 256, gpu) == tuned
    assert fp8.choose_config(ROWWISE_FAST, 900, 4, 128, 256, gpu) == fp8.CONFIGS[ROWWISE_FAST]["large"]
