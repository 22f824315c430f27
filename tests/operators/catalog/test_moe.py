"""Permutations and the layer of a mixture of experts as operators: problems, references, backends, modes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from groupbench.operators.catalog import moe, moe_layer
from groupbench.operators.catalog.moe import MoeShape, choose, parse
from groupbench.operators.catalog.moe_layer import GRADIENTS, MOE_LAYER
from groupbench.operators.catalog.moe_permute import MOE_PERMUTE, as_bits
from groupbench.operators.catalog.moe_unpermute import MOE_UNPERMUTE
from groupbench.operators.errors import Unavailable
from groupbench.operators.measure import accuracy
from groupbench.operators.operator import Target
from groupbench.operators.tolerances import TOLERANCES, tolerance_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUTINGS = ["balanced", "multinomial", "zipf(1.2)", "uniform(0.7,1.3)", "multinomial+empty(0.5)"]


@st.composite
def any_shape(draw: st.DrawFn, layer: bool = True) -> MoeShape:
    G = draw(st.integers(1, 12))
    E = draw(st.sampled_from([0, G, G + 3]))
    sizes = (draw(st.integers(0, 40)), draw(st.integers(1, E or G)), G, draw(st.integers(1, 99)))
    return MoeShape(*sizes, draw(st.integers(1, 99)) if layer else 0, E=E, routing=draw(st.sampled_from(ROUTINGS)))


@given(any_shape())
def test_text_reads_back_as_the_same_shape(shape: MoeShape) -> None:
    assert parse(str(shape), layer=True) == shape
    assert str(parse(str(shape), layer=True)) == str(shape)


@given(any_shape(layer=False))
def test_a_permutation_has_no_f(shape: MoeShape) -> None:
    assert "F" not in shape.dims
    assert parse(str(shape), layer=False) == shape
    with pytest.raises(ValueError, match="missing"):
        parse(str(shape), layer=True)


@given(any_shape())
def test_a_token_has_k_experts_all_different(shape: MoeShape) -> None:
    everywhere = choose(MoeShape(shape.T, shape.k, shape.experts, shape.H, routing=shape.routing))
    assert everywhere.shape == (shape.T, shape.k)
    assert everywhere.dtype == np.int64
    for row in everywhere:
        assert len(set(row)) == shape.k
        assert set(row) <= set(range(shape.experts))
    here = choose(shape)
    assert (here == np.where(everywhere < shape.G, everywhere, -1)).all(), "E drops choices, and draws the same ones"
    assert (here >= 0).sum() == shape.M
    if shape.routing == "balanced" and shape.T:
        counts = np.bincount(everywhere.flatten(), minlength=shape.experts)
        assert counts.max() - counts.min() <= 1


def test_ids_are_drawn_once_and_for_all() -> None:
    assert choose(parse("T=3,k=2,G=5,H=8,routing=zipf(1.2)", False)).tolist() == DRAWN


DRAWN = [[1, 2], [4, 2], [3, 4]]


def test_a_backend_without_a_mode_names_the_one_that_it_has() -> None:
    target = Target("cuda", "bf16", capability=(9, 0))
    for name, backend in {"torch_compile": None, "triton_recompute": None, "torch": "ok", "triton": "ok"}.items():
        reason = MOE_LAYER.in_mode("bwd").backend(name).unavailable(target)
        message = f"{name} has no mode bwd by itself; --mode fwd_bwd measures its backward"
        assert reason == (None if backend else message)
        assert MOE_LAYER.in_mode("fwd_bwd").backend(name).unavailable(target) is None
    only_bwd = replace(MOE_LAYER, forward_backward=None).in_mode("bwd").backend("torch_compile")
    assert only_bwd.unavailable(target) == "torch_compile has no backward"


def test_names_of_shapes_are_unique_and_parse() -> None:
    for layer, suites in ((True, moe.LAYER_SUITES), (False, moe.PERMUTE_SUITES)):
        named = [item for suite in suites.values() for item in suite.items()]
        assert len({name for name, _ in named}) == len(named)
        assert all(parse(name, layer) == shape for name, shape in named)


def test_smoke_holds_the_corners() -> None:
    shapes = moe.LAYER_SUITES["smoke"].values()
    assert any(0 in shape.rows for shape in shapes), "an empty expert"
    assert any(1 in shape.rows for shape in shapes), "an expert of one row"
    assert any(max(shape.rows) == shape.choices > 1 and shape.G > 1 for shape in shapes), "one owner"
    assert any(shape.choices > shape.M for shape in shapes), "experts elsewhere"
    assert any(shape.H % 8 and shape.F % 8 for shape in shapes), "sizes that TMA cannot take"
    assert any(shape.G == 1 for shape in shapes)
    assert any(shape.T == 0 for shape in shapes)


# --- backends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwd_bwd"])
def test_torch_is_right_in_bf16(mode: str) -> None:
    operator = MOE_LAYER.in_mode(mode)
    shape = parse("T=40,k=2,G=4,H=64,F=48,routing=multinomial", layer=True)
    x = operator.make_inputs(shape, "bf16", DEVICE, 0)
    _, problem = accuracy.check_backend(
        operator.backend("torch").prepare(x), operator.reference(x), operator, "torch", "bf16"
    )
    assert problem is None, problem


def moved(rows: Tensor, offs: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Swap the first expert's first two rows: this is a permutation too, but not the stable one."""
    rows, position = rows.clone(), position.clone()
    rows[[0, 1]] = rows[[1, 0]]
    first, second = (position == 0), (position == 1)
    position[first], position[second] = 1, 0
    return rows, offs, position


WRONG: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "an unstable order": moved,
    "an offset too large": lambda rows, offs, position: (rows, offs + (torch.arange(len(offs)) == 0), position),
    "a position off by one": lambda rows, offs, position: (rows, offs, position + (position == 7)),
    "a row of zeros": lambda rows, offs, position: (rows * (torch.arange(len(rows)) != 5)[:, None], offs, position),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_permutation_is_reported(wrong: Callable[..., Any]) -> None:
    shape = parse("T=64,k=2,G=4,H=16,routing=balanced", layer=False)
    x = MOE_PERMUTE.make_inputs(shape, "fp32", "cpu", 0)
    right = MOE_PERMUTE.backend("torch").prepare(x)
    reference = MOE_PERMUTE.reference(x)
    assert accuracy.check_backend(right, reference, MOE_PERMUTE, "torch", "fp32")[1] is None

    def run() -> Any:
        rows, offs, position = wrong(*right())
        return rows, offs.int(), position.int()

    assert accuracy.check_backend(run, reference, MOE_PERMUTE, "torch", "fp32")[1] is not None


@pytest.mark.parametrize("output", [None, (1, 2, 3), torch.zeros(2), (torch.zeros(2), torch.zeros(2))])
def test_an_output_that_is_not_a_permutation_is_refused(output: Any) -> None:
    with pytest.raises(TypeError, match=r"not three tensors \(rows, offs, position\)"):
        MOE_PERMUTE.decode(output)


def test_offsets_of_another_dtype_are_refused() -> None:
    with pytest.raises(TypeError, match="int32"):
        MOE_PERMUTE.decode((torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int32)))


def test_bits_tell_numbers_apart() -> None:
    bits = as_bits(torch.tensor([0, -1, 5, 2**30], dtype=torch.int32))
    assert bits.shape == (4, 32)
    assert bits.sum(1).tolist() == [0, 32, 2, 1]


# --- the layer's modes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["empty_experts", "elsewhere"])
def test_references_are_the_gradients_that_autograd_finds(name: str) -> None:
    from groupbench.kernels.moe.layer import moe_layer_reference

    x = moe_layer.make_inputs(moe.LAYER_SUITES["smoke"][name], "fp32", DEVICE, 3)
    leaves = [leaf.double().requires_grad_() for leaf in x.leaves]
    out = moe_layer_reference(leaves[0], x.ids, *leaves[1:])
    expected = moe_layer.decode((out, *torch.autograd.grad(out, leaves, x.dout.double())))
    outputs = moe_layer.reference_both(x)
    assert tuple(outputs) == ("out", *GRADIENTS)
    for got, wanted in zip(outputs.values(), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(moe_layer.reference(x), outputs["out"])
    for gradient, value in moe_layer.reference_backward(x).items():
        assert torch.equal(value, outputs[gradient])


@pytest.mark.parametrize("output", [None, (torch.zeros(1),) * 3, [1, 2, 3, 4]])
def test_outputs_that_are_not_gradients_are_refused(output: Any) -> None:
    with pytest.raises(TypeError, match="dw_gate_up"):
        moe_layer.decode(output)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_rounding_every_term_has_its_own_tolerance(dtype: str) -> None:
    """A wrong baseline would fail every nightly run, so those of torch may round every term; ours round once."""
    held = {backend.name: tolerance_of(MOE_UNPERMUTE, backend.name, dtype) for backend in MOE_UNPERMUTE.backends}
    summed, once = TOLERANCES[f"{dtype}_summed"], TOLERANCES[dtype]
    assert held == {"torch": summed, "torch_index_add": summed, "triton": once, "helion": once}


def test_torch_is_right_where_most_experts_are_elsewhere() -> None:
    shape = MOE_UNPERMUTE.parse_shape("T=8192,k=8,G=32,H=256,E=256,routing=multinomial")
    x = MOE_UNPERMUTE.make_inputs(shape, "bf16", DEVICE, 0)
    for name in ("torch", "torch_index_add"):
        run = MOE_UNPERMUTE.backend(name).prepare(x)
        _, problem = accuracy.check_backend(run, MOE_UNPERMUTE.reference(x), MOE_UNPERMUTE, name, "bf16")
        assert problem is None


def test_backends_say_why_they_do_not_run() -> None:
    cpu = Target("cpu", "bf16", interpreted=True)
    assert "fp16" in (MOE_LAYER.backend("triton").unavailable(cpu) or "")
    assert "GPU" in (MOE_LAYER.backend("torch_compile").unavailable(cpu) or "")
    assert "no mode bwd" in (MOE_LAYER.in_mode("bwd").backend("torch_compile").unavailable(cpu) or "")
    x = moe_layer.make_inputs(moe.LAYER_SUITES["smoke"]["even"], "fp16", "cpu", 0)
    with pytest.raises(Unavailable, match="fwd_bwd"):
        MOE_LAYER.backend("triton_recompute").prepare(x)


def test_shapes_too_large_to_check_and_decode_are_not_trained() -> None:
    for mode in ("bwd", "fwd_bwd"):
        suites = MOE_LAYER.in_mode(mode).suites
        assert "decode" not in suites
        assert moe.LAYER_SUITES["moe"]["qwen30b"] in suites["moe"]


def test_gradients_of_routing_weights_that_are_mostly_elsewhere_are_judged_together() -> None:
    """With an eighth of the experts on this rank, blocks of one small number each do not measure a kernel's error."""
    torch.manual_seed(0)
    here = torch.rand(16384, 8) < 1 / 8
    exact = torch.randn(16384, 8) * here
    noisy = exact + 4.5e-3 * torch.randn(16384, 8) * here
    rest = torch.zeros(3, 1, 1)
    tolerance = tolerance_of(MOE_LAYER, "triton", "bf16")
    expected, actual = (moe_layer.decode((rest[0], weights, rest[1], rest[2]))[1] for weights in (exact, noisy))
    assert accuracy.compare(actual, expected, tolerance)[1] is None
    actual[3, 5] += 1
    assert "the first at [3, 5]" in str(accuracy.compare(actual, expected, tolerance)[1])
