"""The problem for this folder's fused kernels, the source, and a reference in plain torch.

For each of G groups of its own sizes, with M = M0 * M1 * M2 rows, N = N0 * N1 columns and a sum over K:

    c[m, n]                 =  sum_k a[m, k] * b[n, k]  +  d[n]               a [M, K]   b [N, K]   d [N]
    c[m, n]                 =  c[m, n] * e[m, n]   or   c[m, n] + e[m, n]     e [M, N]; or neither
    f[m0, n0, m1, n1, m2]   =  c[(m0 * M1 + m1) * M2 + m2, n0 * N1 + n1]      f [M0, N0, M1, N1, M2]

The innermost dimension of the output is the innermost one of the *rows*: neighbours in a row of the product are M2
elements apart in f. M2 rows of one column are neighbours in f, followed by the other columns of the same n0. For each
(m0, n0, m1) there are N1 * M2 elements in a run, the transpose of an M2 x N1 block of the product.

Source: example 28_grouped_gemm_bias_e_permute of Composable Kernel (ROCm). Its README describes an elementwise stage
with an operand e. Its code only adds the bias ("E" is the output there), and has packed strides of f as well as
permuted ones. Here e is multiplied, added, or left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from groupbench.kernels.grouped_gemm.reference import reference_list
from groupbench.kernels.grouped_gemm.support import require_runnable, require_tensors

OPS = ("mul", "add", "none")


@dataclass(frozen=True)
class Group:
    """One group's operands, any strides. Raises ValueError if sizes do not fit together."""

    a: Tensor  # [M, K]
    b: Tensor  # [N, K]
    d: Tensor  # [N]
    e: Tensor | None  # [M, N]; None if the operation is "none"
    m: tuple[int, int, int]  # M0, M1, M2
    n: tuple[int, int]  # N0, N1

    def __post_init__(self) -> None:
        require_tensors(a=self.a, b=self.b, d=self.d, **({} if self.e is None else {"e": self.e}))
        M, N = prod(self.m), prod(self.n)
        if min(*self.m, *self.n) < 0 or self.a.ndim != 2 or tuple(self.b.shape) != (N, self.a.size(-1)):
            raise ValueError(
                f"M0, M1, M2 = {self.m} and N0, N1 = {self.n} take a [{M}, K] and b [{N}, K], "
                f"got {list(self.a.shape)} and {list(self.b.shape)}"
            )
        for name, x, expected in (("a", self.a, (M, self.a.size(1))), ("d", self.d, (N,)), ("e", self.e, (M, N))):
            if x is not None and tuple(x.shape) != expected:
                raise ValueError(f"{name} of shape {list(x.shape)}, expected {list(expected)}")

    @property
    def permuted(self) -> tuple[int, int, int, int, int]:
        """Return the output's shape."""
        M0, M1, M2 = self.m
        N0, N1 = self.n
        return M0, N0, M1, N1, M2

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """Return all present operands."""
        return (self.a, self.b, self.d) if self.e is None else (self.a, self.b, self.d, self.e)


def require_problem(groups: Sequence[Group], op: str) -> None:
    """Raise ValueError unless the groups can be computed here by one kernel, with `op` for the elementwise step."""
    if not groups:
        raise ValueError("groups is empty")
    if op not in OPS:
        raise ValueError(f"op {op!r} is not one of {', '.join(OPS)}")
    for g, group in enumerate(groups):
        if (group.e is None) != (op == "none"):
            raise ValueError(f"group {g} has {'no e for' if group.e is None else 'an e with'} op {op!r}")
    require_runnable(*(operand for group in groups for operand in group.operands))


def bias_add_permute_reference(groups: Sequence[Group], op: str) -> list[Tensor]:  # G of [M0, N0, M1, N1, M2]
    """Return every group's output by one product per group, in fp32, or in fp64 for fp32 operands."""
    outputs = []
    for group, product in zip(groups, reference_list([g.a for g in groups], [g.b.t() for g in groups]), strict=True):
        c = product + group.d
        if group.e is not None:
            c = c * group.e if op == "mul" else c + group.e
        outputs.append(c.view(*group.m, *group.n).permute(0, 3, 1, 4, 2).contiguous())
    return outputs
