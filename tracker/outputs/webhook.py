"""Send a message to Slack's incoming webhook, or to a service with the same format, such as Mattermost.

A message has at most 50 blocks, a header 150 characters and a section 3,000:
https://api.slack.com/reference/block-kit/blocks. The URL is a secret, so messages show only the host.
"""

from __future__ import annotations

from typing import Any

from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.outputs import http
from groupbench.tracker.outputs.escape import clean, shown, slack, slack_code
from groupbench.tracker.outputs.result import ChangeGroup, CiLocation, GateResult
from groupbench.tracker.text.terminal import shortened

BLOCKS = 50

_WEBHOOK_GROUPS = 20


def send(result: GateResult, url: str) -> None:
    """Send the result to a webhook. Raises OutputError if it is not accepted."""
    http.send(http.HttpRequest("POST", url, body=payload(result), secret=url), what=f"webhook at {http.host(url)}")


def payload(result: GateResult) -> dict[str, Any]:
    """Return {text, blocks}. Notifications and clients without blocks show the text."""
    gate = result.gate
    head, _, counts = gate.summary.partition(". ")
    groups = result.groups
    lines = [
        slack(shown("; ".join(line.strip() for line in view.lines), 900)) for view in result.incidents[:_WEBHOOK_GROUPS]
    ]
    lines += [_line(group, result.place) for group in groups[:_WEBHOOK_GROUPS]]
    if len(groups) > _WEBHOOK_GROUPS:
        lines.append(f"and {len(groups) - _WEBHOOK_GROUPS} more groups of series")
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": shown(f"{gate.outcome.tone.dot} {head}", 140)}},
        _section(slack(counts) or "nothing"),
        *[_section(f"• {line}") for line in lines],
        {"type": "context", "elements": [_mrkdwn(_foot(result))]},
    ]
    message = {"text": slack(shown(gate.summary, 1000)), "blocks": blocks[:BLOCKS]}
    cleaned: dict[str, Any] = clean(message)
    return cleaned


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": _mrkdwn(text)}


def _mrkdwn(text: str) -> dict[str, Any]:
    return {"type": "mrkdwn", "text": text, "verbatim": True}


def _line(group: ChangeGroup, place: CiLocation) -> str:
    """Return one line for a group. Parts are cut before they are escaped, to keep below a section's limit."""
    first = group.first
    if first.verdict is Verdict.INCOMPARABLE:
        return f"*incomparable* {len(group.rows)} series: {slack(shown(first.note or '', 300))}"
    name = " ".join(slack_code(shown(each, 40)) for each in group.names[:4])
    parts = [f"*{first.verdict}* {name}: {group.head} {group.change}".rstrip()]
    if len(group.rows) == 1:
        parts.append(slack_code(shortened(shown(first.series.shape, 10**6), 60)))
    if first.span is not None:
        parts.append("since " + _commit(first.span, place))
    if group.note:
        parts.append(slack(shown(group.note, 150)))
    return ", ".join(parts)


def _commit(span: Span, place: CiLocation) -> str:
    url, state = place.commit(span.commit), slack(shown(span.label, 20))
    text = state if url is None or len(url) > 300 else f"<{url}|{state}>"
    text += f" {slack_code(shown(span.subject, 80))}" if span.subject else ""
    text += f" by {slack_code(shown(span.author, 40))}" if span.author else ""
    return text + (f" ({span.remark})" if span.remark else "")


def _foot(result: GateResult) -> str:
    run, job = result.gate.run, result.place.job
    parts = [f"run {slack(shown(run.id, 32))}", f"commit {slack(shown(str(run.state), 20))}"]
    parts += [f"plan {slack(shown(run.plan, 60))}"] if run.plan else []
    parts += [f"on {slack(shown(', '.join(result.hardware), 150))}"] if result.hardware else []
    parts += [f"<{job}|job>"] if job and len(job) <= 300 else []
    return ", ".join(parts)
