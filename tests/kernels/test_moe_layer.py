"""Compare the MoE layer's formulas with numerical differentiation, and its kernels with its formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases import named
from grouped import NO_GPU
from torch import Tensor

from groupbench.kernels.grouped_gemm import flat
from groupbench.kernels.moe import gate_up, layer, swiglu
from groupbench.kernels.moe.layer import moe_layer_reference
from groupbench.kernels.moe.routing import Routing
from groupbench.kernels.ops import moe_layer


@dataclass(frozen=True)
class Layer:
    T: int
    k: int
    G: int
    H: int = 48
    F: int = 40
    only: tuple[int, ...] = ()  # the ids that occur; () is all of -1..G
    ids: torch.dtype = torch.int64


CASES = {
    "empty_experts": Layer(19, 2, 5, 32, 24, only=(1, 3)),
    "one_owner": Layer(40, 1, 3, only=(1,)),
    "one_row_experts": Layer(2, 2, 5, only=(0, 4)),
    "one_token": Layer(1, 2, 3, only=(0, 2)),
    "one_expert": Layer(17, 1, 1, only=(0,)),
    "no_token": Layer(0, 2, 3),
    "nothing_has_a_row": Layer(5, 2, 3, only=(-1,)),
    "dropped_choices": Layer(21, 3, 3, 32, 24),
    "ragged_tiles": Layer(19, 2, 2, H=72, F=40),
    "odd_sizes": Layer(9, 2, 4, H=45, F=33),
    "int32_ids": Layer(9, 2, 2, 32, 32, ids=torch.int32),
}


def operands(case: Layer, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return ids, dout, and (x, weights, w_gate_up, w_down)."""
    torch.manual_seed(2)
    only = torch.tensor(case.only or range(-1, case.G + 1))
    ids = only[torch.randint(len(only), (case.T, case.k))].to(case.ids)
    x, dout = torch.randn(2, case.T, case.H).to(dtype)
    w_gate_up = (torch.randn(case.G, 2 * case.F, case.H) * case.H**-0.5).to(dtype)
    w_down = (torch.randn(case.G, case.H, case.F) * case.F**-0.5).to(dtype)
    return ids, dout, (x, torch.rand(case.T, case.k).to(dtype), w_gate_up, w_down)


def call(function: Callable[..., Tensor], ids: Tensor, leaves: tuple[Tensor, ...], **options: bool) -> Tensor:
    x, weights, w_gate_up, w_down = leaves
    return function(x, ids, weights, w_gate_up, w_down, **options)


def gradients(function: Any, ids: Tensor, dout: Tensor, leaves: tuple[Tensor, ...], **options: bool) -> Any:
    """Return (out, dx, dweights, dw_gate_up, dw_down)."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    out = call(function, ids, leaves, **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("case_", CASES.values(), ids=CASES)
def test_formulas_match_torch_expert_by_expert(case_: Layer, recompute: bool) -> None:
    ids, dout, leaves = operands(case_, torch.float64)
    expected = gradients(moe_layer_reference, ids, dout, leaves)
    actual = gradients(moe_layer, ids, dout, leaves, recompute=recompute)
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted)


KINDS = {f"{name}-{str(of)[6:]}": (case, of) for of in (torch.float32, torch.float16) for name, case in CASES.items()}
# The ownership of rows does not affect the rounding of products.
FURTHER = [name for name in KINDS if name.endswith("16") and not name.startswith(("odd_sizes", "no_token"))]


@pytest.mark.parametrize(("case_", "dtype_"), named(KINDS, *FURTHER))
def test_kernels_match_the_formulas(case_: Layer, dtype_: torch.dtype, device, poisoned) -> None:
    ids, dout, leaves = operands(case_, dtype_)
    expected = gradients(moe_layer, ids, dout.double(), tuple(x.double() for x in leaves))
    on_device = (ids.to(device), dout.to(device), tuple(x.to(device) for x in leaves))
    with poisoned():
        actual = gradients(moe_layer, *on_device)
        again = gradients(moe_layer, *on_device, recompute=True)
        with torch.no_grad():
            inferred = call(moe_layer, on_device[0], on_device[2])
    limit = {torch.float16: 2e-3, torch.float32: 2e-6}[dtype_]
    for got, same, wanted in zip(actual, again, expected, strict=True):
        assert got.dtype == dtype_
        assert got.shape == wanted.shape
        assert torch.equal(got, same)
        error = (got.cpu().double() - wanted).square().mean().sqrt()
        assert not wanted.numel() or error <= limit * wanted.square().mean().sqrt()
    # Without gradients the first product is not written; the output has the same bits.
    assert torch.equal(actual[0], inferred)


def test_takes_views(device: torch.device) -> None:
    case = Layer(7, 2, 2, H=16, F=24)
    ids, dout, leaves = operands(case, torch.float32)
    ids, dout = ids.to(device), dout.to(device)
    leaves = tuple(leaf.to(device) for leaf in leaves)
    expected = gradients(moe_layer, ids, dout, leaves)
    views = tuple(leaf.transpose(-1, -2).contiguous().transpose(-1, -2) for leaf in leaves)
    assert not any(view.is_contiguous() for view in views)
    actual = gradients(moe_layer, ids.t().contiguous().t(), dout.t().contiguous().t(), views)
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    ones = gradients(moe_layer, ids, torch.ones(1, 1, device=device).expand(case.T, case.H), leaves)
    wanted = gradients(moe_layer, ids, torch.ones(case.T, case.H, device=device), leaves)
    assert all(torch.equal(*pair) for pair in zip(ones, wanted, strict=True))


@pytest.mark.parametrize("save", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["cpu", "cpu_swap"])
def test_both_orders_of_the_first_product(name: str, save: bool, device, poisoned, check) -> None:
    torch.manual_seed(0)
    config = gate_up.CONFIGS[name if device.type == "cpu" else {"cpu": "small", "cpu_swap": "decode"}[name]]
    a, w = torch.randn(50, 48), torch.randn(4, 2 * 40, 48) * 0.2
    offs = torch.tensor([33, 33, 34, 47], dtype=torch.int32)
    expected, expected_both = gate_up.gate_up_reference(a.double(), w.double(), offs, save=True)
    a[47:] = float("nan")
    a, w, offs = a.to(device, torch.float16), w.to(device, torch.float16), offs.to(device)
    with poisoned():
        act, both = gate_up.gate_up(a, w, offs, save, config)
    check(act[:47].cpu(), expected[:47], torch.float16)
    assert act[47:].isnan().all(), "rows that belong to no expert are not written"
    assert (both is not None) == save
    if both is not None:
        check(both[:47].cpu(), expected_both[:47], torch.float16)


def test_the_first_product_if_tma_cannot_read(device: torch.device, check: Callable) -> None:
    torch.manual_seed(0)
    a, w = torch.randn(20, 45, device=device), torch.randn(2, 2 * 33, 45, device=device) * 0.2
    offs = torch.tensor([13, 20], dtype=torch.int32, device=device)
    act, both = gate_up.gate_up(a, w, offs, save=True)
    for got, wanted in zip((act, both), gate_up.gate_up_reference(a.double(), w.double(), offs, True), strict=True):
        check(got, wanted, torch.float32)


@pytest.mark.parametrize("name", ["cpu", "cpu_swap", "cpu_halves"])
def test_a_product_does_not_write_rows_of_no_expert(name: str, device, poisoned, check) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(50, 48).to(device, torch.float16), torch.randn(3, 48, 40).to(device, torch.float16)
    offs = torch.tensor([20, 20, 37], dtype=torch.int32, device=device)
    with poisoned():
        config = flat.CONFIGS[name] if device.type == "cpu" else None
        out = flat.bind_flat(a, b, offs, config, zero_rest=False)(a, b, offs)
    check(out[:20], a[:20].double() @ b[0].double(), torch.float16)
    check(out[20:37], a[20:37].double() @ b[2].double(), torch.float16)
    assert out[37:].isnan().all()


def test_swiglu_by_itself_and_far_from_zero(device: torch.device, check: Callable) -> None:
    torch.manual_seed(0)
    both = torch.randn(6, 2 * 1030, device=device) * 3
    both[0, :4] = torch.tensor([100.0, -100.0, 0.0, 1e4], device=device)
    offs = torch.tensor([2, 6], dtype=torch.int32, device=device)
    check(swiglu.swiglu(both, offs), swiglu.swiglu_reference(both.double()), torch.float32)
    da, weights = torch.randn(6, 1030, device=device), torch.rand(3, 2, device=device)
    routing = Routing(offs, torch.empty(0), torch.tensor([3, 1, 0, 5, 4, 2], dtype=torch.int32, device=device))
    actual = swiglu.swiglu_backward(da, both, weights, routing)
    wanted = swiglu.swiglu_backward_reference(da.double(), both.double(), weights.double(), routing)
    for got, expected in zip(actual, wanted, strict=True):
        check(got, expected, torch.float32)


def test_only_wanted_gradients_are_computed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, dout, leaves = operands(CASES["dropped_choices"], torch.float32)
    x, weights, w_gate_up, w_down = (leaf.to(device) for leaf in leaves)
    calls: list[str] = []

    def counted(name: str, function: Any) -> Any:
        return lambda *args: calls.append(name) or function(*args)

    parts = layer.Parts(**{name: counted(name, part) for name, part in vars(layer.TRITON).items()})
    monkeypatch.setattr(layer, "TRITON", parts)
    x.requires_grad_()
    moe_layer(x, ids.to(device), weights, w_gate_up, w_down).backward(dout.to(device))
    assert x.grad is not None
    assert calls.count("wgrad") == 0
    assert calls.count("product") == 3
    calls.clear()
    with torch.no_grad():
        moe_layer(x, ids.to(device), weights, w_gate_up, w_down)
    assert calls == ["permute", "gate_up", "product", "combine"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_with_parameters_keeps_nothing(mode, device, monkeypatch) -> None:
    ids, _, leaves = operands(CASES["dropped_choices"], torch.float32)
    leaves = tuple(torch.nn.Parameter(leaf.to(device)) for leaf in leaves)
    kept: list[bool] = []

    def gate_up(*args: Any) -> Any:
        kept.append(args[3])
        return layer.gate_up(*args)

    monkeypatch.setattr(layer, "TRITON", replace(layer.TRITON, gate_up=gate_up))
    call(moe_layer, ids.to(device), leaves)
    with mode():
        call(moe_layer, ids.to(device), leaves)
    assert kept == [True, False]


def test_routing_weights_may_be_wider_than_the_rest(device: torch.device) -> None:
    """A router's weights are usually in fp32, and so is their gradient."""
    ids, dout, (x, weights, *matrices) = operands(CASES["dropped_choices"], torch.float16)
    wide = (x, weights.float() + 1e-5, *matrices)
    expected = gradients(moe_layer, ids, dout.double(), tuple(x.double() for x in wide))
    actual = gradients(moe_layer, ids.to(device), dout.to(device), tuple(x.to(device) for x in wide))
    assert [got.dtype for got in actual] == [torch.float16] * 2 + [torch.float32] + [torch.float16] * 2
    for got, wanted in zip(actual, expected, strict=True):
        error = (got.cpu().double() - wanted).square().mean().sqrt()
        assert error <= 2e-3 * wanted.square().mean().sqrt()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's operations read tensors too, in another way")
def test_nothing_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, dout, leaves = operands(CASES["dropped_choices"], torch.float32)

    def refuse(self: Tensor) -> None:
        raise AssertionError("read on the host")

    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    gradients(moe_layer, ids, dout, leaves)


REFUSED = {
    "other H": (lambda x, i, w, g, d: (x[:, :8], i, w, g, d), "expected x"),
    "other T": (lambda x, i, w, g, d: (x[1:], i, w, g, d), "a row for each token"),
    "other k": (lambda x, i, w, g, d: (x, i, w[:, :1], g, d), "expected weights"),
    "weights in int": (lambda x, i, w, g, d: (x, i, w.int(), g, d), "expected weights"),
    "ids in float": (lambda x, i, w, g, d: (x, i.float(), w, g, d), "int32 or int64"),
    "one expert fewer": (lambda x, i, w, g, d: (x, i, w, g[1:], d), "needs w_gate_up"),
    "gate without up": (lambda x, i, w, g, d: (x, i, w, g[:, 1:], d), "needs w_gate_up"),
    "one matrix": (lambda x, i, w, g, d: (x, i, w, g, d[0]), "expected w_gate_up"),
    "two dtypes": (lambda x, i, w, g, d: (x, i, w, g.half(), d), "and x is"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_operands_that_do_not_fit(change: Callable[..., Any], message: str, device: torch.device) -> None:
    ids, _, (x, weights, w_gate_up, w_down) = operands(CASES["empty_experts"], torch.float32)
    args = change(*(operand.to(device) for operand in (x, ids, weights, w_gate_up, w_down)))
    with pytest.raises(ValueError, match=message):
        moe_layer(*args)


def test_refuses_an_illegal_config(device: torch.device) -> None:
    a, w = torch.randn(4, 32, device=device), torch.randn(1, 64, 32, device=device)
    with pytest.raises(ValueError, match="block_f=8"):
        gate_up.gate_up(a, w, torch.tensor([4], dtype=torch.int32), config=gate_up.GateUpConfig(16, 8, 16, 4, 1))


@NO_GPU
@pytest.mark.parametrize("tokens", [3, 500], ids=["one_launch", "many_choices"])
def test_a_graph_follows_later_routing(tokens, replays):
    torch.manual_seed(0)
    G, k, H, F = 16, 4, 256, 128
    x = torch.randn(tokens, H, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(tokens, k, device="cuda", dtype=torch.bfloat16)
    w_gate_up, w_down = (
        (torch.randn(G, rows, columns, device="cuda") * columns**-0.5).to(torch.bfloat16)
        for rows, columns in ((2 * F, H), (H, F))
    )
    routings = [torch.randint(-1, G, (tokens, k), device="cuda") for _ in range(3)]
    routings.append(torch.full_like(routings[0], -1))  # no choice has a row
    ids = routings[0].clone()
    with torch.no_grad():
        outputs = replays(
            lambda: moe_layer(x, ids, weights, w_gate_up, w_down), lambda turn: ids.copy_(routings[turn]), 4
        )
        for out, routing in zip(outputs, routings, strict=True):
            expected = moe_layer_reference(x.double(), routing, weights.double(), w_gate_up.double(), w_down.double())
            error = (out.double() - expected).square().mean().sqrt()
            assert error <= 1e-2 * expected.square().mean().sqrt()
