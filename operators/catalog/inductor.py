"""grouped_mm as torch.compile makes it: Inductor's Triton template, tuned for the problem, and proof that it ran.

Inductor has a Triton template for grouped_mm beside torch's own kernel, and takes whichever it measures to be faster,
provided that it may tune at all. Here the template is all that it may take. The settings go with the one function that
is compiled: a patch around the call would be gone when compiling starts, which is at the first call, or would reach
what else the process compiles.

Conditions as in torch/_inductor/kernel/mm_grouped.py (torch 2.11): max_autotune, backend TRITON, Hopper or newer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from groupbench.operators.errors import Unavailable

if TYPE_CHECKING:
    from torch import Tensor

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "TRITON",
}
TEMPLATE = re.compile(r"triton_tem_\w*grouped_mm\w*")


def prepare_grouped_mm(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]
    offs: Tensor,  # [G], int32 end offsets
) -> Callable[[], Tensor]:  # [M, N]
    """Compile and tune; the callable runs what was compiled.

    Raises Unavailable, naming what was compiled instead, where that is not the template.
    """
    import torch
    import torch.nn.functional as F
    from torch._inductor.utils import run_and_get_code

    if reason := _untraceable(a, b, offs):
        raise Unavailable(reason)
    compiled = torch.compile(
        lambda a, b, offs: F.grouped_mm(a, b, offs=offs), options=OPTIONS, dynamic=False, fullgraph=True
    )
    try:
        _, sources = run_and_get_code(compiled, a, b, offs)
    except torch._inductor.exc.InductorError as error:
        if "NoValidChoices" in str(error):
            raise Unavailable(f"Inductor's Triton template takes no such grouped_mm: {_line(error)}") from error
        raise
    ran = launched("\n".join(sources))
    foreign = [name for name in ran if not name.startswith("triton_")]
    if foreign or not any(TEMPLATE.match(name) for name in ran):
        raise Unavailable(f"Inductor's Triton template did not run, but {', '.join(ran) or 'nothing that is known'}")
    return lambda: compiled(a, b, offs)


def _untraceable(a: Tensor, b: Tensor, offs: Tensor) -> str | None:
    """Return why grouped_mm cannot be compiled for such operands, though it may run: torch 2.11 traces bf16 alone."""
    import torch
    import torch.nn.functional as F

    meta = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (a, b, offs)]
    try:
        F.grouped_mm(meta[0], meta[1], offs=meta[2])
    except RuntimeError as error:
        return f"torch cannot compile grouped_mm for {a.dtype}: {_line(error)}"
    return None


def launched(source: str) -> list[str]:
    """Kernels that the code Inductor generated calls: its own by name, others as extern_kernels.x or torch.ops.x."""
    names = re.findall(r"^\s+(?:\w+\s*=\s*)?((?:extern_kernels|torch\.ops)\.[\w.]+)\(", source, re.M)
    names += re.findall(r"^\s+(\w+)\.run\(", source, re.M)
    names += re.findall(r"^\s+(cpp_fused_\w+)\(", source, re.M)
    # Allocations and checks are calls too.
    return sorted({name for name in names if "empty_strided" not in name and "assert" not in name})


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
