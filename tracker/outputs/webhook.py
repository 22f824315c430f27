"""Send a message to Slack's incoming webhook, or to a service with the same format, such as Mattermost.

A message has at most 50 blocks, a header 150 characters and a section 3,000:
https://api.slack.com/reference/block-kit/blocks. The URL is a secret, so messages show only the host.
"""

from __future__ import annotations

from typing import Any

from groupbench.tracker.outputs import http
from groupbench.tracker.outputs.escape import SLACK, clean, shown, slack
from groupbench.tracker.outputs.markdown import group_line
from groupbench.tracker.outputs.result import GateResult

BLOCKS = 50  # Slack's limit

_WEBHOOK_GROUPS = 20  # incidents, and groups of changes, in a message


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
    lines += [group_line(group, result.place, SLACK) for group in groups[:_WEBHOOK_GROUPS]]
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


def _foot(result: GateResult) -> str:
    run, job = result.gate.run, result.place.job
    parts = [f"run {slack(shown(run.id, 32))}", f"commit {slack(shown(str(run.state), 20))}"]
    parts += [f"plan {slack(shown(run.plan, 60))}"] if run.plan else []
    parts += [f"on {slack(shown(', '.join(result.hardware), 150))}"] if result.hardware else []
    parts += [f"<{job}|job>"] if job and len(job) <= 300 else []
    return ", ".join(parts)
