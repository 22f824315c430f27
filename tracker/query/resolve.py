"""Resolve run and commit names in the database."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.record import BACKFILL
from groupbench.tracker.query import filters
from groupbench.tracker.query.ancestry import ancestors, commit_order
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.lines import CommitLine, every_line, line_through
from groupbench.tracker.query.patterns import starts
from groupbench.tracker.query.points import ReadRuns
from groupbench.tracker.query.rows import RunRow, State
from groupbench.tracker.query.runs import run_row, run_rows, run_select
from groupbench.tracker.store.decisions import rejected
from groupbench.tracker.store.schema import NEWEST_FIRST, Commit, Run
from groupbench.tracker.text.wording import counted, some
from groupbench.tracker.tools import git

Lookup = Callable[[str], str | None]
"""Returns the full hash of a name that the database does not know, such as `git.rev_parse`."""

ReadThrough = Callable[[Session, RunRow], CommitLine]
"""Reads the line of a run, such as `lines.line_through`."""


def _line_by_git(session: Session, run: RunRow) -> CommitLine:
    return line_through(session, run, git.first_parents)


def find_run(session: Session, text: str | None = None) -> RunRow:
    """Return the run whose id starts with `text`; without one, or for `latest`, `latest_run`. Raises QueryError."""
    if text is None or text == "latest":
        run = latest_run(session)
        if run is None and session.scalar(select(Run.id).limit(1)) is not None:
            raise QueryError("every run is rejected; `groupbench list runs` lists them")
        if run is None:
            raise QueryError("the database has no runs; `groupbench ingest FILE` stores one")
        return run
    query = run_select().order_by(*NEWEST_FIRST)
    exact = session.execute(query.where(Run.uuid == text)).first()
    rows = [exact] if exact else list(session.execute(query.where(starts(Run.uuid, text)).limit(6)))
    if not rows:
        raise QueryError(f"no run {text!r}; `groupbench list runs` lists them")
    if len(rows) > 1:
        raise QueryError(f"run {text!r} is ambiguous: {some([row.id for row in rows])}")
    return run_row(rows[0])


def latest_run(
    session: Session, read_through: ReadThrough = _line_by_git, read_runs: ReadRuns = run_rows
) -> RunRow | None:
    """Return the newest run that was not rejected, or None for a database without one.

    A backfill measures old commits last. If the newest run is part of one, the newest run on the line is returned.
    """
    query = select(Run.id).where(Run.id.not_in(rejected(session))).order_by(*NEWEST_FIRST)
    key = session.scalar(query.limit(1))
    if key is None:
        return None
    run = read_runs(session, [key])[key]
    if run.trigger == BACKFILL:
        key = read_through(session, run).runs[0]
        run = read_runs(session, [key])[key]
    return run


def run_at(session: Session, when: datetime) -> RunRow:
    """Return the newest run started by a point in time. Raises QueryError."""
    row = session.execute(run_select().where(Run.started <= when).order_by(*NEWEST_FIRST).limit(1)).first()
    if row is None:
        raise QueryError(f"no run at or before {when:%Y-%m-%d %H:%M} UTC; `groupbench list runs` lists them")
    return run_row(row)


def newest_run(session: Session, state: State) -> RunRow:
    """Return a measured state's newest run."""
    at_state = run_select().where(Commit.hash == state.commit, Run.dirty == state.dirty)
    return run_row(session.execute(at_state.order_by(*NEWEST_FIRST).limit(1)).one())


def resolve_commit(session: Session, text: str, lookup: Lookup | None = None) -> State:
    """Return the state named by `latest`, `previous`, a branch, a hash prefix, or a name for `lookup`.

    The newest state has the newest commit, and within one commit the last measurement. `HASH+` is a commit's dirty
    tree. Without the plus sign, and for a branch, a clean tree is preferred.

    Raises QueryError if nothing or several commits match, or the commit has no run.
    """
    if text in ("latest", "previous"):
        place, newest = ("latest", "previous").index(text), _newest_states(session)
        if len(newest) > place:
            return newest[place]
        raise QueryError(f"no {text} commit: the database has runs of {counted(len(newest), 'commit')}")
    if session.scalar(select(Run.id).join(Commit).where(Commit.branch == text).limit(1)) is not None:
        return min(_newest_states(session, text), key=lambda state: state.dirty)
    prefix = text.removesuffix("+")
    hashes = _stored_hashes(session, prefix)
    if not hashes:
        hashes = [_looked_up(session, text, prefix, lookup)]
    if len(hashes) > 1:
        raise QueryError(f"commit {text!r} is ambiguous: {some([hash_[:12] for hash_ in hashes])}")
    trees = set(session.scalars(select(Run.dirty).join(Commit).where(Commit.hash == hashes[0])))
    if not trees:
        raise QueryError(f"commit {hashes[0][:12]} has no run; `groupbench list runs` lists the stored runs")
    dirty = text.endswith("+") or False not in trees
    if dirty not in trees:
        raise QueryError(f"commit {prefix!r} has no run with uncommitted changes; leave out the +")
    return State(hashes[0], dirty)


def commit_hash(session: Session, text: str, lookup: Lookup) -> str | None:
    """Return a commit's full hash, measured or not: from the database, else from `lookup`."""
    hashes = _stored_hashes(session, text)
    return hashes[0] if len(hashes) == 1 else lookup(text)


def _stored_hashes(session: Session, prefix: str) -> list[str]:
    """Return the stored hashes with a prefix, at most six; only the exact one if it exists."""
    hashes = list(session.scalars(select(Commit.hash).where(starts(Commit.hash, prefix)).limit(6))) if prefix else []
    return [prefix] if prefix in hashes else hashes


def _newest_states(session: Session, branch: str | None = None) -> list[State]:
    """Return the measured states on all branches or one, newest first: by commit, and within a commit by time.

    So a commit measured late by a backfill is not the newest.
    """
    query = select(Run.id, Commit.hash, Run.dirty).join(Commit)
    rows = session.execute(query if branch is None else query.where(Commit.branch == branch))
    states = {key: State(hash_, dirty) for key, hash_, dirty in rows}
    return list(dict.fromkeys(states[key] for key in every_line(session).runs if key in states))


def _looked_up(session: Session, text: str, name: str, lookup: Lookup | None) -> str:
    hash_ = lookup(name) if lookup else None
    if hash_ is None:
        raise QueryError(f"no commit or branch {text!r}; `groupbench list runs` lists the stored runs")
    if session.scalar(select(Commit.id).where(Commit.hash == hash_)) is None:
        raise QueryError(
            f"{text!r} is commit {hash_[:12]}, which has no stored run; `groupbench list runs` lists those that do"
        )
    return hash_


def commits_between(session: Session, text: str) -> set[str]:
    """Return the stored commits' hashes in a range `A..B`, without A and with B.

    Uses git if it knows both commits, else the stored parents if they lead from B to A, else the commit order.
    """
    first, last = filters.commit_range(text)
    low = resolve_commit(session, first, git.rev_parse).commit if first else None
    high = resolve_commit(session, last, git.rev_parse).commit if last else None
    if low and high:
        by_git = git.between(low, high)
        if by_git is not None:
            return by_git
        reached = ancestors(session, high)
        if low in reached:
            return reached - ancestors(session, low)
    order = [node.hash for node in commit_order(session)]
    begin = order.index(low) + 1 if low else 0
    end = order.index(high) + 1 if high else len(order)
    if begin > end:
        raise QueryError(f"{text!r} is reversed: {first} came after {last}")
    return set(order[begin:end])


def run_conditions(session: Session, where: Filter, lookup: Lookup | None = git.rev_parse) -> list[ColumnElement[bool]]:
    """Return a filter's run conditions, for a query with run and commit joined. `lookup` is for single commits."""
    conditions = [*dates(where), *on_branch(session, where)]
    if where.named:
        states = [resolve_commit(session, text, lookup) for text in where.named]
        conditions.append(or_(*(and_(Commit.hash == state.commit, Run.dirty == state.dirty) for state in states)))
    for text in where.ranges:
        conditions.append(Commit.hash.in_(sorted(commits_between(session, text))))
    return conditions


def on_branch(session: Session, where: Filter) -> list[ColumnElement[bool]]:
    """Return a filter's conditions on branches. Raises QueryError for a branch without commits."""
    if not where.branch:
        return []
    branches = sorted(filter(None, session.scalars(select(Commit.branch).distinct())))
    filters.refuse_unknown("branch", where.branch, branches)
    return [Commit.branch.in_(where.branch)]


def dates(where: Filter) -> list[ColumnElement[bool]]:
    """Return a filter's conditions on run starts."""
    conditions: list[ColumnElement[bool]] = []
    if where.since is not None:
        conditions.append(Run.started >= where.since)
    if where.until is not None:
        conditions.append(Run.started < where.until)
    return conditions
