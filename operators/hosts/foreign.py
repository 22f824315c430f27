"""Operators that are not ours: what their inputs are called, and how far their backends' outputs lie apart.

Of TritonBench's own operators there is no reference in higher precision, and their outputs are whatever their authors
return. So the numbers are a distance from the baseline, two roundings apart at best: for a history to watch, not for a
verdict, which stays TritonBench's own. One thing is wrong whatever the tolerance: NaN where the baseline has a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from groupbench.operators.dtypes import dtype_name
from groupbench.operators.measure.accuracy import compare, worst_of
from groupbench.operators.tolerances import TOLERANCES
from groupbench.tracker.record import Accuracy


def shape_text(x_val: Any, example_inputs: Any) -> str:
    """A problem's name: TritonBench's x_val, with the sizes and numbers of the inputs where it leaves any out.

    TritonBench's tables are content with x_val, but several inputs of a run may share one (jagged_sum's is one size of
    four), and a history needs a name that is theirs alone: `4 [4x*x512, 4, 512, 512, 0.1]`.
    """
    leaves = tree_leaves(example_inputs)
    said = set(map(str, tree_leaves(x_val)))
    numbers = {str(number) for leaf in leaves for number in _numbers(leaf)}
    if numbers <= said | {"1"}:
        return str(x_val)
    return f"{x_val} [{', '.join(text for text in map(_text, leaves) if text)}]"


def _numbers(leaf: Any) -> list[Any]:
    if isinstance(leaf, Tensor):
        return [size for size in leaf.shape if type(size) is int]
    return [leaf] if isinstance(leaf, (bool, int, float, str)) else []


def _text(leaf: Any) -> str:
    """Sizes as 4x128, a ragged one, which differs between runs, as *; other objects have no name."""
    if isinstance(leaf, Tensor):
        return "x".join(str(size) if type(size) is int else "*" for size in leaf.shape) or "scalar"
    return str(leaf) if isinstance(leaf, (bool, int, float, str)) else ""


def input_dtype(example_inputs: Any) -> str | None:
    """The name of the first floating-point tensor's dtype, or None: for operators that say no precision of theirs."""
    found = [
        leaf.dtype for leaf in tree_leaves(example_inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    return (dtype_name(found[0]) or str(found[0]).removeprefix("torch.")) if found else None


def tensors(output: Any) -> list[Tensor]:
    """Copies of all tensors in an output, in whatever tuples, lists and dicts they come."""
    return [leaf.detach().clone() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def compare_outputs(
    run: Callable[[], Any], expected: list[Tensor] | None
) -> tuple[Accuracy | None, str | None, list[Tensor]]:
    """(errors, the worst of all tensors', or None; what is wrong, or None; the first run's tensors).

    Runs twice, without poisoning memory: an output may share it with the inputs. Without `expected` what is known is
    whether the runs agreed. Tensors of other number or shape than `expected` cannot be compared.
    """
    first, second = tensors(run()), tensors(run())
    if not first:
        return None, None, first
    repeatable = len(first) == len(second) and all(map(_same, first, second))
    if expected is None:
        return Accuracy(repeatable=repeatable), None, first
    if [x.shape for x in first] != [x.shape for x in expected]:
        return Accuracy(repeatable=repeatable), None, first
    found = [_compare(x, y) for x, y in zip(first, expected, strict=True)]
    accuracy = msgspec.structs.replace(worst_of(found), repeatable=repeatable)
    if not accuracy.unwritten:
        return accuracy, None, first
    return accuracy, f"{100 * accuracy.unwritten:.3g} % of the output is NaN where the baseline's is not", first


def _compare(x: Tensor, y: Tensor) -> Accuracy:
    tolerance = TOLERANCES.get(dtype_name(x.dtype) or "", TOLERANCES["fp32"])
    return compare(_wide(x), _wide(y), tolerance)[0]


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.dtype in (torch.float64, torch.int32, torch.int64) else x.float()


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool(((x == y) | (torch.isnan(_wide(x)) & torch.isnan(_wide(y)))).all())
