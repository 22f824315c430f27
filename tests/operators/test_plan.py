"""The cells that are measured for a selection or a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from groupbench.operators import plan
from groupbench.operators.catalog import shapes
from groupbench.operators.catalog.grouped_gemm import GROUPED_GEMM
from groupbench.operators.errors import PlanError, UsageError
from groupbench.operators.hosts import builtin
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.plan import Selection, jobs, read_plan

ROOT = Path(__file__).parents[2]
SMOKE = [str(shape) for shape in shapes.SUITES["smoke"].values()]
BACKENDS = [backend.name for backend in GROUPED_GEMM.backends if not backend.only_as_baseline]


def cells(**fields: object) -> list[tuple[str, str, str]]:
    """Return (shape, dtype, backend) of each job on a CPU."""
    selection = Selection("grouped_gemm", **fields)  # type: ignore[arg-type]
    return [(job.shape, job.dtype, job.backend) for job in jobs(selection, "cpu", interpreted=True)]


def test_defaults_on_a_cpu() -> None:
    assert cells() == [(shape, "fp16", name) for shape in SMOKE for name in BACKENDS]


def test_the_baseline_of_a_suite_is_measured_on_its_shapes_or_by_name() -> None:
    shared, other = "G=4,M_g=1024,N=1024,K=1024,B=shared", "G=4,M_g=1024,N=1024,K=1024"
    assert (GROUPED_GEMM.baseline_of(shapes.parse(shared)), GROUPED_GEMM.baseline_of(shapes.parse(other))) == (
        "aten_grouped_mm",
        "torch_loop",
    )
    measured = [(shape, name) for shape, _, name in cells(shapes=(shared, other))]
    assert [shape for shape, name in measured if name == "aten_grouped_mm"] == [shared]
    named = [(shape, name) for shape, _, name in cells(shapes=(shared, other), only=("aten_grouped_mm",))]
    assert named == [(shared, "aten_grouped_mm"), (other, "aten_grouped_mm")]
    assert GROUPED_GEMM.in_mode("bwd").baseline_of(shapes.parse(shared)) == "torch_loop"


def test_defaults_on_a_gpu() -> None:
    planned = jobs(Selection("grouped_gemm"), "cuda", interpreted=False)
    assert {job.dtype for job in planned} == {"bf16"}
    assert list(dict.fromkeys(job.shape for job in planned)) == [
        f"G=4,M_g={n},N={n},K={n},B=shared" for n in (1024, 2048, 4096, 8192)
    ]


def test_canary_has_a_suite_for_each_device() -> None:
    for device, first in (("cpu", "copy,N=2048"), ("cuda", "copy,N=16384")):
        assert jobs(Selection("canary"), device, interpreted=device == "cpu")[0].shape == first


def test_shapes_outermost_then_dtypes_then_backends() -> None:
    planned = cells(shapes=("1,2,3,4", "2,2,3,4"), dtypes=("fp32", "fp16"), only=("triton_pointer", "torch_loop"))
    assert planned == [
        (shape, dtype, name)
        for shape in ("G=1,M_g=2,N=3,K=4", "G=2,M_g=2,N=3,K=4")
        for dtype in ("fp32", "fp16")
        for name in ("triton_pointer", "torch_loop")
    ]


def test_each_cell_once() -> None:
    planned = cells(
        suites=("smoke", "smoke"), shapes=("ragged", SMOKE[0], "4,64,64,64", "4,64,64,64"), only=("torch_loop",) * 2
    )
    assert [shape for shape, _, _ in planned] == [*SMOKE, "G=4,M_g=64,N=64,K=64"]


def test_jobs_of_two_selections_once() -> None:
    selection = Selection("grouped_gemm", only=("torch_loop",))
    other = replace(selection, shapes=("single",))
    assert len(builtin.list_jobs([selection, other], "cpu")) == len(SMOKE)


def test_skip() -> None:
    assert [name for _, _, name in cells(shapes=("single",), skip=("torch_loop", "helion_jagged"))] == [
        name for name in BACKENDS if name not in ("torch_loop", "helion_jagged")
    ]


def test_all_fields_reach_the_job() -> None:
    facts = {"seed": 7, "rtol": 0.5, "atol": 0.25, "protocol": Protocol("sustained")}
    selection = Selection("grouped_gemm", only=("torch_loop",), shapes=("single",), **facts)
    (job,) = jobs(selection, "cpu", interpreted=True)
    assert (job.seed, job.rtol, job.atol, job.protocol.name, job.interpreted) == (7, 0.5, 0.25, "sustained", True)


# --input-id, --num-inputs -> which of four; as TritonBench's first-k mode has it
PICKED: dict[str, tuple[tuple[int, ...], int | None, list[int]]] = {
    "all": ((), None, [0, 1, 2, 3]),
    "from one on": ((2,), None, [2, 3]),
    "the first": ((), 1, [0]),
    "two from one on": ((1,), 2, [1, 2]),
    "more than there are": ((), 99, [0, 1, 2, 3]),
    "more than are left": ((3,), 99, [3]),
    "several": ((3, 0), None, [3, 0]),
    "several, one twice": ((3, 0, 3), None, [3, 0]),
}


@pytest.mark.parametrize(("ids", "number", "expected"), PICKED.values(), ids=PICKED)
def test_input_ids(ids: tuple[int, ...], number: int | None, expected: list[int]) -> None:
    assert plan.input_ids(4, ids, number) == expected
    assert [s for s, _, _ in cells(input_ids=ids, num_inputs=number, only=("torch_loop",))] == [
        SMOKE[i] for i in expected
    ]


@pytest.mark.parametrize(
    ("ids", "number"), [((4,), None), ((-1,), None), ((0, 4), None), ((), 0), ((0, 1), 2)], ids=str
)
def test_bad_input_ids(ids: tuple[int, ...], number: int | None) -> None:
    with pytest.raises(UsageError, match="input"):
        plan.input_ids(4, ids, number)


# --- plan files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def plan_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "plan.toml"
        path.write_text(text)
        return path

    return write


def test_every_field_of_an_entry(plan_file: Callable[[str], Path]) -> None:
    entry = """{operator = "grouped_gemm", suites = ["smoke"], shapes = ["1,2,3,4"], dtypes = ["fp32"], device = "cpu",
        only = ["torch_loop"], skip = ["triton_pointer"], mode = "fwd", protocol = "sustained", bursts = 2,
        samples = 3, idle = 1, seed = 5}""".replace("\n", "")
    canaries = '{operator = "canary", device = "cuda"}, {operator = "canary"}'
    path = plan_file(f'name = "night"\nbudget = 12.5\nmeasure = [{entry}, {canaries}]')
    plan = read_plan(path, "cpu", ("m.p",))
    assert (plan.name, plan.budget_s) == ("night", 750.0)
    sets = (("smoke",), ("1,2,3,4",), ("fp32",), ("torch_loop",), ("triton_pointer",))
    protocol = Protocol("sustained", 2, 3, idle_s=1.0)
    assert plan.selections == [
        Selection("grouped_gemm", *sets, "fwd", protocol, 5, plugins=("m.p",)),
        Selection("canary", plugins=("m.p",)),
    ]
    assert [s.operator for s in read_plan(path, "cuda").selections] == ["canary", "canary"]


def test_a_name_is_as_a_record_holds_it(plan_file: Callable[[str], Path]) -> None:
    assert read_plan(plan_file('name = "a\\u0000"\n[[measure]]\noperator = "canary"'), "cpu").name == r"a\x00"


BAD_PLANS = {
    "no entries": ('name = "x"', "no entry in it"),
    "an unknown field": ('name = "x"\n[[measure]]\noperator = "canary"\nbakends = ["a"]', "bakends"),
    "a float for an integer": ('name = "x"\n[[measure]]\noperator = "canary"\nbursts = 1.5', "bursts"),
    "only for the other device": ('name = "x"\n[[measure]]\noperator = "canary"\ndevice = "cuda"', "device cpu"),
    "a bad protocol": ('name = "x"\n[[measure]]\noperator = "canary"\nprotocol = "hot"', "'hot'"),
    "a seed below zero": ('name = "x"\n[[measure]]\noperator = "canary"\nseed = -1', "seed"),
    "a seed that no record holds": (f'name = "x"\n[[measure]]\noperator = "canary"\nseed = {2**63}', "seed"),
    "no bursts": ('name = "x"\n[[measure]]\noperator = "canary"\nbursts = 0', "bursts"),
}


@pytest.mark.parametrize(("text", "message"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_bad_plans(text: str, message: str, plan_file: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=message):
        read_plan(plan_file(text), "cpu")


BAD_ENTRIES = {
    "operator": ('operator = "cannary"', r"no operator 'cannary' \(did you mean 'canary'"),
    "backend": ('operator = "canary"\nonly = ["trch"]', "canary has no backend 'trch'"),
    "shape": ('operator = "canary"\nshapes = ["many"]', "canary: shape 'many'"),
    "protocol": ('operator = "canary"\nprotocol = "hot"', "no protocol 'hot'"),
}


@pytest.mark.parametrize(("entry", "message"), BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_an_error_names_the_entry(entry: str, message: str, plan_file: Callable[[str], Path]) -> None:
    other = '[[measure]]\noperator = "canary"\ndevice = "cuda"\n'
    path = plan_file(f"{other}[[measure]]\n{entry}\n")
    with pytest.raises(PlanError, match=rf"^{path.name}, \[\[measure\]\] 2: {message}"):
        builtin.list_jobs(read_plan(path, "cpu").selections, "cpu")


def test_a_plugin_that_does_not_load_is_no_error_of_an_entry(plan_file: Callable[[str], Path]) -> None:
    selections = read_plan(plan_file('plugins = ["nope.py"]\n[[measure]]\noperator = "canary"'), "cpu").selections
    with pytest.raises(UsageError, match=r"^plugin 'nope.py': there is no file"):
        builtin.list_jobs(selections, "cpu")


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_plan_that_is_not_a_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="plan"):
        read_plan(tmp_path / name, "cpu")


def test_a_plan_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="plan"):
        read_plan(path, "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_nightly_plan_can_be_measured(device: str) -> None:
    nightly = read_plan(ROOT / "groupbench.toml", device)
    planned = builtin.list_jobs(nightly.selections, device)
    assert nightly.name == "nightly"
    assert nightly.budget_s
    assert {job.operator for job in planned} >= {"canary", "grouped_gemm"}
    assert len(planned) == len(set(planned))
    for job in planned:
        operator = plan.get_operator(job.operator)
        assert operator.flops(operator.parse_shape(job.shape)) >= 0
