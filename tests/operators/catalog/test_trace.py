"""Routing of real traffic: files, the shapes that they make, and the suites of published models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators import plan, registry
from groupbench.operators.catalog import models, moe, routing, shapes
from groupbench.operators.errors import UsageError
from groupbench.operators.plan import Selection
from groupbench.tracker.tools import traces
from groupbench.tracker.tools.traces import TraceStep

IDS = [[0, 1], [1, 3], [1, -1], [-1, -1]]
STEP = TraceStep(3, 2, (1, 3, 0, 1), 4)


def npy(path: Path, ids: Any) -> Path:
    np.save(path / "t.npy", ids)
    return path / "t.npy"


def text(name: str, content: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(content)
        return folder / name

    return write


WRITERS: dict[str, Callable[[Path], Path]] = {
    "npy": lambda folder: npy(folder, np.array(IDS)),
    "npy of steps": lambda folder: npy(folder, np.array([IDS], dtype=np.int32)),
    "jsonl lists": text("t.jsonl", json.dumps(IDS) + "\n\n"),
    "jsonl objects": text("t.jsonl", json.dumps({"layer": 3, "topk_ids": IDS, "num_experts": 4})),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_every_format_holds_the_same_step(write: Callable[[Path], Path], tmp_path: Path) -> None:
    assert traces.read(write(tmp_path)) == [STEP]


def test_loads_alone(tmp_path: Path) -> None:
    lines = '{"expert_counts": [1, 3, 0, 1], "num_experts": 8}\n{"rows": [0, 2]}\n{"rows": [0, 0]}'
    steps = traces.read(text("t.jsonl", lines)(tmp_path))
    assert steps == [TraceStep(0, 0, (1, 3, 0, 1, 0, 0, 0, 0), 8), TraceStep(0, 0, (0, 2, 0, 0, 0, 0, 0, 0), 8)]


FAULTS = {
    "no file": (lambda folder: folder / "none.npy", "No such file"),
    "format": (text("t.txt", ""), "one of .npy, .jsonl"),
    "no rows": (text("t.jsonl", "[[-1]]"), "no token in it has an expert"),
    "floats": (lambda folder: npy(folder, np.ones((2, 2))), "must be integers"),
    "objects": (lambda folder: npy(folder, np.array([None])), "allow_pickle"),
    "dimensions": (lambda folder: npy(folder, np.ones(3, dtype=int)), "[T, k]"),
    "half json": (text("t.jsonl", "[[0]]\n[[1"), "line 2"),
    "other json": (text("t.jsonl", '{"a": 1}'), "line 1: the object needs one of the keys topk_ids"),
    "too large an id": (
        text("t.jsonl", '{"topk_ids": [[7]], "num_experts": 4}'),
        "expert 7 does not exist: there are 4",
    ),
    "negative rows": (text("t.jsonl", '{"rows": [-1]}'), "must not be negative"),
}


@pytest.mark.parametrize(("write", "message"), FAULTS.values(), ids=FAULTS)
def test_a_fault_names_its_place(write: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as raised:
        traces.read(write(tmp_path))
    assert message in str(raised.value)


@given(st.integers(1, 50), st.integers(1, 20))
def test_steps_are_spread_over_time(count: int, most: int) -> None:
    steps = [TraceStep(i, 1, (1,)) for i in range(count)]
    tokens = [step.tokens for step in traces.spread(steps, most)]
    assert len(tokens) == min(count, most) == len(set(tokens))
    assert tokens[0] == 0 and tokens == sorted(tokens)
    assert most == 1 or tokens[-1] == count - 1


def shapes_on(operator: str, path: Path, base: str, **fields: Any) -> list[str]:
    measured = registry.get_operator(operator)
    return [
        str(s)
        for s in plan.shapes_of(measured, Selection(operator, shapes=(base,), routing_trace=path, **fields), "cpu")
    ]


@pytest.mark.parametrize("operator", ["grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad", "grouped_gemm_fp8"])
def test_a_grouped_gemm_has_the_rows_of_each_step(operator: str, tmp_path: Path) -> None:
    path = npy(tmp_path, np.array([IDS, [[2, 3], [2, 3], [0, 1], [2, 0]]]))
    texts = shapes_on(operator, path, "G=4,M_g=9,N=32,K=64,W=nk")
    assert texts == ["G=4,M_g=1|3|0|1,N=32,K=64,W=nk", "G=4,M_g=2|1|3|2,N=32,K=64,W=nk"]


def test_a_rank_has_its_share_of_the_steps_and_its_total_varies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = npy(tmp_path, np.array([IDS, [[2, 3], [2, 3], [0, 1], [2, 0]], [[2, 3]] * 4]))
    texts = shapes_on("grouped_gemm", path, "G=2,M_g=9,N=32,K=64")
    assert texts == ["G=2,M_g=1|3,N=32,K=64", "G=2,M_g=2|1,N=32,K=64"]  # the third step has no row there
    assert "1 of 3 problems left out: the step routes no row" in capsys.readouterr().err


def test_more_groups_than_experts_in_the_trace_are_accepted(tmp_path: Path) -> None:
    assert shapes_on("grouped_gemm", npy(tmp_path, np.array(IDS)), "G=6,M_g=9,N=8,K=8") == [
        "G=6,M_g=1|3|0|1|0|0,N=8,K=8"
    ]


def test_a_layer_draws_its_tokens_by_the_loads_of_each_step(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    popularity = 1 / np.arange(1, 17)
    ids = np.stack([random.choice(16, (4000, 2), p=popularity / popularity.sum()) for _ in range(2)])
    texts = shapes_on("moe_layer", npy(tmp_path, ids), "T=1,k=1,G=16,H=64,F=32")
    assert len(texts) == 2
    for step, traced in zip(ids, texts, strict=True):
        shape = moe.parse(traced, layer=True)
        assert (shape.T, shape.k, shape.G) == (4000, 2, 16)
        wanted = np.bincount(step.ravel(), minlength=16)
        assert np.abs(np.array(shape.rows) - wanted).max() < 0.15 * 8000
        assert np.corrcoef(shape.rows, wanted)[0, 1] > 0.97


def test_an_operator_without_routing_refuses_a_trace(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vector_add has no routing"):
        shapes_on("vector_add", npy(tmp_path, np.array(IDS)), "N=8")


def test_few_steps_of_many(tmp_path: Path) -> None:
    path = npy(tmp_path, np.random.default_rng(0).integers(8, size=(30, 40, 2)))
    assert len(shapes_on("grouped_gemm", path, "G=8,M_g=9,N=8,K=8", trace_steps=5)) == 5


# --- laws -------------------------------------------------------------------------------------------------------------


def test_loads_are_a_routing() -> None:
    assert routing.rows("loads(1|0|3)", 3, 8) == (2, 0, 6)
    assert sum(routing.rows("loads(1|1|1)", 3, 100)) == 100
    shape = shapes.parse("G=3,M=8,N=4,K=4,routing=loads(1|0|3)")
    assert shape.rows == (2, 0, 6) and shapes.parse(str(shape)) == shape
    for wrong in ("loads()", "loads(0|0)", "loads(1|x)", "loads(-1)"):
        with pytest.raises(ValueError, match="loads"):
            routing.check(wrong)
    with pytest.raises(ValueError, match="2 experts"):
        shapes.parse("G=3,M=8,N=4,K=4,routing=loads(1|2)")


def test_ranks_share_out_one_draw_of_the_global_law() -> None:
    ranks = [shapes.parse(f"G=8,E=32,rank={r},M=4096,N=16,K=16,routing=zipf(1.2)") for r in range(4)]
    together = tuple(row for shape in ranks for row in shape.rows)
    assert together == routing.rows("zipf(1.2)", 32, 4096)
    assert len({shape.M for shape in ranks}) > 1  # a rank's total varies
    assert shapes.parse(str(ranks[1])) == ranks[1]
    for wrong in ("rank=4", "rank=-1"):
        with pytest.raises(ValueError, match="rank"):
            shapes.parse(f"G=8,E=32,{wrong},M=64,N=16,K=16")
    with pytest.raises(ValueError, match="E=30"):
        shapes.parse("G=8,E=30,rank=0,M=64,N=16,K=16")


def test_suites_of_published_models() -> None:
    for phase in models.PHASES:
        grouped, layers = shapes.SUITES[phase], moe.LAYER_SUITES[phase]
        for model in models.MODELS:
            gate_up, down = grouped[f"{model.name}_{phase}_gu"], grouped[f"{model.name}_{phase}_dn"]
            assert (gate_up.N, gate_up.K) == (2 * model.F, model.H) and (down.N, down.K) == (model.H, model.F)
            assert gate_up.rows == down.rows and len(gate_up.rows) == model.local
            layer = layers[f"{model.name}_{phase}"]
            assert (layer.G, layer.experts, layer.k) == (model.local, model.experts, model.k)
            assert 3 * layer.G * layer.H * layer.F * 2 < 80e9


def test_sweeps() -> None:
    batch = shapes.SUITES["sweep_batch"]
    assert {shape.M // 8 for shape in batch.values()} == {2**i for i in range(17)}
    skew = [max(shape.rows) for shape in shapes.SUITES["sweep_skew"].values()]
    assert skew[0] == min(skew) and skew[-1] == max(skew) > 4 * skew[0]


def test_a_step_without_tokens_is_usual(tmp_path: Path) -> None:
    """A rank is idle while the others work."""
    path = tmp_path / "t.jsonl"
    path.write_text('[]\n[[0, 1]]\n{"topk_ids": [], "num_experts": 4}\n{"topk_ids": [[1, 3]], "num_experts": 4}\n')
    assert [step.rows for step in traces.read(path)] == [(1, 1, 0, 0), (0, 1, 0, 1)]
