"""The list of operators describes every input and output to authors of backends, and describes them right."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from groupbench.operators import contract
from groupbench.operators.dtypes import torch_dtype
from groupbench.operators.errors import Unavailable
from groupbench.operators.measure.given import named_tensors
from groupbench.operators.measure.selection import why_unavailable
from groupbench.operators.operator import Operator, Target
from groupbench.operators.registry import get_operator, operator_names

MODES = [(name, mode) for name in operator_names() for mode in get_operator(name).modes]
NAMED = {"int32": torch.int32, "int64": torch.int64, "fp32": torch.float32, "e4m3fn": torch.float8_e4m3fn}
NAMED |= {"uint8": torch.uint8}


def measured(name: str, mode: str) -> tuple[Operator, str, object]:
    """Return (operator, dtype, inputs of its first small shape)."""
    operator = get_operator(name).in_mode(mode)
    dtype = "fp16" if "fp16" in operator.dtypes else operator.dtypes[0]
    return operator, dtype, operator.make_inputs(operator.suites["smoke"][0], dtype, "cpu", 0)


def dims(text: str) -> list[int]:
    """Return the number of sizes of each tensor in a text: [2, 1] for "[M, N] or [N]"."""
    return [sizes.count(",") + 1 for sizes in re.findall(r"\[(.*?)\]", text)]


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_the_description_of_every_field_is_right(name: str, mode: str) -> None:
    operator, dtype, inputs = measured(name, mode)
    cls = contract.inputs_class(operator.make_inputs)
    assert type(inputs) is cls
    descriptions = dict(contract.fields(cls))
    assert all(descriptions.values()), descriptions
    assert {name.partition(".")[0] for name in descriptions} == {field.name for field in dataclasses.fields(cls)}
    for path, tensor in named_tensors(inputs):
        path = path.removesuffix("]").rpartition("[")[0] if path.endswith("]") else path  # of a tuple of tensors
        if "[" in path:  # a tensor of a group; the comment on the tuple describes it
            assert f" {path.rpartition('.')[2]} [" in descriptions[path.partition("[")[0]]
            continue
        about = descriptions[path]
        if about.startswith("as "):
            about = descriptions[about.split()[1]]
        assert tensor.dim() in dims(about), path
        dtypes = [NAMED[word] for word in NAMED if word in about]
        assert tensor.dtype == (dtypes[0] if dtypes else torch_dtype(dtype)), path


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_the_description_of_the_output_is_right(name: str, mode: str) -> None:
    operator, dtype, inputs = measured(name, mode)
    assert operator.returns
    if why_unavailable(operator, operator.baseline, Target("cpu", dtype, interpreted=True)):
        return
    try:
        out = operator.backend(operator.baseline).prepare(inputs)()
    except Unavailable as reason:
        if torch.version.cuda is None:
            raise
        pytest.skip(f"NOT TESTED: {operator.baseline} of {name}. {reason}")
    parts = out if isinstance(out, tuple) else [out]
    assert all(part.dim() in dims(operator.returns) for part in parts)
    if operator.returns.startswith("("):
        assert len(parts) == len(re.findall(r"\[.*?\]", operator.returns.partition(", or ")[0]))


def test_the_list_names_every_mode_and_field() -> None:
    lines = list(contract.lines(get_operator("grouped_gemm")))
    assert lines[0] == "  prepare(x): a callable that returns [M, N]"
    assert "    x.offs: [G] int32, where each group's rows end" in lines
    assert "  prepare_bwd(x): a callable that returns (dA [M, K], dB [G, K, N])" in lines
    assert "    x.x.b: [G, K, N], any strides" in lines
    assert list(contract.lines(get_operator("moe_layer"))).count("    x is the same") == 2
