"""Series judged together get the verdicts that each gets alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from groupbench.tracker.facts.record import Record
from groupbench.tracker.judge.cases import Cases
from groupbench.tracker.judge.gate import judge_run
from groupbench.tracker.judge.pasts import Past, Table
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.stats import screen
from groupbench.tracker.store.engine import Store, open_store
from groupbench.tracker.store.ingest import ingest

Make = Callable[..., Record]


@given(seed=st.integers(0, 2**32), groups=st.integers(1, 4), limit=st.integers(1, 9))
def test_pasts_of_a_group_are_those_of_its_series(seed: int, groups: int, limit: int) -> None:
    rng = np.random.default_rng(seed)
    nights = [np.flatnonzero(rng.random(12) < 0.9) for _ in range(groups)]
    parts = [nights[number] for number in rng.integers(groups, size=20)]
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    run = np.concatenate(parts)
    used = rng.integers(3, size=12)[run]
    log, error = rng.normal(size=(2, len(run)))
    series = {key: place for place, key in enumerate(range(100, 120))}
    table = Table(series, starts, run, used // 2, used, 10 * np.arange(12), log, error)
    keys = rng.permutation(list(series))[:15].tolist()
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("groupbench.tracker.judge.pasts.AT_ONCE", limit)
        for places, past in table.alike(keys):
            assert len(places) <= limit
            for row, at in enumerate(places.tolist()):
                seen.append(keys[at])
                alone, one = table.of(keys[at]), past.one(row, keys[at])
                for field in fields(Past):
                    np.testing.assert_array_equal(getattr(one, field.name), getattr(alone, field.name), field.name)
    assert sorted(seen) == sorted(keys)


def nights(make: Make, seed: int, series: int = 40, count: int = 14) -> Iterator[Record]:
    """Random histories: steps of several sizes and ages, outliers, gaps, noisy and failed cells, another driver."""
    rng = np.random.default_rng(seed)
    for number in range(series):
        level, noise = np.exp(rng.uniform(-3, 2)), rng.choice([0.001, 0.005, 0.02])
        begins, size = int(rng.integers(1, count + 12)), float(rng.choice([0.8, 0.97, 1.02, 1.1, 2.0]))
        rms, changed = 2e-3 * (1 + 0.01 * rng.random()), int(rng.integers(1, count + 40))
        for night in range(count):
            if rng.random() < 0.02:
                continue
            ms = level * np.exp(rng.normal(0, noise)) * (size if night >= begins else 1)
            ms *= 1.5 if rng.random() < 0.02 else 1
            status = "oom" if rng.random() < 0.01 else "ok"
            driver = "580" if number % 9 == 0 and night >= count - 1 - number % 2 else "570"
            accuracy = {"rms": rms * (3 if night >= changed else 1)} if status == "ok" else {}
            record = make(night, ms, backend=f"b{number}", status=status, environment={"driver": driver}, **accuracy)
            if record.latency is not None and rng.random() < 0.05:  # too noisy
                bursts = tuple((float(each),) for each in ms * np.exp(rng.normal(0, 1, 5)))
                latency = msgspec.structs.replace(record.latency, bursts_ms=bursts)
                record = msgspec.structs.replace(record, latency=latency)
            yield record


@contextmanager
def alone() -> Iterator[None]:
    """Give every series a case of its own, whether or not something may have happened to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cases, "_unmoved", lambda self, point: None)
        yield


def judged(store: Store) -> list[Judged]:
    with store.read() as session:
        return [replace(row, series=row.series) for row in judge_run(session, find_run(session, None)).rows]


@settings(
    max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)  # no shrinking
@given(seed=st.integers(0, 2**32))
def test_rows_of_unmoved_series_are_those_of_their_cases(make: Make, monkeypatch: Any, seed: int) -> None:
    monkeypatch.setattr(screen, "FEW", 0)  # as in a night of thousands of series
    with open_store("sqlite://", create=True) as store:
        ingest(store, enumerate(nights(make, seed), 1), "generated")
        together = judged(store)
        with alone():
            assert judged(store) == together
