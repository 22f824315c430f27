"""torch_compile: Inductor's kernel is read from the generated code, and any kernel but the template is refused."""

from __future__ import annotations

import pytest
import torch

from groupbench.operators.catalog import inductor
from groupbench.operators.catalog.grouped_gemm import GROUPED_GEMM
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Target

TEMPLATE = """
        def call(args):
            with torch.cuda._DeviceGuard(0):
                buf0 = empty_strided_cuda((64, 64), (64, 1), torch.bfloat16)
                triton_tem_fused__grouped_mm_0.run(arg0_1, arg1_1, arg2_1, buf0, stream=stream0)
            return (buf0, )
"""
EXTERN = """
            buf0 = torch.ops.aten._grouped_mm.default(arg0_1, arg1_1, arg2_1)
            assert_size_stride(buf0, (64, 64), (64, 1), 'torch.ops.aten._grouped_mm.default')
"""
OPERANDS = (torch.ones(4, 8).bfloat16(), torch.ones(1, 8, 8).bfloat16(), torch.tensor([4], dtype=torch.int32))


@pytest.mark.parametrize(
    ("source", "names"),
    [(TEMPLATE, ["triton_tem_fused__grouped_mm_0"]), (EXTERN, ["torch.ops.aten._grouped_mm.default"]), ("", [])],
    ids=["template", "extern", "nothing"],
)
def test_kernels_are_read_from_the_generated_code(source: str, names: list[str]) -> None:
    assert inductor.launched(source) == names


@pytest.mark.parametrize(
    ("source", "message"),
    [(EXTERN, "_grouped_mm.default"), (TEMPLATE + EXTERN, "_grouped_mm.default"), ("", "nothing"), (TEMPLATE, None)],
    ids=["extern", "both", "nothing", "template"],
)
def test_only_the_template_will_do(source: str, message: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    before = config.max_autotune, config.max_autotune_gemm_backends
    monkeypatch.setattr("torch._inductor.utils.run_and_get_code", lambda run, *args: (None, [source]))
    if message is None:
        assert callable(inductor.prepare_grouped_mm(*OPERANDS))
    else:
        with pytest.raises(Unavailable, match=message):
            inductor.prepare_grouped_mm(*OPERANDS)
    assert (config.max_autotune, config.max_autotune_gemm_backends) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_product_that_torch_cannot_compile_is_unavailable(dtype: torch.dtype) -> None:
    """Eager grouped_mm takes these dtypes, its meta function in torch 2.11 does not."""
    a, b, offs = OPERANDS
    if torch.__version__ >= "2.12":
        pytest.skip("which dtypes later releases trace was not looked at")
    with pytest.raises(Unavailable, match=f"cannot compile grouped_mm for {dtype}"):
        inductor.prepare_grouped_mm(a.to(dtype), b.to(dtype), offs)


@pytest.mark.parametrize(
    ("target", "runs"),
    [
        (Target("cpu", "bf16"), False),
        (Target("cuda", "bf16", capability=(8, 0)), False),
        (Target("cuda", "bf16", capability=(9, 0)), True),
    ],
    ids=["cpu", "ampere", "hopper"],
)
def test_says_where_it_cannot_run(target: Target, runs: bool) -> None:
    assert (GROUPED_GEMM.backend("torch_compile").unavailable(target) is None) == runs
