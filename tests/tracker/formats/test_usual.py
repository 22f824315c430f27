"""Facts under usual names, and google-benchmark's families and old aggregates."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.formats import load
from groupbench.tracker.formats.usual import BRANCH, COMMIT, usual

HASH = "0123456789abcdef0123456789abcdef01234567"


@given(st.sampled_from(COMMIT), st.sampled_from([str.lower, str.upper, str.title]), st.sampled_from("_- ."))
def test_a_commit_under_any_name(name: str, case: Any, separator: str) -> None:
    assert usual({case(name).replace("_", separator): HASH}).commit == HASH


@given(
    st.dictionaries(
        st.text(max_size=8) | st.sampled_from([*COMMIT, *BRANCH, "dirty", "date"]),
        st.none() | st.text() | st.integers() | st.floats() | st.booleans(),
        max_size=6,
    )
)
def test_any_facts(facts: dict[str, Any]) -> None:
    found = usual(facts)
    assert found.commit is None or found.commit.strip()


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"vcs": {"revision": HASH, "modified": True}}, (HASH, None, True)),
        ({"git": {"commit": HASH, "branch": "refs/heads/main"}}, (HASH, "main", False)),
        ({"GIT_COMMIT_HASH": HASH, "GIT_CLEAN_STATUS": "DIRTY"}, (HASH, None, True)),
        ({"GIT_COMMIT_HASH": HASH, "GIT_CLEAN_STATUS": "CLEAN"}, (HASH, None, False)),
        ({"GIT_IS_CLEAN": "x", "git_clean": "false", "sha": HASH}, (HASH, None, True)),
        ({"git_describe": "v1.2-14-gabcdef1-dirty"}, ("abcdef1", None, True)),
        ({"commit": "unknown", "GITHUB_SHA": HASH, "GITHUB_REF_NAME": "dev"}, (HASH, "dev", False)),
        ({"commit": 12, "branch": ""}, (None, None, False)),
    ],
)
def test_spellings(facts: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = usual(facts)
    assert (found.commit, found.branch, found.dirty) == expected


def google(write: Any, rows: list[dict[str, Any]], **context: Any) -> Any:
    content = {"context": {"date": "2026-03-01T03:00:00", "num_cpus": 4, "commit": "a", **context}, "benchmarks": rows}
    return load(write([json.dumps(content).encode()], "g.json"))


def test_facts_of_a_context(write: Any) -> None:
    facts = {"GIT_COMMIT_HASH": "fea9315", "GIT_BRANCH": "develop", "GIT_COMMIT_DATE": "2026-02-28T17:00:00-06:00"}
    (record,) = google(write, [{"name": "a", "real_time": 1.0}], commit=None, **facts).records
    commit = record.run.commit
    assert (commit.hash, commit.branch, commit.dirty) == ("fea9315", "develop", False)
    assert commit.time == datetime(2026, 2, 28, 23, tzinfo=UTC)


def row(name: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"name": name, "real_time": time, "time_unit": "ms", **fields}


def shapes(loaded: Any) -> dict[tuple[str, str], list[float]]:
    return {
        (one.cell.operator, one.cell.shape): [burst[0] for burst in one.latency.bursts_ms] for one in loaded.records
    }


def test_two_families_of_one_name_are_two_series(write: Any) -> None:
    families = [row("BM", 1.0, family_index=0, repetition_index=i) for i in range(2)]
    families += [row("BM", 9.0, family_index=5, repetition_index=i) for i in range(2)]
    expected = {("BM", "-"): [1.0, 1.0], ("BM", "-#2"): [9.0, 9.0]}
    assert shapes(google(write, families)) == expected
    assert shapes(google(write, [families[i] for i in (2, 0, 3, 1)])) == expected, "in another order"
    without = [{key: value for key, value in one.items() if key != "family_index"} for one in families]
    assert shapes(google(write, without)) == expected, "a repetition that begins again"


def test_old_files(write: Any) -> None:
    repeated = [row("BM", 1.0), row("BM", 2.0), row("BM_mean", 1.5), row("BM_median", 1.5), row("BM_stddev", 0.1)]
    assert shapes(google(write, repeated)) == {("BM", "-"): [1.0, 2.0]}
    assert shapes(google(write, repeated[2:])) == {("BM", "-"): [1.5]}
    fitted = [row("BM/8", 1.0), row("BM/9", 2.0), row("BM_BigO", 3.0), row("BM_RMS", 0.1), row("Sum_mean", 7.0)]
    assert shapes(google(write, fitted)) == {("BM", "8"): [1.0], ("BM", "9"): [2.0], ("Sum_mean", "-"): [7.0]}
    assert shapes(google(write, [row("BM", 1.0), row("BM", 9.0)])) == {("BM", "-"): [1.0], ("BM", "-#2"): [9.0]}


def test_a_container_is_no_machine(write: Any) -> None:
    loaded = google(write, [row("BM", 1.0)], host_name="09e45318565b")
    assert loaded.records[0].environment.cpu == "4 CPUs"
    assert loaded.notes == (
        "dropped from names, because it changes with each run: "
        "machine, now '4 CPUs'; name it with --cpu (09e45318565b)",
    )


def test_names_that_become_equal_are_numbered(write: Any) -> None:
    rows = [row(f"BM/<f at 0x7f31c0de4a{number}>", number) for number in (10, 20)]
    loaded = google(write, rows)
    assert shapes(loaded) == {("BM", "<f>"): [10.0], ("BM", "<f>#2"): [20.0]}
    assert "memory address" in loaded.notes[0]
