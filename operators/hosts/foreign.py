"""Names of the inputs of TritonBench's own operators, and the distance of their backends' outputs.

TritonBench's operators have no reference in higher precision, and return whatever their authors chose. So the accuracy
in a record is the distance from the baseline, at best two roundings, whose history can be watched. The verdict is that
of TritonBench's check if someone chose a tolerance for it. Otherwise an output is wrong if it is far from the
baseline's, or NaN in an element that the baseline computes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from groupbench.operators.dtypes import dtype_name
from groupbench.operators.measure.accuracy import compare, worst_of
from groupbench.operators.tolerances import TOLERANCES
from groupbench.tracker.facts.record import Accuracy

SIZES = (
    *("B", "D", "H", "K", "M", "N", "T", "V", "batch", "batch_size", "d_head", "head_d", "head_kv", "head_q"),
    *("hidden_size", "in_features", "k", "m", "n", "n_heads", "n_heads_kv", "n_heads_q", "out_features"),
    *("seq_len", "seq_len_kv", "seq_len_q", "seqlen", "sparsity", "vocab_size"),
)
"""Options that are a size of the inputs. A problem's name leaves them out if it already contains the number."""

CHOICES = (
    *("batch_scaling_shapes", "custom_shapes_attr", "custom_shapes_file", "input", "input_types", "large_k_shapes"),
    *("llama", "mod_type", "non_square", "only_fb_shapes", "persistent_tutorial_shapes", "plot_benchmarks"),
    *("prefill", "quack_shapes", "shapes", "splitk", "v_range", "verbose_autotune"),
)
"""Options that choose among inputs, each with a name of its own, or that only affect the output."""


DISTANCE_FACTOR = 10
"""Multiple of the tolerance table's limit for the distance of two backends, since each may round between steps."""


def shape_text(x_val: Any, example_inputs: Any, options: dict[str, Any] | None = None) -> str:
    """Return a problem's name: TritonBench's x_val, the inputs unless x_val describes them, and the options.

    Several inputs of a run may have the same x_val (jagged_sum's is one of four sizes), and a history needs unique
    names: `4 [4x*x512, 4, 512, 512, 0.1]`. x_val describes an input if it has each of its numbers as often as the
    input does. `options` are the operator's options that differ from their defaults:
    `512 [512x512] input_dim=2,reduce_dim=0`.
    """
    leaves = tree_leaves(example_inputs)
    numbers = Counter(map(str, tree_leaves(x_val)))
    name = str(x_val)
    if not all(Counter(number for number in map(str, _numbers(leaf)) if number != "1") <= numbers for leaf in leaves):
        name += f" [{', '.join(text for text in map(_text, leaves) if text)}]"
    return f"{name} {options_text(options or {}, name)}".rstrip()


def options_text(options: dict[str, Any], name: str) -> str:
    """Return options sorted by name, `causal,layout=nn`, without sizes that the problem's name already contains."""
    numbers = set(re.findall(r"\d+(?:\.\d+)?", name))
    texts = {key: _value(value) for key, value in sorted(options.items()) if key not in CHOICES}
    return ",".join(
        key if text == "True" else f"{key}={text}"
        for key, text in texts.items()
        if key not in SIZES or not numbers.issuperset(text.split("|"))
    )


def _value(value: Any) -> str:
    return "|".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _numbers(leaf: Any) -> list[Any]:
    if isinstance(leaf, Tensor):
        return [size for size in leaf.shape if type(size) is int]
    return [leaf] if isinstance(leaf, (bool, int, float, str)) else []


def _text(leaf: Any) -> str:
    """Return a tensor's sizes as 4x128, with * for a ragged size, which differs between runs; "" for other objects."""
    if isinstance(leaf, Tensor):
        return "x".join(str(size) if type(size) is int else "*" for size in leaf.shape) or "scalar"
    return str(leaf) if isinstance(leaf, (bool, int, float, str)) else ""


def input_dtype(example_inputs: Any) -> str | None:
    """Return the name of the first floating-point tensor's dtype, or None, for operators without a precision."""
    dtypes = [
        leaf.dtype for leaf in tree_leaves(example_inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    return (dtype_name(dtypes[0]) or str(dtypes[0]).removeprefix("torch.")) if dtypes else None


def tensors(output: Any) -> list[Tensor]:
    """Return copies of all tensors in an output, which may nest tuples, lists and dicts."""
    return [leaf.detach().clone() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def compare_outputs(
    run: Callable[[], Any], expected: list[Tensor] | None
) -> tuple[Accuracy | None, str | None, list[Tensor]]:
    """Return (errors of the worst tensor or None, the problem or None, the first run's tensors).

    Runs twice, and does not poison memory, since an output may share it with the inputs. Without `expected`, or if the
    tensors differ from it in number or shape, the errors only state whether both runs agreed.
    """
    first, second = tensors(run()), tensors(run())
    if not first:
        return None, None, first
    repeatable = len(first) == len(second) and all(map(_same, first, second))
    if expected is None:
        return Accuracy(repeatable=repeatable), None, first
    if [x.shape for x in first] != [x.shape for x in expected]:
        return Accuracy(repeatable=repeatable), None, first
    errors = [_compare(x, y) for x, y in zip(first, expected, strict=True)]
    accuracy = msgspec.structs.replace(worst_of(errors), repeatable=repeatable)
    if not accuracy.unwritten:
        return accuracy, None, first
    return accuracy, f"{100 * accuracy.unwritten:.3g} % of the output is NaN where the baseline's is not", first


def is_distant(accuracy: Accuracy, dtype: str) -> bool:
    """Return whether an output is further from the baseline's than any order of additions explains."""
    return accuracy.rms is None or accuracy.rms > DISTANCE_FACTOR * TOLERANCES.get(dtype, TOLERANCES["fp32"]).rms


def _compare(x: Tensor, y: Tensor) -> Accuracy:
    """Return the distance of two tensors, without the elements outside the tolerance table: it does not judge them."""
    tolerance = TOLERANCES.get(dtype_name(x.dtype) or "", TOLERANCES["fp32"])
    return msgspec.structs.replace(compare(_wide(x), _wide(y), tolerance)[0], mismatch=None, first_bad=None)


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.dtype in (torch.float64, torch.int32, torch.int64) else x.float()


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool(((x == y) | (torch.isnan(_wide(x)) & torch.isnan(_wide(y)))).all())
