"""One matrix product, out = a @ b, by plain tiled code (kernels/outer_k.py) and by cuBLAS.

A compute canary: a simple kernel's speed changes with the compiler and the clocks, not with our own code.
"""

from __future__ import annotations

from groupbench.operators.catalog import gemm_shapes
from groupbench.operators.catalog.backends import lazy, triton
from groupbench.operators.catalog.gemm_shapes import GemmShape

SUITES = {
    "square": (
        GemmShape(1024, 1024, 1024),
        GemmShape(4096, 4096, 4096),
        GemmShape(8192, 8192, 4096),  # the tutorial's
        GemmShape(4096, 4096, 4096, nk=True),
    ),
    "ragged": (
        GemmShape(1, 1, 1),
        GemmShape(1, 4096, 4096, nk=True),
        GemmShape(257, 509, 1021),
        GemmShape(1000, 2003, 999, km=True),
        GemmShape(4099, 127, 8191, km=True, nk=True),
    ),
    "smoke": (
        GemmShape(64, 64, 64),
        GemmShape(1, 1, 1),
        GemmShape(7, 13, 101, nk=True),
        GemmShape(65, 129, 70, km=True),
    ),
}


MATMUL_OUTER_K = gemm_shapes.product(
    "matmul_outer_k",
    torch_mm="torch.mm: cuBLAS",
    backends=(
        triton(
            "triton_outer_k",
            lazy("outer_k:prepare_outer_k", "a b"),
            "one tile per program, K in the outer loop, masked, not tuned; after gpu-mode/triton-tutorials",
        ),
    ),
    suites=SUITES,
)
