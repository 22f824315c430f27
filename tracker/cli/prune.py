"""`groupbench prune`: let old points go."""

from __future__ import annotations

import click

from groupbench.tracker.cli.options import reading
from groupbench.tracker.text.wording import counted


@click.command()
@click.option("--all", "all_days", type=click.IntRange(min=0), default=90, show_default=True, metavar="DAYS",
              help="Keep every point of the newest days.")  # fmt: skip
@click.option("--every", "every_days", type=click.IntRange(min=1), default=7, show_default=True, metavar="DAYS",
              help="Of what is older, keep one night in so many days.")  # fmt: skip
@click.option("--apply", "really", is_flag=True, help="Remove them. Without it, only say what would be removed.")
@click.option("--compact", is_flag=True, help="With --apply: give the space back to the file system (SQLite).")
@click.pass_obj
def prune(db: str, all_days: int, every_days: int, really: bool, compact: bool) -> None:
    """Thin out old points. Says what it would do, and does it with --apply.

    The first and the last point of each stretch of a series in one environment, status and timing always stay, and so
    do what an alert rests on and the points of pinned commits. Age is counted from the newest run. Pruned records come
    back if their file is ingested again.
    """
    from groupbench.tracker.store.engine import open_store
    from groupbench.tracker.store.prune import Policy, Pruning, apply_pruning, plan_pruning

    def tell(pruning: Pruning) -> None:
        kept = pruning.points - pruning.removed
        young, periodic = counted(all_days, "day"), counted(every_days, "day")
        click.echo(
            f"{counted(pruning.points, 'point')}: {pruning.young:,} younger than {young}, {pruning.edges:,} at the "
            f"edge of a stretch, {pruning.evidence:,} evidence, {pruning.periodic:,} one in {periodic}"
        )
        verb = "removed" if really else "would be removed"
        click.echo(f"{pruning.removed:,} {verb}, {kept:,} kept" + ("" if really else "; --apply removes them"))

    policy = Policy(all_days, every_days)
    if not really:
        with reading(db) as session:
            tell(plan_pruning(session, policy))
        return
    with open_store(db, create=False) as store:
        with store.write() as session:
            pruning = plan_pruning(session, policy)
            apply_pruning(session, pruning)
        tell(pruning)
        if compact:
            store.compact()
