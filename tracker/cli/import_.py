"""`groupbench import`: import files written by other benchmarks."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.declared import argument, command, flag, group, option
from groupbench.tracker.cli.options import When, reading
from groupbench.tracker.facts.errors import IngestError, StoreError, TrackerError
from groupbench.tracker.facts.record import encode
from groupbench.tracker.facts.vocabulary import BACKEND, DTYPE, OPERATOR
from groupbench.tracker.formats import FORMATS, Options, Summary, described, load
from groupbench.tracker.formats.sources import Given, arguments_of
from groupbench.tracker.text.cells import json_for
from groupbench.tracker.text.wording import counted, printable, some
from groupbench.tracker.tools import git, signals
from groupbench.tracker.tools.progress import Progress

if TYPE_CHECKING:
    from groupbench.tracker.formats.loading import Prepared, Stored
    from groupbench.tracker.store.engine import Store
    from groupbench.tracker.store.ingest import Ingested

MOST_NOTES = 3
"""Largest number of printed notes of one kind for an argument."""

_HASH = re.compile(r"[0-9a-f]{7,64}")
MOST_ERRORS = 3
"""Largest number of files named in an error."""


class Mapping(click.ParamType[dict[str, str]]):
    """Record fields and their columns: `latency_ms=time,operator=op`."""

    name = "mapping"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, str]:
        if isinstance(value, dict):
            return value
        pairs: dict[str, str] = {}
        for part in str(value).split(","):
            field, equals, column = (text.strip() for text in part.partition("="))
            if not (equals and field and column):
                self.fail(f"{part.strip()!r} is not FIELD=COLUMN", param, ctx)
            if field in pairs:
                self.fail(f"{field} is mapped twice", param, ctx)
            pairs[field] = column
        return pairs


def _known_commit(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """Return the full hash for any revision known to git here, or another repository's hash as it is.

    Raises BadParameter for an unknown name in a repository, and elsewhere for a sentence.
    """
    if text is None or (full := git.rev_parse(text)) is not None:
        return None if text is None else full
    if not re.fullmatch(r"[^\s~^:?*\[\\]+", text):
        raise click.BadParameter(f"{text!r} is not a commit")
    if not _HASH.fullmatch(text) and git.ask(".", "rev-parse", "--git-dir") is not None:
        raise click.BadParameter(git.unknown_commit(text, ".", "give a hash, or a name that git knows here"))
    return text


def _print_formats(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        for name, title, contents in described():
            click.echo(f"{name}\n    {title}: {contents}")
        ctx.exit()


@command(name="import")
@click.option(
    "--formats",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_formats,
    help="List the formats and their values that are read.",
)
def import_(
    db: str,
    files: tuple[str, ...] = argument(nargs=-1, required=True, metavar="FILE..."),
    format_name: str | None = option(
        "--format", help=f"Format of the files: {', '.join(FORMATS)}. Default: detected for each file."
    ),
    facts: Options = group(
        Options,
        commit=option(
            "--commit",
            metavar="HASH",
            callback=_known_commit,
            help="Commit that was measured, if the file does not name it: a hash, or any name that git knows here.",
        ),
        branch=option("--branch", help="Branch of that commit."),
        dirty=flag("--dirty", help="Mark the working tree as different from that commit."),
        date=option(
            "--date", type=When(), metavar="DATE", help="Time of the measurement, if the file does not have it."
        ),
        gpu=option("--gpu", help="GPU model, if the file does not name it."),
        cpu=option("--cpu", help="CPU model, for results without a GPU."),
        operator=option(*OPERATOR, help="Operator of all results."),
        backend=option(*BACKEND, help="Backend of all results."),
        mode=option("--mode", help="Mode of all results: fwd, bwd or fwd_bwd."),
        dtype=option(*DTYPE, help="Dtype of all results."),
        plan=option("--plan", help="Plan of the run, which the gate compares with earlier runs of the plan."),
        commit_of=option(
            "--commit-of",
            default="tritonbench",
            help="A TritonBench file names the commits of tritonbench, triton and pytorch; use this one.",
        ),
        mapping=option(
            "--map",
            type=Mapping(),
            default=dict,
            show_default=False,
            metavar="FIELD=COLUMN,...",
            help="Columns of a plain CSV that hold a record's fields: latency_ms=time,operator=op.",
        ),
        unit=option("--unit", metavar="UNIT", help="Unit of a plain CSV's latency: s, ms, us or ns. Default: ms."),
    ),
    dry_run: bool = flag("--dry-run", help="Write the records to stdout instead of storing them."),
) -> None:
    """Import files written by other benchmarks.

    FILE is a file, a folder, an archive (zip or tar) or a pattern such as 'nights/*.json'. Each file is stored
    completely or not at all, one after another, so an interrupted import keeps the files stored so far. Run it again to
    continue. Text instead of a number, such as "CUDA OOM", becomes a status, never a latency. A plain CSV needs --map,
    and columns for commit and date, or --commit and --date.
    """
    with ExitStack() as stack:
        arguments = arguments_of(files, stack)
        if dry_run:
            _print_records(arguments, format_name, facts)
        else:
            _Import(db, format_name, facts).store(arguments)
    if facts.commit is not None and git.rev_parse(facts.commit) is None:
        message = f"groupbench: git knows no commit {facts.commit!r} here; it is stored as it is"
        click.echo(printable(message), err=True)


def _print_records(arguments: list[Given], format_name: str | None, facts: Options) -> None:
    for each in arguments:
        for source in each.sources:
            loaded = load(source.path, format_name, facts)
            for record in loaded.records:
                click.echo(json_for(sys.stdout, encode(record)), nl=False)
            for note in _notes(loaded.summary):
                click.echo(printable(f"{source.name}: {note}"), err=True)


class _Import:
    """Stores the files of all arguments, in order."""

    def __init__(self, db: str, format_name: str | None, facts: Options) -> None:
        self.db, self.format_name, self.facts = db, format_name, facts
        self.files = 0  # stored, now or by an earlier import
        self.read: list[dict[str, Any]] = []  # rows of newly imported files
        self.opened = ExitStack()  # of the database, once a file can be stored
        self.database: Store | None = None

    def store(self, arguments: list[Given]) -> None:
        """Store all files. Raises IngestError for the first failing argument."""
        from groupbench.tracker.formats.loading import Stored, preparing

        sources = [source for argument in arguments for source in argument.sources]
        with Progress(len(sources), "files"):  # ended before the processes begin, which are forks
            stored = self._stored() if len(sources) > 1 else Stored()
        gc.freeze()  # modules live as long as the process
        gc.disable()  # collections within a file take a twentieth of the time
        try:
            with (
                signals.keeping(lambda: f"{counted(self.files, 'file')} stored; the same command continues"),
                self.opened,
                preparing(sources, self.format_name, self.facts, stored) as prepared,
                Progress(len(sources), "files") as progress,
            ):
                try:
                    for argument in arguments:
                        self._argument(argument, prepared, progress)
                finally:
                    self._remember()
        except (TrackerError, ChildProcessError) as error:
            message = error.message if isinstance(error, TrackerError) else str(error)
            if not self.files:
                raise IngestError(message) from error
            kept = "the file before it is" if self.files == 1 else f"the {self.files:,} other files are"
            raise IngestError(f"{message}; {kept} stored") from error
        finally:
            gc.enable()

    def _stored(self) -> Stored:
        """Return the imported runs and files in the database."""
        from groupbench.tracker.formats.loading import Stored, stored_imports

        try:
            with reading(self.db) as session:
                return stored_imports(session)
        except StoreError:  # it does not exist yet; any other reason is reported when a file is stored
            return Stored()

    def _remember(self) -> None:
        """Store which files were read, in one transaction."""
        from groupbench.tracker.formats.loading import remember

        if self.read:
            with self._opened().write() as session:
                remember(session, self.read)

    def _ingest(self, one: Prepared) -> Ingested:
        from groupbench.tracker.store.ingest import ingest_checked
        from groupbench.tracker.store.staged import unpacked

        assert one.part is not None
        stored = ingest_checked(self._opened(), unpacked(one.part), one.source.name)
        gc.collect()  # of cycles with the session: without it, memory grows with each file
        return stored

    def _opened(self) -> Store:
        from groupbench.tracker.store.engine import open_store

        if self.database is None:
            self.database = self.opened.enter_context(open_store(self.db, create=True))
        return self.database

    def _argument(self, argument: Given, prepared: Iterator[Prepared], progress: Progress) -> None:
        summary, done, skipped = Summary(), [], 0
        unknown: list[str] = []
        broken: list[str] = []
        for one in islice(prepared, len(argument.sources)):
            if one.problem is not None:
                if not argument.several:
                    raise IngestError(one.problem)
                (unknown if one.unknown else broken).append(one.problem)
            else:
                summary.add(one.summary)
                if one.part is None:
                    skipped += 1
                else:
                    done.append(self._ingest(one))
                if one.file is not None and len(argument.sources) > 1:
                    self.read.append(one.file)
                self.files += 1
            progress.add(1, one.summary.results, known=one.problem is None and one.part is None)
        if not done and not skipped:
            names = f"; the first of {len(argument.sources):,} files: " if len(argument.sources) > 1 else ": "
            raise IngestError(f"{argument.name}{names}{[*broken, *unknown][0]}")
        progress.clear()
        click.echo(printable(_line(argument, summary, done, skipped, len(unknown))))
        if broken:
            more = f", and {len(broken) - MOST_ERRORS:,} more" if len(broken) > MOST_ERRORS else ""
            raise IngestError(
                f"{counted(len(broken), 'file')} of {argument.name} cannot be read: "
                f"{'; '.join(broken[:MOST_ERRORS])}{more}"
            )


def _line(argument: Given, summary: Summary, done: list[Ingested], skipped: int, unknown: int) -> str:
    """Return the stored counts for one argument, in one line."""
    from groupbench.tracker.store.ingest import total

    files = len(done) + skipped
    titles = ", ".join(summary.titles) + (f", {files:,} files" if files > 1 else "")
    failed = f", {summary.failed:,} of them without a correct result" if summary.failed else ""
    notes = _notes(summary)
    whole = total(argument.name, done, summary.results)
    if skipped:
        notes.append(f"{counted(skipped, 'file')} stored before")
    if unknown:
        notes.append(f"{counted(unknown, 'file')} of no known format")
    head = f"{argument.name}: {titles}: {counted(summary.results, 'result')}{failed}: {whole.summary}"
    return "; ".join([head, *notes, *whole.warnings])


def _notes(summary: Summary) -> list[str]:
    """Return notes on the files, each one line at most."""
    notes = list(map(str, islice(summary.notes.values(), MOST_NOTES)))
    if len(summary.notes) > MOST_NOTES:
        notes.append(f"{len(summary.notes) - MOST_NOTES:,} more notes of this kind")
    if summary.left_out:
        notes.append(f"{counted(summary.left_out.total(), 'result')} left out: {summary.losses}")
    if merged := list(summary.merged):
        column = merged[0]
        notes.append(
            f"rows that differ in {some(merged)} became bursts of one cell; "
            f"if they are other problems, give --map {column}={column}"
        )
    return notes
