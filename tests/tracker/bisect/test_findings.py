"""Test how a comparison of two commits becomes a finding of the search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from groupbench.tracker.ab.result import AbCell, AbResult, SideAccuracy
from groupbench.tracker.ab.side import AbSide
from groupbench.tracker.bisect import drive
from groupbench.tracker.bisect.history import BisectError
from groupbench.tracker.bisect.log import Header, Log
from groupbench.tracker.bisect.search import AbFinding, ComparisonRequest

BUSY = "times, because other work kept the CPU busy"


def test_a_log_from_before_it_named_what_was_not_checked_is_read(tmp_path: Path) -> None:
    facts = {"metric": "latency", "all": False, "confidence": 0.95}
    header = Header(repository="r", good="a", bad="b", cell={}, **facts)
    question = ComparisonRequest("a", "b", "ends")
    Log(tmp_path / "l", header, resume=False).add(question, AbFinding("same"))
    text = (tmp_path / "l").read_text()
    assert text.count(',"unchecked":{},"routing":""') == 1
    (tmp_path / "l").write_text(text.replace(',"unchecked":{},"routing":""', ""))
    assert Log(tmp_path / "l", header, resume=True).replay(question) == AbFinding("same")


def result(base: SideAccuracy, head: SideAccuracy, verdict: str = "same", **facts: Any) -> AbResult:
    sides = AbSide("a"), AbSide("b")
    facts |= {"base_accuracy": base, "head_accuracy": head}
    return AbResult(AbCell("o", "b", "s", "fp32"), *sides, verdict, **facts)  # type: ignore[arg-type]


FINE, WRONG, LOST = SideAccuracy("ok", 1e-3), SideAccuracy("wrong", 0.9e-3), SideAccuracy("wrong", None)


def test_a_finding_keeps_what_was_not_checked_and_what_became_of_the_result() -> None:
    unchecked = {"head": [BUSY]}
    of = result(FINE, FINE, effect=0.0, unchecked=unchecked)
    assert drive.finding_of_latency(of).unchecked == drive.finding_of_accuracy(of).unchecked == unchecked
    assert drive.finding_of_latency(result(FINE, WRONG, "different", effect=-1.0)).accuracy == "wrong"


@pytest.mark.parametrize(
    ("base", "head", "verdict", "sign"),
    [
        (FINE, FINE, "same", 0),
        (FINE, SideAccuracy("ok", 1.4e-3), "same", 1),
        (FINE, SideAccuracy("ok", 2e-3), "different", 1),
        (SideAccuracy("ok", 2e-3), FINE, "different", -1),
        (FINE, WRONG, "different", 1),
        (FINE, LOST, "different", 1),
        (LOST, FINE, "different", -1),
        (LOST, LOST, "same", 0),
        (SideAccuracy("ok", 0.0), SideAccuracy("ok", 1e-8), "same", 1),
    ],
)
def test_accuracy_is_compared_by_its_error(base: SideAccuracy, head: SideAccuracy, verdict: str, sign: int) -> None:
    finding = drive.finding_of_accuracy(result(base, head, "unknown"))
    assert finding.verdict == verdict and finding.effect is not None
    assert (finding.effect > 0) - (finding.effect < 0) == sign


def test_interpreted_kernels_are_not_searched_for_latency() -> None:
    with pytest.raises(BisectError, match="interpreted"):
        drive.finding_of_latency(result(FINE, FINE, timing="interpreted"))
