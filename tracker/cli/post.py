"""`groupbench post`: post a comment on a pull request, or update it in place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from groupbench.tracker.cli.declared import argument, command, flag, option
from groupbench.tracker.cli.here import traffic_of
from groupbench.tracker.cli.output import say
from groupbench.tracker.facts.errors import OutputError
from groupbench.tracker.outputs import comment
from groupbench.tracker.outputs import post as posting
from groupbench.tracker.outputs.post import Forge
from groupbench.tracker.text.wording import printable, printable_lines
from groupbench.tracker.tools import git
from groupbench.tracker.tools.parameters import Number


@command()
def post(
    context: click.Context,
    file: Path | None = argument(metavar="[FILE]", required=False, type=click.Path(path_type=Path, allow_dash=True)),
    number: int | None = option("--pr", type=Number(1), help="Number of the pull or merge request. Default: from CI."),
    repository: str | None = option(
        "--repo",
        help="Repository: OWNER/NAME on GitHub, project ID or path on GitLab. Default: from CI.",
    ),
    kind: str | None = option(
        "--on", type=click.Choice(("github", "gitlab")), help="Service to post to. Default: from CI."
    ),
    key: str = option(
        "--key",
        default="comment",
        help="Update the comment with this key; other comments stay. Text from `gate` has its own key.",
    ),
    issues: bool = flag(
        "--issues",
        help="Instead of a comment, keep one issue for each incident: open, update, assign, close or reopen it.",
    ),
    dry_run: bool = flag("--dry-run", help="Print the comment or the issues instead of posting them."),
) -> None:
    """Post FILE on a GitHub pull request or GitLab merge request, or update the comment posted earlier.

    FILE is the Markdown of `gate -o comment=FILE`, or any other; `-` reads standard input. The token is read
    from GITHUB_TOKEN, GH_TOKEN or GITLAB_TOKEN.
    """
    if issues == (file is not None):
        raise click.UsageError("give a FILE, or --issues")
    if file is None:
        forge = None if dry_run else posting.forge(os.environ, kind=kind, repository=repository, number=0)
        _issues(context, forge)
        return
    try:
        text = (sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()).decode("utf-8", "replace")
    except OSError as cause:
        raise OutputError(f"{file}: cannot be read: {cause.strerror or cause}") from cause
    if not text.strip():
        raise OutputError(f"{file}: the file is empty; `groupbench gate -o comment={file}` writes a comment")
    text = text.removeprefix("\ufeff")
    mark = comment.mark_of(text)
    if mark is None:
        mark = comment.mark("post", key)
        text = f"{mark}\n{text}"
    text = comment.fitted(text)
    if dry_run:
        click.echo(text)
        return
    forge = posting.forge(os.environ, kind=kind, repository=repository, number=number)
    done, url = posting.post(forge, mark, text)
    click.echo(url or f"{forge.repository} {forge.number}")
    say(f"{done} the comment")


def _issues(context: click.Context, forge: Forge | None) -> None:
    """Bring the issues of all incidents up to date; without a forge, print them."""
    from groupbench.tracker.judge import alerts, triage
    from groupbench.tracker.outputs import issues
    from groupbench.tracker.store.engine import open_store
    from groupbench.tracker.store.schema import Incident

    with open_store(context.obj, create=False) as database:

        def store(key: int, link: str | None, state: str | None) -> None:
            with database.write() as session:
                incident = session.get_one(Incident, key)
                incident.link, incident.posted = link, state

        with database.read() as session:
            rows = alerts.find(session, first_parents=git.first_parents, between=git.between)
            views = triage.of(session, rows, traffic_of(context).resolve(session))
        if forge is None:
            for text in issues.preview(views):
                click.echo(printable_lines(text))
            return
        for posted in issues.post(forge, views, store):
            click.echo(printable(f"{posted.done}: issue of incident {posted.incident} {posted.url or ''}".rstrip()))
