"""Detection of backends that change or return their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from groupbench.operators.catalog.vector_add import VECTOR_ADD, VectorInputs
from groupbench.operators.measure import exchange, given
from groupbench.operators.measure.accuracy import check
from groupbench.operators.measure.given import Given
from groupbench.operators.registry import get_operator, operator_names
from groupbench.operators.tolerances import TOLERANCES


@dataclass(frozen=True)
class Nested:
    x: VectorInputs
    parts: tuple[Tensor, ...]
    shared: Tensor
    empty: Tensor
    rows: int = 3


def nested() -> Nested:
    values = torch.arange(1.0, 1001)
    return Nested(
        VectorInputs(values[::3], torch.arange(7, dtype=torch.int8)),
        (torch.ones(5, dtype=torch.float64), torch.ones(3, 3, dtype=torch.bfloat16).t()),
        torch.full((4, 6), 2.0).expand(1000, 4, 6),
        torch.empty(0, 5),
    )


def set_between(x: Nested) -> None:
    """Write between the strided elements, which is memory of the input too."""
    x.x.x.untyped_storage()[5] = 1


CHANGES: dict[str, tuple[Callable[[Nested], object], str | None]] = {
    "nothing": (lambda x: x.x.x + 1, None),
    "the_same_values": (lambda x: x.x.x.copy_(x.x.x.clone()), None),
    "one_element": (lambda x: x.x.x[-1:].zero_(), "the backend changed its input x.x"),
    "a_sign": (lambda x: x.parts[0][:1].neg_(), "the backend changed its input parts[0]"),
    "all_signs": (lambda x: x.parts[0].neg_(), "the backend changed its input parts[0]"),
    "places": (lambda x: x.x.x.copy_(x.x.x.flip(0)), "the backend changed its input x.x"),
    "between": (set_between, "the backend changed its input x.x"),
    "the_last_byte": (lambda x: x.x.y[-1:].zero_(), "the backend changed its input x.y"),
    "a_small_dtype": (lambda x: x.parts[1][2, 2].zero_(), "the backend changed its input parts[1]"),
    "shared_memory": (lambda x: x.shared[0, 3, 5].zero_(), "the backend changed its input shared"),
    "two": (lambda x: (x.x.x.zero_(), x.shared[0].zero_()), "the backend changed its inputs x.x, shared"),
    "many": (
        lambda x: [part.zero_() for part in (x.x.x, x.x.y, *x.parts, x.shared[0])],
        "the backend changed its inputs x.x, x.y, parts[0] and 2 more",
    ),
}


@pytest.mark.parametrize("summed", [given.SUMMED, 100])
@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_reported_with_the_inputs_names(
    change: Callable[[Nested], object], message: str | None, summed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given, "SUMMED", summed)
    x = nested()
    before = Given(x)
    change(x)
    assert before.misuse() == message


def test_tensors_without_storage_are_skipped() -> None:
    values = torch.eye(4)
    before = Given([values.to_sparse(), Nested, torch.ones(3, device="meta"), values])
    assert before.misuse() is None
    values.zero_()
    assert before.misuse() == "the backend changed its input [3]"


def test_an_input_that_requires_grad_is_checked_and_not_changed() -> None:
    x = torch.ones(3, requires_grad=True)
    before = Given([x])
    (2 * x).sum().backward()
    assert before.misuse() is None
    with torch.no_grad():
        x.zero_()
    assert before.misuse() == "the backend changed its input [0]"


MISUSES = {
    "in_place": (lambda x: x.x.add_(x.y), "the backend changed its input x"),
    "as_scratch": (lambda x: [x.x + x.y, x.y.zero_()][0], "the backend changed its input y"),
    "the_input": (lambda x: x.x, "the output shares memory with its input x"),
    "a_view_of_it": (lambda x: x.y.view(-1), "the output shares memory with its input y"),
    "groups_of_it": (lambda x: [x.x[:2], x.x[2:]], "the output shares memory with its input x"),
    "a_copy": (lambda x: x.x.clone(), "relative RMS error"),
    "right": (lambda x: x.x + x.y, None),
}


@pytest.mark.parametrize(("run", "message"), MISUSES.values(), ids=MISUSES)
def test_misuse_is_reported_before_wrong_numbers(run: Callable[[VectorInputs], Tensor], message: str | None) -> None:
    """The wrong numbers would be reported as unwritten output, which is misleading."""
    x = VECTOR_ADD.make_inputs(VECTOR_ADD.parse_shape("N=5"), "fp32", "cpu", 0)
    reference, before = VECTOR_ADD.reference(x), Given(x)
    kept = (x.x.clone(), x.y.clone())
    problem = check(lambda: run(x), reference, TOLERANCES["fp32"], given=before)[1]
    assert (problem or "").startswith(message or "")
    assert (problem is None) == (message is None)
    if message is None or "changed" not in message:  # the check itself must not change the inputs
        assert torch.equal(x.x, kept[0])
        assert torch.equal(x.y, kept[1])


@pytest.mark.parametrize("name", operator_names())
def test_every_operators_inputs_are_found(name: str) -> None:
    operator = get_operator(name)
    for mode in operator.modes:
        measured = operator.in_mode(mode)
        dtype = "fp16" if "fp16" in operator.dtypes else operator.dtypes[0]
        inputs = measured.make_inputs(measured.suites["smoke"][0], dtype, "cpu", 0)
        tensors = [tensor for _, tensor in given.named_tensors(inputs) if tensor.numel()]
        assert any(tensor.is_floating_point() for tensor in tensors)
        for tensor in tensors:
            before = Given(inputs)
            tensor.untyped_storage()[0] = 1 + tensor.untyped_storage()[0] % 100
            assert before.misuse() is not None


def test_a_copy_of_an_input_in_another_layout_may_not_be_returned_either() -> None:
    x, copy, other = torch.ones(4, 4), torch.empty(4, 4), torch.empty(4, 4)
    given = Given([x])
    given.register([(copy, x)])
    assert given.holding([copy[1:], other]) == ["[0]"] == given.holding([x.t()])
    assert given.holding([other]) == []


def test_an_empty_view_of_an_input_shares_no_memory() -> None:
    x = torch.ones(4)
    inputs = VectorInputs(x, x)
    assert Given(inputs).holding([x[:0]]) == []
    assert Given(inputs).holding([x[:1]]) == ["x"]


def test_an_empty_array_has_a_sum() -> None:
    empty = torch.from_numpy(np.arange(4.0, dtype=np.float32)[np.zeros(4, dtype=bool)])
    assert exchange.sums([[empty, torch.ones(3)], [empty]]) == exchange.sums([[torch.ones(3)], []])


def test_no_other_output_has_the_sum_of_one() -> None:
    """In host memory, where an output could otherwise be chosen for a sum that was named in advance."""
    values = torch.arange(64.0)
    assert (
        len({*exchange.sums([[values], [values.flip(0)], [values[:32]], [values + 1, values], [values, values]])}) == 5
    )
