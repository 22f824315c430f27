"""Markdown of a verdict within a size limit, shared by the step summary and the comment.

It is written for GitHub and GitLab. Rows that do not fit are left out, the least severe first, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from groupbench.tracker.facts.verdicts import BESIDES_CODE, Verdict
from groupbench.tracker.outputs.escape import LONGEST, code, link, shown, size, words
from groupbench.tracker.text.terminal import shortened
from groupbench.tracker.text.wording import latency, printable, short_number, signed_change

if TYPE_CHECKING:  # or `post` would import the database's library
    from groupbench.tracker.judge.spans import Span
    from groupbench.tracker.judge.verdicts import Judged
    from groupbench.tracker.outputs.result import ChangeGroup, CiLocation, GateResult

_NAMES = 5  # of series in a line about a group
_COMMAND = 600
"""Longest command to show, in bytes: a truncated command would measure something else."""
_COMMANDS = 10  # to reproduce the first rows
_RESERVE = 400
"""Bytes reserved for the line that counts the rows left out."""


class MarkdownPage:
    """A Markdown text that grows up to a limit in bytes."""

    def __init__(self, limit: int) -> None:  # bytes
        self.limit, self.parts, self.size, self.left_out = limit, [""], 0, 0

    def room(self, text: str, after: int = 0) -> bool:
        return self.size + size(text) + after + _RESERVE <= self.limit

    def add(self, text: str) -> None:
        self.parts.append(text)
        self.size += size(text)

    def table(self, title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
        """Add a table, folded below a title and without empty columns. Columns named `>...` are right-aligned."""
        used = [i for i in range(len(columns)) if any(line[i] for line in cells)]
        rule = ["---:" if columns[i].startswith(">") else "---" for i in used]
        top = f"{_line(columns[i].removeprefix('>') for i in used)}\n{_line(rule)}\n"
        start, end = f"<details><summary>{title}</summary>\n\n{top}", "\n</details>\n\n"
        kept = 0
        for line in cells:
            text = ("" if kept else start) + _line(line[i] for i in used) + "\n"
            if not self.room(text, size(end)):
                break
            self.add(text)
            kept += 1
        if kept:
            self.add(end)
        self.left_out += len(cells) - kept

    def text(self) -> str:
        if self.left_out:
            self.add(
                f"\n{self.left_out} lines were left out, the least severe ones, because this page is limited to "
                f"{self.limit:,} bytes. `groupbench gate --format json` prints all of them.\n"
            )
        return "".join(self.parts)


def head(result: GateResult, level: str) -> str:
    """Return a heading with the verdict, and a line with every count."""
    gate = result.gate
    verdict, _, counts = gate.summary.partition(". ")
    line = f"**{printable(counts)}**\n\n" if counts else ""
    return f"{level} {gate.outcome.tone.dot} {printable(verdict)}\n\n{line}"


def changes(page: MarkdownPage, result: GateResult, most: int) -> None:
    """Add the open incidents, the changes of the environment, and a line for each other group that changed."""
    for view in result.incidents[:most]:
        state, *facts = (words(line.strip()) for line in view.lines)
        page.add("\n".join([f"- **incident** {state}", *(f"  - {line}" for line in facts)]) + "\n")
    for line in result.gate.transitions:
        page.add(f"- {words(line)}\n")
    groups = result.groups
    for number, group in enumerate(groups):
        text = f"- {group_line(group, result.place)}\n"
        command = group.first.repro if group.first.verdict.changed else None
        if command and number < _COMMANDS and size(command) <= _COMMAND:
            text += f"  - reproduce: {code(printable(command))}\n"
        if number == most or not page.room(text):
            page.add(f"- and {len(groups) - number} more groups of series\n")
            break
        page.add(text)
    page.add("\n" if groups or result.gate.transitions else "")


def group_line(group: ChangeGroup, place: CiLocation) -> str:
    """Return one line for a group: verdict, backend, metric, change and first commit."""
    first = group.first
    note = words(shown(group.note or "", LONGEST.note))
    if first.verdict is Verdict.INCOMPARABLE:
        return f"**incomparable** {len(group.rows)} series: {note}"
    name = " ".join(code(shown(each, LONGEST.name)) for each in group.names[:_NAMES])
    verdict = f"**{first.verdict}**{' (acknowledged)' if first.acknowledged else ''}"
    parts = [f"{verdict} {name}: {group.head} {group.change}".rstrip()]
    if len(group.rows) == 1:
        parts.append(code(shortened(printable(first.series.shape), LONGEST.shape)))
    if first.span is not None:
        by_code = first.cause not in BESIDES_CODE
        shown_commit = commit(first.span, place) if by_code else code(first.span.label)
        parts.append(f"since {first.span.date}, {shown_commit}")
    if first.cause:
        parts.append(f"cause {first.cause}")
    if note and first.what != "accuracy":
        parts.append(note)
    return ", ".join(parts)


def commit(span: Span, place: CiLocation) -> str:
    """Return the commit to show for a change, as a link with subject, author, and how it was found."""
    text = link(code(span.label), place.commit(span.commit))
    if span.subject:
        text += f" {code(shown(span.subject, LONGEST.subject))}"
    text += f" by {code(shown(span.author, LONGEST.name))}" if span.author else ""
    return text + (f" ({span.remark})" if span.remark else "")


def sections(page: MarkdownPage, result: GateResult, rows: Sequence[Judged]) -> None:
    """Add a folded table for each verdict, the most severe first."""
    for verdict in Verdict:
        matching = [row for row in rows if row.verdict == verdict]
        if matching:
            page.table(f"{len(matching)} {verdict}", _CHANGED, [_changed(row, result) for row in matching])


_CHANGED = (
    *("operator", "backend", "series", "metric", ">before", ">now", ">change", "interval", "cause", "commits", "note"),
)


def _changed(row: Judged, result: GateResult) -> list[str]:
    levels = row.shown
    return [
        *_names(row, result),
        row.what or "",
        levels.before_text,
        levels.now_text,
        levels.change_text,
        levels.interval(),
        row.cause or "",
        _commits(row, result),
        "" if row.note is None else words(shown(row.note, LONGEST.note)),
    ]


def _commits(row: Judged, result: GateResult) -> str:
    if row.span is None:
        return ""
    text = link(code(row.span.text), result.place.commit(row.span.commit))
    return text + (f" ({row.span.remark})" if row.span.remark else "")


def every(page: MarkdownPage, result: GateResult) -> None:
    """Add a folded table of every series of the run."""
    rows = sorted(result.gate.rows, key=lambda row: (row.verdict.severity, row.series.sort_key))
    columns = ("verdict", "operator", "backend", "series", ">now ms", ">change", ">rms", ">earlier results")
    cells = [
        [
            row.verdict,
            *_names(row, result),
            _now(row),
            signed_change(row.change),
            short_number(None if row.point is None else row.point.rms),
            str(row.evidence.n),
        ]
        for row in rows
    ]
    page.table(f"All {len({row.series.pk for row in rows})} series", columns, cells)


def _names(row: Judged, result: GateResult) -> list[str]:
    series = row.series
    label = shortened(printable(result.label(series)), LONGEST.shape)
    return [code(shown(series.operator, LONGEST.name)), code(shown(series.backend, LONGEST.name)), code(label)]


def _now(row: Judged) -> str:
    if row.point is None:
        return ""
    return latency(row.latency_now, row.point.timing)


def foot(result: GateResult) -> str:
    """Return the last line: the commit, the run, the plan and the hardware."""
    run, parts = result.gate.run, []
    parts.append(f"Commit {link(code(str(run.state)), result.place.commit(run.commit))}")
    if run.subject:
        parts.append(code(shown(run.subject, LONGEST.subject)))
    parts.append(f"run {code(shown(run.id, 32))} of {run.started:%Y-%m-%d %H:%M} UTC")
    if run.plan:
        parts.append(f"plan {code(shown(run.plan, LONGEST.name))}")
    if result.hardware:
        more = len(result.hardware) - 4
        parts.append("on " + ", ".join(code(shown(name, LONGEST.name)) for name in result.hardware[:4]))
        parts[-1] += f" and {more} more" if more > 0 else ""
    if result.place.job:
        parts.append(link("job", result.place.job))
    return ", ".join(parts) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
