"""Operators that are not ours: names of their problems, distances between their outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from groupbench.operators.hosts.foreign import compare_outputs, input_dtype, is_distant, shape_text, tensors
from groupbench.tracker.facts.record import Accuracy

JAGGED = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)

# name: (x_val, inputs, text)
NAMES: dict[str, tuple[Any, Any, str]] = {
    "all said": ((4096, 256), (torch.ones(4096, 256),), "(4096, 256)"),
    "vectors": (7, (torch.ones(7), torch.ones(7)), "7"),
    "dimensions of one": (7, (torch.ones(7, 1), 1), "7"),
    "a size left out": (7, (torch.ones(7, 5), torch.ones(5)), "7 [7x5, 5]"),
    "a number left out": (7, (torch.ones(7), 0.5), "7 [7, 0.5]"),
    "a flag": (7, {"x": torch.ones(7), "causal": True}, "7 [7, True]"),
    "ragged": (2, (JAGGED, 2, 8, 3), "2 [2x*x8, 2, 8, 3]"),
    "lists": (2, ([torch.ones(2, 3), torch.ones(4, 3)], None), "2 [2x3, 4x3]"),
    "an input without a name": (2, (torch.ones(2), print), "2"),
    "a size twice": (512, (torch.ones(512, 512),), "512 [512x512]"),
    "of each input": ((8, 8, 8), (torch.ones(8, 8), torch.ones(8, 8)), "(8, 8, 8)"),
    "a scalar among others": (2, (torch.tensor(1.0), torch.ones(3)), "2 [scalar, 3]"),
}


@pytest.mark.parametrize(("x_val", "inputs", "text"), NAMES.values(), ids=NAMES)
def test_name(x_val: Any, inputs: Any, text: str) -> None:
    assert shape_text(x_val, inputs) == text


# options: text behind the name (64, 8)
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a flag": ({"causal": True}, " causal"),
    "a flag that is off": ({"fast": False}, " fast=False"),
    "in the order of their names": ({"reduce_dim": 0, "input_dim": 2}, " input_dim=2,reduce_dim=0"),
    "a size in the name": ({"M": 64, "n_heads": 8}, ""),
    "one that is not": ({"M": 64, "n_heads": 4}, " n_heads=4"),
    "a number other than a size": ({"window_size": 8}, " window_size=8"),
    "several sizes": ({"seq_len": [8, 64], "batch": [8, 9]}, " batch=8|9"),
    "options that choose inputs": ({"shapes": "64,8", "llama": True}, ""),
}


@pytest.mark.parametrize(("options", "text"), OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], text: str) -> None:
    assert shape_text((64, 8), (torch.ones(64, 8),), options) == f"(64, 8){text}"


def test_what_is_distant() -> None:
    assert not is_distant(Accuracy(rms=1e-3), "fp16")
    assert is_distant(Accuracy(rms=2e-2), "fp16")
    assert is_distant(Accuracy(rms=1e-3), "fp32")
    assert is_distant(Accuracy(), "bf16"), "an error of NaN"


def test_two_problems_of_one_x_val_have_two_names() -> None:
    assert shape_text(4, (torch.ones(4, 3), 2)) != shape_text(4, (torch.ones(4, 3), 5))


X = torch.linspace(1, 2, 12).reshape(3, 4)

INPUT_DTYPES: dict[str, tuple[Any, str | None]] = {
    "the first": ((X.half(), X.bfloat16()), "fp16"),
    "of floats": ((torch.arange(3), X), "fp32"),
    "one that is not ours": ({"x": X.double()}, "float64"),
    "fp8": ([X.to(torch.float8_e4m3fn)], "fp8"),
    "none": ((torch.arange(3), 1.5), None),
}


@pytest.mark.parametrize(("inputs", "name"), INPUT_DTYPES.values(), ids=INPUT_DTYPES)
def test_an_operator_without_a_precision_has_that_of_its_inputs(inputs: Any, name: str | None) -> None:
    assert input_dtype(inputs) == name


def calls(*outputs: Any) -> Any:
    """A function that returns these, one per call."""
    rest = iter(outputs)
    return lambda: next(rest)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: [x, None], lambda x: {"out": x, "n": 3}])
def test_equal_outputs(wrap: Any) -> None:
    accuracy, problem, first = compare_outputs(lambda: wrap(X.clone()), tensors(wrap(X)))
    assert problem is None
    assert (accuracy.rms, accuracy.max_abs, accuracy.unwritten, accuracy.repeatable) == (0, 0, 0, True)
    assert torch.equal(first[0], X)


def test_the_worst_of_several() -> None:
    accuracy, problem, _ = compare_outputs(lambda: (X, X * 1.01), [X, X])
    assert problem is None, "a distance gives no verdict"
    assert accuracy.rms == pytest.approx(0.01, rel=1e-3)
    assert accuracy.mismatch is None, "the tolerance table judges none of TritonBench's operators"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.float64])
@pytest.mark.parametrize("shape", [(12,), (2, 2, 3), ()], ids=str)
def test_any_dtype_and_rank(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    out = torch.ones(shape).to(dtype)
    accuracy, problem, _ = compare_outputs(lambda: out, [out])
    assert problem is None
    assert (accuracy.rms, accuracy.repeatable) == (0, True)


def test_nan_where_the_baseline_has_a_number_is_wrong() -> None:
    bad = X.clone()
    bad[0] = float("nan")
    accuracy, problem, _ = compare_outputs(lambda: bad, [X])
    assert problem == "33.3 % of the output is NaN where the baseline's is not"
    assert accuracy.repeatable, "NaN in the same place is the same"
    assert compare_outputs(lambda: bad, [bad])[1] is None


def test_runs_that_differ() -> None:
    accuracy, _, _ = compare_outputs(calls(X, X + 1e-6), [X])
    assert accuracy.repeatable is False
    assert accuracy.rms == 0


def test_an_output_that_shares_memory_with_the_next_is_copied() -> None:
    counter = torch.zeros(3)
    accuracy, _, _ = compare_outputs(lambda: counter.add_(1), None)
    assert (accuracy.repeatable, accuracy.rms) == (False, None)


@pytest.mark.parametrize("expected", [[X[:2]], [X, X], []], ids=["shape", "more", "none"])
def test_what_cannot_be_compared_is_not(expected: list[torch.Tensor]) -> None:
    accuracy, problem, _ = compare_outputs(lambda: X, expected)
    assert problem is None
    assert (accuracy.rms, accuracy.repeatable) == (None, True)


def test_no_tensors_no_accuracy() -> None:
    assert compare_outputs(lambda: None, [X]) == (None, None, [])
