"""Operators defined by plain functions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measured import measure_plugin

from groupbench.operators.define import Definition, operator
from groupbench.operators.measure import accuracy
from groupbench.operators.measure.given import Given
from groupbench.operators.operator import Operator, Target
from groupbench.operators.tolerances import Tolerance, tolerance_of
from groupbench.tracker.facts.record import Record

pytestmark = pytest.mark.usefixtures("unaudited")
EXAMPLES = Path(__file__).parents[2] / "examples" / "operators"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def defined(**facts: Any) -> Definition:
    """Return an operator with sizes of every type."""

    @operator(["M=2,N=3"], **facts)
    def scaled(M, N, scale=1.5, causal=False, layout="nk", *, dtype, device):  # type: ignore[no-untyped-def]
        return torch.randn(M, N, dtype=dtype, device=device), scale

    scaled.reference(lambda x, factor: x * factor)
    scaled.backend(lambda x, factor: x * factor, name="torch")
    return scaled


SHAPES = {
    "M=2,N=3": "M=2,N=3",
    "2,3": "M=2,N=3",
    " N=3, M=2 ": "M=2,N=3",
    "M=2,N=3,scale=1.5,causal=false,layout=nk": "M=2,N=3",
    "M=2,N=0,causal=1": "M=2,N=0,causal=true",
    "2,3,0.1,true,kn": "M=2,N=3,scale=0.1,causal=true,layout=kn",
}


@pytest.mark.parametrize(("text", "canonical"), SHAPES.items())
def test_a_shape_has_one_text(text: str, canonical: str) -> None:
    shape = defined().sizes.parse(text)
    assert str(shape) == canonical
    assert defined().sizes.parse(canonical) == shape
    assert shape.dims["M"] == 2


BAD_SHAPES = {
    "": "it needs N",
    "M=2": "it needs N",
    "M=2,N=x": "N=x is not an integer",
    "M=2,N=-5": "N=-5 is out of range: 0 to ",
    "M=2,N=3,K=4": "no size 'K'",
    "M=2,M=3,N=4": "given twice",
    "1,2,3,1,nk,6": "6 sizes are too many",
    "M=2,N=3,causal=maybe": "neither true nor false",
    "M=2,N=3,scale=nan": "not a finite number",
    f"M=2,N={10**25}": "N=",
}


@pytest.mark.parametrize(("text", "message"), BAD_SHAPES.items())
def test_an_error_shows_the_form_of_a_shape(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message) if text else ".") as caught:
        defined().sizes.parse(text)
    assert "A shape is M=..,N=..,(scale=1.5),(causal=false),(layout=nk)" in str(caught.value)


@given(
    st.fixed_dictionaries(
        {"M": st.integers(0, 2**40), "N": st.integers(0, 9)},
        optional={"scale": st.floats(allow_nan=False, allow_infinity=False), "causal": st.booleans()},
    )
)
def test_sizes_come_back_from_their_text(sizes: dict[str, Any]) -> None:
    shape = defined().sizes.shape(sizes)
    assert dict(shape.values) | sizes == dict(shape.values)
    assert defined().sizes.parse(str(shape)) == shape


def test_a_shape_of_defaults_alone_has_a_text() -> None:
    @operator([{}])
    def alone(N=4):  # type: ignore[no-untyped-def]
        return np.zeros(N)

    (shape,) = alone.suites["default"]
    assert alone.sizes.parse(str(shape)) == shape
    assert shape.dims == {"N": 4}


def test_a_size_with_a_default_may_be_negative() -> None:
    @operator(["N=4", "N=4,dim=-2"])
    def sums(N, dim=-1):  # type: ignore[no-untyped-def]
        return np.zeros((N, N)), dim

    assert [shape.dims["dim"] for shape in sums.suites["default"]] == [-1, -2]


def test_a_call_of_the_function_that_the_operator_replaced_says_so() -> None:
    with pytest.raises(TypeError, match="scaled is the operator here: rename it, or import the module"):
        defined()(1)


def test_inputs_have_the_names_of_the_references_parameters() -> None:
    definition = defined()
    made = definition.operator.make_inputs(definition.sizes.parse("2,3"), "fp16", "cpu", 7)
    assert (made.x.dtype, made.factor) == (torch.float16, 1.5)
    again = definition.operator.make_inputs(definition.sizes.parse("2,3"), "fp16", "cpu", 7)
    other = definition.operator.make_inputs(definition.sizes.parse("2,3"), "fp16", "cpu", 8)
    assert Given(made).is_like(Given(again))
    assert not Given(made).is_like(Given(other))


@pytest.mark.parametrize(("dtype", "wide"), [("bf16", "float32"), ("fp16", "float32"), ("fp32", "float64")])
def test_the_reference_gets_higher_precision(dtype: str, wide: str) -> None:
    definition = defined()
    inputs = definition.operator.make_inputs(definition.sizes.parse("2,3"), dtype, "cpu", 0)
    out = definition.operator.reference(inputs)
    assert out.dtype == getattr(torch, wide)
    assert torch.equal(out, inputs.x.to(out.dtype) * 1.5)


def test_bytes_are_those_of_inputs_and_output() -> None:
    made = defined().operator
    assert made.min_bytes(made.parse_shape("20,30"), "fp16") == 2 * 20 * 30 * 2
    wider = defined(output="fp32").operator
    assert wider.min_bytes(wider.parse_shape("20,30"), "fp16") == 20 * 30 * (2 + 4)
    exact = defined(min_bytes=lambda M, dtype: M if dtype == "fp16" else 0, flops=lambda N: 7 * N).operator
    assert (exact.min_bytes(exact.parse_shape("20,30"), "fp16"), exact.flops(exact.parse_shape("20,30"))) == (20, 210)


def test_bytes_of_arrays_are_counted_without_torch() -> None:
    code = """if True:
        import sys
        from groupbench.operators.registry import get_operator
        averages = get_operator("moving_average", (sys.argv[1],))
        print(averages.min_bytes(averages.parse_shape("N=1000,window=10"), "fp64"), "torch" in sys.modules)
    """
    file = EXAMPLES / "moving_average.py"
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True)
    assert done.stdout.split() == [str(8 * (1000 + 991)), "False"], done.stderr


@pytest.mark.parametrize(
    ("make", "reference", "expected"),
    [
        ("x, x", lambda a, b: a, 16 + 32),
        ("x, x.copy()", lambda a, b: a, 32 + 32),
        ("x[:2], np.float32(2)", lambda a, b: [a * b, b], 8 + 4 + 16 + 8),
        ("{'x': x, 'n': 3}", lambda x, n: {"sum": x.sum()}, 16 + 8),
        ("x > 0, x", lambda a, b: "text", 0),
    ],
)
def test_bytes_of_arrays(make: str, reference: Any, expected: int) -> None:
    def made(N, dtype: np.dtype):  # type: ignore[no-untyped-def]
        return eval(make, {"x": np.ones(N, dtype), "np": np})

    defined = operator(["N=4"], dtypes="fp32", output="fp64")(made)
    defined.reference(reference)
    defined.backend(lambda *args: args[0], name="first")
    assert defined.operator.min_bytes(defined.sizes.parse("4"), "fp32") == expected


def test_a_backend_is_used_as_the_function_it_is() -> None:
    definition = defined()

    @definition.backend
    def doubled(x, factor):  # type: ignore[no-untyped-def]
        """twice the product

        and more"""
        return 2 * x * factor

    @definition.prepare(name="late", baseline=True)
    def later(x, factor):  # type: ignore[no-untyped-def]
        return lambda: x * factor

    made = definition.operator
    inputs = made.make_inputs(made.parse_shape("2,3"), "fp32", "cpu", 0)
    assert torch.equal(doubled(inputs.x, 2), 4 * inputs.x)
    assert torch.equal(made.backend("doubled").prepare(inputs)(), 3 * inputs.x)
    assert torch.equal(made.backend("late").prepare(inputs)(), 1.5 * inputs.x)
    assert made.backend("doubled").source == "twice the product"
    assert made.baseline == "late"
    with pytest.raises(ValueError, match="two backends 'doubled'"):
        definition.backend(doubled)


def test_inputs_by_name_are_passed_by_name() -> None:
    @operator(["N=4"])
    def named(N):  # type: ignore[no-untyped-def]
        return {"scale": 2, "x": np.ones(N)}

    named.reference(lambda x, scale: x * scale)
    named.backend(lambda x, scale: x * scale, name="numpy")
    made = named.operator
    inputs = made.make_inputs(made.parse_shape("4"), "fp32", "cpu", 0)
    assert made.backend("numpy").prepare(inputs)().tolist() == [2.0] * 4
    assert made.dtypes == ("fp32",)
    reason = made.backend("numpy").unavailable(Target("cuda", "fp32"))
    assert reason is not None and "--device cpu" in reason
    assert made.backend("numpy").unavailable(Target("cpu", "fp32")) is None


@pytest.mark.parametrize(
    "call", [lambda dtype: np.ones(4).astype(dtype), lambda dtype: np.zeros(4, dtype=dtype)], ids=["astype", "dtype="]
)
def test_torchs_dtype_in_numpy_names_the_annotation(call: Any) -> None:
    @operator(["N=4"], dtypes=["fp32"])
    def ones(N, dtype):  # type: ignore[no-untyped-def]
        return call(dtype)

    ones.reference(lambda x: x)
    ones.backend(lambda x: x)
    made = ones.operator
    with pytest.raises(TypeError, match=r"torch\.float32; write `dtype: np\.dtype` in the parameters of ones"):
        made.make_inputs(made.parse_shape("4"), "fp32", "cpu", 0)


def plain(make: Any, run: Any, size: str = "N=9", dtype: str = "fp32", **facts: Any) -> tuple[Operator, Any]:
    """Return an operator whose reference and only backend are one function, and inputs."""
    definition = operator([size], dtypes=dtype, **facts)(make)
    definition.reference(run)
    definition.backend(run, name="torch")
    made = definition.operator
    return made, made.make_inputs(made.parse_shape(size), dtype, "cpu", 0)


def randn(N, dtype, device):  # type: ignore[no-untyped-def]
    return torch.randn(N, 20, dtype=dtype, device=device)


def test_integers_are_compared_exactly() -> None:
    made, inputs = plain(randn, lambda x: torch.argsort(x), output="int64")
    reference, exact = made.reference(inputs), tolerance_of(made, "torch", "fp32")
    right = torch.argsort(inputs.x)
    assert accuracy.judge(right, reference, made, "fp32", exact)[1] is None
    right[3, 0] += 1
    assert "the first at [3, 0]" in str(accuracy.judge(right, reference, made, "fp32", exact)[1])
    with pytest.raises(TypeError, match=r"torch.int32, expected torch.int64"):
        accuracy.judge(right.int(), reference, made, "fp32", exact)


@pytest.mark.parametrize("output", [None, "fp32"])
def test_an_integer_output_next_to_values_is_compared_exactly(output: str | None) -> None:
    made, inputs = plain(randn, lambda x: tuple(torch.topk(x, 4)), output=output)
    reference, loose = made.reference(inputs), Tolerance(1.0, 1.0, 1.0)
    values, places = torch.topk(inputs.x, 4)
    assert made.min_bytes(made.parse_shape("9"), "fp32") == 4 * 9 * 20 + (4 + 8) * 9 * 4
    assert accuracy.judge((values, places), reference, made, "fp32", loose)[1] is None
    assert accuracy.check_backend(lambda: (values.clone(), places.clone()), reference, made, "torch", "fp32")[1] is None
    places[3, 2] += 1
    fault = accuracy.judge((values * 1.1, places), reference, made, "fp32", loose)[1]
    assert str(fault).startswith("output 1: ") and "the first at [3, 2]" in str(fault)
    with pytest.raises(TypeError, match=r"torch.int32, expected torch.int64"):
        accuracy.judge((values, places.int()), reference, made, "fp32", loose)
    with pytest.raises(TypeError, match=r"torch.int64, expected torch.float32"):
        accuracy.judge((values.long(), places), reference, made, "fp32", loose)


def test_a_large_integer_is_not_rounded() -> None:
    made, inputs = plain(lambda N: torch.full((N,), 2**60 + 1), lambda x: x, "N=1", name="digest")
    reference, exact = made.reference(inputs), tolerance_of(made, "torch", "fp32")
    assert accuracy.judge(reference.clone(), reference, made, "fp32", exact)[1] is None
    assert "the first at [0]" in str(accuracy.judge(reference - 1, reference, made, "fp32", exact)[1])


def test_an_operator_that_looks_at_values_has_no_bytes() -> None:
    def looks(N, device):  # type: ignore[no-untyped-def]
        return torch.ones(N, device=device) / torch.ones(N, device=device).max().item()

    made, _ = plain(looks, lambda x: x, "N=4")
    assert made.min_bytes(made.parse_shape("4"), "fp32") == 0


def test_a_mask_may_still_be_returned_as_numbers() -> None:
    made, inputs = plain(randn, lambda x: x > 0, dtype="fp16")
    tolerance = tolerance_of(made, "torch", "fp16")
    assert accuracy.judge((inputs.x > 0).half(), made.reference(inputs), made, "fp16", tolerance)[1] is None


def test_tolerances_of_its_own() -> None:
    loose = Tolerance(rms=1.0, rtol=1.0, atol=1.0)
    made = defined(tolerances={"fp16": loose}).operator
    assert tolerance_of(made, "torch", "fp16") == loose
    assert tolerance_of(made, "torch", "bf16") != loose


def timing(record: Record) -> str | None:
    return record.latency.timing if record.latency else None


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem)
        for file in sorted(EXAMPLES.glob("*.py"))  # row_log_softmax is one of torch and Triton too
    ],
)
def test_an_example_is_right(file: Path) -> None:
    device = "cpu" if file.stem == "moving_average" else DEVICE  # of NumPy arrays
    records = measure_plugin(file, file.stem, device=device)
    assert {name: (record.status, record.message) for name, record in records.items()} == dict.fromkeys(
        records, ("ok", None)
    )
    assert all(record.cell.min_bytes for record in records.values())
    in_triton = "gpu" if device == "cuda" else "interpreted"
    assert {name: timing(record) for name, record in records.items()} == {
        name: in_triton if "triton" in name else "gpu" if device == "cuda" else "cpu" for name in records
    }


FAULTY = """
import numpy as np
from groupbench.operators.define import operator

@operator({"smoke": ["N=64"]})
def tripled(N):
    return np.random.rand(N).astype(np.float32)

@tripled.reference
@tripled.backend
def right(x):
    return 3 * x

@tripled.prepare
def cached(x):
    out = 3 * x
    return lambda: out.copy()

@tripled.backend
def overwrites(x):
    x *= 3
    return x.copy()

@tripled.backend
def hands_back(x):
    return x

@tripled.backend
def nothing(x):
    return None

@operator({"smoke": ["N=64"]})
def unseeded(N):
    return np.random.default_rng().random(N, dtype=np.float32)

unseeded.reference(right)
unseeded.backend(right)

if __import__("os").environ.get("TRITON_INTERPRET"):
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, out, N: tl.constexpr):
        tl.store(out + tl.arange(0, N), 3 * tl.load(x + tl.arange(0, N)))

    @tripled.backend
    def unmarked_triton(x):
        import torch
        out = torch.empty(64)
        kernel[(1,)](torch.from_numpy(x), out, 64)
        return out.numpy()
"""


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if DEVICE == "cpu":  # else the fork server has imported Triton without its interpreter
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "faulty.py").write_text(FAULTY)
    return tmp_path / "faulty.py"


def test_changes_of_numpy_arrays_by_a_backend_are_noticed(faulty: Path) -> None:
    records = measure_plugin(faulty, "tripled")
    expected = {
        "right": ("ok", ""),
        "cached": ("wrong", "in a timed call: "),
        "overwrites": ("wrong", "the backend changed its input x"),
        "hands_back": ("wrong", "the output shares memory with its input x"),
        "nothing": ("error", "TypeError: the backend returned NoneType, not"),
    }
    if DEVICE == "cpu":
        expected["unmarked_triton"] = ("ok", "")
    assert records.keys() == expected.keys()
    for name, (status, message) in expected.items():
        assert records[name].status == status, records[name].message
        assert (records[name].message or "").startswith(message)
    assert {name: timing(records[name]) for name in ("right", "unmarked_triton") if name in records} == (
        {"right": "cpu"} if DEVICE == "cuda" else {"right": "cpu", "unmarked_triton": "interpreted"}
    )


def test_inputs_that_differ_from_process_to_process_are_refused(faulty: Path) -> None:
    (record,) = measure_plugin(faulty, "unseeded").values()
    assert record.status == "error"
    assert "unseeded makes other inputs each time" in (record.message or "")
