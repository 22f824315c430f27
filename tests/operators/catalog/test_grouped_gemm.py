"""Grouped GEMM as an operator: its inputs, its numbers, and every backend against the reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from groupbench.operators.catalog import backends
from groupbench.operators.catalog import grouped_gemm as gg
from groupbench.operators.catalog.shapes import GroupedShape, listed, parse, uniform
from groupbench.operators.errors import Unavailable
from groupbench.operators.measure import accuracy
from groupbench.operators.operator import Target
from groupbench.operators.registry import get_operator
from groupbench.operators.tolerances import TOLERANCES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def inputs(shape: GroupedShape, dtype: str = "fp16", seed: int = 0) -> gg.GroupedInputs:
    return gg.make_inputs(shape, dtype, DEVICE, seed)


# --- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_have_the_shape_and_dtype(dtype: str) -> None:
    x = inputs(listed((3, 0, 2), 7, 6), dtype)
    assert (x.a.dtype, x.b.dtype, x.offs.dtype) == (DTYPES[dtype], DTYPES[dtype], torch.int32)
    assert (x.a.shape, x.b.shape) == ((5, 6), (3, 6, 7))
    assert x.offs.tolist() == [3, 3, 5]
    assert x.rows == (3, 0, 2)
    assert x.a.device.type == x.offs.device.type == DEVICE


def test_weights_differ_by_expert() -> None:
    b = inputs(uniform(4, 2, 8, 8)).b
    assert all(not torch.equal(b[i], b[j]) for i in range(4) for j in range(i))


def test_shared_weights_are_one_matrix_and_positive() -> None:
    x = inputs(uniform(4, 2, 8, 8, shared=True))
    assert x.b.stride(0) == 0
    assert x.b.shape == (4, 8, 8)
    assert x.a.min() >= 0
    assert x.b.min() >= 0
    assert inputs(uniform(4, 2, 8, 8)).a.min() < 0


def test_layouts_by_their_strides() -> None:
    assert inputs(uniform(2, 4, 8, 16)).b.stride() == (128, 8, 1)
    assert inputs(uniform(2, 4, 8, 16, nk=True)).b.stride() == (128, 1, 16)


# --- numbers ----------------------------------------------------------------------------------------------------------


# --- TritonBench's inputs ---------------------------------------------------------------------------------------------


def test_from_tritonbench_keeps_one_b_for_all() -> None:
    a = [torch.randn(m, 6, dtype=torch.float16) for m in (3, 3)]
    b = torch.randn(6, 7, dtype=torch.float16)
    example = gg.from_tritonbench(a, [b, b], None, None)
    assert str(example.shape) == "G=2,M_g=3,N=7,K=6,B=shared"
    assert example.dtype == "fp16"
    assert example.inputs.b.stride(0) == 0
    assert torch.equal(example.inputs.a, torch.cat(a))


def test_from_tritonbench_with_unlike_rows_and_weights() -> None:
    a = [torch.randn(m, 6, dtype=torch.bfloat16) for m in (3, 0, 2)]
    b = [torch.randn(6, 7, dtype=torch.bfloat16) for _ in a]
    example = gg.from_tritonbench(a, b)
    assert str(example.shape) == "G=3,M_g=3|0|2,N=7,K=6"
    assert example.dtype == "bf16"
    expected = torch.cat([x.float() @ w.float() for x, w in zip(a, b, strict=True)])
    torch.testing.assert_close(gg.reference(example.inputs), expected, rtol=1e-5, atol=1e-5)


# --- backends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch_loop", "torch_grouped_mm", "aten_grouped_mm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ["G=3,M_g=0|1|5,N=7,K=3", "G=2,M_g=9|2,N=1,K=1,W=nk", "G=2,M_g=3,N=5,K=5,B=shared"])
def test_torch_backends_take_odd_strides(name: str, dtype: str, text: str) -> None:
    x = inputs(parse(text), dtype)
    run = gg.GROUPED_GEMM.backend(name).prepare(x)
    assert accuracy.check(run, gg.reference(x), TOLERANCES[dtype])[1] is None
    assert run().dtype == DTYPES[dtype]


def test_torch_loop_without_rows() -> None:
    x = inputs(listed((0, 0), 4, 4))
    assert gg.prepare_torch_loop(x)().shape == (0, 4)


LAYOUTS = {
    "even": torch.zeros(2, 16, 8),
    "odd inner": torch.zeros(2, 16, 7),
    "odd outer": torch.zeros(2, 15, 8),
    "transposed": torch.zeros(2, 8, 16).transpose(1, 2),
    "odd transposed": torch.zeros(2, 8, 15).transpose(1, 2),
    "shared": torch.zeros(16, 8).expand(3, -1, -1),
    "two dimensions": torch.zeros(5, 8),
    "two odd dimensions": torch.zeros(5, 9),
    "one column": torch.zeros(2, 5, 1),
    "one row": torch.zeros(2, 1, 5),
    "one element": torch.zeros(1, 1, 1),
    "every other column": torch.zeros(4, 32)[:, ::2],
    "sliced": torch.zeros(4, 32)[:, :17],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_aligned_has_the_values_and_16_byte_strides(name: str, dtype: torch.dtype) -> None:
    layout = LAYOUTS[name]
    if name == "shared":
        x = torch.randn(16, 8, dtype=dtype).expand(3, -1, -1)
    else:
        x = torch.empty_strided(layout.shape, layout.stride(), dtype=dtype).normal_()
    out = backends.aligned(x)
    assert torch.equal(out, x)
    strides = list(out.stride())
    inner = -1 if strides[-1] == 1 else -2
    assert strides[inner] == 1
    others = [s for i, s in enumerate(strides) if i != len(strides) + inner]
    assert all(s and s * x.element_size() % 16 == 0 for s in others), strides
    assert (out is x) == (name in ("even", "odd outer", "transposed", "two dimensions", "sliced"))


def test_a_lazy_kernel_gets_the_named_inputs_in_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    from groupbench.kernels import elementwise

    x, y = torch.ones(2, 3), torch.ones(3, 2)
    passed: list[object] = []
    monkeypatch.setattr(elementwise, "prepare_add", lambda *args, **more: passed.extend((*args, more)))
    prepare = backends.lazy("elementwise:prepare_add", "y x", {"x": torch.t}, checked=True)
    prepare(SimpleNamespace(x=x, y=y, z=None))
    assert passed[0] is y
    assert passed[1].shape == (3, 2)  # type: ignore[attr-defined]
    assert passed[2] == {"checked": True}


def test_bf16_is_unavailable_in_the_interpreter_alone() -> None:
    assert "fp16" in (backends.no_interpreted_bf16(Target("cpu", "bf16", interpreted=True)) or "")
    assert backends.no_interpreted_bf16(Target("cpu", "fp16", interpreted=True)) is None
    assert backends.no_interpreted_bf16(Target("cuda", "bf16")) is None


def test_every_backend_that_is_interpreted_says_so_of_bf16() -> None:
    for backend in gg.GROUPED_GEMM.backends:
        reason = backend.unavailable(Target("cpu", "bf16", interpreted=True))
        assert ("fp16" in (reason or "")) == (backend.kind != "torch"), backend.name


@pytest.mark.parametrize("name", gg.INTERLEAVED)
@pytest.mark.parametrize(
    "text", ["G=3,M=500,N=40,K=33,routing=interleaved(64),W=nk", "G=4,M=96,N=64,K=48,routing=interleaved(96)"]
)
def test_interleaved_rows(name: str, text: str) -> None:
    """Block i of the rows is of expert i % G; the second shape has one block alone, and experts without rows."""
    operator = gg.GROUPED_GEMM
    shape = operator.parse_shape(text)
    assert (shape.M % shape.block, sum(shape.rows)) == (0, shape.M)
    x = operator.make_inputs(shape, "fp32", DEVICE, 0)
    expected = operator.reference(x)
    last = len(x.experts) - 1
    assert torch.allclose(
        expected[last * shape.block :], x.a[last * shape.block :].double() @ x.b[last % shape.G].double()
    )
    _, problem = accuracy.check_backend(operator.backend(name).prepare(x), expected, operator, name, "fp32")
    assert problem is None


def test_interleaved_rows_are_refused_where_experts_need_theirs_together() -> None:
    operator = gg.GROUPED_GEMM
    shape = operator.parse_shape("G=2,M=256,N=16,K=16,routing=interleaved(128)")
    with pytest.raises(Unavailable, match="interleaved"):
        operator.backend("triton_flat").prepare(operator.make_inputs(shape, "fp16", DEVICE, 0))
    backward = operator.in_mode("bwd")
    with pytest.raises(Unavailable, match="interleaved"):
        backward.make_inputs(shape, "fp16", DEVICE, 0)
    for other in ("grouped_gemm_wgrad", "grouped_gemm_dgrad", "grouped_gemm_fp8"):
        with pytest.raises(ValueError, match="grouped_gemm alone"):
            get_operator(other).parse_shape(str(shape))
    with pytest.raises(ValueError, match="one B per expert"):
        operator.parse_shape(f"{shape},B=shared")
