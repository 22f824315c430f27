"""A badge as SVG, without a server, font or script. The colours have a contrast to white of at least 4.5."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from html import escape

from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.verdicts import GOOD, Verdict
from groupbench.tracker.outputs.result import GateResult

LABEL = "kernels"
_LABEL_COLOUR = "#444"
_HEIGHT = 20
_EDGE = 7  # px to the left and right of a text


def message(result: GateResult) -> str:
    """Return the text of the badge: `2 regressed`, `312 ok`."""
    gate = result.gate

    def counted(verdicts: Iterable[Verdict]) -> list[str]:
        return [f"{gate.counts[verdict]} {verdict}" for verdict in verdicts if verdict in gate.counts]

    if gate.exit_code == ExitCode.FAILED:
        return ", ".join(counted(verdict for verdict in Verdict if verdict.fails))
    if gate.exit_code != ExitCode.OK:
        return gate.word
    acknowledged = sum(row.acknowledged for row in gate.rows)
    parts = [
        *counted(verdict for verdict in Verdict if verdict.tone is GOOD),
        *([f"{acknowledged} acknowledged"] if acknowledged else []),
        *counted(verdict for verdict in Verdict if verdict.unjudged),
        *(["no latency judged"] if gate.blind else []),
    ]
    return ", ".join(parts) or "ok"


def colour(result: GateResult) -> str:
    """Return the colour of the outcome."""
    return result.gate.outcome.tone.badge


def render(result: GateResult) -> str:
    return svg(LABEL, message(result), colour(result))


def svg(label: str, text: str, colour: str) -> str:
    """Return a badge of two fields. Texts are fitted to their estimated widths, whatever the font."""
    left, right = (_width(part) + 2 * _EDGE for part in (label, text))
    title = escape(f"{label}: {text}")

    def part(written: str, x: int, width: int) -> str:
        return (
            f'<text x="{x + width / 2:g}" y="14" textLength="{width - 2 * _EDGE}" lengthAdjust="spacingAndGlyphs">'
            f"{escape(written)}</text>"
        )

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{_HEIGHT}" role="img" '
        f'viewBox="0 0 {left + right} {_HEIGHT}" aria-label="{title}">\n'
        f"<title>{title}</title>\n"
        f'<clipPath id="r"><rect width="{left + right}" height="{_HEIGHT}" rx="3"/></clipPath>\n'
        f'<g clip-path="url(#r)"><rect width="{left}" height="{_HEIGHT}" fill="{_LABEL_COLOUR}"/>'
        f'<rect x="{left}" width="{right}" height="{_HEIGHT}" fill="{colour}"/></g>\n'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,Geneva,sans-serif" font-size="11">'
        f"{part(label, 0, left)}{part(text, left, right)}</g>\n"
        "</svg>\n"
    )


def _width(text: str) -> int:
    """Return the approximate width in pixels of a text in 11 px Verdana."""
    narrow, wide = "fijlrtI.,:;!|'()[] ", "mwMW%@"
    steps = [
        11.0 if unicodedata.east_asian_width(char) in "WF" else 4.2 if char in narrow else 10.2 if char in wide else 6.9
        for char in text
    ]
    return max(round(sum(steps)), 1)
