"""New values in the same buffers: equal in every process, reversible without a copy, and of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from groupbench.operators import relayout
from groupbench.operators.catalog.moe_unpermute import MOE_UNPERMUTE
from groupbench.operators.measure import moves
from groupbench.operators.measure.moves import Moves
from groupbench.operators.registry import get_operator, operator_names

SECRET = 7


@dataclass
class Inputs:
    a: Tensor
    b: Tensor
    ids: Tensor


def make(dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 33, generator=generator).to(dtype) for _ in "ab")
    return Inputs(a, b, torch.arange(5))


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_change_and_stay_within_a_factor_of_two(dtype: torch.dtype) -> None:
    inputs = make(dtype)
    before = inputs.a.double().abs()
    Moves(inputs).set(SECRET, 3)
    after = inputs.a.double()
    assert (after != make(dtype).a.double()).float().mean() > 0.4
    assert after.isfinite().all()
    assert (after.abs() <= 2 * before).all() and (after.abs() >= before / 2).all()
    assert inputs.ids.equal(torch.arange(5))


def test_equal_secrets_give_equal_inputs_and_others_do_not() -> None:
    one, two, three = make(), make(), make()
    stepwise = Moves(one)
    stepwise.set(SECRET)
    for _ in range(4):
        stepwise.advance()
    Moves(two).set(SECRET, 4)
    Moves(three).set(SECRET + 1, 4)
    assert one.a.equal(two.a) and one.b.equal(two.b)
    assert not one.a.equal(three.a)


def test_every_step_changes_every_input() -> None:
    inputs = make()
    moved = Moves(inputs)
    moved.set(SECRET)
    seen = [(inputs.a.clone(), inputs.b.clone())]
    for _ in range(20):
        moved.advance()
        seen.append((inputs.a.clone(), inputs.b.clone()))
        assert not any(seen[-1][0].equal(a) or seen[-1][1].equal(b) for a, b in seen[:-1])


@pytest.mark.parametrize("back", [None, SECRET, 99], ids=["first", "fewer steps", "another secret"])
def test_moves_are_undone(back: int | None) -> None:
    inputs, expected = make(), make()
    moved = Moves(inputs)
    moved.set(SECRET, 5)
    moved.set(back, 0 if back is None else 2)
    Moves(expected).set(back, 0 if back is None else 2)
    assert inputs.a.equal(expected.a) and inputs.b.equal(expected.b)


def test_only_named_inputs_move() -> None:
    inputs = make()
    Moves(inputs, ("b",)).set(SECRET, 2)
    assert inputs.a.equal(make().a) and not inputs.b.equal(make().b)


def test_positive_values_stay_positive_and_nan_stays_nan() -> None:
    inputs = make()
    inputs.a.abs_()
    inputs.b[3:5] = torch.nan
    Moves(inputs).set(SECRET, 3)
    assert (inputs.a >= 0).all()
    assert inputs.b.isnan().any(1).nonzero().flatten().tolist() == [3, 4]


def test_copies_in_another_layout_follow() -> None:
    inputs = make()
    relayout.take()
    padded = relayout.laid_out(torch.empty(64, 40)[:, :33], inputs.a)
    copies = moves.within(relayout.take(), inputs)
    Moves(inputs, (), copies).set(SECRET, 2)
    assert padded.equal(inputs.a) and not padded.equal(make().a)
    assert relayout.take() == []


def test_a_copy_of_an_empty_input_has_nothing_to_refresh() -> None:
    """All empty tensors share the address 0, as do an empty input and its copy."""
    inputs = make()
    inputs.a = torch.empty(0, 33)
    assert moves.within([(torch.empty(0, 40)[:, :33], inputs.a)], inputs) == []


@pytest.mark.parametrize(
    "pair",
    [
        lambda x: (torch.empty(3), torch.empty(3)),
        lambda x: (torch.empty(64, 33, dtype=torch.float64), x.a),
        lambda x: (x.b, x.a),
        lambda x: (torch.nn.Parameter(torch.empty(64, 33)), x.a),
    ],
    ids=["no input", "another dtype", "into an input", "a subclass"],
)
def test_tensors_that_are_not_copies_of_an_input_are_refused(pair: object) -> None:
    inputs = make()
    with pytest.raises(TypeError):
        moves.within([pair(inputs)], inputs)  # type: ignore[operator]


ROUTED = [name for name in operator_names() if get_operator(name).reroute is not None]


@pytest.mark.parametrize("name", ROUTED)
def test_another_routing_has_as_many_rows(name: str) -> None:
    operator = get_operator(name)
    changed = 0
    for shape in operator.suites["smoke"]:
        inputs = operator.make_inputs(shape, operator.dtypes[-1], "cpu", 0)
        rows = getattr(inputs, "rows", None)
        with moves.rerouted(operator, shape, inputs, 3) as has_another:
            changed += has_another
            if hasattr(inputs, "offs") and inputs.offs.numel():
                ends = inputs.offs.tolist()
                assert ends == sorted(ends) and ends[-1] == sum(rows)  # type: ignore[arg-type]
            operator.reference(inputs)
    assert changed


def test_rows_without_an_owner_stay_without_one() -> None:
    shape = MOE_UNPERMUTE.parse_shape("elsewhere")
    inputs = MOE_UNPERMUTE.make_inputs(shape, "fp32", "cpu", 0)
    with moves.rerouted(MOE_UNPERMUTE, shape, inputs, 5):
        Moves(inputs).set(SECRET, 4)
        assert MOE_UNPERMUTE.reference(inputs).isfinite().all()  # type: ignore[union-attr]


@dataclass
class Counted:
    """Inputs without floating-point values."""

    x: Tensor
    bins: int = 8


def _counted(seed: int) -> Counted:
    return Counted(torch.randint(0, 8, (64,), generator=torch.Generator().manual_seed(seed)))


def test_inputs_without_floating_point_values_are_drawn_again() -> None:
    inputs, judged = _counted(0), _counted(0)
    there, here = Moves(inputs, draw=_counted), Moves(judged, draw=_counted)
    first, seen = inputs.x.clone(), []
    there.set(5)
    for step in range(1, 8):
        there.advance()
        here.set(5, step)
        assert torch.equal(inputs.x, judged.x) and int(inputs.x.max()) < 8
        seen.append(inputs.x.clone())
    assert not any(torch.equal(one, other) for n, one in enumerate([first, *seen]) for other in seen[n:])
    there.set(None)
    assert torch.equal(inputs.x, first)


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed: Counted(torch.zeros(63 + seed, dtype=torch.int64)),
        lambda seed: Counted(torch.zeros(64, dtype=torch.int64), 8 + seed),
    ],
    ids=["other sizes", "other numbers"],
)
def test_inputs_that_cannot_take_the_place_of_others_do_not_move(draw: Callable[[int], Counted]) -> None:
    assert not Moves(draw(0), draw=draw).any
