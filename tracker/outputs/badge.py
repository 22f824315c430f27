"""A badge: one picture that needs no server, no font and no script. Colours keep a contrast of 4.5 to white."""

from __future__ import annotations

import unicodedata
from html import escape

from groupbench.tracker.exits import ExitCode
from groupbench.tracker.outputs.result import Result
from groupbench.tracker.verdicts import FAINT, Verdict

LABEL = "kernels"
_LABEL_COLOUR = "#444"
_HEIGHT = 20
_EDGE = 7  # px left and right of a text


def message(result: Result) -> str:
    """A few words: `2 regressed`, `312 ok`."""
    gate = result.gate
    counts = gate.counts
    if gate.exit_code == ExitCode.FAILED:
        return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if verdict.fails and verdict in counts)
    if gate.exit_code != ExitCode.OK:
        return gate.word
    passed = (Verdict.IMPROVED, Verdict.OK, Verdict.NEW)
    told = [f"{counts[verdict]} {verdict}" for verdict in passed if verdict in counts]
    known = sum(row.acknowledged for row in gate.rows)
    told = [*told[:2], *([f"{known} acknowledged"] if known else [])]
    if noisy := counts.get(Verdict.NOISY):
        told.append(f"{noisy} noisy")
    return ", ".join([*told, *(["no latency judged"] if gate.blind else [])]) or "ok"


def colour(result: Result) -> str:
    """Return the colour of the outcome; that of nothing known where no latency was judged."""
    return FAINT.badge if result.gate.blind else result.gate.outcome.tone.badge


def render(result: Result) -> str:
    return svg(LABEL, message(result), colour(result))


def svg(label: str, text: str, colour: str) -> str:
    """Two fields. Texts are pressed into the width they are thought to have, whatever font there is."""
    left, right = (_width(part) + 2 * _EDGE for part in (label, text))
    said = escape(f"{label}: {text}")

    def part(written: str, x: int, width: int) -> str:
        return (
            f'<text x="{x + width / 2:g}" y="14" textLength="{width - 2 * _EDGE}" lengthAdjust="spacingAndGlyphs">'
            f"{escape(written)}</text>"
        )

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{_HEIGHT}" role="img" '
        f'viewBox="0 0 {left + right} {_HEIGHT}" aria-label="{said}">\n'
        f"<title>{said}</title>\n"
        f'<clipPath id="r"><rect width="{left + right}" height="{_HEIGHT}" rx="3"/></clipPath>\n'
        f'<g clip-path="url(#r)"><rect width="{left}" height="{_HEIGHT}" fill="{_LABEL_COLOUR}"/>'
        f'<rect x="{left}" width="{right}" height="{_HEIGHT}" fill="{colour}"/></g>\n'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,Geneva,sans-serif" font-size="11">'
        f"{part(label, 0, left)}{part(text, left, right)}</g>\n"
        "</svg>\n"
    )


def _width(text: str) -> int:
    """Pixels of a text in Verdana of 11 px, near enough."""
    narrow, wide = "fijlrtI.,:;!|'()[] ", "mwMW%@"
    steps = [
        11.0 if unicodedata.east_asian_width(char) in "WF" else 4.2 if char in narrow else 10.2 if char in wide else 6.9
        for char in text
    ]
    return max(round(sum(steps)), 1)
