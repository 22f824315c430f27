"""SARIF 2.1.0: a result for each regression, at the kernel's line.

It is written for GitHub's code scanning, which rejects a whole file if one result has no location, matches results of
different runs only by their fingerprints, and shows the first 5,000. A series that could not be judged becomes a
notification of the invocation, since it is not a defect of a line.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any
from urllib.parse import quote

from groupbench.tracker.facts.environment import installed_version
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.outputs import source
from groupbench.tracker.outputs.escape import clean, shown
from groupbench.tracker.outputs.junit import message
from groupbench.tracker.outputs.result import GateResult
from groupbench.tracker.outputs.source import SourceLine
from groupbench.tracker.query.rows import SeriesRow
from groupbench.tracker.text.wording import printable

MOST_RESULTS = 5000
"""Most results in a file."""

_NOTIFICATIONS = 1000  # of series without a verdict
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_RULES = {
    "latency": (
        "LatencyRegression",
        "A kernel became slower.",
        "It is slower than its history by more than its noise.",
    ),
    "accuracy": (
        "AccuracyRegression",
        "A kernel became less accurate.",
        "It is within tolerance but worse than before.",
    ),
    "repeatability": ("RepeatabilityLost", "Two executions differ.", "They were bitwise equal before."),
    "result": ("WrongResult", "A kernel's result is wrong.", "Its error against the reference exceeds the tolerance."),
}


def render(result: GateResult) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(clean(sarif(result))), indent=1).decode() + "\n"


def sarif(result: GateResult) -> dict[str, Any]:
    gate = result.gate
    worse = [row for row in gate.notable if row.verdict.fails]
    listed, left = worse[:MOST_RESULTS], len(worse) - MOST_RESULTS
    places = source.find(result.root, [row.series for row in listed], result.kernels)
    notes = [_notification("error", f"{row.series}: {message(row)}") for row in gate.notable if _unjudged(row, result)]
    cut = [_notification("warning", f"the {left} least severe regressions are left out")] if left > 0 else []
    if len(notes) > _NOTIFICATIONS:
        cut.append(_notification("warning", f"{len(notes) - _NOTIFICATIONS} more series could not be judged"))
    run: dict[str, Any] = {
        "tool": {
            "driver": {
                "name": "groupbench",
                "version": installed_version("groupbench") or "unknown",
                "rules": [
                    {
                        "id": f"groupbench/{what}",
                        "name": name,
                        "shortDescription": {"text": short},
                        "fullDescription": {"text": full},
                        "defaultConfiguration": {"level": "error"},
                        "properties": {"tags": ["performance" if what == "latency" else "correctness"]},
                    }
                    for what, (name, short, full) in _RULES.items()
                ],
            }
        },
        "automationDetails": {"id": _category(result)},
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": gate.exit_code in (ExitCode.OK, ExitCode.FAILED),
                "exitCode": gate.exit_code,
                "startTimeUtc": f"{gate.run.started:%Y-%m-%dT%H:%M:%SZ}",
                "toolExecutionNotifications": [
                    _notification("note", gate.summary),
                    *cut,
                    *notes[:_NOTIFICATIONS],
                ],
            }
        ],
        "results": [_result(row, result, places[row.series.pk]) for row in listed],
    }
    if result.place.repository:
        control = {"repositoryUri": result.place.repository, "revisionId": gate.run.commit}
        run["versionControlProvenance"] = [control]
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(row: Judged, result: GateResult, at: SourceLine) -> dict[str, Any]:
    what = "result" if row.verdict is Verdict.WRONG else row.what if row.what in _RULES else "latency"
    accepted = row.acknowledged and not result.strict
    series, span = row.series, row.span
    text = f"{series.operator} {series.backend}, {shown(result.label(series), 300)}: {message(row)}"
    if span is not None:
        text += f"; since {span.text}" + (f" ({shown(span.subject, 200)})" if span.subject else "")
        text += f", {span.remark}" if span.remark else ""
    entry: dict[str, Any] = {
        "ruleId": f"groupbench/{what}",
        "ruleIndex": list(_RULES).index(what),
        "level": "note" if accepted else "error",
        "message": {"text": _plain(text)},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": quote(at.path), "uriBaseId": "%SRCROOT%"},
                    "region": {"startLine": at.line},
                },
                "logicalLocations": [{"fullyQualifiedName": f"{series.operator}.{series.backend}", "kind": "function"}],
            }
        ],
        "partialFingerprints": {
            "groupbench/v1": fingerprint(series, what),
            "primaryLocationLineHash": f"{fingerprint(series, what)}:1",  # the one that GitHub uses
        },
        "properties": {
            "series": printable(str(series)),
            "hardware": printable(series.hardware),
            "cause": row.cause,
            "change": row.change,
            "low": row.effect.low,
            "high": row.effect.high,
            "source": at.found_by,
        },
    }
    if row.acknowledged:
        assert row.alert is not None
        suppression = {"kind": "external", "status": "accepted", "justification": printable(row.alert.text)}
        entry["suppressions"] = [suppression] if accepted else []
    return entry


def fingerprint(series: SeriesRow, what: str) -> str:
    """Return a hash of the series and the metric that changed, equal for every run and machine with this hardware."""
    fields = (*series.problem, series.backend, what)
    return hashlib.sha256("\0".join(fields).encode("utf-8", "replace")).hexdigest()[:32]


def _unjudged(row: Judged, result: GateResult) -> bool:
    return result.red(row) == "error"


def _category(result: GateResult) -> str:
    """Return the category, by plan and hardware, so that GitHub does not close the results of another machine."""
    name = "/".join((result.gate.run.plan or "run", *sorted(result.hardware)))
    return f"groupbench/{quote(printable(name)[:200], safe='/ ')}/"


def _notification(level: str, text: str) -> dict[str, Any]:
    return {"level": level, "message": {"text": _plain(shown(text, 2000))}}


def _plain(text: str) -> str:
    """Return one line without anything that reads as an embedded link or placeholder (SARIF 2.1.0, 3.11.5, 3.11.6)."""
    return re.sub(r"\{(?=\d)", "{ ", printable(text).replace("](", "] ("))
