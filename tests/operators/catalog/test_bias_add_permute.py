"""grouped_gemm_bias_add_permute: shapes, inputs, counts, and every backend against the reference."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from groupbench.operators.catalog import grouped_gemm_bias_add_permute as op
from groupbench.operators.catalog.grouped_gemm_bias_add_permute import FusedShape, GroupSize, parse_shape
from groupbench.operators.measure import accuracy
from groupbench.operators.measure.selection import default_suite
from groupbench.operators.operator import Target
from groupbench.operators.tolerances import TOLERANCES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPERATOR = op.GROUPED_GEMM_BIAS_ADD_PERMUTE
# --- shapes -----------------------------------------------------------------------------------------------------------


def test_the_examples_groups_are_those_of_its_unseeded_rand() -> None:
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if not hasattr(libc, "gnu_get_libc_version"):
        pytest.skip("NOT TESTED: the example's groups come from rand() of glibc, and this is another C library")
    libc.srand(1)
    G = libc.rand() % 16 + 1
    assert op.example_rules(G, lambda: libc.rand() % 4) == op.example_groups()


def test_the_first_suite_is_the_example_and_multiplies_first() -> None:
    assert next(iter(OPERATOR.suites)) == "example"
    shape = OPERATOR.suites["example"][0]
    assert shape == parse_shape("example_mul")
    assert shape.dims == {"G": 8, "M": 262144, "N": 2048, "K": 256}
    assert default_suite(OPERATOR, "cpu") == "smoke"
    assert {shape.op for shape in OPERATOR.suites["smoke"]} == set(op.OPS)


def test_texts_for_people() -> None:
    alike = GroupSize((2, 3, 8), (4, 16), 64)
    assert parse_shape("G=3,groups=2x3x8:4x16:64") == FusedShape((alike,) * 3, "mul")
    assert str(FusedShape((alike,) * 3, "add")) == "G=3,groups=2x3x8:4x16:64,E=add"
    drawn = parse_shape("G=12,groups=random(3),E=none")
    assert drawn == parse_shape(str(drawn))
    assert drawn.groups == op.random_groups(12, 3) != op.random_groups(12, 4)
    for group in op.random_groups(200, 0):
        assert {*group.m[:2], group.n[0]} <= {4, 8, 12, 16}
        assert (group.m[2], group.n[1], group.K % 64, 64 <= group.K <= 256) == (256, 128, 0, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "field ''"),
        ("4,1024,1024,1024", "field '4'"),
        ("G=2", "missing groups"),
        ("groups=2x2x2:2x2:2", "missing G"),
        ("G=0,groups=2x2x2:2x2:2", "1 to"),
        ("G=2,groups=2x2x2:2x2:2,E=div", "E=div is not one of mul, add, none"),
        ("G=2,groups=2x2x2:2x2:2|2x2x2:2x2:2|2x2x2:2x2:2", "3 groups are listed for G=2"),
        ("G=1,groups=2x2:2x2:2", "M0xM1xM2:N0xN1:K"),
        ("G=1,groups=2x2x2:2x2", "M0xM1xM2:N0xN1:K"),
        ("G=1,groups=2x2x-2:2x2:2", "M0xM1xM2:N0xN1:K"),
        ("G=1,groups=", "group '' is not of the form M0xM1xM2:N0xN1:K"),
        ("G=1,groups=2x2x2:2x2:2|", "group '' is not of the form"),
        ("G=x,groups=2x2x2:2x2:2", "G=x is not an integer"),
        ("G=1,groups=99999x99999x2:2x2:2", "at most"),
        ("G=1,groups=40000x40000x1:40000x40000:40000", "64 bits"),
        ("G=1,groups=random(x)", "random=x is not an integer"),
        ("G=9000,groups=random(1)", "more than"),
        ("G=1,groups=2x2x2:2x2:2,G=1", "given twice"),
    ],
)
def test_errors_name_the_right_form(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_shape(text)
    assert "A shape is G=2,groups=" in str(caught.value)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_inputs_are_apart() -> None:
    shape = parse_shape("G=2,groups=1x2x3:2x5:7")
    x = op.make_inputs(shape, "fp16", DEVICE, 1)
    assert not torch.equal(x.groups[0].b, x.groups[1].b)
    operands = [operand for group in x.groups for operand in group.operands]
    assert len({operand.untyped_storage().data_ptr() for operand in operands}) == len(operands) == 8
    assert all(group.e is None for group in op.make_inputs(replace(shape, op="none"), "fp16", DEVICE, 1).groups)


# --- backends ---------------------------------------------------------------------------------------------------------


def test_a_wrong_operation_and_a_wrong_order_are_seen() -> None:
    shape = parse_shape("G=2,groups=2x2x8:2x8:16|2x2x8:2x8:16")
    x = OPERATOR.make_inputs(shape, "fp32", DEVICE, 0)
    right = OPERATOR.reference(x)
    added = op.prepare_torch_unfused(replace(x, op="add"))
    assert accuracy.check_backend(added, right, OPERATOR, "x", "fp32")[1] is not None

    def packed() -> tuple[torch.Tensor, ...]:  # [M0, M1, M2, N0, N1], read as if it were permuted
        outputs = op.prepare_torch_unfused(x)()
        return tuple(
            out.permute(0, 2, 4, 1, 3).reshape(group.permuted) for out, group in zip(outputs, x.groups, strict=True)
        )

    problem = accuracy.check_backend(packed, right, OPERATOR, "x", "fp32")[1]
    assert problem.startswith("F0: ")


@pytest.mark.parametrize(
    "output",
    [torch.ones(2, 2), (torch.ones(2, 2),), (torch.ones(1, 1, 1, 1, 1), torch.ones(1, 1, 1, 1, 1).half()), (1,)],
    ids=["tensor", "matrix", "two_dtypes", "number"],
)
def test_outputs_of_the_wrong_kind(output: Any) -> None:
    with pytest.raises(TypeError, match="returned"):
        op.decode(output)


def test_the_function_that_is_compiled_traces_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the backend's call of torch.compile without Inductor, whose code for a CPU takes half a minute."""
    compile_, passed = torch.compile, {}

    def eager(function: Any, *, options: dict[str, Any], **more: Any) -> Any:
        passed.update(options)
        return compile_(function, backend="aot_eager", **more)

    monkeypatch.setattr(torch, "compile", eager)
    for shape in OPERATOR.suites["smoke"][:3]:
        x = OPERATOR.make_inputs(shape, "fp32", "cpu", 0)
        run = OPERATOR.backend("torch_compile_max").prepare(x)
        assert accuracy.check(lambda run=run: op.decode(run()), OPERATOR.reference(x), TOLERANCES["fp32"])[1] is None
    assert passed == {"max_autotune": True}
    assert OPERATOR.backend("torch_compile").unavailable(Target("cpu", "fp32")) is not None
    assert OPERATOR.backend("torch_compile").unavailable(Target("cuda", "bf16", capability=(9, 0))) is None
