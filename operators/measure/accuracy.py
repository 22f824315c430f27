"""Compare outputs with a reference in higher precision, after poisoning memory to reveal unwritten elements."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from groupbench.operators.dtypes import torch_dtype
from groupbench.operators.measure.arrays import size_of, tensor_of
from groupbench.operators.measure.deferred import F, Tensor, torch
from groupbench.operators.measure.exchange import arranged, plain_parts
from groupbench.operators.measure.given import Given
from groupbench.operators.operator import Operator
from groupbench.operators.tolerances import TOLERANCES, Tolerance, tolerance_of
from groupbench.tracker.facts.metrics import finite_or_none
from groupbench.tracker.facts.record import Accuracy

ERROR_BLOCK = 64
"""Rows and columns of the blocks whose error is computed on its own."""
UNWRITTEN = 77
"""The value that marks unwritten elements of integer outputs, which have no NaN."""

_FRESH = {2: 0x7FE5, 4: 0x7FE5E5E5, 8: 0x7FFDE5E5E5E5E5E5}
_EARLIER = {2: 0x7FDA, 4: 0x7FDADADA, 8: 0x7FFDDADADADADADA}
"""Bits of the NaN in fresh memory, and in earlier outputs, by size of an element in bytes. An element of one byte has
too few of them. The sum of one and a number may have the same bits, or those of any other NaN."""


@dataclass(frozen=True)
class Finer:
    """The limit for a result that should have rounding errors like those of another one.

    The square of a relative RMS error is a mean over elements, weighted by their squares. So it scatters like a mean
    over `number` equal elements, where number = sum(x^2)^2 / sum(x^4): a third of the elements of normal values, and
    one if a single element is most of the output. The error may be `coarser + spread / sqrt(number)` times the other
    one. No element is off by more than 2.4 times the RMS error of a rounding, so few elements cannot exceed this. None
    applies if `number` is below `least`: the limit would reach the error of int8 in place of bf16, thrice as large.
    """

    coarser: float = 1.5
    spread: float = 5.0
    least: float = 12.0


FINER = Finer()

View = Callable[["Tensor", "Tensor"], tuple["Tensor", "Tensor"]]
Judged = tuple[Accuracy, str | None]
"""The errors of an output, and a text with the exceeded tolerance, or None."""


def as_given(out: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    return out, reference


@dataclass(frozen=True)
class Rehearsal:
    """The outputs of two calls on poisoned memory.

    form      how the tensors of an output are arranged
    second    tensors of the second output
    first     those of the first output if they are unlike, else none
    returned  names of the inputs that share memory with an output
    fresh     whether outputs that were held at once have memory of their own
    """

    form: str
    second: list[Tensor]
    first: list[Tensor]
    returned: list[str]
    fresh: bool


HELD, HELD_BYTES, HELD_S = 9, 256 << 20, 0.05
"""Most outputs that are held at once, their size in bytes together, and the time for these calls in s, to find buffers
that are used in turns."""

_now = time.perf_counter


def rehearse(run: Callable[[], Any], device: str, inputs: Given | None, patient: bool = True) -> Rehearsal:
    """Run twice on poisoned memory, and a few times more to find outputs that share memory.

    patient  whether the callable is fast enough for more than two calls

    Raises TypeError if an output contains anything but plain tensors.
    """
    with poisoned():
        first = run()
        form, parts = plain_parts(first, device)
        kept = [part.detach().clone() for part in parts]
        returned = _spoil(parts, inputs)
        second = plain_parts(run(), device)[1]
    # Copies, since the backend must not be able to change tensors that another process reads.
    copies = [part.detach().clone() for part in second]
    held, until = [parts, second], _now() + HELD_S
    room = HELD_BYTES // max(size_of(parts), 1) if patient else 0
    while len(held) < min(HELD, room) and _now() < until:
        held.append(plain_parts(run(), device)[1])
    fresh = _are_apart(held)
    del first, parts, second, held
    if device == "cuda":
        torch.cuda.synchronize()
    like = len(kept) == len(copies) and all(map(_same_bits, kept, copies))
    return Rehearsal(form, copies, [] if like else kept, returned, fresh)


def _are_apart(outputs: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether no two of these outputs have memory in common."""
    places = [{part.untyped_storage().data_ptr() for part in parts if part.numel()} for parts in outputs]
    return len(set().union(*places)) == sum(map(len, places))


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(_bits(x), _bits(y))


def judge(
    out: Any,
    reference: Tensor | Mapping[str, Tensor],
    operator: Operator,
    dtype: str,
    tolerance: Tolerance,
    local: float = 1.0,
    view: View = as_given,
    like: float | None = None,
) -> Judged:
    """Return an output's errors for a dtype, and a text with the exceeded tolerance, or None.

    The further arguments are those of `compare`. Raises TypeError or ValueError if the output does not have the
    reference's shape and the operator's dtype.
    """
    return _compare_each(out, reference, _returned(operator, dtype), operator.decode, tolerance, local, like, view)


def check(
    run: Callable[[], Any],
    reference: Tensor | Mapping[str, Tensor],
    tolerance: Tolerance,
    dtype: torch.dtype | None = None,
    given: Given | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> Judged:
    """Rehearse a callable in this process and compare each output with the reference.

    Returns the errors, for several outputs the worst numbers, and the fault as text, or None. A changed or returned
    input of `given` is reported first, then wrong numbers. Raises TypeError or ValueError if the output is not a tensor
    with the reference's shape and, if given, `dtype`.
    """
    some = next(iter(reference.values())) if isinstance(reference, Mapping) else reference
    shown = rehearse(run, some.device.type, given, patient=False)
    accuracy, problem = _compare_each(arranged(shown.form, shown.second), reference, dtype, decode, tolerance)
    if problem is None and shown.first:
        _, first = _compare_each(arranged(shown.form, shown.first), reference, dtype, decode, tolerance)
        problem = first and f"another run of the same call: {first}"
    if given is not None:
        problem = given.misuse(shown.returned) or problem
    return msgspec.structs.replace(accuracy, repeatable=not shown.first), problem


def check_backend(
    run: Callable[[], Any],
    reference: Tensor | Mapping[str, Tensor],
    operator: Operator,
    backend: str,
    dtype: str,
    rtol: float | None = None,
    atol: float | None = None,
    given: Given | None = None,
) -> Judged:
    """Call `check` with the tolerance for the backend's name and the operator's output dtype.

    Args:
        rtol, atol: Replace those of the tolerance table.
    """
    tolerance = tolerance_of(operator, backend, dtype).with_overrides(rtol, atol)
    return check(run, reference, tolerance, _returned(operator, dtype), given, operator.decode)


def _returned(operator: Operator, dtype: str) -> torch.dtype | None:
    """Return the dtype of an operator's output: bf16 for the row bf16_summed of the tolerance table.

    None if the operator decodes the output, which may be packed, such as w4.
    """
    return None if operator.decode is not None else torch_dtype(operator.output_dtype(dtype).partition("_")[0])


def _spoil(parts: Sequence[Tensor], inputs: Given | None) -> list[str]:
    """Fill an output with a NaN, and so the block likely to be allocated next.

    `poisoned` does not reach a backend with allocations below Python, or with private buffers. An output shared with an
    input is not changed. Returns these inputs' names.
    """
    returned = inputs.holding(parts) if inputs is not None else []
    with torch.inference_mode():  # or torch refuses to change an output from a backend's own inference mode
        for part in () if returned else parts:
            if part.is_floating_point():
                _fill(part, _EARLIER)
            else:
                part.fill_(UNWRITTEN)
    return returned


def _fill(x: Tensor, marks: Mapping[int, int]) -> None:
    """Fill a floating-point tensor with a NaN by size."""
    mark = None if x.is_neg() else marks.get(x.element_size())
    if mark is None:
        x.fill_(math.nan)
    else:
        x.view(_integers(x)).fill_(mark)


def _compare_each(
    out: Any,
    reference: Tensor | Mapping[str, Tensor],
    dtype: torch.dtype | None,
    decode: Callable[[Any], Any] | None,
    *limits: Any,
) -> Judged:
    """Compare every output with a reference. Return the worst of each number, and the first fault.

    Args:
        limits: Further arguments of `compare`.
    """
    out = out if decode is None else decode(out)
    if not isinstance(reference, Mapping):
        return compare(_output("", out, reference, dtype), reference, *limits)
    if not isinstance(out, (tuple, list)):
        raise TypeError(f"the backend returned {type(out).__name__}, not a tuple of {', '.join(reference)}")
    if len(out) != len(reference):
        raise ValueError(f"the backend returned {len(out)}, expected {len(reference)} outputs: {', '.join(reference)}")
    outputs = [_output(name, part, reference[name], dtype) for name, part in zip(reference, out, strict=True)]
    errors = [compare(each, reference[name], *limits) for name, each in zip(reference, outputs, strict=True)]
    faults = (f"{name}: {fault}" for name, (_, fault) in zip(reference, errors, strict=True) if fault)
    return worst_of([accuracy for accuracy, _ in errors]), next(faults, None)


def worst_of(errors: Sequence[Accuracy]) -> Accuracy:
    """Return the worst numbers over several outputs, and the first bad coordinates."""

    def worst(field: str) -> Any:
        values = [getattr(one, field) for one in errors]
        return None if None in values else max(values)  # None means infinity

    numbers = {name: worst(name) for name in ("rms", "max_abs", "worst_block_rms", "mismatch", "unwritten")}
    return Accuracy(**numbers, first_bad=next((one.first_bad for one in errors if one.first_bad), None))


def compare(
    out: Tensor,
    reference: Tensor,
    tolerance: Tolerance,
    local: float = 1.0,
    like: float | None = None,
    view: View = as_given,
) -> Judged:
    """Return the errors of `out` [M, N] from `reference` [M, N], and the exceeded tolerance as text, or None.

    Args:
        out: Any dtype; it is compared in the reference's. Integers are compared with integers bit by bit.
        local: Limit for a row or block, in units of the tolerance's relative RMS.
        like: A relative RMS error than which this one must not be much larger (`Finer`).
        view: (output, reference) -> the tensors to compare.
    """
    if out.numel() == 0:
        return Accuracy(rms=0.0, max_abs=0.0, worst_block_rms=0.0, mismatch=0.0, unwritten=0.0), None
    if out.is_floating_point() or reference.is_floating_point():
        out, reference = view(out, reference if reference.is_floating_point() else reference.double())
    else:
        out, tolerance = (out == reference).double(), TOLERANCES["int64"]
        reference = torch.ones_like(out)
    missing = torch.isnan(out) & ~torch.isnan(reference)
    unwritten = missing.float().mean().item()
    wide = out.to(reference.dtype)
    # NaN and infinity in the same place on both sides is agreement, anywhere else the largest possible error.
    same = (wide == reference) | (torch.isnan(wide) & torch.isnan(reference))
    error = torch.where(same, 0.0, wide - reference).abs_().nan_to_num_(nan=math.inf, posinf=math.inf)
    expected = reference.abs().nan_to_num_(0.0, 0.0, 0.0)
    scale = expected.square().mean().sqrt().item()
    near = expected.square().mean(-1, keepdim=True).sqrt_().clamp_(min=scale)
    outside = error > tolerance.atol * near + tolerance.rtol * expected
    mismatch = outside.float().mean().item()
    rms = error.square().mean().sqrt().item()
    rms = rms / scale if scale else math.inf if rms else 0.0
    worst = _worst_block(error, expected, scale)
    first_bad = tuple(torch.nonzero(outside)[0].tolist()) if mismatch else None
    accuracy = Accuracy(
        rms=finite_or_none(rms),
        max_abs=finite_or_none(error.max().item()),
        worst_block_rms=finite_or_none(worst),
        mismatch=mismatch,
        unwritten=unwritten,
        first_bad=first_bad,
    )
    allowed = tolerance.rms if like is None else min(tolerance.rms, _coarsest(like, expected, scale))
    if unwritten:
        problem = _missing(out, missing)
    elif rms > allowed:
        problem = f"relative RMS error {rms:.2g} (allowed {allowed:.2g})"
    elif worst > local * tolerance.rms:
        problem = f"relative RMS error {worst:.2g} in a row or block (allowed {local * tolerance.rms:.2g})"
    elif mismatch:
        problem = f"{_percent(mismatch)} of the elements are outside the tolerance"
    else:
        return accuracy, None
    return accuracy, problem + (f", the first at {list(first_bad)}" if first_bad else "")


def _coarsest(like: float, expected: Tensor, scale: float) -> float:
    """Return the largest relative RMS error by `Finer`, for an output with these magnitudes and this RMS."""
    if not scale:
        return math.inf
    weights = (expected / scale).square_()
    number = weights.numel() / weights.square_().mean().item()
    return (FINER.coarser + FINER.spread / math.sqrt(number)) * like if number >= FINER.least else math.inf


def _missing(out: Tensor, missing: Tensor) -> str:
    """Return why elements are NaN: from an earlier output, from fresh memory, or computed."""
    size = out.element_size()
    if size in _FRESH:
        bits = _bits(out)
        for marks, text in (
            (_EARLIER, "is that of an earlier call, returned again or never overwritten"),
            (_FRESH, "was never written"),
        ):
            share = ((bits == marks[size]) & missing).float().mean().item()
            if share:
                return f"{_percent(share)} of the output {text}"
    return f"{_percent(missing.float().mean().item())} of the output is NaN, perhaps from memory that was never written"


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill uninitialized floating-point tensors, allocated by Python code in this context, with NaN."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names = ("empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided")
    fresh = {torch.ops.aten.empty.memory_format, *(getattr(torch.ops.aten, name).default for name in names)}

    class Poison(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """Return `function`: if Dynamo is not imported it has nothing to skip, and `disable` would import it."""
            return "torch._dynamo" in sys.modules

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in fresh and result.is_floating_point():
                _fill(result, _FRESH)
            return result

    with Poison():  # type: ignore[no-untyped-call] # untyped in torch
        yield


def _output(name: str, out: Any, reference: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the output as one [M, N] tensor; a list of one tensor per group is concatenated."""
    if isinstance(out, (list, tuple)) and out and all(isinstance(part, torch.Tensor) for part in out):
        out = torch.cat(list(out))
    tensor, returned = tensor_of(out), f"{name and f'{name}: '}the backend returned"
    if tensor is None:
        raise TypeError(f"{returned} {type(out).__name__}, not a tensor")
    if tensor.shape != reference.shape:
        raise ValueError(f"{returned} shape {list(tensor.shape)}, expected {list(reference.shape)}")
    if dtype is not None and not (tensor.is_floating_point() or reference.is_floating_point()):
        dtype = reference.dtype if dtype.is_floating_point else dtype  # an index next to values in the cell's dtype
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{returned} {tensor.dtype}, expected {dtype}")
    return tensor


def _worst_block(error: Tensor, expected: Tensor, scale: float) -> float:
    """Return the largest relative RMS over rows and 64 x 64 blocks, which a mean over everything would hide.

    Args:
        error: [M, N] absolute errors.
        expected: [M, N] magnitudes of the reference.
        scale: RMS of the whole reference.

    A twentieth of the whole output's RMS is added to the denominator: a row canceling to nothing is not divided by
    nothing.
    """
    floor = (0.05 * scale) ** 2

    def worst(e: Tensor, r: Tensor) -> float:
        return (e / (r + floor).clamp_min(torch.finfo(r.dtype).tiny)).max().sqrt().item()

    e, r = error.square(), expected.square()
    rows = worst(e.mean(-1), r.mean(-1))
    width = e.shape[-1] if e.dim() else 1  # a vector is one row
    e, r = (F.avg_pool2d(x.reshape(1, 1, -1, width), ERROR_BLOCK, ceil_mode=True) for x in (e, r))
    return max(rows, worst(e, r))


def _bits(x: Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers with the same size: NaN equals NaN, and -0 differs from 0."""
    return x.detach().contiguous().view(_integers(x))


def _integers(x: Tensor) -> torch.dtype:
    """Return the integer type as large as a tensor's elements."""
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
