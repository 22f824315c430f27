"""The operations that a model calls: results, gradients, torch.compile, autocast, transforms, fallbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from groupbench.kernels import ops
from groupbench.kernels.grouped_gemm import choose
from groupbench.kernels.moe.layer import moe_layer_reference
from groupbench.kernels.moe.permute import combine_reference

Operands = tuple[Tensor, Tensor, Tensor]
WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda call: call,
    "compiled": lambda call: torch.compile(call, fullgraph=True, backend="aot_eager"),
}
EVERY_CHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def operands(device: torch.device, nk: bool = False) -> Operands:
    a, b, offs = (x.detach().to(device) for x in drawn((4, 0, 8), 2, "nk" if nk else "kn", 8, 16))
    return a.requires_grad_(), b.requires_grad_(), offs


def expected(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    ends = offs.tolist()
    parts = [a[start:end] @ b[g] for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*parts, a.new_zeros(a.size(0) - ends[-1], b.size(2))])


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nk", [False, True], ids=["kn", "nk"])
def test_a_product_and_its_gradients(device: torch.device, nk: bool, way: str) -> None:
    a, b, offs = operands(device, nk)
    got, want = WAYS[way](lambda a, b, o: F.silu(ops.grouped_mm(a, b, o)))(a, b, offs), F.silu(expected(a, b, offs))
    close(got, want)
    grads = torch.autograd.grad(got.square().sum(), (a, b))
    close(grads, torch.autograd.grad(want.square().sum(), (a, b)))
    assert grads[1].stride() == b.stride()


def test_a_sum_by_groups_and_its_gradients(device: torch.device) -> None:
    a = torch.randn(16, 12, device=device, requires_grad=True)
    b = torch.randn(12, 8, device=device, requires_grad=True)
    offs = torch.tensor([4, 4, 12], dtype=torch.int32, device=device)
    got = ops.grouped_mm(a, b, offs)
    want = torch.stack([a[:, :4] @ b[:4], a.new_zeros(16, 8), a[:, 4:] @ b[4:]])
    close(got, want)
    close(torch.autograd.grad(got.square().sum(), (a, b)), torch.autograd.grad(want.square().sum(), (a, b)))


def test_lazily_negated_operands(device: torch.device) -> None:
    a, b, offs = (each.detach() for each in operands(device))
    close(ops.grouped_mm(torch._neg_view(a), b, offs), -expected(a, b, offs))
    close(ops.grouped_mm(a, torch._neg_view(b), offs), -expected(a, b, offs))


def test_autocast_casts_as_a_product_of_torch(device: torch.device) -> None:
    a, b, offs = (each.detach() for each in operands(device))
    with torch.autocast(device.type, torch.float16):
        got = ops.grouped_mm(a, b.half(), offs)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.float(), expected(a, b, offs), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("groups", [False, True], ids=["one", "by_group"])
def test_bias(device: torch.device, groups: bool) -> None:
    a, b, offs = operands(device)
    bias = torch.randn(3, 8, device=device) if groups else torch.randn(8, device=device)
    each = (bias if groups else bias.expand(3, 8))[[0] * 4 + [2] * 8]
    close(ops.grouped_mm(a, b, offs, bias=bias)[:12], expected(a, b, offs)[:12] + each)
    assert not ops.grouped_mm(a, b, offs, bias=bias)[12:].any()


def test_transforms(device: torch.device) -> None:
    a, b, offs = operands(device)
    want = torch.autograd.grad(ops.grouped_mm(a, b, offs).square().sum(), a)[0]
    close(torch.func.grad(lambda a: ops.grouped_mm(a, b, offs).square().sum())(a), want)
    again = a.detach().clone().requires_grad_()
    checkpoint(lambda a: ops.grouped_mm(a, b, offs).square(), again, use_reentrant=False).sum().backward()
    assert again.grad is not None and torch.equal(again.grad, want)


def test_saved_operands_that_return_with_other_strides(device: torch.device) -> None:
    _, b, offs = operands(device, nk=True)
    wide = torch.randn(14, 32, device=device)[:, :16].requires_grad_()
    for saved in (torch.Tensor.detach, torch.Tensor.contiguous, torch.Tensor.detach):
        with torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x):
            got = ops.grouped_mm(wide, b, offs)
        want = torch.autograd.grad(expected(wide, b, offs).square().sum(), (wide, b))
        close(torch.autograd.grad(got.square().sum(), (wide, b)), want)


def test_a_tensor_left_by_a_transform(device: torch.device) -> None:
    a, b, offs = operands(device)
    left: list[Tensor] = []
    torch.func.grad(lambda a: (left.append(a), a.square().sum())[1])(a.detach())
    close(ops.grouped_mm(left[0], b, offs), expected(a, b, offs))


def test_export(device: torch.device) -> None:
    class Model(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
            return ops.grouped_mm(a, b, offs)

    a, b, offs = (each.detach() for each in operands(device))
    close(torch.export.export(Model(), (a, b, offs)).module()(a, b, offs), expected(a, b, offs))


def test_double_backward_and_vmap_are_refused_by_name(device: torch.device) -> None:
    a, b, offs = operands(device)
    (da,) = torch.autograd.grad(ops.grouped_mm(a, b, offs).square().sum(), a, create_graph=True)
    with pytest.raises(NotImplementedError, match="grouped_mm_grad has no derivative"):
        torch.autograd.grad(da.sum(), a)
    layer = layer_operands(device)
    (dx,) = torch.autograd.grad(ops.moe_layer(*layer).square().sum(), layer[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="moe_layer_grad has no derivative"):
        torch.autograd.grad(dx.sum(), layer[0])
    with pytest.raises(NotImplementedError, match="grouped_mm does not support vmap"):
        torch.vmap(lambda a: ops.grouped_mm(a, b, offs))(torch.stack([a, a]))


def test_what_falls_back_says_why(device: torch.device) -> None:
    a, b, offs = (each.detach() for each in operands(device))
    assert ops.fallback_reason(a, b, offs) is None
    assert "float64" in (ops.fallback_reason(a.double(), b.double(), offs) or "")
    assert "dimensions" in (ops.fallback_reason(b, b.transpose(1, 2)) or "")
    close(ops.grouped_mm(b, b.transpose(1, 2)), b @ b.transpose(1, 2))


def test_offsets_are_checked_on_request(device: torch.device) -> None:
    a, b, _ = operands(torch.device("cpu"))
    if device.type == "cuda":
        pytest.skip("the device's assertion ends the process")
    with ops.check_offsets(), pytest.raises(RuntimeError, match="offs must not decrease"):
        ops.grouped_mm(a, b, torch.tensor([4, 2, 12], dtype=torch.int32))


def test_any_thread(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("NOT TESTED: threads. Triton's interpreter runs one launch at a time")
    a, b, offs = (each.detach() for each in operands(device))
    got: list[Tensor] = []
    threads = [threading.Thread(target=lambda: got.append(ops.grouped_mm(a, b, offs))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in got:
        close(each, expected(a, b, offs))
    assert len(got) == 4


def test_a_bound_launch_holds_no_operands(device: torch.device) -> None:
    import gc
    import weakref

    choose.forget()
    a, b, offs = (each.detach().clone() for each in operands(device))
    ops.grouped_mm(a, b, offs)
    held = weakref.ref(b)
    del a, b
    gc.collect()
    assert held() is None


# --- gradients -------------------------------------------------------------------------------------------------------


def drawn(sizes: tuple[int, ...], tail: int, layout: str, n: int = 4, k: int = 3):
    """Return a, b (leaves that require gradients) and offs."""
    torch.manual_seed(0)
    a = torch.randn(sum(sizes) + tail, k).requires_grad_()
    if layout == "nk":
        b = torch.randn(len(sizes), n, k).transpose(1, 2).requires_grad_()
    else:
        b = torch.randn(len(sizes), k, n).requires_grad_()
    return a, b, torch.tensor(sizes).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("only", ["a", "b"])
def test_a_gradient_that_is_not_needed_is_not_computed(only, device, monkeypatch):
    a, b, offs = (x.detach().to(device) for x in drawn((2, 0, 3), 1, "kn"))
    (a if only == "a" else b).requires_grad_()
    out = ops.grouped_mm(a, b, offs)

    saved = [saved is not None for saved in out.grad_fn.saved_tensors]
    assert saved == [only == "b", only == "a", True]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("computed")

    monkeypatch.setattr(choose.Launches, "gradient_of_b" if only == "a" else "gradient_of_a", refuse)
    out.sum().backward()
    assert (a.grad is None) == (only == "b")
    assert (b.grad is None) == (only == "a")


@pytest.mark.parametrize("dtype_", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("layout", ["kn", "nk", "shared"])
@pytest.mark.parametrize(
    ("sizes", "tail", "n", "k"),
    [((33, 0, 1, 40), 0, 48, 64), ((21, 0, 40), 6, 48, 64), ((5, 30), 2, 45, 33)],
    ids=["ragged", "rows_past_the_groups", "odd_n_and_k"],
)
def test_kernels_match_the_gradients_of_torch(sizes, tail, n, k, layout, dtype_, device, poisoned, check):
    a, b, offs = drawn(sizes, tail, layout, n, k)
    a, b, offs = a.detach().to(device), b.detach().to(device), offs.to(device)
    b = b[:1] if layout == "shared" else b
    rows = sum(sizes)
    a[rows:] = float("nan")
    a, b = a.to(dtype_), b.to(dtype_)
    dc = torch.randn(rows + tail, n).to(device, dtype_)
    dc[rows:] = float("nan")

    def gradients(a: Tensor, b: Tensor, dc: Tensor, product: Any) -> tuple[Tensor, ...]:
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        each = b.expand(len(sizes), -1, -1) if layout == "shared" else b
        with poisoned():
            out = product(a, each, offs)
            da, db = torch.autograd.grad(out, (a, b), dc)
        assert (out[rows:] == 0).all()
        assert (da[rows:] == 0).all()
        if layout != "shared" and product is ops.grouped_mm:
            assert db.stride() == b.stride()
        return out, da, db

    by_torch = gradients(a.double(), b.double(), dc.double(), expected)
    for got, wanted in zip(gradients(a, b, dc, ops.grouped_mm), by_torch, strict=True):
        check(got, wanted, dtype_)


def test_the_gradient_of_a_sum(device, check):
    """The gradient is one expanded number: TMA cannot read its strides."""
    a, b, offs = drawn((20, 12), 0, "kn", 16, 16)
    a, b, offs = a.detach().to(device).requires_grad_(), b.detach().to(device).requires_grad_(), offs.to(device)
    ops.grouped_mm(a, b, offs).sum().backward()
    check(a.grad, torch.cat([b[0].sum(1).expand(20, -1), b[1].sum(1).expand(12, -1)]).detach(), torch.float32)
    sums = torch.stack([part.sum(0) for part in a.detach().split([20, 12])])
    check(b.grad, sums[:, :, None].expand(-1, -1, 16), torch.float32)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter's operations look at offsets too, in another way"
)
def test_offsets_are_not_read_on_the_host(monkeypatch):
    a, b, offs = drawn((20, 12), 0, "kn", 16, 16)

    def refuse(self: Tensor) -> Any:
        raise AssertionError("read on the host")

    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    ops.grouped_mm(a, b, offs).sum().backward()
    assert a.grad is not None


# --- the layer and its parts ------------------------------------------------------------------------------------------


def layer_operands(device: torch.device, hidden: int = 16) -> tuple[Tensor, ...]:
    T, k, G, F_ = 6, 2, 4, 24
    ids = torch.stack([torch.randperm(G, device=device)[:k] for _ in range(T)])
    ids[0, 0] = -1
    made = (
        torch.randn(T, hidden, device=device),
        torch.rand(T, k, device=device),
        torch.randn(G, 2 * F_, hidden, device=device) / 4,
        torch.randn(G, hidden, F_, device=device) / 4,
    )
    x, weights, w_gate_up, w_down = (each.requires_grad_() for each in made)
    return x, ids, weights, w_gate_up, w_down


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("recompute", "hidden"), [(False, 16), (True, 16), (False, 13)])
def test_the_layer_and_its_gradients(device: torch.device, way: str, recompute: bool, hidden: int) -> None:
    inputs = layer_operands(device, hidden)
    leaves = [inputs[0], *inputs[2:]]
    got, want = WAYS[way](ops.moe_layer)(*inputs, recompute=recompute), moe_layer_reference(*inputs)
    close(got, want)
    close(torch.autograd.grad(got.square().sum(), leaves), torch.autograd.grad(want.square().sum(), leaves))
    with torch.no_grad():
        assert torch.equal(ops.moe_layer(*inputs), got)


def test_the_layer_in_a_dtype_that_kernels_do_not_take(device: torch.device) -> None:
    inputs = [each.double() if each.is_floating_point() else each for each in layer_operands(device)]
    assert "float64" in (ops.layer_fallback_reason(inputs[0], inputs[3], inputs[4]) or "")
    torch.testing.assert_close(ops.moe_layer(*inputs), moe_layer_reference(*inputs))


@pytest.mark.parametrize("way", WAYS)
def test_permute_and_unpermute(device: torch.device, way: str) -> None:
    x, ids, weights, *_ = layer_operands(device)

    def there_and_back(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows, _, position = ops.permute(x, ids, 4)
        return ops.unpermute(2 * rows, position, weights)

    got = WAYS[way](there_and_back)(x, ids, weights)
    want = (2 * x[:, None] * (weights * (ids >= 0))[..., None]).sum(1)
    close(got, want)
    close(torch.autograd.grad(got.square().sum(), (x, weights)), torch.autograd.grad(want.square().sum(), (x, weights)))
    rows, _, position = ops.permute(x, ids, 4)
    y = torch.randn_like(rows)
    close(ops.unpermute(y, position), combine_reference(y, position, None))


@pytest.mark.parametrize("blockwise", [False, True], ids=["rows", "blocks"])
def test_quantize(device: torch.device, blockwise: bool) -> None:
    x = torch.randn(6, 256, device=device)
    q, scale = torch.compile(ops.quantize, fullgraph=True, backend="aot_eager")(x, blockwise)
    factors = scale.repeat_interleave(128, 1) if blockwise else scale[:, None]
    assert ((q.float() * factors - x).abs() <= 2**-4 * x.abs() + 1e-2).all()


def cases(device: torch.device) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    registered = torch.ops.groupbench
    x, ids, weights, *matrices = layer_operands(device)
    ids = ids.clamp_min(0)  # rows that belong to no choice are arbitrary, and so never equal
    rows, _, position = ops.permute(x, ids, 4)
    return {
        "grouped_mm": (registered.grouped_mm, operands(device)),
        "moe_layer": (registered.moe_layer, (x, ids, weights, *matrices, True, False, True)),
        "permute": (registered.permute, (x, ids, 4, True)),
        "unpermute": (registered.unpermute, (rows.detach().requires_grad_(), position, weights, True)),
        "quantize": (registered.quantize, (torch.randn(6, 256, device=device), True, True)),
    }


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", ["grouped_mm", "moe_layer", "permute", "unpermute", "quantize"])
def test_the_registration(device: torch.device, name: str) -> None:
    operation, inputs = cases(device)[name]
    results = opcheck(operation.default, inputs, test_utils=EVERY_CHECK)
    assert set(results.values()) == {"SUCCESS"}
