"""Whether a row's bits depend on its batch, for backends of each kind of operator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from groupbench.operators.catalog import placements
from groupbench.operators.errors import Unavailable
from groupbench.operators.measure.costs import batch_invariant
from groupbench.operators.operator import Operator
from groupbench.operators.registry import get_operator

GROUPED = "G=3,M_g=9|0|15,N=16,K=32"
LAYER = "T=12,k=2,G=4,H=32,F=16"


def measured(name: str, mode: str = "fwd") -> Operator:
    return get_operator(name).in_mode(mode)


@pytest.mark.parametrize(
    ("name", "mode", "shape", "backend"),
    [
        ("grouped_gemm", "fwd", GROUPED, "torch_loop"),
        ("grouped_gemm", "bwd", GROUPED, "torch_loop"),
        ("grouped_gemm_dgrad", "fwd", GROUPED, "torch_loop"),
        ("moe_layer", "fwd", LAYER, "torch"),
        ("moe_layer", "fwd_bwd", LAYER, "torch"),
    ],
)
def test_a_batch_holds_the_planted_row_and_is_computed(name: str, mode: str, shape: str, backend: str) -> None:
    operator = measured(name, mode)
    inputs = operator.make_inputs(operator.parse_shape(shape), "fp32", "cpu", 0)
    batches = list(operator.placements(inputs))
    assert len(batches) == 3 * len(placements.SIZES) - 3  # one place in a group of one row, two in one of two
    for batch in (batches[0], batches[30], batches[-1]):
        reference = operator.reference(batch.inputs)
        rows = next(iter(reference.values())) if isinstance(reference, dict) else reference
        assert rows.size(0) == batch.rows
    assert batch_invariant(operator.backend(backend).prepare, batches[:6]) is not None


def test_scales_stay_with_their_rows_and_their_layout() -> None:
    operator = measured("grouped_gemm_fp8_blockwise")
    inputs = operator.make_inputs(operator.parse_shape("G=2,M=8,N=16,K=256"), "fp8", "cpu", 0)
    batch = list(operator.placements(inputs))[-1]
    x = batch.inputs
    assert x.scale_a.stride(0) == 1
    assert torch.equal(x.scale_a[batch.row], inputs.scale_a[0])
    assert torch.equal(x.a[batch.row].float(), inputs.a[0].float())
    one, other = operator.reference(x)[batch.row], operator.reference(inputs)[0]
    assert torch.allclose(one, other)


def product(dependent: str = ""):
    """Return a `prepare` whose rows depend on a fact about the batch."""

    def prepare(x):
        def run() -> torch.Tensor:
            out = x.a.double() @ x.b[0].double()
            if dependent == "rows" and x.a.size(0) > 400:
                out = out * (1 + 1e-9)
            if dependent == "place":
                out[0] = out[0] * (1 + 1e-9)
            return out

        if dependent == "unavailable":
            raise Unavailable("never")
        return run

    return prepare


@pytest.mark.parametrize(("dependent", "invariant"), [("rows", False), ("place", False), ("unavailable", None)])
def test_a_dependence_on_the_batch_is_found(dependent: str, invariant: bool | None) -> None:
    operator = measured("grouped_gemm")
    shape = operator.parse_shape("G=1,M=16,N=16,K=16")
    inputs = operator.make_inputs(shape, "fp32", "cpu", 0)
    inputs = replace(inputs, b=inputs.b.expand(1, -1, -1))
    assert batch_invariant(product(dependent), operator.placements(inputs)) is invariant


def test_a_planted_group_keeps_its_gradient() -> None:
    operator = measured("grouped_gemm_wgrad")
    inputs = operator.make_inputs(operator.parse_shape(GROUPED), "fp32", "cpu", 0)
    batches = list(operator.placements(inputs))
    for batch in batches[:5]:
        assert torch.allclose(operator.reference(batch.inputs)[batch.row], operator.reference(inputs)[0])
    assert len({batch.inputs.a.size(0) for batch in batches}) > 10
    assert batch_invariant(operator.backend("torch_loop").prepare, batches) is True


def test_groups_without_rows_have_no_row_to_plant() -> None:
    operator = measured("grouped_gemm")
    inputs = operator.make_inputs(operator.parse_shape("G=2,M=0,N=16,K=16"), "fp32", "cpu", 0)
    assert list(operator.placements(inputs)) == []
