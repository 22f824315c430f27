"""`groupbench evaluate` finds a candidate correct, honest and faster, or reports the problem."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from cases import rarely
from click.testing import CliRunner, Result

from groupbench.operators.measure.side import list_offers
from groupbench.tracker.ab.answers import Prepared
from groupbench.tracker.ab.evaluate import Evaluation, Evaluator, decided, exit_code, of, to_try
from groupbench.tracker.ab.result import AbCell, AbResult, SideAccuracy
from groupbench.tracker.ab.side import AbError, AbSide
from groupbench.tracker.cli import main
from groupbench.tracker.cli.evaluate import lines_of
from groupbench.tracker.facts.record import Accuracy

pytestmark = pytest.mark.usefixtures("warm_imports")

OPERATOR = """
import torch
from groupbench.operators.define import operator

@operator({"smoke": ["N=4096"], "two": ["N=8", "N=16"]}, dtypes="fp32")
def doubled(N, dtype, device):
    return torch.randn(N, dtype=dtype, device=device)

@doubled.reference
@doubled.backend
def slow(x):
    for _ in range(200):
        y = x + x
    return y
"""
BROKEN = """
@doubled.backend
def broken(x):
    raise ValueError("not today")
"""
CANDIDATE = """
import torch
from groupbench.operators.operator import Backend

def fast(x):
    return lambda: x.x + x.x

def wrong(x):
    def run():
        y = x.x + x.x
        y[7] += 1
        return y
    return run

def cached(x):
    y = x.x + x.x
    return lambda: y.clone()

def raises(x):
    raise KeyError("BLOCK")

ALL = [Backend(f.__name__, f, "", operator="doubled") for f in (fast, wrong, cached, raises)]
"""


BACKEND = "from groupbench.operators.operator import Backend"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluate")
    (path / "doubled.py").write_text(OPERATOR + BROKEN)
    (path / "candidate.py").write_text(CANDIDATE)
    return path


class PatientEvaluator(Evaluator):
    """Evaluates again if other tests kept the processor busy, since a latency is not checked then."""

    def evaluate(self, *args: Any, **options: Any) -> Iterator[Evaluation]:
        for _ in range(5):
            evaluations = [*super().evaluate(*args, **options)]
            if not any("shared with other work" in (one.problem or "") for one in evaluations):
                break
        yield from evaluations


@pytest.fixture(scope="module")
def evaluator(folder: Path) -> Iterator[Evaluator]:
    with PatientEvaluator([str(folder / "doubled.py")], device="cpu", min_effect=0.3, budget_s=20) as running:
        yield running


def test_every_backend_of_a_candidate_gets_its_verdict(evaluator: Evaluator, folder: Path) -> None:
    evaluations = {one.backend: one for one in evaluator.evaluate(f"{folder / 'candidate.py'}:ALL")}
    fast = evaluations["fast"]
    assert (fast.verdict, fast.right, fast.honest, fast.against) == ("faster", True, True, "slow")
    assert fast.low and fast.speedup and fast.high and 2 < fast.low < fast.speedup < fast.high
    assert (evaluations["wrong"].verdict, evaluations["wrong"].first_wrong) == ("wrong", (7,))
    assert evaluations["wrong"].speedup is None and evaluations["wrong"].blocks == 0, "a wrong result is not timed"
    assert (evaluations["cached"].verdict, evaluations["cached"].honest) == ("suspicious", False)
    assert evaluations["raises"].verdict == "failed" and evaluations["raises"].right is None
    assert (evaluations["raises"].problem or "").startswith("KeyError: 'BLOCK', at ")
    assert exit_code([fast]) == 0 and exit_code([evaluations["wrong"], evaluations["raises"]]) == 1
    assert exit_code([evaluations["raises"], fast]) == 5


def test_a_file_that_was_changed_is_read_again(evaluator: Evaluator, folder: Path) -> None:
    candidate = folder / "changing.py"
    text = CANDIDATE.replace("(fast, wrong, cached, raises)", "(wrong,)")
    for place in (7, 8):  # wrong both times, so that neither is timed
        candidate.write_text(text.replace("y[7]", f"y[{place}]"))
        (one,) = evaluator.evaluate(f"{candidate}:ALL")
        assert (one.verdict, one.first_wrong) == ("wrong", (place,))


def test_a_wrong_candidate_is_wrong_beside_a_backend_that_fails(evaluator: Evaluator, folder: Path) -> None:
    """On a busy machine the latency of `against` may be refused, which says nothing about the candidate."""
    (wrong,) = evaluator.evaluate(f"{folder / 'candidate.py'}:ALL", backends=["wrong"], against="broken")
    assert (wrong.verdict, wrong.right, wrong.first_wrong) == ("wrong", False, (7,))


@pytest.mark.parametrize("attribute", ["", ":ALL"], ids=["file", "attribute"])
def test_a_file_that_changes_during_its_evaluation_has_no_verdict(
    evaluator: Evaluator, folder: Path, monkeypatch: pytest.MonkeyPatch, attribute: str
) -> None:
    """Each process imports the file, so the results would be of two versions."""
    candidate = folder / "edited.py"
    candidate.write_text(CANDIDATE)
    monkeypatch.setattr(evaluator._bench, "compare", lambda cell: candidate.write_text(f"{CANDIDATE}# changed"))
    (one, *_) = evaluator.evaluate(f"{candidate}{attribute}", backends=["fast"])
    assert (one.verdict, one.right, one.backend, exit_code([one])) == ("failed", None, "fast", 5)
    assert one.problem == "the file changed during its evaluation; repeat it"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *rarely(("import not_installed", "does not load: ModuleNotFoundError: No module named 'not_installed'")),
        ("def f(", r"does not load: SyntaxError: '\(' was never closed"),
        ("raise SystemExit(3)", "does not load: SystemExit: 3"),
        ("raise KeyboardInterrupt", "does not load: KeyboardInterrupt, at .*broken.py:1"),
        (f"{BACKEND}; A = (Backend('mine', print, ''),)", "backend 'mine' has no `operator`; known: grouped_gemm, "),
        ("import os; os.abort()", r"does not load: the process died \(signal SIGABRT\)"),
        ("x = 1", "the module has no operator and no Backend"),
    ],
)
def test_a_candidate_that_does_not_load_has_failed(text: str, says: str, evaluator: Evaluator, folder: Path) -> None:
    candidate = folder / "broken.py"
    candidate.write_text(text)
    (one,) = evaluator.evaluate(str(candidate), shapes=["N=8"])
    assert (one.verdict, one.backend, one.right, exit_code([one])) == ("failed", None, None, 5)
    assert re.match(f"plugin '{candidate}'.*{says}", one.problem or ""), one.problem
    assert lines_of(one) == [f"failed: {one.problem}"]
    json.loads(msgspec.json.encode(one))


def test_a_candidate_may_decorate_a_function_of_the_trusted_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "twofold.py").write_text(OPERATOR.replace("doubled", "twofold"))
    text = "from twofold import twofold\n\n@twofold.backend\ndef mine(x):\n    return 2 * x\n"
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    offered = list_offers(str(tmp_path / "mine.py"), (str(tmp_path / "twofold.py"),))
    assert offered == [{"operator": "twofold", "backend": "mine", "baseline": "slow", "own": False}]


def test_the_operators_that_a_candidate_imports_are_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "candidate.py").write_text(
        "from groupbench.operators.catalog.grouped_gemm import GROUPED_GEMM\n"
        "from groupbench.operators.operator import Backend\n"
        "loop = Backend('loop', GROUPED_GEMM.backend('torch_loop').prepare, '', operator='grouped_gemm')\n"
    )
    offered = list_offers(str(tmp_path / "candidate.py"), ())
    assert [(offer["backend"], offer["own"]) for offer in offered] == [("loop", False)]


MISTAKES = {
    "no file": ("nowhere.py", {}, "no such file"),
    "no such backend": ("candidate.py:ALL", {"backends": ["nope"]}, "its backends: doubled/fast"),
    "a file that is trusted already": ("doubled.py", {}, "adds no backend to those of the trusted plugins"),
    "nothing to compare with": ("candidate.py:ALL", {"against": "nope"}, "no backend 'nope'"),
    "no such shape": ("candidate.py:ALL", {"shapes": ["K=3"]}, "A shape is N=.."),
}


@pytest.mark.parametrize(("file", "by_name", "says"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_say_what_there_is(
    file: str, by_name: dict[str, list[str]], says: str, evaluator: Evaluator, folder: Path
) -> None:
    with pytest.raises(AbError, match=says):
        list(evaluator.evaluate(str(folder / file), **by_name))  # type: ignore[arg-type]


def command(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["evaluate", *map(str, words), "--device", "cpu", "--format=json"])


@pytest.mark.parametrize(("returns", "right"), [("x + x + 1", False), *rarely(("2 * x", True))])
def test_the_command(tmp_path: Path, returns: str, right: bool) -> None:
    """By default with a wrong result, which is not timed."""
    (tmp_path / "alone.py").write_text(f"{OPERATOR}\n@doubled.backend\ndef mine(x):\n    return {returns}\n")
    done = command(tmp_path / "alone.py", "--suite", "two", "--min-effect", "30")
    evaluations = json.loads(done.stdout)
    shown = [(one["shape"], one["backend"], one["right"]) for one in evaluations]
    assert shown == [("N=8", "mine", right), ("N=16", "mine", right)]
    assert all("own reference was trusted" in one["note"] for one in evaluations)
    assert done.exit_code == (0 if right else 1), done.output


def test_suites_may_be_separated_by_commas_and_a_mistake_has_an_answer(folder: Path) -> None:
    done = command(folder / "doubled.py", "--suite", "smoke,none")
    (answer,) = json.loads(done.stdout)
    assert (done.exit_code, answer["verdict"]) == (2, "refused")
    assert "no suite 'none'" in answer["problem"], answer


def test_the_command_goes_by_groupbench_toml(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is the file's plugin's: nothing on the command line names it."""
    (folder / "groupbench.toml").write_text('plugins = ["doubled.py"]\n')
    (folder / "only_wrong.py").write_text(CANDIDATE.replace("(fast, wrong, cached, raises)", "(wrong,)"))
    monkeypatch.chdir(folder)
    done = command("only_wrong.py:ALL", "--shape", "N=8")
    assert [(one["backend"], one["verdict"]) for one in json.loads(done.stdout)] == [("wrong", "wrong")]
    assert done.exit_code == 1


CELL = AbCell("op", "mine", "N=8", "fp32", plugins=("/a b.py",), base_backend="torch", trusted=())
RIGHT = Prepared("gpu", Accuracy(rms=0.0))
FASTER: dict[str, Any] = {"verdict": "different", "effect": -0.1, "low": -0.11, "high": -0.09, "head_facts": RIGHT}


def result(**facts: object) -> Evaluation:
    return of(AbResult(CELL, AbSide("against"), AbSide("candidate"), **facts), "cpu", "/a b.py")  # type: ignore[arg-type]


def test_a_cheat_that_shows_while_it_is_timed_is_suspicious() -> None:
    fails = {"failed_side": "head", "failed_status": "wrong", "message": "in a timed call: stale"}
    evaluation = result(verdict="failed", head_facts=RIGHT, **fails)
    assert (evaluation.verdict, evaluation.honest, evaluation.right) == ("suspicious", False, False)


def test_a_baseline_that_is_wrong_or_fails_is_named_and_not_blamed_on_the_candidate() -> None:
    wrong = result(**FASTER, base_accuracy=SideAccuracy("wrong", 0.28, "element 3 is 0"))
    assert wrong.verdict == "faster"
    assert lines_of(wrong)[3:5] == ["  rms error 0; torch has 0.28", "  torch itself is wrong or fails: element 3 is 0"]
    fails = {"failed_side": "base", "failed_status": "error", "message": "base (against): no memory"}
    failed = result(verdict="failed", head_facts=RIGHT, **fails)
    assert (failed.verdict, failed.right, failed.against_problem, failed.note) == ("unknown", True, "no memory", None)
    assert exit_code([failed]) == 3


def test_a_candidate_that_a_busy_machine_could_not_check_has_not_failed() -> None:
    reason = "not checked: the device is shared with other work; measure again when it is idle"
    fails = {"failed_side": "head", "failed_status": "error", "message": f"head (candidate): {reason}"}
    unknown = result(verdict="failed", head_facts=RIGHT, **fails)
    assert (unknown.verdict, unknown.problem, exit_code([unknown])) == ("unknown", reason, 3)


def test_an_interpreted_kernel_is_right_and_has_no_speed() -> None:
    evaluation = result(verdict="same", timing="interpreted", head_facts=RIGHT, message="accuracy alone was compared")
    assert (evaluation.verdict, evaluation.speedup, evaluation.note) == ("right", None, "accuracy alone was compared")


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (-0.11, -0.09, ": 1.105 x, 1.094 to 1.116, from"),
        (-0.11, math.inf, ": 1.105 x, below 1.116, from"),
        (-math.inf, math.inf, ": 1.105 x, from"),
    ],
)
def test_an_unknown_end_of_the_interval_is_not_printed(low: float, high: float, text: str) -> None:
    line = lines_of(result(**FASTER | {"verdict": "unknown", "low": low, "high": high}))[1]
    assert text in line and "?" not in line


def test_what_could_not_be_checked_names_the_candidate_and_its_rival() -> None:
    busy = ["times, because other work kept the CPU busy"]
    assert result(**FASTER).unchecked == {}
    evaluation = result(**FASTER, unchecked={"base": busy, "head": busy})
    assert (evaluation.verdict, evaluation.unchecked) == ("faster", {"against": busy, "candidate": busy})
    assert f"  not checked in torch and the candidate: {busy[0]}" in lines_of(evaluation)


def test_a_routing_that_only_the_candidate_has_built_in_is_named() -> None:
    note = result(**FASTER, base_dynamic=True, head_dynamic=False).note or ""
    assert note.startswith("the candidate has a built-in routing, so")
    assert result(**FASTER, base_dynamic=True, head_dynamic=True).note is None


# lower and upper end of log(candidate / against) at the end of the budget
ENDS = {
    "slower by more than the threshold": (0.026, 0.029, "slower"),
    "faster by more": (-0.06, -0.02, "faster"),
    "within it": (-0.008, 0.009, "same"),
    "maybe within it": (-0.001, 0.02, "unknown"),
    "slower by less, or more": (0.002, 0.02, "unknown"),
    "not known": (None, 0.02, "unknown"),
}


@pytest.mark.parametrize(("low", "high", "verdict"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("limit", ["budget", "blocks"])
def test_at_the_end_of_a_limit_the_interval_decides(
    low: float | None, high: float, verdict: str, limit: Literal["budget", "blocks"]
) -> None:
    facts = {"effect": 0.0, "low": low, "high": high, "min_effect": 0.01, "message": "not resolved"}
    evaluation = result(verdict="unknown", head_facts=RIGHT, ran_out=limit, **facts)
    assert (evaluation.verdict, evaluation.ran_out) == (verdict, limit)
    assert ("95 %" in (evaluation.note or "")) == (verdict != "unknown")
    assert ("--budget" in (evaluation.note or "")) == (verdict != "unknown" and limit == "budget")


def test_no_change_is_too_small_if_the_smallest_is_zero() -> None:
    facts = {"effect": 0.003, "low": 0.002, "high": 0.004, "min_effect": 0.0}
    assert decided(AbResult(CELL, AbSide("a"), AbSide("b"), "unknown", **facts)) == "slower"


@pytest.mark.parametrize("verdict", ["wrong", "suspicious", "failed", "unknown", "faster"])
def test_what_to_try_can_be_pasted(verdict: str) -> None:
    for command in to_try(verdict, CELL, "cuda", "/a b.py"):  # type: ignore[arg-type]
        assert "'/a b.py'" in command and command.split()[0] in ("tritonbench", "groupbench")


def test_an_interpreted_candidate_is_right_or_wrong_and_not_timed(evaluator: Evaluator, tmp_path: Path) -> None:
    """torch's baseline has a latency on a CPU, but a kernel in Triton's interpreter does not."""
    candidate = tmp_path / "candidate.py"
    candidate.write_text("""
from groupbench.operators.catalog.vector_add import VECTOR_ADD
from groupbench.operators.operator import Backend

def prepare_triton(given):
    return VECTOR_ADD.backend("triton").prepare(given)

def off(given):
    run = prepare_triton(given)
    return lambda: run() + 1

def cached(given):
    out = prepare_triton(given)()
    return lambda: out.clone()

ALL = [Backend(f.__name__, f, "", kind="triton", operator="vector_add") for f in (prepare_triton, off, cached)]
""")
    right, wrong, stale = evaluator.evaluate(f"{candidate}:ALL", shapes=("M=17,N=33",), dtypes=("fp32",))
    assert (right.verdict, right.right, right.speedup) == ("right", True, None)
    assert right.note is not None and "speed was not measured" in right.note
    assert (wrong.verdict, wrong.right, wrong.speedup) == ("wrong", False, None)
    assert (stale.verdict, stale.honest) == ("suspicious", False) and "in a timed call" in (stale.problem or "")
