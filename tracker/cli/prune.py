"""`groupbench prune`: remove old points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from groupbench.tracker.cli.options import reading
from groupbench.tracker.text.wording import counted

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


@click.command()
@click.option("--all", "all_days", type=click.IntRange(min=0), default=90, show_default=True, metavar="DAYS",
              help="Keep every point of the newest DAYS days.")  # fmt: skip
@click.option("--every", "every_days", type=click.IntRange(min=1), default=7, show_default=True, metavar="DAYS",
              help="Of the older points, keep those of one nightly run every DAYS days.")  # fmt: skip
@click.option("--apply", "really", is_flag=True, help="Remove the points.")
@click.option("--compact", is_flag=True, help="With --apply, return the free space to the file system (SQLite only).")
@click.pass_obj
def prune(db: str, all_days: int, every_days: int, really: bool, compact: bool) -> None:
    """Remove some of the old points. Without --apply, only print how many.

    These points always stay: the evidence of alerts, the points of pinned commits, and the first and last point of
    each stretch. A stretch is a part of a series with one environment, status and timing. Age is counted from the
    newest run. In a backfill, --every uses the dates of the commits. Pruned records come back if their file is ingested
    again.
    """
    from groupbench.tracker.query.lines import every_line
    from groupbench.tracker.store.engine import open_store
    from groupbench.tracker.store.prune import Policy, Pruning, apply_pruning, plan_pruning

    def print_plan(pruning: Pruning) -> None:
        kept = pruning.points - pruning.removed
        young, periodic = counted(all_days, "day"), counted(every_days, "day")
        click.echo(
            f"{counted(pruning.points, 'point')}: {pruning.young:,} younger than {young}, {pruning.edges:,} at the "
            f"edge of a stretch, {pruning.evidence:,} evidence, {pruning.periodic:,} one in {periodic}"
        )
        verb = "removed" if really else "would be removed"
        click.echo(f"{pruning.removed:,} {verb}, {kept:,} kept" + ("" if really else "; --apply removes them"))

    def plan(session: Session) -> Pruning:
        return plan_pruning(session, Policy(all_days, every_days), order=every_line(session).runs[::-1])

    if not really:
        with reading(db) as session:
            print_plan(plan(session))
        return
    with open_store(db, create=False) as store:
        with store.write() as session:
            pruning = plan(session)
            apply_pruning(session, pruning)
        print_plan(pruning)
        if compact:
            store.compact()
