"""Test the league of backends, on simulated records and on an H100's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nights import Cli

from groupbench.tracker.compare import sides
from groupbench.tracker.compare.league import LeagueTable, league
from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.record import Record, read
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.rows import PointRow

from ..conftest import backfilled, build

H100 = Path(__file__).parents[2] / "data" / "h100_kernels"


def points_of(records: Iterable[Record]) -> list[PointRow]:
    return sides.points_of(records, "file")


def table_of(*records: Record, **by_shape: dict[str, float | None]) -> LeagueTable:
    """Return the table of records, and of latencies by shape and backend: None is a result that is missing."""
    timed = [
        build(0, ms, backend=backend, shape=shape, status="oom" if ms is None else "ok")
        for shape, of in by_shape.items() for backend, ms in of.items()
    ]  # fmt: skip
    (table,) = league(points_of([*records, *timed]))
    return table


def test_the_fastest_is_first_and_others_are_behind_it() -> None:
    table = table_of(one={"quick": 1.0, "slow": 1.2, "slowest": 2.0}, other={"quick": 2.0, "slow": 1.0})
    assert [standing.backend for standing in table.standings] == ["slow", "quick", "slowest"]
    slow, quick, slowest = table.standings
    assert slow.behind.ratio == pytest.approx(math.sqrt(1.2), rel=0.01)
    assert (slow.won, slow.matches, quick.won, slowest.won, slowest.matches) == (1, 2, 1, 0, 1)
    assert quick.worst == pytest.approx(2, rel=0.01) and quick.worst_shape == "other"
    first = table.matches[0]
    bounds = first.lead_over(first.entries[1])
    assert bounds is not None and bounds.low < 1.2 < bounds.high


def test_indistinguishable_backends_are_level_and_both_win() -> None:
    table = table_of(s={"a": 1.0, "b": 1.0005, "c": 1.1})
    assert {standing.backend: standing.won for standing in table.standings} == {"a": 1, "b": 1, "c": 0}


def test_wrong_and_missing_results_win_nothing_and_are_counted() -> None:
    cheat = build(0, 0.1, backend="cheat", status="wrong", shape="r")
    third = {"a": 1.0, "b": None, "cheat": 1.5}
    table = table_of(cheat, r={"a": 1.0, "b": 2.0}, s={"a": 1.0, "b": 2.0, "cheat": 3.0}, t=third)
    by_backend = {standing.backend: standing for standing in table.standings}
    assert (by_backend["cheat"].won, by_backend["cheat"].matches, by_backend["cheat"].wrong) == (0, 2, 1)
    assert (by_backend["b"].absent, by_backend["b"].wrong) == (1, 0)


def test_backends_without_a_latency_are_named() -> None:
    untimed = [build(0, 3.0, backend="c", timing="interpreted"), build(0, 3.0, backend="d", status="wrong")]
    table = table_of(*untimed, build(0, 1.0, backend="a"), build(0, 2.0, backend="b"), s={"a": 1.0, "b": 2.0, "d": 3.0})
    assert table.untimed == {"c": "interpreted"}


def test_an_interval_of_how_far_a_backend_is_behind_starts_at_one() -> None:
    """The t interval of two ratios, 1 and 1.5, reaches far below 1."""
    slow = table_of(s={"a": 1.0, "b": 1.5}, t={"a": 1.0, "b": 1.0}).standings[1]
    assert slow.behind.low == 1 and slow.behind.high is not None and slow.behind.high > slow.behind.ratio


APART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "card": ({"environment": {"gpu_uuid": "GPU-1"}}, {"environment": {"gpu_uuid": "GPU-2"}}),
    "toolchain": ({"environment": {"triton": "3.6.0"}}, {"environment": {"triton": "3.7.0"}}),
    "operator": ({"operator": "x"}, {"operator": "y"}),
    "dtype": ({"dtype": "bf16"}, {"dtype": "fp16"}),
    "mode": ({"mode": "fwd"}, {"mode": "bwd"}),
    "interpreted": ({}, {"timing": "interpreted"}),
}


@pytest.mark.parametrize(("one", "other"), APART.values(), ids=APART)
def test_unlike_places_are_not_compared(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert league(points_of([build(0, 1.0, backend="a", **one), build(0, 2.0, backend="b", **other)])) == []


def test_commits_are_not_compared_and_the_newest_counts() -> None:
    assert league(points_of([build(0, 1.0, backend="a"), build(1, 2.0, backend="b")])) == []
    records = [build(night, ms, backend=name) for night, ms, name in ((0, 1.0, "a"), (0, 2.0, "b"), (1, 3.0, "a"))]
    assert table_of(*records).standings[0].backend == "a"  # the second night has no pair
    assert table_of(*records, build(1, 2.0, backend="b")).standings[0].backend == "b"


def test_versions_memory_and_routing_are_shown() -> None:
    facts: dict[str, Any] = {"environment": {"settings": {"package quack-kernels": "0.6.5"}}}
    facts["metrics"] = {"dynamic_routing": 1, "workspace_mib": 3, "kept_mib": 4}
    slow = build(0, 2.0, backend="loop", metrics={"dynamic_routing": 0})
    quack, loop = table_of(build(0, 1.0, backend="quack", **facts), slow).standings
    assert (quack.packages, quack.memory_mib, quack.properties) == (("quack-kernels 0.6.5",), 7, ("dynamic",))
    assert (loop.packages, loop.memory_mib, loop.properties) == ((), None, ("fixed routing",))


@given(st.lists(st.floats(0.05, 50), min_size=2, max_size=6))
def test_the_winner_has_the_smallest_latency(times: list[float]) -> None:
    (table,) = league(points_of([build(0, ms, backend=f"b{i}") for i, ms in enumerate(times)]))
    (match,) = table.matches
    medians = [point.median_ms or 0 for point in match.entries]
    assert medians == sorted(medians)
    assert table.standings[0].behind.ratio == 1 <= min(s.behind.ratio for s in table.standings)
    assert any(standing.won for standing in table.standings)


def test_filters() -> None:
    points = points_of([build(0, 1.0, backend=name, shape=shape) for name in "abc" for shape in ("x", "y")])
    (table,) = league(points, Filter(backend=("a", "c"), shape=("y",)))
    assert [len(table.matches), *(s.backend for s in table.standings)] == [1, "a", "c"]
    with pytest.raises(QueryError, match="no backend 'nope'"):
        league(points, Filter(backend=("nope",)))


def test_the_tables_of_an_h100_have_wins_losses_and_where_they_are_from() -> None:
    records = [record for _, record in read((H100 / "grouped_gemm.jsonl").read_bytes().split(b"\n"))]
    tables = league(points_of(records))
    (table,) = [t for t in tables if (t.operator, t.dtype) == ("grouped_gemm", "bf16")]
    by_backend = {standing.backend: standing for standing in table.standings}
    assert by_backend["triton_flat"].matches == len(table.matches) > 20
    assert 1 < by_backend["torch_grouped_mm"].behind.ratio < 1.5
    assert by_backend["torch_loop"].won > 0  # a loss of ours is in the same table
    assert all("driver 580" in line and "torch 2.11.0" in line for line in table.provenance)


def test_the_command_reads_files_and_the_database(cli: Cli, stored: Any, write: Any) -> None:
    records = [build(0, 1.0, backend="a"), build(0, 2.0, backend="b")]
    of_file = cli("league", write(records))
    assert of_file.exit_code == 0 and "commit " in of_file.stdout
    stored(records)
    assert cli("league", "latest").stdout == of_file.stdout
    (row,) = json.loads(cli("league", "latest", "--format=json").stdout)
    assert row["problems"] == 1 and [s["backend"] for s in row["standings"]] == ["a", "b"]
    nothing = cli("league", "latest", "--backend", "a")
    assert nothing.exit_code == 4 and "two backends" in nothing.stderr


def test_a_backfilled_commit_is_not_the_newest(cli: Cli, stored: Any) -> None:
    stored(backfilled())
    text = cli("league", "c" * 40, "a" * 40).stdout
    assert "commit cccccccccc" in text and "commit aaaaaaaaaa" not in text
