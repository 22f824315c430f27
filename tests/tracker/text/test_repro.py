"""The command that measures a cell again."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

import pytest
from click.testing import CliRunner

from groupbench.operators import cli as measuring
from groupbench.operators.options import COSTS
from groupbench.operators.plan import jobs
from groupbench.tracker.facts.metrics import METRICS, NCU
from groupbench.tracker.facts.record import Environment
from groupbench.tracker.text import repro

CPU, GPU = Environment(device="cpu"), Environment(device="cuda", cuda="13.0", gpu_uuid="GPU-1")
CARD = "GPU-12920978-c777-bf80-1591-342f3bb24834"


@dataclass
class Cell:
    operator: str = "grouped_gemm"
    backend: str = "torch_loop"
    mode: str = "fwd"
    dtype: str = "fp32"
    shape: str = "G=3,M_g=0|1|12,N=9,K=6"
    host: str = "builtin"
    protocol: str = "cooled"
    seed: int = 7


def test_the_commit_is_switched_to_where_git_knows_it() -> None:
    assert repro.measure(Cell(), "c" * 40, CPU).startswith(
        f"git switch --detach {'c' * 40} && tritonbench --host builtin "
    )
    assert repro.measure(Cell(), "imported", CPU).startswith("tritonbench ")
    assert repro.measure(Cell(), None, None).startswith("tritonbench ")


@pytest.mark.parametrize(
    ("shape", "test"), [("default", "test_x"), ("default #2", "test_x"), ("64-fp16", "test_x[64-fp16]")]
)
def test_a_test_is_run_by_pytest(shape: str, test: str) -> None:
    cell = Cell(host="pytest", operator="tests/test_k.py::test_x", shape=shape)
    expected = ["pytest", "--groupbench", f"tests/test_k.py::{test}"]
    assert shlex.split(repro.measure(cell, None, CPU) or "") == expected
    assert repro.compare(cell, "a" * 40, "b" * 40, CPU) == repro.measure(cell, "b" * 40, CPU)


def test_what_another_program_measured_has_no_command() -> None:
    cell = Cell(host="google-benchmark")
    assert repro.measure(cell, "a" * 40, CPU) is None
    assert repro.compare(cell, "a" * 40, "b" * 40, CPU) is None


@pytest.mark.parametrize("shape", ["G=3,M_g=0|1|12,N=9,K=6", "it's; rm -rf ~"])
def test_a_shell_takes_it_as_one_command(shape: str) -> None:
    words = shlex.split(repro.measure(Cell(shape=shape), None, CPU))
    assert words[words.index("--shapes") + 1] == shape


@pytest.mark.parametrize(
    ("label", "options"),
    [
        ("cooled", []),
        ("sustained", ["--protocol", "sustained"]),
        ("cooled+idle=0.5s+cudagraph", ["--idle", "0.5s", "--cudagraph"]),
    ],
)
def test_the_protocol_is_spelled_by_options(label: str, options: list[str]) -> None:
    words = shlex.split(repro.measure(Cell(protocol=label), None, None))
    assert words[words.index("--seed") + 2 :] == options


def test_it_measures_exactly_that_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell()
    measured = []

    def measure(selections: list[object], device: str, session: object, unmeasured: None) -> int:
        assert device == "cpu"
        measured.extend(jobs(selections[0], device, True))  # type: ignore[arg-type]
        return 0

    monkeypatch.setattr("groupbench.operators.hosts.builtin.measure", measure)
    words = shlex.split(repro.measure(cell, None, CPU))[1:]
    done = CliRunner().invoke(measuring.command, words)
    assert done.exit_code == 0, done.output
    (job,) = measured
    identity = (job.operator, job.backend, job.shape, job.dtype, job.mode, job.seed, job.protocol.label)
    assert identity == (cell.operator, cell.backend, cell.shape, cell.dtype, cell.mode, cell.seed, cell.protocol)


@pytest.mark.parametrize("name", sorted(name for name, metric in METRICS.items() if metric.cost))
def test_a_metric_is_asked_for_by_its_cost(name: str) -> None:
    words = shlex.split(repro.measure(Cell(), None, GPU, METRICS[name]))
    assert words[words.index("--costs") + 1] in (*COSTS, NCU)
    assert words[words.index("--metrics") + 1] == f"latency,{name}"
    assert "--costs" not in repro.measure(Cell(), None, GPU, METRICS["spills"])


@pytest.mark.parametrize(
    ("cell", "environment", "options"),
    [
        (Cell(seed=0), GPU, ["--device", "cuda"]),
        (Cell(), CPU, ["--input-seed", "7", "--device", "cpu"]),
        (Cell(seed=0, protocol="cooled+idle=0.5s+cudagraph"), None, ["--idle", "0.5s", "--cudagraph"]),
        (Cell(seed=0, protocol="sustained"), None, []),  # an A/B has a protocol of its own
    ],
)
def test_two_commits_are_compared(cell: Cell, environment: Environment | None, options: list[str]) -> None:
    words = shlex.split(repro.compare(cell, "a" * 40, "b" * 40, environment))
    assert words[:4] == ["groupbench", "ab", "a" * 40, "b" * 40]
    assert words[words.index("--shape") + 1] == Cell().shape
    assert words[words.index("--mode") + 2 :] == options


def test_the_card_of_a_machine_with_several_is_selected() -> None:
    """CUDA takes a card's UUID, which the driver gives it. ROCm does not, and imported records may hold any text."""
    card = Environment(device="cuda", cuda="13.0", gpu_uuid=CARD)
    prefix = f"CUDA_VISIBLE_DEVICES={CARD} "
    assert repro.measure(Cell(), "c" * 40, card).startswith(f"git switch --detach {'c' * 40} && {prefix}tritonbench ")
    assert repro.compare(Cell(), "one", "two", card).startswith(f"{prefix}groupbench ab ")
    assert repro.search(["groupbench"], 7, "one", "two", "latency", card).startswith(f"{prefix}groupbench bisect ")
    assert repro.measure(Cell(), None, Environment(device="cuda", gpu_uuid=CARD)).startswith("tritonbench ")
    assert repro.measure(Cell(), None, GPU).startswith("tritonbench ")
