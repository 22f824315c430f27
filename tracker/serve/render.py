"""Render pages as HTML. The template engine escapes every text; numbers and dates are formatted here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote

import jinja2
from markupsafe import Markup
from starlette.requests import Request

from groupbench.tracker.facts.verdicts import BESIDES_CODE, INCIDENT_STATES, TONES
from groupbench.tracker.report.templates import REPORT, environment
from groupbench.tracker.serve import static
from groupbench.tracker.serve.frame import wants_json
from groupbench.tracker.serve.security import Person
from groupbench.tracker.serve.site import Page
from groupbench.tracker.text import wording
from groupbench.tracker.text.wording import date, percent, signed_change

MARKS = {tone.name: tone.sign for tone in TONES}
"""The sign of each tone, shown with its colour, since not everyone can tell the colours apart."""

NAVIGATION = (
    ("/", "Overview"),
    ("/runs", "Runs"),
    ("/series", "Series"),
    ("/incidents", "Incidents"),
)


@dataclass(frozen=True)
class Wanted:
    """The request facts behind a page."""

    path: str
    query: str
    json: bool
    person: Person | None = None

    @classmethod
    def of(cls, request: Request, person: Person | None = None) -> Wanted:
        return cls(request.url.path, request.url.query, wants_json(request), person)


def render(wanted: Wanted, page: Page, database: str, writes: bool) -> str:
    """Return the page as HTML."""
    shown, person = dict(page.shown), wanted.person
    path = shown.get("path") or wanted.path
    query = f"?{wanted.query}" if wanted.query else ""
    here = f"{path}{query}"
    return (
        _environment()
        .get_template(page.template)
        .render(
            data=page.data,
            again=page.again,
            navigation=NAVIGATION,
            section="/" + path.strip("/").partition("/")[0],
            here=here,
            json=f"{'/overview' if path == '/' else quote(path)}.json{query}",
            database=_short(database),
            writes=writes,
            person=person if person is not None and person.session else None,
            figures=page.figures(),
            **shown,
        )
    )


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    templates = environment(("groupbench.tracker.serve", REPORT))
    templates.filters.update(
        ms=wording.milliseconds, percent=percent, signed=signed_change, date=date, commit=wording.commit_text,
        number=number, count=wording.counted, part=lambda text: quote(str(text), safe=""), seconds=seconds,
        value=wording.fact_text,
    )  # fmt: skip
    templates.globals.update(
        static=static.address,
        style_marks=static.style_marks,
        spark=spark,
        marks=MARKS,
        besides_code=BESIDES_CODE,
        incident_states=INCIDENT_STATES,
    )
    return templates


def prepare() -> None:
    """Compile every template and load every static file, to spare the first request."""
    for name in _environment().list_templates(["html"]):
        _environment().get_template(name)
    for name in (*static.FILES, "plotly.js"):
        static.load(name)
    static.style_marks()


def seconds(duration: float) -> str:
    return f"{duration:.0f} s" if duration >= 1 else "less than a second"


def number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def spark(values: Sequence[float | None], width: int = 110, height: int = 22) -> Markup:
    """Return a small SVG line chart for latencies.

    The vertical range is at least 3 % to each side around the median, so noise does not look like a change.
    """
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if len(numbers) < 2:
        return Markup("")
    typical = sorted(numbers)[len(numbers) // 2]
    low, high = min(*numbers, 0.97 * typical), max(*numbers, 1.03 * typical)
    step = (width - 6) / (len(numbers) - 1)
    points = [(3 + step * i, 3 + (height - 6) * (high - v) / ((high - low) or 1)) for i, v in enumerate(numbers)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    x, y = points[-1]
    return Markup(  # noqa: S704 # numbers alone
        f'<svg class="spark" width="{width}" height="{height}" viewBox="0 0 {width} {height}" aria-hidden="true">'
        f'<polyline points="{path}"/><circle cx="{x:.1f}" cy="{y:.1f}" r="2.2"/></svg>'
    )


def _short(name: str) -> str:
    """Return a file's name without the folder, which readers should not see."""
    return name if "://" in name else name.replace("\\", "/").rpartition("/")[2]
