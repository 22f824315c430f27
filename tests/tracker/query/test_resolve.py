"""Resolve names of commits, with one resolver for the command line and the pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.query.resolve import resolve_commit
from groupbench.tracker.query.rows import State
from groupbench.tracker.store.engine import open_store

COMMITS = ("a" * 40, "ab" + "c" * 38, "d" * 40)


@pytest.fixture
def session(stored: Any, make: Any, db: Any) -> Iterator[Session]:
    """Return a session on three commits of main, then dirty trees of the second of them and of a fourth."""
    main = {"branch": "main"}
    stored([make(n, commit=hash_, commit_facts=main) for n, hash_ in enumerate(COMMITS)])
    stored(
        [
            make(3, commit=COMMITS[1], commit_facts={"dirty": True}),
            make(4, commit="e" * 40, commit_facts={"dirty": True}),
        ]
    )
    with open_store(db, create=False) as store, store.read() as session:
        yield session


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("latest", State("e" * 40, True)),
        ("previous", State(COMMITS[2], False)),
        ("main", State(COMMITS[2], False)),
        ("aa", State(COMMITS[0], False)),
        ("ab", State(COMMITS[1], False)),
        ("ab+", State(COMMITS[1], True)),
        ("e", State("e" * 40, True)),
        (COMMITS[2], State(COMMITS[2], False)),
    ],
)
def test_stored_words_are_resolved_without_asking(session: Session, word: str, state: State) -> None:
    def refuse(name: str) -> str | None:
        raise AssertionError(f"asked about {name}")

    assert resolve_commit(session, word) == resolve_commit(session, word, refuse) == state


def test_a_commit_that_is_measured_late_is_not_the_latest(stored: Any, make: Any, db: Any) -> None:
    first, second, third = "1" * 40, "2" * 40, "3" * 40
    main = {"branch": "main"}
    stored([make(0, commit=third, commit_facts=main | {"parents": (second,)})])
    stored([make(1, commit=second, commit_facts=main | {"parents": (first,)})])  # as a backfill does
    stored([make(2, commit=first, commit_facts=main)])
    with open_store(db, create=False) as store, store.read() as session:
        commits = [resolve_commit(session, word).commit for word in ("latest", "previous", "main")]
    assert commits == [third, second, third]


@pytest.mark.both
def test_an_unknown_word_is_looked_up(session: Session) -> None:
    names = {"v1": COMMITS[0], "HEAD": "f" * 40}
    assert resolve_commit(session, "v1", names.get) == State(COMMITS[0], False)
    with pytest.raises(QueryError, match="'HEAD' is commit ffffffffffff, which has no stored run"):
        resolve_commit(session, "HEAD", names.get)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("v1", "no commit or branch 'v1'"),
        ("+", "no commit or branch '\\+'"),
        ("", "no commit or branch ''"),
        ("a", "commit 'a' is ambiguous: aaaaaaaaaaaa, abcccccccccc"),
        ("aa+", "commit 'aa' has no run with uncommitted changes; leave out the +"),
    ],
)
def test_a_word_that_stands_for_no_commit_is_refused(session: Session, word: str, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        resolve_commit(session, word)
