"""Canaries: their text, and a product of any size as the ceiling for a grouped GEMM."""

from __future__ import annotations

import pytest
import torch

from groupbench.operators.catalog.canary import CANARY

# text: dims, flops, least bytes in fp16
COUNTED = {
    "copy,N=4": ({"N": 4}, 0, 64),
    "matmul,N=8": ({"N": 8}, 1024, 384),
    "matmul,M=4,N=8,K=2": ({"M": 4, "N": 8, "K": 2}, 128, 2 * (8 + 16 + 32)),
    "matmul,M=4,N=8,K=2,W=nk": ({"M": 4, "N": 8, "K": 2}, 128, 2 * (8 + 16 + 32)),
}


@pytest.mark.parametrize(("text", "counted"), COUNTED.items(), ids=COUNTED)
def test_text_sizes_and_result(text: str, counted: tuple[dict[str, int], int, int]) -> None:
    shape = CANARY.parse_shape(text)
    assert str(shape) == text
    assert (shape.dims, CANARY.flops(shape), CANARY.min_bytes(shape, "fp16")) == counted
    x = CANARY.make_inputs(shape, "fp32", "cpu", 0)
    assert x.y.is_contiguous() == ("W=nk" not in text)
    torch.testing.assert_close(CANARY.backend("torch").prepare(x)(), CANARY.reference(x))


def test_each_suite_reads_back_and_smoke_is_small() -> None:
    assert list(CANARY.suites) == ["cuda", "cpu", "smoke"]
    for suite in CANARY.suites.values():
        assert [CANARY.parse_shape(str(shape)) for shape in suite] == list(suite)
        assert {shape.kind for shape in suite} == {"copy", "matmul"}
    assert all(max(shape.sizes) <= 64 for shape in CANARY.suites["smoke"])
    assert any(shape.nk for shape in CANARY.suites["smoke"])


@pytest.mark.parametrize(
    "text",
    ["", ",", "matmul", "matmul,N=0", "matmul,N=5,W=nk", "matmul,N=²", "copy,N=2,N=3",
     "copy,M=1,N=2,K=3", "matmul,M=1,N=2", "conv,N=2", f"matmul,N={2**21}"],
)  # fmt: skip
def test_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="copy,N=SIZE"):
        CANARY.parse_shape(text)
