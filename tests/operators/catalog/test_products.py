"""split_k_matmul, matmul_outer_k and vector_add: their text, inputs and counts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators.catalog.gemm_shapes import GemmShape
from groupbench.operators.catalog.matmul_outer_k import MATMUL_OUTER_K
from groupbench.operators.catalog.split_k_matmul import SEED, SPLIT_K_MATMUL
from groupbench.operators.catalog.vector_add import VECTOR_ADD, from_tritonbench
from groupbench.operators.operator import Target

INTERPRETED = Target("cpu", "fp16", interpreted=True)


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
