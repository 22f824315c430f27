"""Google Benchmark's JSON: families, old aggregates, facts under usual names."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.record import Record
from groupbench.tracker.formats import Options, load
from groupbench.tracker.formats.usual import BRANCH, COMMIT, usual

CONTEXT: dict[str, Any] = {
    "date": "2026-01-31T13:00:00+01:00", "host_name": "box", "executable": "./build/gemm_bench", "num_cpus": 8,
    "mhz_per_cpu": 3000, "cpu_scaling_enabled": False, "caches": [], "library_build_type": "release",
    "git_commit": "a" * 40,
}  # fmt: skip


def one(name: str, time: float | None = 10.0, **fields: Any) -> dict[str, Any]:
    times = {"iterations": 5, "real_time": time, "cpu_time": 1.0, "time_unit": "us"}
    return {"name": name, "run_type": "iteration", **times, **fields}


def read(write: Any, *benchmarks: dict[str, Any], context: Any = CONTEXT, **facts: Any) -> tuple[Record, ...]:
    content = json.dumps({"context": context, "benchmarks": benchmarks}).encode()
    return load(write([content], "bench.json"), options=Options(**facts)).records


def test_repetitions_are_bursts(write: Any) -> None:
    name = "BM_Gemm/64/N:1024/threads:8"
    repeated = [one(name, 10.0 + i, run_name=name) for i in range(3)]
    mean = one(f"{name}_mean", run_type="aggregate", aggregate_name="mean", run_name=name)
    gemm, copy = read(write, *repeated, mean, one("BM_Copy", 2.0, time_unit="ms"))
    assert gemm.cell.operator == "BM_Gemm"
    assert gemm.cell.shape == "64,N=1024,threads=8"
    assert gemm.cell.dims == {"N": 1024, "threads": 8}
    assert gemm.latency is not None
    assert gemm.latency.bursts_ms == ((pytest.approx(0.010),), (pytest.approx(0.011),), (pytest.approx(0.012),))
    assert (gemm.cell.backend, gemm.environment.host, gemm.environment.cpu_count) == ("gemm_bench", "box", 8)
    assert gemm.run.commit.hash == "a" * 40
    assert gemm.run.started == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert copy.cell.shape == "-"
    assert copy.latency is not None
    assert copy.latency.bursts_ms == ((2.0,),)


def test_a_key_with_two_values_is_refused(write: Any) -> None:
    """Readers of JSON disagree on which of them counts."""
    text = json.dumps({"context": CONTEXT, "benchmarks": [one("BM_X")]})
    double = text.replace('"real_time": 10.0', '"real_time": 10.0, "real_time": 99.0')
    with pytest.raises(IngestError, match="the key 'real_time' has two values in one object"):
        load(write([double.encode()], "bench.json"))
    same = text.replace('"real_time": 10.0', '"real_time": 10.0, "real_time": 10.0')
    assert load(write([b"\xef\xbb\xbf" + same.encode()], "bench.json")).records[0].latency is not None


def test_aggregates_alone(write: Any) -> None:
    name = {"run_name": "BM_X", "run_type": "aggregate"}
    (record,) = read(
        write,
        one("BM_X_mean", 3.0, aggregate_name="mean", **name),
        one("BM_X_median", 2.0, aggregate_name="median", **name),
        one("BM_X_cv", 0.01, aggregate_name="cv", **name),
        one("BM_Y_BigO", None, run_name="BM_Y", run_type="aggregate", aggregate_name="BigO"),
    )
    assert record.latency is not None
    assert record.latency.bursts_ms == ((pytest.approx(0.002),),)


def test_failures_are_a_status(write: Any) -> None:
    records = read(
        write,
        one("a", error_occurred=True, error_message="out of memory"),
        one("b", error_occurred=True, error_message="skipped a beat"),
        one("c", skipped=True, skip_message="needs AVX"),
        one("d", 0.0),
    )
    assert [(r.status, r.message) for r in records] == [
        ("oom", "out of memory"),
        ("error", "skipped a beat"),
        ("skipped", "needs AVX"),
        ("error", "latency is 0, which is not a valid duration"),
    ]
    assert not any(r.latency for r in records)


def test_a_slash_in_a_template(write: Any) -> None:
    (record,) = read(write, one("BM_X<a/b>/8"))
    assert (record.cell.operator, record.cell.shape) == ("BM_X<a/b>", "8")


def test_a_date_without_a_zone_and_no_commit(write: Any) -> None:
    context = {"date": "2026-01-31 13:00:00", "num_cpus": 1}
    (record,) = read(write, one("a"), context=context, commit="b")
    assert record.run.started == datetime(2026, 1, 31, 13, tzinfo=UTC)
    with pytest.raises(IngestError, match="names no commit"):
        read(write, one("a"), context=context)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (one("a", time_unit="weeks"), r"benchmarks\[0\].time_unit: 'weeks'"),
        (one("a", None), r"benchmarks\[0\]: no real_time"),
        ({"real_time": 1.0}, r"missing required field `name` - at `benchmarks\[0\]`"),
        (one("a", "fast"), r"got `str` - at `benchmarks\[0\].real_time`"),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_is_named(write: Any, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(IngestError, match=message):
        read(write, entry)


@pytest.mark.parametrize(
    ("commit", "added"),
    [("a" * 40, 0), ("a" * 12, 0), ("b" * 40, 1)],
    ids=["as in the file", "start of the hash", "another"],
)
def test_a_commit_that_the_file_names_itself(write: Any, cli: Any, commit: str, added: int) -> None:
    path = write([json.dumps({"context": CONTEXT, "benchmarks": [one("BM_Gemm/64")]}).encode()], "bench.json")
    assert "1 point added" in cli("import", path).stdout
    assert f"{added} point" in cli("import", path, "--commit", commit).stdout
    again = cli("import", path, "--date", CONTEXT["date"])
    assert "0 points added, 1 already known" in again.stdout


@pytest.mark.parametrize(
    ("name", "time"), [("BM_Copy/64", 1.0), ("BM_Copy/64/real_time", 10.0), ("BM_Copy/64/manual_time", 10.0)]
)
def test_bytes_per_second_are_the_bytes_of_an_iteration(write: Any, name: str, time: float) -> None:
    """The rate is over the CPU time (1 us here), or over the wall clock (10 us) where the benchmark uses that."""
    (record,) = read(write, one(name, bytes_per_second=4096 / (time * 1e-6)))
    assert record.cell.min_bytes == 4096


def test_a_fitted_complexity_is_left_out_and_named(write: Any) -> None:
    fit = {"run_type": "aggregate", "aggregate_name": "BigO", "cpu_coefficient": 1.0, "run_name": "BM_Sort"}
    content = json.dumps({"context": CONTEXT, "benchmarks": [one("BM_Gemm/64"), one("BM_Sort_BigO", None, **fit)]})
    assert load(write([content.encode()], "bench.json")).summary.losses == "1 without a time (BM_Sort)"


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
    usual_facts = usual(facts)
    assert usual_facts.commit is None or usual_facts.commit.strip()


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
    usual_facts = usual(facts)
    assert (usual_facts.commit, usual_facts.branch, usual_facts.dirty) == expected


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
    assert tuple(map(str, loaded.summary.notes.values())) == (
        "dropped from names, because it changes with each run: "
        "machine, now '4 CPUs'; name it with --cpu (09e45318565b)",
    )


def test_names_that_become_equal_are_numbered(write: Any) -> None:
    rows = [row(f"BM/<f at 0x7f31c0de4a{number}>", number) for number in (10, 20)]
    loaded = google(write, rows)
    assert shapes(loaded) == {("BM", "<f>"): [10.0], ("BM", "<f>#2"): [20.0]}
    assert "memory address" in next(map(str, loaded.summary.notes.values()))
