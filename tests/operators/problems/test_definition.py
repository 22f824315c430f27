"""Definitions, workloads and solutions in the forms of FlashInfer-Bench and SOL-ExecBench, all written here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import rarely
from measured import measure_plugin

from groupbench.operators import registry
from groupbench.operators.errors import UsageError
from groupbench.operators.operator import Target
from groupbench.operators.problems.definition import PublishedProblem, evaluated, read_json
from groupbench.operators.problems.solution import Solution, read_solutions

pytestmark = pytest.mark.usefixtures("unaudited")

DEFINITION = {
    "name": "scaled_sum_h8",
    "op_type": "sum",
    "axes": {
        "rows": {"type": "var"},
        "h": {"type": "const", "value": 8},
        "pairs": {"type": "expr", "expression": "rows * h // 2"},
    },
    "custom_inputs_entrypoint": "make",
    "inputs": {
        "x": {"shape": ["rows", "h"], "dtype": "float16"},
        "order": {"shape": ["rows"], "dtype": "int64"},
        "scale": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"y": {"shape": ["rows", "h"], "dtype": "float16"}},
    "reference": """import torch

def make(axes_and_scalars, device):
    return {"order": torch.randperm(axes_and_scalars["rows"], device=device)}

def run(x, order, scale):
    return (x[order] * scale).to(x.dtype)
""",
}
INPUTS = {"x": {"type": "random"}, "order": {"type": "custom"}, "scale": {"type": "scalar", "value": 2.5}}
WORKLOADS = [{"uuid": f"{n}{n}{n}{n}-uuid", "axes": {"rows": n}, "inputs": INPUTS} for n in (5, 3)]


def solution(name: str, source: str, dps: bool, language: str = "python") -> dict[str, Any]:
    return {
        "name": name,
        "definition": "scaled_sum_h8",
        "author": "a test",
        "spec": {
            "language": language,
            "target_hardware": ["cpu"],
            "entry_point": "main.py::run",
            "destination_passing_style": dps,
        },
        "sources": [
            {"path": "main.py", "content": source},
            {"path": "helper.py", "content": f"FACTOR = {1 if name != 'wrong' else 2}\n"},
        ],
    }


SOLUTIONS = [
    solution("writes", "def run(x, order, scale, y):\n    y.copy_(x[order] * scale)\n", True),
    solution(
        "returns", "import helper\ndef run(x, order, scale):\n    return x[order] * scale * helper.FACTOR\n", False
    ),
    solution("by_name", "def run(x, order, scale):\n    return {'y': x[order] * scale}\n", False),
    solution("wrong", "import helper\ndef run(x, order, scale):\n    return x[order] * scale * helper.FACTOR\n", False),
    solution("shapeless", "def run(x, order, scale):\n    return x[:1]\n", False),
    solution("only_returns", "def run(x, order, scale):\n    return x[order] * scale\n", True),
    solution("in_cuda", "__global__", True, "cuda"),
]


def flashinfer(root: Path) -> Path:
    """Write a dataset in FlashInfer's layout."""
    for folder in ("definitions/sum", "workloads/sum", "solutions/a_test"):
        (root / folder).mkdir(parents=True)
    lines = [{"definition": "scaled_sum_h8", "solution": None, "workload": w, "evaluation": None} for w in WORKLOADS]
    (root / "workloads/sum/scaled_sum_h8.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    for one in SOLUTIONS:
        (root / f"solutions/a_test/{one['name']}.json").write_text(json.dumps(one))
    path = root / "definitions/sum/scaled_sum_h8.json"
    path.write_text(json.dumps(DEFINITION))
    return path


def sol(root: Path) -> Path:
    """Write a problem in SOL-ExecBench's layout."""
    (root / "workload.jsonl").write_text("\n".join(map(json.dumps, WORKLOADS)))
    for one in SOLUTIONS:
        spec = {key: value for key, value in one["spec"].items() if key != "language"}
        spec |= {"languages": [one["spec"]["language"]]}
        (root / f"solution_{one['name']}.json").write_text(json.dumps(one | {"spec": spec}))
    (root / "definition.json").write_text(json.dumps(DEFINITION))
    return root / "definition.json"


def test_both_layouts_are_read_alike(tmp_path: Path) -> None:
    made = []
    for layout in (flashinfer, sol):
        (tmp_path / layout.__name__).mkdir()
        made.append(registry.get_operator("scaled_sum_h8", (str(layout(tmp_path / layout.__name__)),)))
    one = made[0]
    reasons = [{b.name: b.unavailable(Target("cpu", "fp16")) for b in operator.backends} for operator in made]
    assert reasons[0] == reasons[1] and "only Python and Triton" in (reasons[0]["in_cuda"] or "")
    assert {*(s["name"] for s in SOLUTIONS), "reference"} == {b.name for b in one.backends}
    assert [[str(shape) for shape in operator.suites["smoke"]] for operator in made] == [
        ["rows=3,workload=3333-uuid"]
    ] * 2


@pytest.mark.parametrize("layout", [flashinfer, *rarely(sol)])
def test_a_dataset_is_measured(layout: Any, tmp_path: Path) -> None:
    path = layout(tmp_path)
    records = measure_plugin(path, "scaled_sum_h8")
    statuses = {name: record.status for name, record in records.items()}
    assert statuses == {
        "reference": "ok",
        "by_name": "ok",
        "in_cuda": "unavailable",
        "only_returns": "error",
        "returns": "ok",
        "shapeless": "error",
        "writes": "ok",
        "wrong": "wrong",
    }, {name: record.message for name, record in records.items()}
    assert records["writes"].cell.shape == "rows=3,workload=3333-uuid"
    assert records["writes"].cell.min_bytes == 3 * 8 * 2 * 2 + 3 * 8
    assert 'set "destination_passing_style": false' in (records["only_returns"].message or "")
    assert "Python and Triton run here" in (records["in_cuda"].message or "")


def test_a_solution_alone_is_a_candidate(tmp_path: Path) -> None:
    path = sol(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    candidate = tmp_path / "elsewhere" / "mine.json"
    candidate.write_text(json.dumps(solution("mine", "def run(x, order, scale):\n    return x\n", False)))
    made = registry.get_operator("scaled_sum_h8", (str(path), str(candidate)))
    assert made.backends[-1].name == "mine"
    assert registry.home_of("scaled_sum_h8", (str(path), str(candidate))) == (str(path),)


@pytest.mark.parametrize(
    "text", ['{"sources": ' + "[" * 100_000, '{"reference": "\udcff"}'], ids=["nested", "not UTF-8"]
)
def test_a_file_that_cannot_be_decoded_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hostile.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(UsageError, match=r"hostile\.json: "):
        read_json(path)
    assert read_solutions([path]) == []


def test_a_workload_is_found_by_text_uuid_or_axes(tmp_path: Path) -> None:
    problem: Any = read_json(sol(tmp_path))
    for text in ("rows=5,workload=5555-uuid", "5555", "workload=5555-uuid", "rows=5"):
        assert problem.parse_shape(text).dims == {"rows": 5}
    with pytest.raises(ValueError, match="match one of the 2 workloads, such as rows=5"):
        problem.parse_shape("rows=7")


def test_integers_among_floats_are_compared_bit_by_bit(tmp_path: Path) -> None:
    definition = DEFINITION | {
        "outputs": {"y": {"shape": ["rows"], "dtype": "float16"}, "at": {"shape": ["rows"], "dtype": "int64"}},
        "reference": "def run(x, order, scale):\n    y, at = x.max(-1)\n    return y, at + 1000000\n",
        "custom_inputs_entrypoint": None,
    }
    inputs = INPUTS | {"order": {"type": "random"}}
    (tmp_path / "workload.jsonl").write_text(json.dumps(WORKLOADS[0] | {"inputs": inputs}))
    (tmp_path / "definition.json").write_text(json.dumps(definition))
    problem: Any = read_json(tmp_path / "definition.json")
    made = problem.operator.make_inputs(problem.parse_shape("5555"), "fp16", "cpu", 0)
    exact = problem.operator.reference(made)
    y, at = made.x.max(-1)
    decoded = problem.operator.decode((y, at + 1000000))
    assert torch.equal(decoded[1], exact["at"])
    assert not torch.equal(problem.operator.decode((y, at + 1000001))[1], exact["at"])
    with pytest.raises(TypeError, match=r"at in torch.int32, expected torch.int64"):
        problem.operator.decode((y, at.int()))


BAD = {
    "no JSON": ("{", "definition.json"),
    "something else": ('{"a": 1}', "neither a definition"),
    "no axes": ('{"reference": ""}', "missing required field"),
    "no workloads": (json.dumps(DEFINITION), "scaled_sum_h8 has no workloads"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "definition.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_json(tmp_path / "definition.json")


EXPRESSIONS = {"a * b + 1": 7, "-a + b ** 2": 7, "(a + b) // 2": 2, "b % a": 1}


@pytest.mark.parametrize(("text", "value"), EXPRESSIONS.items())
def test_axes_are_computed(text: str, value: int) -> None:
    assert evaluated(text, {"a": 2, "b": 3}) == value


@pytest.mark.parametrize("text", ["c", "__import__('os')", "a.b", "a if b else a", "a //", "a // (b - 3)", "'x'"])
def test_axes_are_arithmetic_alone(text: str) -> None:
    with pytest.raises(UsageError, match="axis"):
        evaluated(text, {"a": 2, "b": 3})


def test_sources_stay_in_their_folder(tmp_path: Path) -> None:
    import msgspec

    from groupbench.operators.problems.solution import _written

    bad = solution("bad", "", True) | {"sources": [{"path": "../x.py", "content": ""}]}
    with pytest.raises(UsageError, match="leads out of its folder"):
        _written(msgspec.convert(bad, Solution))


def test_inputs_are_found_in_the_folder_of_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definition: Any = SimpleNamespace(root=tmp_path / "definition", path=tmp_path / "definition/d.json")
    found = tmp_path / "traces/blob/x.safetensors"
    found.parent.mkdir(parents=True)
    found.touch()
    monkeypatch.delenv("FLASHINFER_TRACE_DIR", raising=False)
    with pytest.raises(UsageError, match=r"set FLASHINFER_TRACE_DIR to the folder of the traces"):
        PublishedProblem._blob(definition, "blob/x.safetensors")
    monkeypatch.setenv("FLASHINFER_TRACE_DIR", str(tmp_path / "traces"))
    assert PublishedProblem._blob(definition, "blob/x.safetensors") == found
    with pytest.raises(UsageError, match="nor in FLASHINFER_TRACE_DIR="):
        PublishedProblem._blob(definition, "blob/none.safetensors")
