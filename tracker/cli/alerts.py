"""`groupbench alerts`: list alerts and change their state."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from groupbench.tracker.cli.here import person
from groupbench.tracker.cli.options import reading
from groupbench.tracker.cli.output import APART, CELL, Column, Format, output_formats, plain, say, write_table
from groupbench.tracker.facts.verdicts import ALERT_STATES
from groupbench.tracker.text.wording import commit_text, date, printable, signed_change

if TYPE_CHECKING:
    from groupbench.tracker.judge.alerts import AlertRow

F = TypeVar("F", bound=Callable[..., Any])

_GROUPS = (
    Column("alerts", "alerts"),
    Column("state", "state", tones=ALERT_STATES),
    Column("metric", "metric"),
    Column("operator", "operator"),
    Column("backend", "backend"),
    Column("series", "series", right=True),
    Column("change", "change", right=True),
    Column("cause", "cause"),
    Column("commits", "commits"),
    Column("subject", "subject", wraps=True),
    Column("until", "until"),
    Column("last event", "last", wraps=True),
)
_EACH = (
    Column("alert", "alert", right=True),
    Column("state", "state", tones=ALERT_STATES),
    Column("metric", "metric"),
    *CELL,
    *APART,
    Column("change", "change", signed_change, right=True),
    Column("A/B", "ab"),
    Column("cause", "cause"),
    Column("commit", "commit", commit_text),
    Column("opened", "opened", date),
    Column("until", "until"),
    Column("last event", "last", wraps=True),
)


@click.command()
@click.option("--all", "everything", is_flag=True, help="Include closed alerts.")
@click.option(
    "--each",
    is_flag=True,
    help="Print one line per alert, not one per commit, operator and backend. Also print the commands that measure "
    "them again.",
)
@output_formats
@click.pass_obj
def list_alerts(db: str, everything: bool, each: bool, form: Format) -> None:
    """List open alerts, grouped by commit, operator and backend.

    `gate --update` opens and closes them. JSON and CSV have one entry per alert, with every event.
    """
    from groupbench.tracker.judge import alerts as stored
    from groupbench.tracker.judge.alerts import AlertRow
    from groupbench.tracker.tools import git

    with reading(db) as session:
        states = None if everything else stored.OPEN
        rows = stored.find(session, states=states, first_parents=git.first_parents, between=git.between)
    if form in ("json", "csv"):
        write_table(plain(AlertRow.columns()), [alert.flat() for alert in rows], form)
    elif each:
        write_table(_EACH, [alert.flat() for alert in rows], form)
        for alert in rows:
            if form != "table" or alert.repro is None:
                continue
            click.echo(printable(f"reproduce {alert.pk}: {alert.repro}"))
    else:
        write_table(_GROUPS, _groups(rows), form)
    if form == "table" and not rows:
        say("no alert" if everything else "no alert is open; --all lists closed alerts")


def _groups(alerts: list[AlertRow]) -> list[dict[str, Any]]:
    """Return a row per commit, operator, backend and state."""
    groups: dict[tuple[Any, ...], list[AlertRow]] = {}
    for alert in alerts:
        series = alert.series
        commits = alert.run.state, alert.commits, alert.span.remark
        key = (commits, alert.metric, series.operator, series.backend, alert.state, alert.until)
        groups.setdefault(key, []).append(alert)
    rows = []
    for together in groups.values():
        first, changes = together[0], [alert.change for alert in together if alert.change is not None]
        ends = sorted({signed_change(min(changes)), signed_change(max(changes))}) if changes else []
        rows.append(
            {
                "alerts": " ".join(str(alert.pk) for alert in together),
                "state": first.state,
                "metric": first.metric,
                "operator": first.series.operator,
                "backend": first.series.backend,
                "series": len(together),
                "change": " to ".join(ends),
                "cause": ", ".join(dict.fromkeys(alert.cause for alert in together if alert.cause)),
                "commits": first.commits + (f" ({first.span.remark})" if first.span.remark else ""),
                "subject": first.span.subject,
                "until": first.until,
                "last": first.events[-1].text if first.events else None,
            }
        )
    return rows


class _AlertId(click.IntRange):
    """The number of an alert."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"{value!r} is not the number of an alert, such as 3; `groupbench alerts` lists them", param, ctx)


_ids = click.argument("ids", type=_AlertId(min=1), nargs=-1, required=True, metavar="ID...")


def _not_blank(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    if text is not None and not text.strip():
        raise click.BadParameter("it must not be blank, since it is recorded with the change")
    return None if text is None else text.strip()


def _reason(help: str, required: bool = False) -> Callable[[F], F]:
    return click.option("--reason", required=required, metavar="TEXT", callback=_not_blank, help=help)


@click.command()
@click.argument("ids", type=_AlertId(min=1), nargs=-1, metavar="[ID...]")
@click.option("--improvements", is_flag=True, help="Accept the new level of every series that the newest run improved.")
@_reason("Why the alerts are acknowledged, or the planned action. Required with ID.")
@click.pass_obj
def ack(db: str, ids: tuple[int, ...], improvements: bool, reason: str | None) -> None:
    """Mark alerts as known and being worked on. The gate still lists them, but fails only under --strict.

    With --improvements, accept improved levels: the gate judges by them from now on and no longer reports them.
    """
    from groupbench.tracker.judge import alert_moves

    if bool(ids) == improvements:
        raise click.UsageError("give the IDs of alerts, or --improvements")
    if improvements:
        _change(db, lambda session: _improvements(session, reason))
        return
    if reason is None:
        raise click.UsageError("missing --reason TEXT: the gate passes from now on, so record why")
    _change(db, lambda session: alert_moves.acknowledge(session, ids, person(), reason, _now()))


def _improvements(session: Any, reason: str | None) -> list[AlertRow]:
    from groupbench.tracker.judge import alert_moves, gate
    from groupbench.tracker.query.resolve import find_run
    from groupbench.tracker.tools import git

    judged = gate.judge_run(session, find_run(session, None), first_parents=git.first_parents)
    return alert_moves.accept_improvements(session, judged, person(), reason, _now())


@click.command("accept-transition")
@click.argument("run", required=False)
@_reason("Why the new levels are right. Default: a list of the changes.")
@click.pass_obj
def accept_transition(db: str, run: str | None, reason: str | None) -> None:
    """Accept the new levels in RUN after a change of toolchain or machine.

    RUN is the start of a run's id. Default: the newest run.

    The gate judges by the new levels from now on. After a GPU change, the series continue their history on the new one.
    If the code changed in the same run, that effect is accepted too. `groupbench confirm` separates the two: run it
    first.
    """
    from groupbench.tracker.facts.errors import QueryError

    def change(session: Any) -> list[AlertRow]:
        from groupbench.tracker.judge import alert_moves, gate
        from groupbench.tracker.query.resolve import find_run
        from groupbench.tracker.tools import git

        judged = gate.judge_run(session, find_run(session, run), first_parents=git.first_parents)
        accepted = alert_moves.accept_transition(session, judged, person(), reason, _now())
        if not accepted:
            raise QueryError(
                f"nothing to accept: no series of run {judged.run.id[:12]} changed with its toolchain or machine"
            )
        return accepted

    _change(db, change)


@click.command()
@_ids
@click.option(
    "--until",
    metavar="DATE|COMMIT",
    help='Make the alert "new" again on this date, after this time (30d), or at this commit.',
)
@_reason("Why the new level is right.", required=True)
@click.pass_obj
def expect(db: str, ids: tuple[int, ...], until: str | None, reason: str) -> None:
    """Accept the new level of alerts: the gate judges by it from now on.

    With --until COMMIT, the alerts become "new" again when COMMIT or a later one is measured. A wrong result
    cannot be accepted.
    """
    from groupbench.tracker.judge import alert_moves

    _change(db, lambda session: alert_moves.expect(session, ids, until, person(), reason, _now()))


@click.command()
@_ids
@click.option(
    "--as",
    "state",
    type=click.Choice(("fixed", "invalid")),
    required=True,
    help="fixed: the old level is back. invalid: the code is not the cause; accept the new level.",
)
@_reason("Why the alerts are closed.", required=True)
@click.pass_obj
def close(db: str, ids: tuple[int, ...], state: str, reason: str) -> None:
    """Close alerts. An alert closed as fixed reopens if the gate sees the change again."""
    from groupbench.tracker.judge import alert_moves

    _change(db, lambda session: alert_moves.close(session, ids, state, person(), reason, _now()))


def _change(db: str, change: Callable[[Any], list[AlertRow]]) -> None:
    from groupbench.tracker.store.engine import open_store

    with open_store(db, create=False) as store, store.write() as session:
        changed = change(session)
    for alert in changed:
        still_fails = f"; {alert.advice}" if alert.state == "acknowledged" and alert.advice else ""
        click.echo(printable(f"{alert.text}; {alert.series}{still_fails}"))


def _now() -> datetime:
    return datetime.now(UTC)
