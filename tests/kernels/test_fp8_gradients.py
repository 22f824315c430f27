"""Gradients in fp8: the kernel of the weights' gradient, the quantisation of its operands, and the layer."""

from __future__ import annotations

import pytest
import torch
from grouped import NO_HOPPER

from groupbench.kernels.device import KNOWN
from groupbench.kernels.grouped_gemm import cluster_fp8_wgrad, cluster_tiles, quantize, quantize_cuda
from groupbench.kernels.grouped_gemm.fp8_wgrad import fp8_wgrad_reference, prepare_fp8_wgrad
from groupbench.kernels.moe.layer_fp8 import moe_layer_fp8
from groupbench.kernels.moe.quantize import quantize_rows_of, row_blocks, swiglu_backward_quantized, swiglu_quantized
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
@pytest.mark.parametrize(("n", "k"), [(72, 45), (136, 328)], ids=["odd", "aligned"])  # on Hopper, two kernels
def test_the_gradient_is_added_to_main_grad(sizes, n, k, blockwise, device, poisoned):
    given = operands(sizes, n, k, blockwise, device)
    main_grad = torch.randn(len(sizes), n, k, device=device)
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
    rows, columns = quantize_rows_of(x, routing, row_blocks(routing), by_columns=True)
    count = int(routing.offs[-1])
    gathered = x[routing.source[:count].long() // 2]
    q, scale = quantize.quantize_blocks_reference(gathered)
    assert torch.equal(rows.scale[:count], scale)
    same(quantize.dequantize(rows.q[:count], rows.scale[:count]), quantize.dequantize(q, scale))
    padded = torch.nn.functional.pad(gathered, (0, 0, 0, 10 - count))  # P follows from all choices
    expected = quantize.dequantize_groups(*quantize.quantize_groups_reference(padded, routing.offs), routing.offs)
    for part, other in zip(quantize.dequantize_groups(*columns, routing.offs), expected, strict=True):
        same(part, other)
    assert quantize_rows_of(x, routing, row_blocks(routing), by_columns=False)[1] is None


def test_swiglu_and_its_gradient_are_quantised(device):
    ids, routing = routed(device)
    both, da = torch.randn(10, 512, device=device).half(), torch.randn(10, 256, device=device).half()
    weights = torch.rand(ids.shape, device=device)
    count = int(routing.offs[-1])
    act = swiglu_quantized(both, row_blocks(routing))
    # Below 2**-6 times the scale, steps of e4m3 are 2**-9 times the scale.
    got, subnormal = quantize.dequantize(act.q[:count], act.scale[:count]), float(act.scale[:count].max()) * 2**-10
    torch.testing.assert_close(got, swiglu_reference(both[:count].float()), rtol=0.07, atol=subnormal)
    dboth, dboth_t, weighted, dweights = swiglu_backward_quantized(da, both, weights, routing, row_blocks(routing))
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


# --- in CUDA C++, for Hopper ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (cluster_tiles.SHORT, "a step's sums take registers"),
        (cluster_tiles.LONG, "4 stages and 2 buffers take"),
    ],
    ids=["in_turns", "too_large"],
)
def test_configs_without_room_for_scaled_sums(config, text):
    assert text in str(cluster_fp8_wgrad.illegal(config, KNOWN["sm_90"]))


def bits(x):
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@NO_HOPPER
@pytest.mark.parametrize("of", quantize_cuda.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("T", "k", "G", "H", "F"), [(1, 1, 1, 128, 128), (300, 2, 7, 256, 640), (70, 4, 200, 384, 128)]
)
def test_cuda_and_triton_quantise_to_the_same_bits(T, k, G, H, F, of, device, monkeypatch):
    torch.manual_seed(0)
    ids = torch.randint(-1, G, (T, k), device=device)
    ids[0, 0] = 0
    routing = route(ids, G)
    blocks, count = row_blocks(routing), int(routing.offs[-1])
    used = int((blocks[:, 1] > 0).sum())
    x, w = (torch.randn(*size, device=device).to(of) for size in ((T, H), (G, F, H)))
    both, da = (torch.randn(T * k, size, device=device).to(of) for size in (2 * F, F))
    x[0, 3], w[0, 1, 2] = float("nan"), float("inf")
    weights = torch.rand(T, k, device=device)

    def results():
        rows, columns = quantize_rows_of(x, routing, blocks, by_columns=True)
        exact = [rows.q[:count], rows.scale[:count], columns.q[:, : used * 128], columns.scale[:used]]
        dboth, dboth_t, weighted, dweights = swiglu_backward_quantized(da, both, weights, routing, blocks)
        close = [dweights, quantize.dequantize(dboth.q[:count], dboth.scale[:count])]
        for part in (dboth_t, weighted):
            close.append(part.q[:, : used * 128].float() * part.scale[:used].T.repeat_interleave(128, 1))
        act = swiglu_quantized(both, blocks)
        return [*exact, *quantize.quantize_weights(w)], [*close, quantize.dequantize(act.q[:count], act.scale[:count])]

    exact, close = results()
    monkeypatch.setattr(quantize_cuda, "unsuitable", lambda *_: "compared with Triton")
    of_triton, close_to = results()
    for got, expected in zip(exact, of_triton, strict=True):
        assert torch.equal(bits(got), bits(expected))
    for got, expected in zip(close, close_to, strict=True):
        assert (got - expected).norm() <= 0.02 * expected.norm()


@NO_HOPPER
def test_a_layer_gives_the_same_bits_twice_and_groups_without_rows_get_no_gradient(device):
    torch.manual_seed(0)
    ids = torch.tensor([[0, 3], [3, 0], [-1, 0]], device=device).repeat(300, 1)  # experts 1 and 2 have no rows
    x, dout = (torch.randn(900, 256, device=device).bfloat16() for _ in range(2))
    w = torch.randn(4, 256, 256, device=device).bfloat16() / 16, torch.randn(4, 256, 128, device=device).bfloat16() / 11
    leaves = [part.requires_grad_() for part in (x, torch.rand(900, 2, device=device), *w)]

    def step():
        out = moe_layer_fp8(leaves[0], ids, *leaves[1:])
        return [out, *torch.autograd.grad(out, leaves, dout)]

    first, second = step(), step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not first[3][1:3].any() and not first[4][1:3].any()
    assert first[3].isfinite().all() and first[3][0].any()


class Bound:
    """In place of a kernel: notes the parameters that a launch would pass."""

    def __init__(self) -> None:
        self.launches: list[list[object]] = []
        self.bound = 0

    def bind(self, grid, threads, arguments, moving):
        self.bound += 1

        def launch(*addresses: int) -> None:
            passed = dict(zip(moving, addresses, strict=True))
            self.launches.append([passed.get(number, argument) for number, argument in enumerate(arguments)])

        return launch


@pytest.mark.parametrize("in_fp32", [True, False])
def test_each_address_is_passed_to_its_parameter(in_fp32, monkeypatch):
    """The order is of cluster_fp8_wgrad.cu: maps, scales, main_grad, out_sums, end_offsets, counters and sizes."""
    bound = Bound()
    counters = torch.zeros(2, dtype=torch.int64)
    monkeypatch.setattr(cluster_fp8_wgrad, "kernel", lambda *arguments: bound)
    monkeypatch.setattr(cluster_fp8_wgrad, "tensor_map", lambda tensor, *arguments: tensor.data_ptr())
    monkeypatch.setattr(cluster_fp8_wgrad, "launch_counters", lambda device: counters)
    monkeypatch.setattr(cluster_fp8_wgrad, "device_of", lambda device: KNOWN["sm_90"])
    G, N, K, P = 2, 64, 128, 384
    dct, at = torch.zeros(N, P).to(torch.float8_e4m3fn), torch.zeros(K, P).to(torch.float8_e4m3fn)
    scale_dc, scale_a, offs = torch.ones(P // 128, N), torch.ones(P // 128, K), torch.tensor([128, 384])
    main_grad, out = torch.zeros(G, N, K), torch.zeros(G, N, K, dtype=torch.float32 if in_fp32 else torch.bfloat16)
    run = cluster_fp8_wgrad._bind(dct, at, offs, out.dtype)
    for added in (main_grad, None) if in_fp32 else (None,):
        run(dct, scale_dc, at, scale_a, offs, added, out)
    for (x, y, mapped, scale_x, scale_y, grad, sums, ends, count, *sizes), added in zip(
        bound.launches, (main_grad, None) if in_fp32 else (None,), strict=True
    ):
        assert (x, y, scale_x, scale_y) == tuple(t.data_ptr() for t in (dct, at, scale_dc, scale_a))
        assert mapped and (in_fp32 or mapped == out.data_ptr())
        assert grad == (added.data_ptr() if added is not None else 0)
        assert sums == (out.data_ptr() if in_fp32 else None)
        assert (ends, count, sizes) == (offs.data_ptr(), counters.data_ptr(), [G, N, K, P // 128])


def test_a_bound_quantisation_passes_other_tensors(monkeypatch):
    bound = Bound()
    monkeypatch.setattr(quantize_cuda, "_kernel", lambda *arguments: bound)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    a, b = torch.zeros(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)
    for x in (a, b, a):
        quantize_cuda.launch("weights_kernel", 3, x, x, None, 7)
    assert bound.launches == [[x.data_ptr(), None, 7] for x in (a, b, a)]
    assert bound.bound == 1
