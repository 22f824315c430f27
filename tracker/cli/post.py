"""`groupbench post`: a comment on a pull request, edited in place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from groupbench.tracker.cli.output import say


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--pr", "number", type=click.IntRange(min=1), metavar="N", help="Number of the request, if CI says none.")
@click.option("--repo", "repository", metavar="NAME", help="OWNER/NAME on GitHub, a project's ID or path on GitLab.")
@click.option("--on", "kind", type=click.Choice(("github", "gitlab")), help="Default: what CI's variables say.")
@click.option("--key", default="comment", metavar="NAME", help="Tells comments apart, of text that gate did not write.")
@click.option("--dry-run", is_flag=True, help="Print what would be posted, and post nothing.")
def post(file: Path, number: int | None, repository: str | None, kind: str | None, key: str, dry_run: bool) -> None:
    """Post Markdown on a pull request of GitHub or a merge request of GitLab, or edit the comment that is there.

    The token is GITHUB_TOKEN, GH_TOKEN or GITLAB_TOKEN. FILE is what `gate -o comment=FILE` wrote, or any Markdown;
    - reads it from a pipe.
    """
    from groupbench.tracker.errors import OutputError
    from groupbench.tracker.outputs import comment
    from groupbench.tracker.outputs import post as posting

    try:
        text = (sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()).decode("utf-8", "replace")
    except OSError as cause:
        raise OutputError(f"{file}: cannot be read: {cause.strerror or cause}") from cause
    if not text.strip():
        raise OutputError(f"{file}: is empty; `groupbench gate -o comment={file}` writes one")
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
