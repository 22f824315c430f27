"""JUnit XML: a case for each series, a suite for each operator, and one case for the gate as a whole.

Of the many dialects, it uses the part that Jenkins' schema (junit-10.xsd) allows, which GitLab and others read too.
"""

from __future__ import annotations

from xml.etree import ElementTree

from groupbench.tracker.facts.verdicts import GOOD
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.outputs.escape import shown, xml
from groupbench.tracker.outputs.result import GateResult
from groupbench.tracker.text.wording import printable

_ATTRIBUTE_BYTES = 300  # of a note in a list of cases; the details have all of it
_MESSAGE_CHARACTERS = 20_000
"""Most characters of a compiler's message."""

_Cases = list[tuple[Judged | None, ElementTree.Element]]


def render(result: GateResult) -> str:
    gate = result.gate
    top = ElementTree.Element("testsuites", name="groupbench")
    overall = ElementTree.Element("testcase", classname="groupbench", name="gate", time="0.000")
    cases: dict[str, _Cases] = {"groupbench gate": [(None, overall)]}
    named: set[int] = set()
    red = False
    for row in gate.rows:
        element = _case(row, result)
        if row.series.pk in named:  # a report must not repeat a name, and a series keeps its name every night
            element.set("name", _text(f"{result.label(row.series)} {row.what}"))
        named.add(row.series.pk)
        red = red or result.red(row) is not None
        cases.setdefault(row.series.operator, []).append((row, element))
    if gate.exit_code and not red:  # an empty run must not pass
        _child(overall, "error", gate.word, gate.summary, gate.summary)
    for name, members in cases.items():
        suite = _suite(name, members, result)
        if name == "groupbench gate":
            _properties(suite, result)
        suite.extend(element for _, element in members)
        top.append(suite)
    for key in ("tests", "failures", "errors"):
        top.set(key, str(sum(int(suite.get(key, "0")) for suite in top)))
    ElementTree.indent(top)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(top, encoding="unicode") + "\n"


def _suite(name: str, members: _Cases, result: GateResult) -> ElementTree.Element:
    """Return a suite for some cases, still without them: counts, time and start."""
    elements = [element for _, element in members]
    seconds = sum(row.point.duration_s or 0.0 for row, _ in members if row is not None and row.point is not None)
    suite = ElementTree.Element("testsuite", name=_text(name), tests=str(len(elements)))
    for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(sum(element.find(tag) is not None for element in elements)))
    suite.set("time", f"{seconds:.3f}")
    suite.set("timestamp", f"{result.gate.run.started:%Y-%m-%dT%H:%M:%S}")
    return suite


def _properties(suite: ElementTree.Element, result: GateResult) -> None:
    run = result.gate.run
    values = {"verdict": result.gate.word, "summary": result.gate.summary, "run": run.id, "commit": run.commit_text}
    values |= {"hardware": ", ".join(result.hardware)}
    values |= {"plan": run.plan} if run.plan else {}
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in values.items():
        ElementTree.SubElement(properties, "property", name=name, value=_text(value))


def _case(row: Judged, result: GateResult) -> ElementTree.Element:
    series, point = row.series, row.point
    seconds = 0.0 if point is None else point.duration_s or 0.0
    case = ElementTree.Element(
        "testcase",
        classname=_text(f"{series.operator}.{series.backend}"),
        name=_text(result.label(series)),
        time=f"{seconds:.3f}",
    )
    text = message(row)
    red = result.red(row)
    if red:
        _child(case, red, row.verdict, text, _details(row))
    elif row.verdict.tone is not GOOD:
        _child(case, "skipped", row.verdict, text, None)
    elif text != row.verdict:
        ElementTree.SubElement(case, "system-out").text = xml(text)
    return case


def message(row: Judged) -> str:
    """Return one line for a series: `regressed: latency 1.000 ms → 1.030 ms, +3.0%; note`."""
    parts = []
    levels = row.shown
    if row.what == "latency" and levels.before is not None and levels.now is not None:
        parts.append(f"latency {levels.before_text} → {levels.now_text}, {levels.change_text}")
    elif row.further:
        parts.append(f"{row.what} {levels.before_text} → {levels.now_text}")
    elif row.what:
        parts.append(row.what)
    if row.note:
        parts.append(shown(row.note, _ATTRIBUTE_BYTES))
    return f"{row.verdict}: {'; '.join(parts)}" if parts else row.verdict


def _details(row: Judged) -> str:
    lines = [message(row)]
    if row.shown.interval():
        lines.append(f"interval {row.shown.interval()}")
    if row.cause:
        lines.append(f"cause {row.cause}")
    if row.span is not None:
        lines.append(f"commits {row.span.text} {printable(row.span.subject or '')}".rstrip())
        lines += [row.span.remark] if row.span.remark else []
        lines += [f"author {printable(row.span.author)}"] if row.span.author else []
    if row.note and len(row.note) > _ATTRIBUTE_BYTES:
        lines.append(row.note[:_MESSAGE_CHARACTERS])
    return "\n".join(lines)


def _child(case: ElementTree.Element, tag: str, kind: str, message_text: str, text: str | None) -> None:
    child = ElementTree.SubElement(case, tag, type=kind, message=_text(message_text))
    child.text = None if text is None else xml(text)


def _text(text: str) -> str:
    """Return a text as an attribute's value: one line that XML can hold."""
    return xml(printable(text))
