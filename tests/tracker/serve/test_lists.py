"""Test the lists of `groupbench serve`: searches of series and runs, and pages of long lists."""

from __future__ import annotations

from typing import Any

import pytest

from groupbench.tracker.serve import queries

from ..conftest import backfilled
from .conftest import Client


def test_a_series_is_found_by_words_names_shapes_and_sizes(stored: Any, make: Any, serve: Client) -> None:
    stored([make(backend=backend, shape=shape, dtype=dtype, cell={"dims": {"M": m}})
            for backend in ("triton", "Torch_100%") for dtype in ("bf16", "fp16")
            for shape, m in (("G=4,M=64", 64), ("G=4,M=4096", 4096))])  # fmt: skip
    client = serve()

    def matching(search: str) -> set[tuple[str, str, str]]:
        body = client.get(f"/series.json?{search}").json()
        assert body["paging"]["total"] == len(body["series"])
        return {(row["backend"], row["dtype"], row["shape"]) for row in body["series"]}

    assert len(matching("")) == 8
    assert {row[1] for row in matching("q=TRITON+bf16")} == {"bf16"}
    assert matching("q=100%25+fp16+M=64") == {("Torch_100%", "fp16", "G=4,M=64")}
    assert matching("q=_1") == matching("backend=Torch_100%25")  # wildcards of LIKE are letters
    assert {row[2] for row in matching("shape=*M=4*")} == {"G=4,M=4096"}
    assert {row[2] for row in matching("where=M>=100")} == {"G=4,M=4096"}
    assert {row[2] for row in matching("where=M!=1..100")} == {"G=4,M=4096"}
    assert matching("where=Z>1") == matching(f"where=M>{10**25}") == set()
    assert len(matching("dtype=bf16&dtype=fp16&backend=triton")) == 4


def test_long_lists_come_in_parts(stored: Any, make: Any, serve: Client) -> None:
    stored([make(shape=f"G=4,N={n}") for n in range(7)])
    client = serve()
    parts = [client.get(f"/series.json?per_page=3&page={page}").json() for page in (1, 2, 3)]
    assert [len(part["series"]) for part in parts] == [3, 3, 1]
    assert parts[0]["paging"] == {"page": 1, "per_page": 3, "pages": 3, "total": 7}
    assert len({row["series"] for part in parts for row in part["series"]}) == 7
    assert 'href="/series?per_page=3&amp;page=3"' in client.get("/series?per_page=3&page=2").text
    beyond = client.get("/series.json?per_page=3&page=5000")
    assert (beyond.status_code, beyond.json()["error"]) == (404, "no page 5000 of this list; the last is 3")
    assert client.get("/series?q=nothing+like+it").status_code == 200  # an empty list has one page


def test_lists_are_sorted_by_name(stored: Any, make: Any, serve: Client) -> None:
    stored([make(backend=backend, shape=f"N={n}") for n in (3, 1, 2) for backend in ("torch", "helion")])
    client = serve()
    parts = [client.get(f"/series.json?per_page=4&page={page}").json()["series"] for page in (1, 2)]
    of_run = client.get("/runs/run.json?q=N").json()["results"]
    names = [(f"N={n}", backend) for n in (1, 2, 3) for backend in ("helion", "torch")]
    assert [(row["shape"], row["backend"]) for row in [*parts[0], *parts[1]]] == names
    assert [(row["shape"], row["backend"]) for row in of_run] == names


def test_new_series_are_found_at_once(stored: Any, make: Any, serve: Client) -> None:
    stored([make(0)])
    client = serve()
    assert client.get("/series.json").json()["paging"]["total"] == 1
    assert client.get("/series?backend=b").status_code == 400
    stored([make(1, backend="b", shape="other")])
    assert client.get("/series.json").json()["paging"]["total"] == 2
    assert client.get("/series.json?backend=b").json()["paging"]["total"] == 1


def test_a_series_of_runs_long_ago_is_shown_all_the_same(stored: Any, make: Any, serve: Client) -> None:
    stored([make(0, ms=3.0, backend="old"), *(make(n) for n in range(1, queries.RECENT_RUNS + 2))])
    row = serve().get("/series.json?backend=old").json()["series"][0]
    assert (row["newest"]["run"], row["points"]) == ("run-000", 1)
    assert row["newest"]["latency_ms"] == pytest.approx(3.0, rel=0.01)


def test_runs_are_found_by_branch_commit_and_date(nights: Any, serve: Client) -> None:
    client = serve()

    def matching(search: str) -> list[str]:
        return [run["run"] for run in client.get(f"/runs.json?{search}").json()["runs"]]

    assert matching("branch=main") == [f"run-{n:03d}" for n in range(7, -1, -1)]
    assert matching("commit=003") == ["run-003"]
    assert matching("since=2026-01-07&until=2026-01-07") == ["run-006"]
    assert matching("branch=other") == []
    body = client.get("/runs/run-007.json?status=unavailable").json()
    assert [row["backend"] for row in body["results"]] == ["cutlass"]
    assert client.get("/runs/run-003.json").json()["verdict"] is None
    assert client.get("/runs/run-003.json?verdict=1").json()["verdict"]["run"] == "run-003"


def test_a_series_page_shows_a_backfill_in_the_order_of_commits(stored: Any, make: Any, serve: Client) -> None:
    """The newest commit was measured first."""
    commits = [f"{n:03x}" + "c" * 37 for n in range(11, -1, -1)]
    parents = [*commits[1:], "f" * 40]
    stored([
        make(n, commit=commit, commit_facts={"parents": [parent]})
        for n, (commit, parent) in enumerate(zip(commits, parents, strict=True))
    ])  # fmt: skip
    client = serve()
    (series,) = client.get("/series.json").json()["series"]
    page = client.get(f"/series/{series['series']}.json").json()
    assert [point["commit"] for point in page["points"]] == commits
    assert [(level["first"], level["last"]) for level in page["levels"]] == [("run-011", "run-000")]


def test_a_backfill_is_never_the_newest(stored: Any, make: Any, serve: Client) -> None:
    """The commands judge the same run, and `latest` names its commit."""
    stored(backfilled())
    client = serve()
    assert client.get("/overview.json").json()["run"]["run"] == "run-001"
    assert client.get("/runs/run-001.json").json()["verdict"] is not None
    assert client.get("/runs/run-003.json").json()["verdict"] is None
    assert {row["newest"]["run"] for row in client.get("/series.json").json()["series"]} == {"run-001"}
