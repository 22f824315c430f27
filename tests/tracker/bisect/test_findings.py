"""Test how a comparison of two commits becomes a finding of the search."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupbench.tracker.ab.bench import AbCell, AbResult, AbSide, SideAccuracy
from groupbench.tracker.bisect import drive
from groupbench.tracker.bisect.history import BisectError
from groupbench.tracker.bisect.log import Header, Log
from groupbench.tracker.bisect.search import AbFinding, ComparisonRequest

BUSY = "times, because other work kept the CPU busy"


def test_a_log_from_before_it_named_what_was_not_checked_is_read(tmp_path: Path) -> None:
    header = Header(
        repository="r", good="a", bad="b", cell={}, metric="latency", direction="worse", all=False, confidence=0.95
    )
    question = ComparisonRequest("a", "b", "ends")
    Log(tmp_path / "l", header, resume=False).add(question, AbFinding("same"))
    text = (tmp_path / "l").read_text()
    assert text.count(',"unchecked":{},"routing":""') == 1
    (tmp_path / "l").write_text(text.replace(',"unchecked":{},"routing":""', ""))
    assert Log(tmp_path / "l", header, resume=True).replay(question) == AbFinding("same")


def test_what_a_comparison_could_not_check_goes_into_its_finding() -> None:
    sides = {"base_accuracy": SideAccuracy("ok", 1e-3), "head_accuracy": SideAccuracy("ok", 1e-3)}
    cell, unchecked = AbCell("o", "b", "s", "fp32"), {"head": [BUSY]}
    result = AbResult(cell, AbSide("a"), AbSide("b"), "same", effect=0.0, unchecked=unchecked, **sides)  # type: ignore[arg-type]
    assert drive.finding_of_latency(result).unchecked == drive.finding_of_accuracy(result).unchecked == unchecked


@pytest.mark.parametrize(
    ("base", "head", "verdict", "sign"),
    [
        (("ok", 1e-3), ("ok", 1e-3), "same", 0),
        (("ok", 1e-3), ("ok", 1.4e-3), "same", 1),
        (("ok", 1e-3), ("ok", 2e-3), "different", 1),
        (("ok", 2e-3), ("ok", 1e-3), "different", -1),
        (("ok", 1e-3), ("wrong", 0.5), "different", 1),
        (("ok", 1e-3), ("wrong", 0.9e-3), "different", 1),
        (("ok", 1e-3), ("wrong", None), "different", 1),
        (("wrong", None), ("ok", 1e-3), "different", -1),
        (("wrong", None), ("wrong", None), "same", 0),
        (("ok", 0.0), ("ok", 1e-8), "same", 1),
    ],
)
def test_accuracy_is_compared_by_its_error(
    base: tuple[str, float | None], head: tuple[str, float | None], verdict: str, sign: int
) -> None:
    cell, at = AbCell("o", "b", "s", "fp32"), AbSide("side")
    sides = {"base_accuracy": SideAccuracy(*base), "head_accuracy": SideAccuracy(*head)}
    finding = drive.finding_of_accuracy(AbResult(cell, at, at, "unknown", **sides))  # type: ignore[arg-type]
    assert finding.verdict == verdict
    assert finding.effect is not None
    assert (finding.effect > 0) - (finding.effect < 0) == sign


def test_a_comparison_of_latencies_keeps_what_became_of_the_result() -> None:
    sides = {"base_accuracy": SideAccuracy("ok", 1e-3), "head_accuracy": SideAccuracy("wrong", 1e-2)}
    result = AbResult(AbCell("o", "b", "s", "fp32"), AbSide("a"), AbSide("b"), "different", effect=-1.0, **sides)  # type: ignore[arg-type]
    assert drive.finding_of_latency(result).accuracy == "wrong"


def test_interpreted_kernels_are_not_searched_for_latency() -> None:
    result = AbResult(AbCell("o", "b", "s", "fp32"), AbSide("a"), AbSide("b"), "same", timing="interpreted")
    with pytest.raises(BisectError, match="interpreted"):
        drive.finding_of_latency(result)
