"""Gradients in fp8: the kernel of the weights' gradient, the quantisation of its operands, and the layer."""

from __future__ import annotations

import pytest
import torch

from groupbench.kernels.grouped_gemm import quantize
from groupbench.kernels.grouped_gemm.fp8_wgrad import fp8_wgrad_reference, prepare_fp8_wgrad
from groupbench.kernels.moe.layer_fp8 import moe_layer_fp8
from groupbench.kernels.moe.quantize import quantize_rows_of, swiglu_backward_quantized, swiglu_quantized
from groupbench.kernels.moe.routing import route
from groupbench.kernels.moe.swiglu import swiglu_backward_reference, swiglu_reference

# Tensor cores keep 13 bits of the products of 128 rows that they add up; the interpreter computes in fp32.
CLOSE = {"rtol": 1e-3, "atol": 2e-2} if torch.cuda.is_available() else {"rtol": 1e-5, "atol": 1e-4}
SIZES = {"ragged": (130, 0, 1, 65), "one_group": (17,), "whole": (128, 256), "no_rows": (0, 0)}


def operands(sizes, n, k, blockwise, device):
    torch.manual_seed(0)
    offs = torch.tensor(sizes, device=device).cumsum(0).int()
    dc, a = (torch.randn(sum(sizes), columns, device=device) for columns in (n, k))
    parts = (quantize.quantize_groups_reference(x, offs, blockwise) for x in (dc, a))
    return (*(part for pair in parts for part in pair), offs)


@pytest.mark.parametrize("blockwise", [True, False])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_gradient_is_added_to_main_grad(sizes, blockwise, device, poisoned):
    given = operands(sizes, 72, 45, blockwise, device)
    main_grad = torch.randn(len(sizes), 72, 45, device=device)
    expected = fp8_wgrad_reference(*given, main_grad)
    with poisoned():
        out = prepare_fp8_wgrad(*given, blockwise, main_grad)()
    torch.testing.assert_close(out, expected, **CLOSE)
    assert out.data_ptr() != main_grad.data_ptr()
    fresh = prepare_fp8_wgrad(*given, blockwise)()
    torch.testing.assert_close(fresh, fp8_wgrad_reference(*given), **CLOSE)
    in_place = prepare_fp8_wgrad(*given, blockwise, main_grad, in_place=True)()
    assert in_place.data_ptr() == main_grad.data_ptr()
    torch.testing.assert_close(main_grad, expected, **CLOSE)


def test_sums_may_stay_in_the_tensor_cores(device):
    given = operands((130, 7), 64, 32, False, device)
    out = prepare_fp8_wgrad(*given, False, fast_accum=True)()
    torch.testing.assert_close(out, fp8_wgrad_reference(*given), rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda g, m: ((g[0][:, :64], *g[1:]), m), "blocks of 128"),
        (lambda g, m: ((g[0], g[1][:1], *g[2:]), m), "expected scales"),
        (lambda g, m: (g, m[:, :5]), "main_grad"),
    ],
)
def test_operands_that_do_not_fit(change, text, device):
    given, main_grad = change(operands((5, 3), 16, 16, True, device), torch.zeros(2, 16, 16, device=device))
    with pytest.raises(ValueError, match=text):
        prepare_fp8_wgrad(*given, True, main_grad)


def routed(device):
    torch.manual_seed(0)
    ids = torch.tensor([[0, 2], [2, -1], [0, 2], [3, 0], [2, 3]], device=device)
    return ids, route(ids, 4)  # expert 1 has no rows, and one choice is elsewhere


def same(quantized, expected, rows=None):
    """Compare values: torch and Triton may round a quotient that is halfway to different sides."""
    torch.testing.assert_close(quantized, expected, rtol=0.13, atol=1e-6)


def test_rows_are_gathered_and_quantised_in_both_forms(device):
    _, routing = routed(device)
    x = torch.randn(5, 200, device=device).half()
    rows, columns = quantize_rows_of(x, routing, by_columns=True)
    count = int(routing.offs[-1])
    gathered = x[routing.source[:count].long() // 2]
    q, scale = quantize.quantize_blocks_reference(gathered)
    assert torch.equal(rows.scale[:count], scale)
    same(quantize.dequantize(rows.q[:count], rows.scale[:count]), quantize.dequantize(q, scale))
    padded = torch.nn.functional.pad(gathered, (0, 0, 0, 10 - count))  # P follows from all choices
    expected = quantize.dequantize_groups(*quantize.quantize_groups_reference(padded, routing.offs), routing.offs)
    for part, other in zip(quantize.dequantize_groups(*columns, routing.offs), expected, strict=True):
        same(part, other)
    assert quantize_rows_of(x, routing, by_columns=False)[1] is None


def test_swiglu_and_its_gradient_are_quantised(device):
    ids, routing = routed(device)
    both, da = torch.randn(10, 512, device=device).half(), torch.randn(10, 256, device=device).half()
    weights = torch.rand(ids.shape, device=device)
    count = int(routing.offs[-1])
    act = swiglu_quantized(both, routing.offs)
    # Below 2**-6 times the scale, steps of e4m3 are 2**-9 times the scale.
    got, subnormal = quantize.dequantize(act.q[:count], act.scale[:count]), float(act.scale[:count].max()) * 2**-10
    torch.testing.assert_close(got, swiglu_reference(both[:count].float()), rtol=0.07, atol=subnormal)
    dboth, dboth_t, weighted, dweights = swiglu_backward_quantized(da, both, weights, routing)
    expected = swiglu_backward_reference(da.float(), both.float(), weights, routing)
    largest = expected[0].abs().max()
    got = quantize.dequantize(dboth.q[:count], dboth.scale[:count])
    torch.testing.assert_close(got, expected[0][:count], rtol=0.07, atol=float(largest) / 400)
    for columns, of in ((dboth_t, expected[0]), (weighted, expected[1])):
        parts = quantize.dequantize_groups(*columns, routing.offs)
        starts = [0, *routing.offs.tolist()]
        for g, part in enumerate(parts):
            rows = of[starts[g] : starts[g + 1]]
            torch.testing.assert_close(part.T[: len(rows)], rows, rtol=0.07, atol=float(of.abs().max()) / 400)
    torch.testing.assert_close(dweights, expected[2], rtol=1e-4, atol=1e-3)


def test_weights_are_quantised_in_both_layouts(device):
    w = torch.randn(2, 130, 200, device=device).half()
    q, scale, q_t, scale_t = quantize.quantize_weights(w)
    for g in range(2):
        expected = quantize.quantize_weight_blocks_reference(w[g])
        assert torch.equal(scale[g], expected[1])
        same(quantize.dequantize(q[g], scale[g]), quantize.dequantize(*expected))
        same(quantize.dequantize(q_t[g], scale_t[g]).T, quantize.dequantize(*expected))


@pytest.mark.parametrize(
    ("size", "text"), [((5, 64, 128), "multiples of 128"), ((0, 128, 128), "at least one token")], ids=["h", "no_token"]
)
def test_layers_that_fp8_does_not_have(size, text, device):
    T, H, F = size
    ids = torch.zeros(T, 1, dtype=torch.int64, device=device)
    w = torch.zeros(1, 2 * F, H, device=device).half(), torch.zeros(1, H, F, device=device).half()
    with pytest.raises(ValueError, match=text):
        moe_layer_fp8(torch.zeros(T, H, device=device).half(), ids, torch.ones(T, 1, device=device), *w)
