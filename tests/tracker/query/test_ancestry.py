"""The order of commits, their names, and the newest results of every series."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np
import pytest
from cases import rarely
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.orm import Session

from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.record import STATUSES, Record
from groupbench.tracker.judge.recent import Recent, recent_points
from groupbench.tracker.query.ancestry import CommitNode, ancestors, commit_order, ordered
from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.query.resolve import resolve_commit
from groupbench.tracker.query.rows import State
from groupbench.tracker.store.engine import Store, open_store
from groupbench.tracker.store.ingest import ingest

START = datetime(2026, 1, 1, tzinfo=UTC)


def node(name: str, *parents: str, day: int | None = None) -> CommitNode:
    return CommitNode(name, parents, None if day is None else START + timedelta(days=day))


def names(*nodes: CommitNode) -> str:
    return "".join(each.hash for each in ordered(nodes))


@pytest.mark.parametrize(
    ("commits", "order"),
    [
        ((), ""),
        ((node("a"),), "a"),
        ((node("b", "a", day=1), node("a", day=0)), "ab"),
        ((node("b", "a", day=0), node("a", day=5)), "ab"),  # the clock was wrong
        ((node("d", "b", "c", day=3), node("c", "a", day=2), node("b", "a", day=1), node("a", day=0)), "abcd"),
        ((node("c", "a", day=1), node("b", "a", day=2), node("d", "c", "b", day=3), node("a", day=0)), "acbd"),
        ((node("b", "x", day=2), node("a", "y", day=1)), "ab"),  # a shallow clone: its parents are missing
        ((node("n"), node("b", "a", day=2), node("a", day=1)), "abn"),  # known by its hash alone, and never run
        ((node("b", "a", day=1), node("a", "b", day=2), node("c", "b", day=0)), "bca"),  # a circle
        ((node("a", "a", day=1),), "a"),  # its own parent
    ],
    ids=["none", "one", "two", "clock", "merge", "branches", "shallow", "bare", "circle", "self"],
)
def test_order(commits: tuple[CommitNode, ...], order: str) -> None:
    assert names(*commits) == order
    assert names(*commits[::-1]) == names(*commits)


@given(st.data())
def test_a_parent_is_before_its_child_whatever_the_clocks_say(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    commits = []
    for i in range(count):
        parents = data.draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else set()
        day = data.draw(st.none() | st.integers(0, 5))
        commits.append(node(str(i), *(str(p) for p in parents), "unknown", day=day))
    shuffled = data.draw(st.permutations(commits))
    hashes = [each.hash for each in ordered(shuffled)]
    place = {hash_: i for i, hash_ in enumerate(hashes)}
    assert sorted(place) == sorted(each.hash for each in commits)
    assert all(place[p] < place[c.hash] for c in commits for p in c.parents if p in place)


def test_order_of_a_store(opened: Store, make: Any) -> None:
    facts = [
        {"commit": "m", "commit_facts": {"parents": ["a", "b"], "time": "2026-01-01T00:00:00Z"}},
        {"commit": "b", "commit_facts": {"parents": ["base"], "time": "2026-02-02T00:00:00Z"}},
        {"commit": "a", "commit_facts": {"parents": ["base"], "time": "2026-02-01T00:00:00Z"}},
        {"commit": "bare"},
    ]
    ingest(
        opened,
        enumerate((make(night + 60 * ("commit_facts" in fields), **fields) for night, fields in enumerate(facts)), 1),
        "file",
    )
    with opened.read() as session:
        assert [each.hash for each in commit_order(session)] == ["bare", "a", "b", "m"]
        assert ancestors(session, "m") == {"m", "a", "b"}
        assert ancestors(session, "none") == set()


@pytest.mark.both
def test_recent_points_are_the_newest_by_time(opened: Store, make: Any) -> None:
    """Whatever order files came in; a series that stopped is found as well."""
    nights = [5, 1, 9, 3, 7, 0, 2, 8, 4, 6]
    records = [make(night, 1 + night / 10, backend=f"b{i}") for night in nights for i in range(60)]
    records += [make(night, 2.0, backend="old", status="ok" if night else "oom") for night in (0, 1)]
    ingest(opened, enumerate(records, 1), "file")
    with opened.read() as session:
        for n in (1, 3, 10, 20):
            recent = recent_points(session, n)
            assert len(recent.series) == 61
            for where in itertools.starmap(slice, itertools.pairwise(recent.starts.tolist())):
                ms, status = (recent.columns[name][where][::-1] for name in ("median_ms", "status"))
                if abs(ms[0] - 2) < 0.01:
                    assert [STATUSES[code] for code in status] == ["ok", "oom"][:n]
                    assert np.isnan(ms[1:]).all()
                else:
                    assert ms == pytest.approx([1.9 - 0.1 * i for i in range(min(n, 10))], rel=2e-3)


@pytest.mark.parametrize("newest", [(5,), *rarely(((1, 2, 100),))])
def test_recent_points_by_key_are_those_of_a_scan(
    newest: tuple[int, ...], opened: Store, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gaps, copies of samples, results without samples, commits measured again, and a line without every run."""
    rng = np.random.default_rng(1)
    samples: dict[tuple[int, int], int] = {}
    records = []
    for run in range(14):
        commit = run - run % 2  # every second run measures the commit before again
        for number in range(60):
            if rng.random() < 0.2 or (number % 7 == 0 and run > 3):
                continue
            kind = rng.choice(["timed", "copied", "oom", "accuracy"], p=[0.4, 0.4, 0.1, 0.1])
            night = samples.get((commit, number), run) if kind == "copied" else run
            samples[commit, number] = night
            ms = None if kind == "accuracy" else 1 + night / 50
            record = make(night, ms, run=f"r{run}", backend=f"b{number}", status="oom" if kind == "oom" else "ok")
            records.append(belonging_to(record, f"{commit:040x}", run))
    ingest(opened, enumerate(records, 1), "file")

    def read(session: Any, share: float, n: int, line: CommitLine | None, keys: list[int] | None) -> Recent:
        monkeypatch.setattr("groupbench.tracker.judge.recent._BY_KEY", share)
        return recent_points(session, n, line=line, series=keys)

    copies = 0
    with opened.read() as session:
        every = recent_points(session, 100)
        runs = sorted(set(every.columns["run"].tolist()), reverse=True)
        some = rng.permutation(every.series).tolist()
        selections = [*([key] for key in some[:4]), sorted(some[:4]), sorted(some[:30])]
        lines = (None, CommitLine(tuple(runs)), CommitLine(tuple(runs[1::2])))
        for n, line, keys in itertools.product(newest, lines, selections):
            scanned = read(session, 0.0, n, line, keys)
            for share in (0.02, 0.5, 1.0):
                by_key = read(session, share, n, line, keys)
                for name in ("series", "starts"):
                    np.testing.assert_array_equal(getattr(by_key, name), getattr(scanned, name), name)
                for name, array in scanned.columns.items():
                    np.testing.assert_array_equal(by_key.columns[name], array, name)
            if len(keys) == 1:  # which are read by key with the share that is in use
                assert read(session, 0.02, n, line, keys).copies == scanned.copies
                copies += scanned.copies
    assert copies


def belonging_to(record: Record, commit: str, day: int) -> Record:
    """Return a record as a run of a commit measured it on a day."""
    replace = msgspec.structs.replace
    run = record.run
    started = START + timedelta(days=day)
    return replace(record, run=replace(run, commit=replace(run.commit, hash=commit), started=started))


@pytest.mark.both
def test_recent_points_of_nothing(opened: Store) -> None:
    with opened.read() as session:
        recent = recent_points(session, 5)
    assert (len(recent.series), len(recent.columns["run"]), recent.starts.tolist()) == (0, 0, [0])


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
