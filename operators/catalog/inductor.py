"""Backends by torch.compile. `compiled` takes any function.

grouped_mm is compiled to Inductor's Triton template, tuned for the problem, with proof that it ran. Inductor has two
choices for grouped_mm, torch's own kernel and a Triton template. If it may tune, it takes the faster one; here it may
take the template alone. The options are passed with the one function that is compiled. A patch around the call would
end before compiling starts, at the first call, or would affect other functions of the process.

Conditions as in torch/_inductor/kernel/mm_grouped.py (torch 2.11): max_autotune, backend TRITON, Hopper or newer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from groupbench.operators.deferred import F, Tensor, torch
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Target

T = TypeVar("T")
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "TRITON",
}
TEMPLATE = re.compile(r"triton_tem_\w*grouped_mm\w*")


def no_gpu_to_compile_for(target: Target) -> str | None:
    if target.device != "cuda":
        return "torch.compile for a CPU needs a C++ compiler, and its fusions do not predict those on a GPU"
    return None


def compiled(function: Callable[..., T], *operands: Any, **options: Any) -> Callable[[], T]:
    """Compile a function for these operands and sizes; return the call."""
    from torch.utils._python_dispatch import _disable_current_modes

    run_compiled = torch.compile(function, options=options or None, dynamic=False, fullgraph=True)
    torch._dynamo.reset()  # else compilations for earlier shapes count against the recompilation limit
    run_compiled(*operands)

    def run() -> T:
        # Under a dispatch mode, such as the one that poisons memory, Dynamo would not run its compiled code.
        with _disable_current_modes():
            return run_compiled(*operands)

    return run


def prepare_grouped_mm(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]
    offs: Tensor,  # [G], int32 end offsets
) -> Callable[[], Tensor]:  # [M, N]
    """Compile and tune grouped_mm; the callable runs the compiled code.

    Raises Unavailable if the compiled code does not launch the template; the message names the kernels it launches.
    """
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
            raise Unavailable(f"Inductor's Triton template does not take this grouped_mm: {_line(error)}") from error
        raise
    ran = launched("\n".join(sources))
    foreign = [name for name in ran if not name.startswith("triton_")]
    if foreign or not any(TEMPLATE.match(name) for name in ran):
        raise Unavailable(f"Inductor's Triton template did not run; the code calls {', '.join(ran) or 'nothing known'}")
    return lambda: compiled(a, b, offs)


def _untraceable(a: Tensor, b: Tensor, offs: Tensor) -> str | None:
    """Return why grouped_mm cannot be compiled for these operands, or None. Torch 2.11 runs others but traces bf16."""
    meta = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (a, b, offs)]
    try:
        F.grouped_mm(meta[0], meta[1], offs=meta[2])
    except RuntimeError as error:
        return f"torch cannot compile grouped_mm for {a.dtype}: {_line(error)}"
    return None


def launched(source: str) -> list[str]:
    """Return the kernels in Inductor's code: own ones by name, others as extern_kernels.x or torch.ops.x."""
    names = re.findall(r"^\s+(?:\w+\s*=\s*)?((?:extern_kernels|torch\.ops)\.[\w.]+)\(", source, re.M)
    names += re.findall(r"^\s+(\w+)\.run\(", source, re.M)
    names += re.findall(r"^\s+(cpp_fused_\w+)\(", source, re.M)
    # Allocations and checks are calls too.
    return sorted({name for name in names if "empty_strided" not in name and "assert" not in name})


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
