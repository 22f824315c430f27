"""Shell completion of names that a database holds: operators, backends, runs and commits.

A shell waits for each answer, so the database is read by SQLite alone, read-only, without SQLAlchemy. Completion never
fails: whatever goes wrong, there is nothing to propose. Databases other than SQLite files propose nothing.
"""

from __future__ import annotations

import os
import sqlite3
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeAlias

import click
from click.shell_completion import CompletionItem

MOST = 100
"""Proposals at once: the newest runs and commits, and the first names."""

_WAIT_S = 0.1
"""How long to wait for a writer's lock."""

_HASH = 10
"""Digits of a commit's hash that are proposed, unless more are typed."""

FurtherNames: TypeAlias = Callable[[click.Context], Iterable[str]]


class _Stored(click.types.StringParamType):
    """A text that is completed from the database, and may be any other."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the shell's proposals for an incomplete value, or nothing on any failure."""
        try:
            start, word = self.split(incomplete)
            return [CompletionItem(start + value, help=text) for value, text in self.proposals(ctx, word)[:MOST]]
        except Exception:  # a traceback in the middle of a command line does not help
            return []

    def split(self, incomplete: str) -> tuple[str, str]:
        """Return the finished part of a value, and the word to complete."""
        return "", incomplete

    @abstractmethod
    def proposals(self, ctx: click.Context, word: str) -> list[tuple[str, str | None]]:
        """Return (value, help) of each proposal that begins with the word. May raise."""


class _Names(_Stored):
    """Names of operators or of backends; with `commas`, several in one value."""

    def __init__(self, commas: bool = False, further: FurtherNames | None = None) -> None:
        self.commas = commas
        self.further = further  # names to propose besides those of the database

    def split(self, incomplete: str) -> tuple[str, str]:
        before, comma, word = incomplete.rpartition(",") if self.commas else ("", "", incomplete)
        return before + comma, word

    def proposals(self, ctx: click.Context, word: str) -> list[tuple[str, str | None]]:
        names = set(self.further(ctx)) if self.further else set()
        with suppress(sqlite3.Error, OSError):  # the further names are known without a database
            names.update(name for (name,) in _read(ctx, *self.query(ctx)))
        return [(name, None) for name in sorted(names) if name.startswith(word)]

    @abstractmethod
    def query(self, ctx: click.Context) -> tuple[str, Sequence[str]]:
        """Return the statement that reads the names, and its parameters."""


class OperatorName(_Names):
    """The name of an operator that the database holds."""

    def query(self, ctx: click.Context) -> tuple[str, Sequence[str]]:
        return "select distinct operator from series", ()


class BackendName(_Names):
    """The name of a backend in the database, limited to the operators that the command line already names."""

    def query(self, ctx: click.Context) -> tuple[str, Sequence[str]]:
        operators = operators_of(ctx)
        marks = ", ".join("?" * len(operators))
        where = f" where operator in ({marks})" if operators else ""
        return f"select distinct backend from series{where}", operators  # noqa: S608 # question marks alone


class RunId(_Stored):
    """The id of a run, newest first. `prefix` comes before the id and is not part of it."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    def split(self, incomplete: str) -> tuple[str, str]:
        return self.prefix, incomplete.removeprefix(self.prefix)

    def proposals(self, ctx: click.Context, word: str) -> list[tuple[str, str | None]]:
        statement = (
            'select run.uuid, run.started, "commit".hash from run join "commit" on run.commit_id = "commit".id '
            "where substr(run.uuid, 1, length(?)) = ? order by run.started desc, run.id desc limit ?"
        )
        rows = _read(ctx, statement, (word, word, MOST))
        return [(run, f"{str(started)[:16]} at {commit[:_HASH]}") for run, started, commit in rows]


class CommitName(_Stored):
    """A measured commit or its branch.

    span   complete either end of a range A..B
    words  also propose `latest` and `previous`
    """

    def __init__(self, span: bool = False, words: bool = True) -> None:
        self.span = span
        self.words = words

    def split(self, incomplete: str) -> tuple[str, str]:
        before, dots, word = incomplete.rpartition("..") if self.span else ("", "", incomplete)
        return before + dots, word

    def proposals(self, ctx: click.Context, word: str) -> list[tuple[str, str | None]]:
        rows = _read(
            ctx,
            'select "commit".hash, "commit".subject from "commit" join run on run.commit_id = "commit".id '
            'where substr("commit".hash, 1, length(?)) = ? group by "commit".id order by max(run.started) desc limit ?',
            (word, word, MOST),
        )
        commits = [(commit[: max(_HASH, len(word))], subject) for commit, subject in rows]
        branches = _read(ctx, 'select distinct branch from "commit" where branch is not null order by branch', ())
        names = [(name, "branch") for (name,) in branches]
        if self.words:
            names = [("latest", "the newest commit measured"), ("previous", "the one before it"), *names]
        return [*(pair for pair in names if pair[0].startswith(word)), *commits]


def operators_of(ctx: click.Context) -> tuple[str, ...]:
    """Return the operators that the command line already names."""
    named: Any = ctx.params.get("operator") or ctx.params.get("ops") or ()
    return (named,) if isinstance(named, str) else tuple(named)


def _read(ctx: click.Context, statement: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
    """Return the rows of a statement; none without a database. Raises sqlite3.Error, OSError, ProjectError."""
    from groupbench.tracker.tools.sqlite_uri import read_only_uri

    path = _database(ctx)
    if path is None or not path.is_file():
        return []
    with closing(sqlite3.connect(read_only_uri(path), uri=True, timeout=_WAIT_S)) as connection:
        return connection.execute(statement, parameters).fetchall()


def _database(ctx: click.Context) -> Path | None:
    """Return the SQLite file that the command line, the environment or groupbench.toml names. Raises ProjectError."""
    from groupbench.tracker import project

    options = ctx.find_root().params
    location = options.get("db") or os.environ.get("GROUPBENCH_DB")
    if not location:
        file = options.get("config") or options.get("plan")
        location = project.load(None if file is None else Path(file)).database
    location = location.removeprefix("sqlite:///")
    return None if "://" in location else Path(location)
