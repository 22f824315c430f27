"""`groupbench history`: the selection, order and contents of its rows; slices, speed-ups, metrics, ids."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from cases import Cli, refused
from repositories import git

from groupbench.tracker.query import history as queries


def rows(cli: Cli, *args: str) -> list[dict[str, Any]]:
    result = cli("history", *args, "--format=json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_by_series_then_time(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(n, backend=b) for n in (2, 0, 1) for b in ("z", "a")])
    assert [(r["backend"], r["run"]) for r in rows(cli)] == [(b, f"run-00{n}") for b in ("a", "z") for n in (0, 1, 2)]


@pytest.mark.parametrize(
    ("args", "runs"),
    {
        "no run": (["--since", "2027-01-01"], set()),
        "the newest": (["--since", "2026-01-20"], {18, 19}),
        "two days": (["--since", "2026-01-10", "--until", "2026-01-11"], {8, 9, 10}),
        "every second": (["--commit", "006", "--commit", "008"], {5, 6, 7, 8}),
    }.values(),
    ids=["no run", "the newest", "two days", "every second"],
)
def test_only_the_points_of_chosen_runs_are_read_and_those_before_them(
    args: list[str], runs: set[int], cli: Cli, stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored([make(n, backend=b) for n in range(20) for b in "ab"])
    read: set[int] = set()
    points_where = queries.points_where

    def counted(*args: Any, **rest: Any) -> Any:
        points = points_where(*args, **rest)
        read.update(int(point.run.id.removeprefix("run-")) for point in points)
        return points

    monkeypatch.setattr(queries, "points_where", counted)
    rows(cli, *args)
    assert read == runs


@pytest.mark.parametrize("seed", range(4))
def test_a_filter_changes_no_row(seed: int, cli: Cli, stored: Any, make: Any) -> None:
    """The changes, environments and files of a row are relative to results that the filter leaves out."""
    rng = random.Random(seed)
    records = []
    for night in range(24):
        shared = {
            "environment": {"driver": rng.choice("12")},
            "commit_facts": {"branch": rng.choice(["main", "topic"])},
        }
        for backend in "abc":
            if rng.random() < 0.7:
                status = rng.choice(["ok", "ok", "ok", "oom"])
                records.append(make(night, 1 + rng.random(), backend=backend, status=status, **shared))
    stored(records)
    every = rows(cli, "--all")
    for since, until in ((20, 24), (7, 12), (1, 3)):
        dates = f"2026-01-{since:02}", f"2026-01-{until:02}"
        filtered = rows(cli, "--all", "--since", dates[0], "--until", dates[1])
        assert filtered == [row for row in every if dates[0] <= row["started"][:10] < f"2026-01-{until + 1:02}"]
    both = rows(cli, "--branch", "main", "--branch", "topic")
    assert both == every
    chosen = ["003", "004", "011", "019"]
    named = rows(cli, "--all", *(f"--commit={each}" for each in chosen if any(r["commit"][:3] == each for r in every)))
    assert named == [row for row in every if row["commit"][:3] in chosen]


def test_a_row_has_the_measured_values(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(0, cell={"flops": 10**12}), make(1, ms=1.1, commit_facts={"dirty": True})])
    text = cli("history").stdout.split("\n")
    assert "2026-01-01 03:00" in text[1]
    assert "000ccccccc " in text[1]
    assert "001ccccccc+" in text[2]
    first, second = rows(cli)
    assert first["tflops"] == pytest.approx(1000, rel=1e-2)
    assert second["change"] == pytest.approx(0.1, rel=1e-2)
    assert first["change"] is None
    assert 0 < first["spread"] < 0.01
    assert first["rms"] == 2e-3


def test_changes_are_within_an_environment_and_changes_of_it_are_named(cli: Cli, stored: Any, make: Any) -> None:
    new = {"driver": "580.2"}
    stored([make(0), make(1, ms=2.0, environment=new), make(2, ms=1.5), make(3, ms=3.0, environment=new)])
    history = rows(cli)
    assert [r["change"] and round(r["change"], 2) for r in history] == [None, None, 0.5, 0.5]
    assert history[1]["environment_changed"] == ["driver 570.1 → 580.2"]
    assert history[2]["environment_changed"] == ["driver 580.2 → 570.1"]
    assert "driver 570.1 → 580.2" in cli("history").stdout


def test_interpreted_timings_are_not_speeds(cli: Cli, stored: Any, make: Any) -> None:
    fields = {"timing": "interpreted", "cell": {"flops": 10**12}}
    stored([make(0, **fields), make(1, ms=2.0, **fields)])
    assert [(r["timing"], r["tflops"], r["change"]) for r in rows(cli)] == [("interpreted", None, None)] * 2
    line = cli("history").stdout.splitlines()[2]
    assert line.count("interpreted") == 2  # the latency and the timing
    assert "2.00" not in line.replace("0.002", "") and "±" not in line


def test_a_status_without_value_is_shown_and_skipped_by_changes(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(0), make(1, status="oom"), make(2, status="wrong", ms=0.1), make(3, ms=1.1)])
    history = rows(cli)
    assert [r["status"] for r in history] == ["ok", "oom", "wrong", "ok"]
    assert history[1]["latency_ms"] is None
    assert history[3]["change"] == pytest.approx(0.1, rel=1e-2)


SHAPES = [
    "G=4,M_g=1024,N=1024,K=1024",
    "G=8,M=32768,N=4096,K=7168,routing=zipf(1.2),W=nk",
    "G=8,M=[1|2],N=1",
    "G=8,M=1,N=1",
    "100%_\\",
]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        *[(shape, [shape]) for shape in SHAPES],
        ("G=8,*", SHAPES[1:4]),
        ("*zipf(?.2)*", SHAPES[1:2]),
        pytest.param("G=8,M=[1|2]*", SHAPES[2:3], marks=pytest.mark.both),
        ("G=8,M=[12],*", []),
        pytest.param("g=8*", [], marks=pytest.mark.both),
        ("%*", []),
        pytest.param("*%_*", SHAPES[4:], marks=pytest.mark.both),
        ("G=_,M=1,N=?", []),
        ("' OR 1=1 --*", []),
        ("4,1024,1024,1024", SHAPES[:1]),  # as `tritonbench --shapes` takes it
        (" 8, 1,1", SHAPES[3:4]),
    ],
)
def test_shapes(cli: Cli, stored: Any, make: Any, pattern: str, expected: list[str]) -> None:
    stored([make(shape=shape) for shape in SHAPES])
    assert sorted(r["shape"] for r in rows(cli, "--shape", pattern)) == sorted(expected)


@pytest.mark.parametrize("shape", ["%", "G=_,M=1,N=1", "' OR 1=1 --", "8,32768,4096,7168", "1024", "n1024", ""])
def test_an_unknown_shape_lists_the_known_ones(cli: Cli, stored: Any, make: Any, shape: str) -> None:
    stored([make(shape=text) for text in (*SHAPES, "x" * 5000)])
    result = cli("history", "--shape", SHAPES[0], "--shape", shape)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"no shape {shape!r}; known: " in result.stderr
    assert len(result.stderr) < 600
    assert result.stderr.endswith(", …\n")
    if "1024" in shape:  # the likest first
        assert f"known: {SHAPES[0]}, " in result.stderr


@pytest.mark.both
def test_filters(cli: Cli, stored: Any, make: Any) -> None:
    main = {"commit_facts": {"branch": "main"}}
    stored(
        [
            make(0, **main),
            make(1, backend="b", mode="bwd", dtype="fp16", **main),
            make(2, operator="other", environment={"gpu": "B200"}, cell={"protocol": "p", "host": "h"}),
        ]
    )
    for args, runs in {
        ("--operator", "other"): [2],
        ("--backend", "b"): [1],
        ("--backend", "b", "--backend", "triton"): [1, 0, 2],
        ("--mode", "bwd"): [1],
        ("--dtype", "fp16"): [1],
        ("--protocol", "p"): [2],
        ("--host", "h"): [2],
        ("--hardware", "*H100*"): [0, 1],
        ("--hardware", "B200"): [2],
        ("--branch", "main"): [0, 1],
        ("--commit", "001"): [1],
        ("--commit", "latest", "--commit", "previous"): [1, 2],
        ("--since", "2026-01-02"): [1, 2],
        ("--until", "2026-01-02"): [0, 1],
        ("--since", "2026-01-02T04:00+01:00", "--until", "2026-01-02T03:00:01Z"): [1],
        ("--since", "9999d"): [0, 1, 2],
        ("--until", "1m"): [0, 1, 2],
        ("--limit", "1"): [0, 1, 2],
    }.items():
        assert sorted(r["run"] for r in rows(cli, *args)) == sorted(f"run-00{n}" for n in runs), args


def test_changes_are_relative_to_hidden_points_too(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(0), make(1, ms=1.1), make(2, ms=1.1)])
    (row,) = rows(cli, "--commit", "001")
    assert row["change"] == pytest.approx(0.1, rel=1e-2)
    assert [r["run"] for r in rows(cli, "--limit", "2")] == ["run-001", "run-002"]


def test_nothing_matches(cli: Cli, stored: Any, make: Any) -> None:
    stored([make()])
    result = cli("history", "--shape", "none*")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no points match" in result.stderr
    assert cli("history", "--shape", "none*", "--format=json").stdout == "[]\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--operator", "x"], "no operator 'x'; known: canary, grouped_gemm"),
        (["--backend", "tritn"], "no backend 'tritn'; known: torch, triton"),
        (["--shape", "4,128,128,128"], "no shape '4,128,128,128'; known: G=4,N=1024,K=1024\n"),
        (["--hardware", "B200"], "no hardware 'B200'; known: NVIDIA H100 80GB HBM3\n"),
        (["--branch", "mian"], "no branch 'mian'; known: main\n"),
        (["--since", "yesterday"], "'yesterday' is not a date"),
        (["--since", "99999999999d"], "'99999999999d' is too long ago"),
        (["--until", "99999999d"], "'99999999d' is too long ago"),
        (["--until", "9999-12-31"], "is not a date"),
        (["--limit", "-1"], "-1"),
        (["--commit", "zzz"], "no commit or branch 'zzz'"),
        (["--commit", "0"], "is ambiguous"),
        (["--commit", "%"], "no commit"),
        (["--shape", "Z>=1"], "no size 'Z'; known: G, M, N"),
        (["--commit", "a...b"], "not a range of commits"),
        (["--commit", "zzz.."], "no commit or branch 'zzz'"),
        (
            ["--metrics", "latency,speed"],
            "no metric 'speed' (did you mean 'speedup'?); known: latency, tflops, gbps, rms",
        ),
        (["--metrics", "speedup"], "requires --baseline"),
        (["--baseline", "tritn"], "no backend 'tritn' (did you mean 'triton'?); known: torch, triton"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(cli: Cli, stored: Any, make: Any, args: list[str], message: str) -> None:
    sizes = {"cell": {"dims": dict.fromkeys("GMN", 1)}}
    stored([make(0, **sizes), make(1, operator="canary", backend="torch", commit_facts={"branch": "main"})])
    assert message in refused(cli, "history", *args)


HARD = 'a "b" | c\nd, <e> [bold]f[/] 100%\x1b[31m\x07\u202e'


def test_any_name_in_any_format(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(backend=HARD, shape=HARD)])
    assert rows(cli, "--backend", HARD, "--shape", HARD)[0]["backend"] == HARD
    (row,) = csv.DictReader(io.StringIO(cli("history", "--format=csv").stdout, newline=""))
    assert row["backend"] == HARD
    text = cli("history").stdout
    assert text.count("\n") == 2
    assert "[bold]f[/] 100%" in text
    assert not set("\x1b\x07\u202e") & set(text)
    table = cli("history", "--format=md").stdout.rstrip("\n").split("\n")
    assert len(table) == 3
    assert r"\|" in table[2]
    assert "<e>" not in table[2]


DIMS = [{"G": 4, "M": 1024, "N": 64}, {"G": 8, "M": 4096, "N": 64}, {"G": 64, "M": 32768, "N": 4096}, {}]


def shape_of(dims: dict[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in dims.items()) or "copy"


@pytest.fixture
def sized(stored: Any, make: Any) -> None:
    stored([make(shape=shape_of(dims), cell={"dims": dims}) for dims in DIMS])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--shape", "M>=4096,N=64"], [1]),
        (["--shape", "G=8..64"], [1, 2]),
        pytest.param(["--shape", "G!=8"], [0, 2], marks=pytest.mark.both),
        (["--shape", "M>10000000"], []),
        (["--shape", "M>=4096"], [1, 2]),
        (["--shape", "M>=4096", "--shape", "copy"], [1, 2, 3]),
        (["--shape", "N=4096"], [2]),
        (["--shape", "G=8,M=4096,N=64"], [1]),
    ],
    ids=str,
)
def test_sizes(cli: Cli, sized: None, args: list[str], expected: list[int]) -> None:
    assert sorted(r["shape"] for r in rows(cli, *args)) == sorted(shape_of(DIMS[i]) for i in expected)


@pytest.mark.both
def test_speed_up_is_over_the_same_run_problem_and_environment(cli: Cli, stored: Any, make: Any) -> None:
    stored(
        [
            make(0, ms=2.0, backend="base"),
            make(0, ms=1.0, backend="fast"),
            make(0, ms=1.0, backend="fast", shape="other"),
            make(0, ms=1.0, backend="fast", dtype="fp16"),
            make(0, ms=1.0, backend="failed", status="wrong"),
            make(0, ms=1.0, backend="interpreted", timing="interpreted"),
            make(0, ms=1.0, backend="elsewhere", environment={"driver": "2"}),
            make(1, ms=8.0, backend="base", status="wrong"),
            make(1, ms=1.0, backend="fast"),
            make(2, ms=3.0, backend="base"),
            make(2, ms=1.0, backend="fast"),
        ]
    )
    speedups = {
        (r["backend"], r["run"], r["shape"][0], r["dtype"]): r["speedup"] for r in rows(cli, "--baseline", "base")
    }
    rounded = {key: round(value, 1) for key, value in speedups.items() if value is not None}
    assert rounded == {
        ("base", "run-000", "G", "bf16"): 1.0,
        ("fast", "run-000", "G", "bf16"): 2.0,
        ("base", "run-002", "G", "bf16"): 1.0,
        ("fast", "run-002", "G", "bf16"): 3.0,
    }
    text = cli("history", "--baseline", "base", "--backend", "fast").stdout
    assert "speedup" in text.split("\n")[0]
    assert "2.00×" in text


def test_metrics_choose_the_columns(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(ms=2.0, cell={"flops": 10**12, "min_bytes": 2 * 10**9})])
    (row,) = rows(cli)
    assert row["tflops"] == pytest.approx(500, rel=1e-2)
    assert row["gbps"] == pytest.approx(1000, rel=1e-2)
    head = cli("history", "--metrics", "gbps,accuracy").stdout.split("\n")[0].split()
    assert {"GB/s", "rms", "max", "repeatable"} <= set(head)
    assert not {"ms", "tflops"} & set(head)


def test_ids_are_those_that_show_takes(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(0), make(1)])
    shown = [line.split()[0] for line in cli("history", "--ids").stdout.strip().split("\n")[1:]]
    assert shown == [r["id"] for r in rows(cli)]
    assert "run-001" in cli("show", shown[1]).stdout


def test_one_burst_has_no_spread(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(latency={"timing": "gpu", "bursts_ms": [[1.0, 2.0]]})])
    assert rows(cli)[0]["spread"] is None


def times(night: int) -> dict[str, Any]:
    return {"commit_facts": {"time": f"2026-01-{night + 1:02d}T00:00:00Z"}}


def test_ranges_of_commits_by_order(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(n, **times(n)) for n in range(5)])

    def nights(*args: str) -> list[int]:
        return [int(r["run"][-1]) for r in rows(cli, *args)]

    assert nights("--commit", "001..003") == [2, 3]
    assert nights("--commit", "002..") == [3, 4]
    assert nights("--commit", "..001") == [0, 1]
    assert nights("--commit", "001..", "--commit", "..002") == [2]
    assert nights("--commit", "previous..latest") == [4]
    assert "is reversed" in refused(cli, "history", "--commit", "003..001")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A repository of four commits, the second tagged v1, in which the command runs; their hashes."""
    tree = tmp_path / "checkout"
    tree.mkdir()
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)

    git(tree, "init", "-q")
    hashes = []
    for n in range(4):
        git(tree, "commit", "-q", "--allow-empty", "-m", str(n))
        hashes.append(git(tree, "rev-parse", "HEAD"))
        if n == 1:
            git(tree, "tag", "-a", "v1", "-m", "v1")
    monkeypatch.chdir(tree)
    return hashes


def test_git_knows_tags_and_ranges(cli: Cli, stored: Any, make: Any, checkout: list[str]) -> None:
    # Measured the wrong way round: only git knows which came first.
    stored([make(n, commit=hash_) for n, hash_ in enumerate(reversed(checkout[:3]))])
    assert [r["commit"] for r in rows(cli, "--commit", "v1")] == [checkout[1]]
    assert [r["commit"] for r in rows(cli, "--commit", "HEAD~3")] == [checkout[0]]
    assert [r["commit"] for r in rows(cli, "--commit", f"v1..{checkout[2][:12]}")] == [checkout[2]]
    assert f"'HEAD' is commit {checkout[3][:12]}, which has no stored run" in refused(
        cli, "history", "--commit", "HEAD"
    )


def test_a_checkout_is_not_needed(cli: Cli, stored: Any, make: Any, tmp_path: Path, monkeypatch: Any) -> None:
    stored([make()])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no commit or branch 'v1'" in cli("history", "--commit", "v1").stderr
    assert "no commit" in cli("history", "--commit", "--help").stderr
