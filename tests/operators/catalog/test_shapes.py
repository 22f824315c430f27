"""A shape's text names the whole problem, and reads back as the same problem."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators.catalog import shapes
from groupbench.operators.catalog.shapes import GroupedShape, listed, parse, uniform

sizes = st.integers(1, 4096)
groups = st.integers(1, 40)
routings = st.sampled_from(
    [
        "balanced",
        "uniform(0.7,1.3)",
        "zipf(1.2)",
        "zipf(0)",
        "multinomial",
        "multinomial+empty(0.25)",
        "balanced+empty(.9)",
    ]
)


@st.composite
def any_shape(draw: st.DrawFn) -> GroupedShape:
    n, k = draw(sizes), draw(sizes)
    options = {"nk": draw(st.booleans()), "shared": draw(st.booleans())}
    if draw(st.booleans()):
        rows = draw(st.lists(st.integers(0, 500), min_size=1, max_size=20))
        return listed(tuple(rows), n, k, **options)
    return GroupedShape(draw(groups), draw(st.integers(0, 5000)), n, k, routing=draw(routings), **options)


@given(any_shape())
def test_text_reads_back_as_the_same_shape(shape: GroupedShape) -> None:
    assert parse(str(shape)) == shape
    assert str(parse(str(shape))) == str(shape)


def test_names_of_shapes_are_unique_and_parse() -> None:
    names = [name for suite in shapes.SUITES.values() for name in suite]
    assert len(names) == len(set(names))
    assert parse("one_owner").rows == (0, 0, 1024, 0, 0, 0, 0, 0)
    assert parse(" titan_cg ") == shapes.SUITES["moe"]["titan_cg"]


def test_suites_hold_the_corners() -> None:
    for suite in ("ragged", "smoke"):
        rows = [shape.rows for shape in shapes.SUITES[suite].values()]
        assert any(0 in r for r in rows), "an empty group"
        assert any(1 in r for r in rows), "a one-row group"
        assert any(len(r) == 1 for r in rows), "one group alone"
        assert any(m % 16 for r in rows for m in r), "a ragged tail"


READ = {
    "tritonbench": ("4,64,32,16", GroupedShape(4, 256, 32, 16, listed=(64, 64, 64, 64)), "G=4,M_g=64,N=32,K=16"),
    "spaces": (" 4 , 64,32 ,16 ", GroupedShape(4, 256, 32, 16, listed=(64, 64, 64, 64)), "G=4,M_g=64,N=32,K=16"),
    "one M_g for all": ("G=3,M_g=5,N=8,K=9", GroupedShape(3, 15, 8, 9, listed=(5, 5, 5)), "G=3,M_g=5,N=8,K=9"),
    "rows listed": (
        "K=9,N=8,G=3,M_g=0|1|129",
        GroupedShape(3, 130, 8, 9, listed=(0, 1, 129)),
        "G=3,M_g=0|1|129,N=8,K=9",
    ),
    "no rows": ("G=2,M_g=0,N=8,K=9", GroupedShape(2, 0, 8, 9, listed=(0, 0)), "G=2,M_g=0,N=8,K=9"),
    "balanced": ("G=3,M=7,N=8,K=9", GroupedShape(3, 7, 8, 9), "G=3,M=7,N=8,K=9,routing=balanced"),
    "a comma in the routing": (
        "G=3,M=7,N=8,K=9,routing=uniform(0.5,2)+empty(0.1),W=nk",
        GroupedShape(3, 7, 8, 9, routing="uniform(0.5,2)+empty(0.1)", nk=True),
        "G=3,M=7,N=8,K=9,routing=uniform(0.5,2)+empty(0.1),W=nk",
    ),
    "shared": ("G=2,M_g=1,N=8,K=9,W=kn,B=shared", uniform(2, 1, 8, 9, shared=True), "G=2,M_g=1,N=8,K=9,B=shared"),
}


@pytest.mark.parametrize(("text", "shape", "canonical"), READ.values(), ids=READ)
def test_reads(text: str, shape: GroupedShape, canonical: str) -> None:
    assert parse(text) == shape
    assert str(shape) == canonical


BAD = {
    "nothing": ("", "A shape is"),
    "three numbers": ("1,2,3", "3 numbers"),
    "five numbers": ("1,2,3,4,5", "5 numbers"),
    "letters": ("a,b,c,d", "'a'"),
    "a fraction": ("1.5,2,3,4", "'1.5'"),
    "no group": ("G=0,M=4,N=4,K=4", "G=0"),
    "no group of numbers": ("0,4,4,4", "G=0"),
    "negative rows": ("G=2,M=-4,N=4,K=4", "M=-4"),
    "negative rows of each group": ("4,-1,2,3", "M=-1 is out of range: 0 to"),
    "negative M_g": ("G=2,M_g=-4,N=4,K=4", "M_g=-4 is out of range: 0 to"),
    "one negative M_g": ("G=2,M_g=-4|8,N=4,K=4", "M_g=-4 is out of range: 0 to"),
    "no columns": ("G=2,M=4,N=0,K=4", "N=0"),
    "negative K": ("G=2,M=4,N=4,K=-1", "K=-1"),
    "huge G": ("999999999999,1,1,1", "1 to 1000000 groups"),
    "huge M": ("G=1,M=99999999999999999999999,N=4,K=4", "M is too large"),
    "M past int32 offsets": ("G=1,M=2147483648,N=4,K=4", "M is too large"),
    "flops past int64": ("G=1,M=2000000000,N=2000000000,K=4", "64 bits"),
    "thousands of digits": ("9" * 5000 + ",1,1,1", "A shape is"),
    "a text longer than a record holds": (f"G=10000,M_g={'|'.join(['10', '11'] * 5000)},N=4,K=4", "20000 characters"),
    "unknown field": ("G=2,M=4,N=4,K=4,L=3", "'L'"),
    "a field twice": ("G=2,M=4,N=4,K=4,K=5", "'K'"),
    "M and M_g": ("G=2,M=4,M_g=2,N=4,K=4", "either M or M_g"),
    "neither M nor M_g": ("G=2,N=4,K=4", "either M or M_g"),
    "no K": ("G=2,M=2,N=4", "missing K"),
    "M_g of other groups": ("G=3,M_g=1|2,N=4,K=4", "2 groups"),
    "M_g and routing": ("G=2,M_g=4,N=4,K=4,routing=balanced", "routing"),
    "unknown layout": ("G=2,M=4,N=4,K=4,W=xy", "W=xy"),
    "unknown B": ("G=2,M=4,N=4,K=4,B=own", "B=own"),
    "unknown routing": ("G=2,M=4,N=4,K=4,routing=magic", "magic"),
    "routing without its argument": ("G=2,M=4,N=4,K=4,routing=zipf", "takes 1"),
    "unknown name": ("n1023", "A shape is"),
    "an open parenthesis": ("G=2,M=4,N=4,K=4,routing=zipf(1,W=nk", "zipf(1"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_an_error_names_the_fault_and_the_right_form(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert "G,M,N,K" in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(alphabet="GMNKg_=,|0123456789.-ab()+routingzpf", max_size=40))
def test_any_text_is_a_shape_or_a_value_error(text: str) -> None:
    try:
        shape = parse(text)
    except ValueError:
        return
    assert parse(str(shape)) == shape


def test_a_shape_has_listed_rows_or_a_routing() -> None:
    with pytest.raises(ValueError, match="leave routing out"):
        GroupedShape(1, 4, 4, 4, listed=(4,), routing="zipf(1)")


def test_dims_are_the_letters() -> None:
    assert parse("G=3,M_g=0|1|129,N=8,K=9").dims == {"G": 3, "M": 130, "N": 8, "K": 9}
