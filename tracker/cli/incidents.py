"""`groupbench incidents`: list incidents and change their state."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.declared import argument, command, flag, option
from groupbench.tracker.cli.here import person, traffic_of
from groupbench.tracker.cli.options import When, reading, reason_option
from groupbench.tracker.cli.output import (
    APART,
    CELL,
    Column,
    Format,
    output_formats,
    say,
    write_rows,
)
from groupbench.tracker.facts.verdicts import INCIDENT_STATES
from groupbench.tracker.text.wording import commit_text, date, printable, printable_lines, signed_percent
from groupbench.tracker.tools.parameters import INCIDENT, SERIES

if TYPE_CHECKING:
    from groupbench.tracker.judge.incident_rows import IncidentRow


_EACH = (
    Column("incident", "incident", right=True),
    Column("state", "state", tones=INCIDENT_STATES),
    Column("metric", "metric"),
    *CELL,
    *APART,
    Column("change", "change", signed_percent, right=True),
    Column("A/B", "ab"),
    Column("cause", "cause"),
    Column("commit", "commit", commit_text),
    Column("opened", "opened", date),
    Column("until", "until"),
    Column("last event", "last", wraps=True),
)


def read(context: click.Context, **which: Any) -> tuple[list[IncidentRow], list[str]]:
    """Return incidents, the most expensive first, and the last lines of the first screen."""
    from groupbench.tracker.judge import triage

    with reading(context.obj) as session:
        calls = traffic_of(context).resolve(session)
        return triage.of(session, calls, **which), triage.notes(session, calls)


@command()
def list_incidents(
    context: click.Context,
    everything: bool = flag("--all", help="Include closed incidents."),
    each: bool = flag(
        "--each",
        help="Print one line per member, not one per incident. Also print the commands that measure them again.",
    ),
    form: Format = output_formats,
) -> None:
    """List open incidents, the most expensive first: what, since when, whose, how sure, the cost and the next step.

    `gate --update` opens and closes them. The last lines count the cells without a result in the newest night. With
    --each, JSON and CSV have one entry per member, with every event.
    """
    from groupbench.tracker.judge import incident_rows, triage

    incidents, notes = read(context, states=None if everything else incident_rows.OPEN)
    if each:
        members = sorted((member for one in incidents for member in one.members), key=lambda member: member.place)
        write_rows(incident_rows.MemberRow, _EACH, members, form)
        for member in members if form == "table" else ():
            if member.repro is not None:
                click.echo(printable(f"reproduce {member.incident.pk}: {member.repro}"))
    elif form in ("json", "csv"):
        write_rows(incident_rows.IncidentRow, (), incidents, form)
    else:
        for line in triage.screen(incidents, notes, most=None if everything else triage.MOST):
            click.echo(printable_lines(line))
    if form == "table" and not incidents:
        say(
            "no incident"
            if everything
            else "no incident is open; `gate` lists undecided series, --all closed incidents"
        )


_ids = argument(type=INCIDENT, nargs=-1, required=True, metavar="ID...")


_of_series = option(
    "--series",
    type=SERIES,
    multiple=True,
    metavar="N",
    help="Only the members about this series, which become an incident of their own; may be repeated.",
)


@command()
def ack(
    db: str,
    ids: tuple[int, ...] = argument(type=INCIDENT, nargs=-1, metavar="[ID...]"),
    improvements: bool = flag(
        "--improvements", help="Accept the new level of every series that the newest run improved."
    ),
    series: tuple[int, ...] = _of_series,
    reason: str | None = reason_option(
        "Why the incidents are acknowledged, or the planned action. Required with ID.", required=False
    ),
) -> None:
    """Mark incidents as known and being worked on. The gate still lists them, but fails only under --strict.

    A wrong result still fails the gate. With --improvements, accept improved levels: the gate judges by them from now
    on and no longer reports them.
    """
    if bool(ids) == improvements:
        raise click.UsageError("give the IDs of incidents, or --improvements")
    if improvements:
        _accept(db, None, reason, transition=False)
    elif reason is None:
        raise click.UsageError("missing --reason TEXT: it is recorded, since the gate no longer fails for a slowdown")
    else:
        _change(db, ids, "acknowledged", reason, series=series)


@command("accept-transition")
def accept_transition(
    db: str,
    run: str | None = argument(required=False),
    reason: str | None = reason_option("Why the new levels are right. Default: a list of the changes.", required=False),
) -> None:
    """Accept the new levels in RUN after a change of toolchain or machine.

    RUN is the start of a run's id. Default: the newest run.

    The gate judges by the new levels from now on. After a GPU change, the series continue their history on the new one.
    If the code changed in the same run, that effect is accepted too. `groupbench confirm` separates the two: run it
    first.
    """
    _accept(db, run, reason, transition=True)


def _accept(db: str, run: str | None, reason: str | None, transition: bool) -> None:
    from groupbench.tracker.facts.errors import QueryError
    from groupbench.tracker.judge import gate, incident_moves
    from groupbench.tracker.query.resolve import find_run
    from groupbench.tracker.tools import git

    def accept(session: Any) -> set[int]:
        judged = gate.judge_run(session, find_run(session, run), first_parents=git.first_parents)
        keys = incident_moves.accept(session, judged, person(), reason, _now(), transition=transition)
        if transition and not keys:
            raise QueryError(
                f"nothing to accept: no series of run {judged.run.id[:12]} changed with its toolchain or machine"
            )
        return keys

    _write(db, accept)


@command()
def expect(
    db: str,
    ids: tuple[int, ...] = _ids,
    until: str | None = option(
        "--until",
        metavar="DATE|COMMIT",
        help='Make the incident "new" again on this date, after this time (30d), or at this commit.',
    ),
    series: tuple[int, ...] = _of_series,
    reason: str = reason_option("Why the new level is right."),
) -> None:
    """Accept incidents' new levels: the gate judges by it from now on.

    With --until COMMIT, the incidents become "new" again when COMMIT or a later one is measured. A wrong result
    cannot be accepted.
    """
    _change(db, ids, "expected", reason, series=series, until=until)


@command()
def close(
    db: str,
    ids: tuple[int, ...] = _ids,
    state: str = option(
        "--as",
        type=click.Choice(("fixed", "invalid")),
        required=True,
        help="fixed: the old level is back. invalid: the code is not the cause; accept the new level.",
    ),
    series: tuple[int, ...] = _of_series,
    reason: str = reason_option("Why the incidents are closed."),
) -> None:
    """Close incidents. An incident closed as fixed reopens if the gate sees the change again."""
    _change(db, ids, state, reason, series=series)


@command()
def note(db: str, ids: tuple[int, ...] = _ids, reason: str = reason_option("The note.")) -> None:
    """Add a note to incidents, without a state change."""
    _change(db, ids, None, reason)


def _change(db: str, ids: tuple[int, ...], state: str | None, reason: str, **facts: Any) -> None:
    from groupbench.tracker.judge import incident_moves

    _write(
        db,
        lambda session: incident_moves.change(session, ids, state, person(), reason, _now(), **facts),
        noted=state is None,
    )


def _write(db: str, change: Callable[[Any], set[int]], noted: bool = False) -> None:
    """Change incidents, and print what became of each."""
    from groupbench.tracker.judge.members import find
    from groupbench.tracker.store.engine import open_store

    with open_store(db, create=False) as store, store.write() as session:
        changed = find(session, keys=change(session))
    for incident in dict.fromkeys(member.incident for member in changed):
        members = [member for member in changed if member.incident is incident]
        fails = [member.advice for member in members if member.state == "acknowledged" and member.advice]
        what = members[0].series if len(members) == 1 else f"{len(members)} series"
        done = f"noted at incident {incident.pk}" if noted else incident.text
        click.echo(printable("; ".join([done, str(what), *fails[:1]])))


def _now() -> datetime:
    return datetime.now(UTC)


@command("triage")
def week(
    context: click.Context,
    since: datetime = option("--since", type=When(), default="7d", metavar="DATE", help="Begin at this date or age."),
) -> None:
    """Summarise the incidents of a week: open ones, and those accepted or fixed since then."""
    from groupbench.tracker.judge import triage

    if since > _now():
        raise click.BadParameter(
            f"{date(since)} is in the future; give a past date, or an age such as 7d", param_hint="--since"
        )
    incidents, notes = read(context)
    parts, new = triage.week(incidents, since), sum(one.opened >= since for one in incidents)
    click.echo(printable_lines(triage.markdown(parts, new, since, notes)).rstrip())
