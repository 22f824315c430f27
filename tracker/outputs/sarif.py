"""SARIF 2.1.0: a result for each regression, at the kernel's line.

Written for GitHub's code scanning, which refuses a whole file for one result without a place, tells results of two
nights apart by their fingerprint alone, and shows the first 5,000. What could not be judged is a notification of the
invocation: it is no defect of a line.
"""

from __future__ import annotations

import hashlib
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import quote

from groupbench.tracker.exits import ExitCode
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.outputs import source
from groupbench.tracker.outputs.escape import clean, shown
from groupbench.tracker.outputs.junit import message
from groupbench.tracker.outputs.result import Result
from groupbench.tracker.outputs.source import Source
from groupbench.tracker.query.rows import SeriesRow
from groupbench.tracker.text.wording import printable
from groupbench.tracker.verdicts import Verdict

MOST = 5000
"""Results."""

_NOTIFICATIONS = 1000
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_RULES = {
    "latency": ("LatencyRegression", "A kernel became slower.", "Slower than its own history by more than its noise."),
    "accuracy": ("AccuracyRegression", "A kernel became less accurate.", "Within tolerance, yet worse than it was."),
    "repeatability": ("RepeatabilityLost", "Two executions differ.", "They agreed bit by bit before."),
    "result": ("WrongResult", "A kernel's result is wrong.", "Outside the tolerance table against the reference."),
}


def render(result: Result) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(clean(sarif(result))), indent=1).decode() + "\n"


def sarif(result: Result) -> dict[str, Any]:
    gate = result.gate
    worse = [row for row in gate.notable if row.verdict.fails]
    shown_, left = worse[:MOST], len(worse) - MOST
    places = source.find(result.root, [row.series for row in shown_], result.kernels)
    notes = [_notification("error", f"{row.series}: {message(row)}") for row in gate.notable if _unjudged(row, result)]
    cut = [_notification("warning", f"{left} more regressions, the least grave, are left out")] if left > 0 else []
    if len(notes) > _NOTIFICATIONS:
        cut.append(_notification("warning", f"{len(notes) - _NOTIFICATIONS} more series could not be judged"))
    run: dict[str, Any] = {
        "tool": {
            "driver": {
                "name": "groupbench",
                "version": _version(),
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
        "results": [_result(row, result, places[row.series.pk]) for row in shown_],
    }
    if result.place.repository:
        control = {"repositoryUri": result.place.repository, "revisionId": gate.run.commit}
        run["versionControlProvenance"] = [control]
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(row: Judged, result: Result, at: Source) -> dict[str, Any]:
    what = "result" if row.verdict is Verdict.WRONG else row.what if row.what in _RULES else "latency"
    known = row.acknowledged and not result.strict
    series, span = row.series, row.span
    text = f"{series.operator} {series.backend}, {shown(result.label(series), 300)}: {message(row)}"
    if span is not None:
        text += f"; since {span.text}" + (f" ({shown(span.head.subject, 200)})" if span.head.subject else "")
    found: dict[str, Any] = {
        "ruleId": f"groupbench/{what}",
        "ruleIndex": list(_RULES).index(what),
        "level": "note" if known else "error",
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
            "primaryLocationLineHash": f"{fingerprint(series, what)}:1",  # the one that GitHub goes by
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
        accepted = {"kind": "external", "status": "accepted", "justification": printable(row.alert.text)}
        found["suppressions"] = [accepted] if known else []
    return found


def fingerprint(series: SeriesRow, what: str) -> str:
    """Of the series and of what changed: the same every night, on every machine with this hardware."""
    fields = (*series.problem, series.backend, what)
    return hashlib.sha256("\0".join(fields).encode("utf-8", "replace")).hexdigest()[:32]


def _unjudged(row: Judged, result: Result) -> bool:
    return result.red(row) == "error"


def _category(result: Result) -> str:
    """What GitHub keeps apart: the results of one plan and machine do not close those of another."""
    name = "/".join((result.gate.run.plan or "run", *sorted(result.hardware)))
    return f"groupbench/{quote(printable(name)[:200], safe='/ ')}/"


def _notification(level: str, text: str) -> dict[str, Any]:
    return {"level": level, "message": {"text": _plain(shown(text, 2000))}}


def _plain(text: str) -> str:
    """One line that no viewer takes for a link to a location or a place-holder (SARIF 2.1.0, 3.11.5 and 3.11.6)."""
    return re.sub(r"\{(?=\d)", "{ ", printable(text).replace("](", "] ("))


def _version() -> str:
    try:
        return version("groupbench")
    except PackageNotFoundError:
        return "unknown"
