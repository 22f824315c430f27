"""`groupbench post`: post a comment on a pull request, or update it in place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

import click

from groupbench.tracker.cli.declared import argument, command, flag, option
from groupbench.tracker.cli.output import say
from groupbench.tracker.facts.errors import OutputError
from groupbench.tracker.outputs import comment
from groupbench.tracker.outputs import post as posting
from groupbench.tracker.outputs.post import Forge
from groupbench.tracker.text.wording import printable_lines
from groupbench.tracker.tools.parameters import Number


@command()
def post(
    context: click.Context,
    file: TextIO | None = argument(
        metavar="[FILE]", required=False, type=click.File("r", encoding="utf-8-sig", errors="replace")
    ),
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
    text = file.read()
    if not text.strip():
        raise OutputError(f"{file.name}: the file is empty; `groupbench gate -o comment={file.name}` writes a comment")
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
    from groupbench.tracker.cli.incidents import read
    from groupbench.tracker.outputs import issues
    from groupbench.tracker.store.engine import open_store
    from groupbench.tracker.store.schema import Incident

    rows: Sequence[issues.Planned | issues.Posted]
    incidents, _ = read(context)
    if forge is None:
        rows = issues.planned(incidents)
    else:
        with open_store(context.obj, create=False) as database:

            def store(key: int, link: str | None, state: str | None) -> None:
                with database.write() as session:
                    incident = session.get_one(Incident, key)
                    incident.link, incident.posted = link, state

            rows = issues.post(forge, incidents, store)
    for row in rows:
        click.echo(printable_lines(row.text))
