"""Compare the fp8 kernel with the product of the same fp8 values in fp32, in every recipe."""

from __future__ import annotations

import pytest
import torch
from fp8_operands import drawn, scaled
from grouped import DEVICE, NO_HOPPER

from groupbench.kernels.grouped_gemm import fp8, quantize
from groupbench.kernels.grouped_gemm.fp8 import (
    BLOCKWISE,
    ROWWISE,
    ROWWISE_FAST,
    grouped_gemm_fp8_reference,
    prepare_fp8,
)

ALL = pytest.mark.parametrize("mode", fp8.MODES)


@ALL
def test_bf16_and_int64_offsets(mode, device, check):
    *x, offs = drawn((21, 0, 40), 53, 300, mode, 3, device)
    out = prepare_fp8(*x, offs.long(), fast_accum=mode == ROWWISE_FAST)()
    check(out, grouped_gemm_fp8_reference(*x, offs), torch.bfloat16)


@pytest.mark.parametrize("mode", [ROWWISE, BLOCKWISE])
@pytest.mark.parametrize(
    "config", [None, pytest.param(fp8.SPECIALIZED, marks=NO_HOPPER)], ids=["chosen", "specialised"]
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


def test_the_reference_matches_scaled_products_by_hand():
    a = torch.tensor([[1.0, 2.0], [4.0, 0.5], [1.0, 1.0]]).to(quantize.E4M3)
    b = torch.tensor([[[1.0, 1.0], [2.0, -1.0]], [[3.0, 0.0], [0.0, 1.0]]]).to(quantize.E4M3)
    offs = torch.tensor([1, 2])
    scale_a, scale_b = torch.tensor([2.0, 10.0, 99.0]), torch.tensor([[1.0, 3.0], [0.5, 2.0]])
    out = grouped_gemm_fp8_reference(a, scale_a, b, scale_b, offs)
    assert out.tolist() == [[6.0, 0.0], [60.0, 10.0], [0.0, 0.0]]
    blocks = grouped_gemm_fp8_reference(a, scale_a[:, None], b, torch.tensor([[[2.0]], [[3.0]]]), offs)
    assert blocks.tolist() == [[12.0, 0.0], [360.0, 15.0], [0.0, 0.0]]


X = drawn((21, 40), 48, 272, ROWWISE, device=DEVICE.type)
Y = drawn((21, 40), 48, 272, BLOCKWISE, device=DEVICE.type)
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
