"""split_k_matmul, matmul_outer_k and vector_add: their text, inputs, counts, and every backend on the smoke shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators.catalog.gemm_shapes import GemmShape
from groupbench.operators.catalog.matmul_outer_k import MATMUL_OUTER_K
from groupbench.operators.catalog.split_k_matmul import SEED, SPLIT_K_MATMUL
from groupbench.operators.catalog.vector_add import VECTOR_ADD, from_tritonbench
from groupbench.operators.measure.accuracy import check_backend
from groupbench.operators.operator import Operator, Target

OPERATORS = (SPLIT_K_MATMUL, MATMUL_OUTER_K, VECTOR_ADD)
HERE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = Target("cpu", "fp16", interpreted=True)
CELLS = [
    (operator, backend.name, shape)
    for operator in OPERATORS
    for backend in operator.backends
    for shape in operator.suites["smoke"]
    if HERE == "cuda" or backend.unavailable(INTERPRETED) is None
]


@pytest.mark.parametrize(("operator", "name", "shape"), CELLS, ids=[f"{o.name}-{n}-{s}" for o, n, s in CELLS])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_smoke(operator: Operator, name: str, shape: Any, dtype: str) -> None:
    inputs = operator.make_inputs(shape, dtype, HERE, 0)
    run = operator.backend(name).prepare(inputs)
    accuracy, problem = check_backend(run, operator.reference(inputs), operator, name, dtype)
    assert problem is None
    assert accuracy.repeatable or (HERE == "cuda" and name == "triton_atomic")


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_suites_text_is_read_back(operator: Operator) -> None:
    for suite in operator.suites.values():
        assert [operator.parse_shape(str(shape)) for shape in suite] == list(suite)


def test_the_seeds_problem() -> None:
    assert str(SEED) == "M=16,N=16,K=4096,W=nk"
    assert SPLIT_K_MATMUL.suites["skinny"][0] == SEED
    x = SPLIT_K_MATMUL.make_inputs(SEED, "fp32", "cpu", 0)
    assert (x.a.shape, x.b.shape, x.b.stride()) == ((16, 4096), (4096, 16), (1, 4096))


sizes = st.integers(1, 1000)


@given(sizes, sizes, sizes, st.booleans(), st.booleans())
def test_gemm_text_goes_both_ways(M: int, N: int, K: int, nk: bool, km: bool) -> None:
    shape = GemmShape(M, N, K, nk, km)
    assert SPLIT_K_MATMUL.parse_shape(str(shape)) == shape
    assert SPLIT_K_MATMUL.flops(shape) == 2 * M * N * K
    assert SPLIT_K_MATMUL.min_bytes(shape, "bf16") == 2 * (M * K + K * N + M * N)
    assert MATMUL_OUTER_K.parse_shape(f"{M},{N},{K}") == GemmShape(M, N, K)


@given(sizes, st.integers(0, 1000), st.integers(1, 9), st.booleans())
def test_vector_text_goes_both_ways(N: int, M: int, stride: int, turned: bool) -> None:
    text = f"M={M},N={N}" + (",y=t" if turned else "") if M else f"N={N}" + (f",stride={stride}" if stride > 1 else "")
    shape = VECTOR_ADD.parse_shape(text)
    assert str(shape) == text
    x = VECTOR_ADD.make_inputs(shape, "fp16", "cpu", 1)
    assert x.x.shape == x.y.shape == ((M, N) if M else (N,))
    assert x.x.numel() == shape.elements == VECTOR_ADD.min_bytes(shape, "fp32") // 12
    if not M and N > 1:
        assert x.y.stride() == (stride,)
    if M > 1 and N > 1:
        assert x.y.is_contiguous() is not turned


@pytest.mark.parametrize(
    "text",
    ["", "16,16", "16,16,16,16", "M=16,N=16", "M=16,N=16,K=0", "M=-1,N=1,K=1", "M=1,M=1,N=1,K=1", "M=1,N=1,K=1,W=kn",
     "M=1,N=1,K=1,A=nk", "M=x,N=1,K=1", "M=²,N=1,K=1", "G=1,M=1,N=1,K=1", f"1,1,{2**31}",
     "2000000000,2000000000,2000000000"],
)  # fmt: skip
def test_text_that_is_not_a_gemm_shape(text: str) -> None:
    with pytest.raises(ValueError, match=r"M,N,K .*skinny"):
        SPLIT_K_MATMUL.parse_shape(text)


@pytest.mark.parametrize(
    "text",
    ["", "N", "N=0", "N=-1", "N=²", "M=3", "M=3,N=0", "N=3,stride=0", "N=3,y=t", "N=3,stride=2,y=t",
     "M=2,N=3,stride=2", f"N={2**41}", f"M={2**21},N={2**21}", "N=3,N=3"],
)  # fmt: skip
def test_text_that_is_not_a_vector_shape(text: str) -> None:
    with pytest.raises(ValueError, match="N=SIZE"):
        VECTOR_ADD.parse_shape(text)


def test_a_grid_barrier_says_that_it_cannot_be_interpreted() -> None:
    backend = SPLIT_K_MATMUL.backend("helion_barrier")
    assert "cannot be interpreted" in (backend.unavailable(INTERPRETED) or "")
    assert backend.unavailable(Target("cuda", "bf16", capability=(9, 0))) is None


def test_tritonbenchs_vectors() -> None:
    x, y = torch.randn(7).half(), torch.randn(7).half()
    example = from_tritonbench(x, y)
    assert (str(example.shape), example.dtype) == ("N=7", "fp16")
    assert example.inputs.x is x
    assert example.inputs.y is y
