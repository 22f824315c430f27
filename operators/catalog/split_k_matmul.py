"""Products with few rows and columns and a long K: out = a @ b, split along K (kernels/split_k).

Every decoding step computes such products: M tokens, often fewer than a tensor core's rows, times weights read once.
The variants differ in the record's `repeatable`: sums in a fixed order give the same bits in every run, atomic adds do
not. In bf16 and fp16 most elements lose the fp32 sum's last bits, so compare variants in fp32.
"""

from __future__ import annotations

from groupbench.operators.catalog import gemm_shapes
from groupbench.operators.catalog.backends import helion, lazy, triton
from groupbench.operators.catalog.gemm_shapes import GemmShape
from groupbench.operators.operator import Target

SEED = GemmShape(16, 16, 4096, nk=True)  # of Helion's examples/split_k_barrier.py

# Layers of public models in decoding, with weights stored as [N, K], and products that are mostly a long sum.
SKINNY = (
    SEED,
    GemmShape(16, 16, 131072, nk=True),
    GemmShape(16, 64, 65536, nk=True),
    GemmShape(32, 128, 16384, nk=True),
    GemmShape(64, 64, 32768, nk=True),
    GemmShape(64, 512, 32768, nk=True),
    GemmShape(64, 64, 32768, km=True),  # a gradient of weights: both operands have the long dimension first
    GemmShape(16, 128, 2880, nk=True),  # gpt-oss' router
    GemmShape(64, 256, 7168, nk=True),  # DeepSeek-V3's router
    GemmShape(16, 2112, 7168, nk=True),  # DeepSeek-V3's attention, projections down
    GemmShape(16, 1024, 16384, nk=True),
    GemmShape(1, 4096, 4096, nk=True),  # Llama 3 8B: attention's output, then the projection down
    GemmShape(16, 4096, 4096, nk=True),
    GemmShape(16, 4096, 4096),
    GemmShape(64, 4096, 4096, nk=True),
    GemmShape(1, 4096, 14336, nk=True),
    GemmShape(16, 4096, 14336, nk=True),
    GemmShape(64, 4096, 14336, nk=True),
)

SUITES = {
    "skinny": SKINNY,
    "seed": (SEED,),
    "ragged": (
        GemmShape(1, 1, 1),
        GemmShape(1, 1, 100003),
        GemmShape(17, 19, 10007, nk=True),
        GemmShape(3, 1001, 4099),
        GemmShape(61, 127, 8191, km=True, nk=True),
        GemmShape(130, 300, 5000, nk=True),
    ),
    "smoke": (
        GemmShape(16, 16, 512, nk=True),
        GemmShape(1, 1, 1),
        GemmShape(7, 13, 101, nk=True),
        GemmShape(33, 45, 200),
        GemmShape(5, 37, 331, km=True),
    ),
}


def no_grid_barrier(target: Target) -> str | None:
    if target.interpreted or target.device != "cuda":
        return "a grid-wide barrier cannot be interpreted, since programs run one after the other"
    return None


SPLIT_K_MATMUL = gemm_shapes.product(
    "split_k_matmul",
    torch_mm="torch.mm: cuBLAS, which splits K if its heuristics choose to",
    backends=(
        triton(
            "triton_fixup",
            lazy("split_k.tiled:prepare_fixup", "a b"),
            "one launch, the last programs of a tile add all partials in order; after stream-K's fixup",
        ),
        triton(
            "triton_two_launches",
            lazy("split_k.tiled:prepare_two_launches", "a b"),
            "partials by one kernel, their sums in order by another",
        ),
        triton(
            "triton_atomic",
            lazy("split_k.tiled:prepare_atomic", "a b"),
            "partials added by atomics to fp32 zeros, in any order: results differ in the last bits",
        ),
        helion(
            "helion_barrier",
            lazy("split_k.helion_barrier:prepare_barrier", "a b"),
            "partials, a grid-wide barrier, sums, in one launch; after Helion's examples/split_k_barrier.py",
            unavailable=no_grid_barrier,
        ),
    ),
    suites=SUITES,
)
