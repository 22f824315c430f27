"""The data behind every output: the verdict on a run and the context."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import quote

from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.verdicts import Gate, Judged
from groupbench.tracker.query.rows import SeriesRow
from groupbench.tracker.query.traffic import NO_TRAFFIC, Traffic

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from groupbench.tracker.judge.incident_rows import IncidentRow


@dataclass(frozen=True)
class CiLocation:
    """URLs of the repository and the CI job, from CI's environment variables."""

    repository: str | None = None  # web page, not the API
    job: str | None = None
    gitlab: bool = False

    def commit(self, hash_: str) -> str | None:
        """Return the URL of a commit, or None without a repository."""
        if self.repository is None:
            return None
        return f"{self.repository}{'/-' if self.gitlab else ''}/commit/{quote(hash_, safe='')}"


@dataclass(frozen=True)
class GateResult:
    """The verdict on a run, with incidents and CI's URLs."""

    gate: Gate
    strict: bool = False
    place: CiLocation = CiLocation()
    incidents: tuple[IncidentRow, ...] = ()  # open ones of tonight's rows, the most expensive first

    @property
    def groups(self) -> list[ChangeGroup]:
        """Rows of no incident that changed together, except unchanged ones: thirty slower shapes are one group."""
        of_incidents = {(each.series.pk, each.metric) for view in self.incidents for each in view.members}
        others = (
            row
            for row in self.gate.notable
            if row.verdict is not Verdict.OK and (row.series.pk, row.what) not in of_incidents
        )
        return [ChangeGroup(tuple(rows)) for rows in grouped(others, _together).values()]

    def red(self, row: Judged) -> str | None:
        """Return `failure` if the series got worse, `error` if it could not be judged, None if the gate passes it."""
        code = row.exit_code(self.strict)
        if code is ExitCode.OK:
            return None
        return "failure" if code is ExitCode.FAILED else "error"

    def label(self, series: SeriesRow) -> str:
        """Return the series' name within the operator and backend, without the usual host, protocol and seed."""
        parts = [series.shape, series.dtype, series.mode]
        parts += [series.host] if series.host != "builtin" else []
        parts += [series.protocol] if series.protocol != "cooled" else []
        parts += [f"seed {series.seed}"] if series.seed else []
        parts += [series.hardware] if len(self.hardware) > 1 else []
        return " ".join(parts)

    @cached_property
    def hardware(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.series.hardware for row in self.gate.rows))


@dataclass(frozen=True)
class ChangeGroup:
    """Series that changed together, which one line describes."""

    rows: tuple[Judged, ...]

    @property
    def first(self) -> Judged:
        return self.rows[0]

    @property
    def names(self) -> list[str]:
        """The operators, then the backends, of which the caller shows a few."""
        return list(dict.fromkeys(name for row in self.rows for name in (row.series.operator, row.series.backend)))

    @property
    def change(self) -> str:
        """The range of changes: `+3.1%`, `+3.1% to +8.0%`, `rms 4.50×`; empty if none is known."""
        changed = [row.shown for row in self.rows if math.isfinite(row.shown.change or 0.0)]
        by_change = sorted((one for one in changed if one.change is not None), key=lambda one: one.change or 0.0)
        return " to ".join(dict.fromkeys(one.factor_text for one in (*by_change[:1], *by_change[-1:])))

    @property
    def head(self) -> str:
        """The metric that changed, with the number of series. The caller adds the names, which need escaping."""
        what = self.first.what or "result"
        number = len(self.rows)
        return f"{what} of {number} series" if number > 1 else what

    @property
    def note(self) -> str | None:
        """The note of all rows if they share one, else None."""
        notes = {row.note for row in self.rows}
        return notes.pop() if len(notes) == 1 else None


def gather(
    session: Session,
    gate: Gate,
    *,
    strict: bool,
    place: CiLocation,
    traffic: Traffic = NO_TRAFFIC,
) -> GateResult:
    """Return the gate's verdict with the open incidents of failing rows. Reads only."""
    from groupbench.tracker.judge import members, triage

    rows = {(row.series.pk, row.what) for row in gate.rows if row.verdict.fails}
    incidents = triage.of(session, traffic.resolve(session), states=members.OPEN)
    return GateResult(
        gate,
        strict=strict,
        place=place,
        incidents=tuple(one for one in incidents if any((each.series.pk, each.metric) in rows for each in one.members)),
    )


def ci_place(environ: Mapping[str, str]) -> CiLocation:
    """Return the URLs that GitHub's or GitLab's environment variables give."""
    server, name, run = (environ.get(f"GITHUB_{key}", "") for key in ("SERVER_URL", "REPOSITORY", "RUN_ID"))
    if server and name:
        repository = _url(f"{server}/{name}")
        return CiLocation(repository, f"{repository}/actions/runs/{quote(run)}" if repository and run else None)
    if environ.get("CI_PROJECT_URL"):
        job = environ.get("CI_JOB_URL") or environ.get("CI_PIPELINE_URL")
        return CiLocation(_url(environ["CI_PROJECT_URL"]), _url(job or ""), gitlab=True)
    return CiLocation()


def _together(row: Judged) -> tuple[object, ...]:
    if row.verdict is Verdict.INCOMPARABLE:
        return (row.verdict, row.note)
    span = row.span
    commits = None if span is None else (span.head.state, span.commit, span.remark)
    return (row.verdict, row.acknowledged, row.what, row.better, commits, row.cause)


def _url(text: str) -> str | None:
    """Return a URL that is safe in Markdown and XML, or None if the text is not a web URL."""
    if not text.startswith(("https://", "http://")):
        return None
    return quote(text.rstrip("/"), safe="/:?=&%+~.,-_@#").replace("@", "%40")
