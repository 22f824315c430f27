"""Test the cost of an incident by the traffic, time moved within a layer, and the last lines of the first screen."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from nights import Cli, Stored, commit, suspect
from planned_ab import FakeBench

SHAPES = {"G=4,M=64,N=8,K=8": 64, "G=4,M=1024,N=8,K=8": 1024}
pytestmark = [pytest.mark.sqlite, pytest.mark.usefixtures("two_nights_are_certain")]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def traffic(text: str) -> None:
    Path("groupbench.toml").write_text(f"[traffic]\n{text}\n")


def level(make: Any, ms: Callable[[int], float], **fields: Any) -> list[Any]:
    """Nine nights of a series, by the latency of each night."""
    sizes = {"dims": {"G": 4, "M": SHAPES[fields["shape"]]}} if fields.get("shape") in SHAPES else {}
    return [make(n, ms=ms(n), cell=sizes, **fields) for n in range(9)]


def slower(ms: float, factor: float = 1.5) -> Callable[[int], float]:
    return lambda night: ms * (factor if night >= 6 else 1.0)


@pytest.fixture
def two_shapes(stored: Stored, make: Any, cli: Cli) -> Cli:
    """Two problems: 1 ms and 4 ms, of which each becomes 50 % slower."""
    for ms, shape in zip((1.0, 4.0), SHAPES, strict=True):
        stored(level(make, slower(ms), shape=shape))
    cli("gate", "--update")
    return cli


def cost(cli: Cli, key: str = "us") -> float:
    (incident,) = json.loads(cli("incidents", "--format=json").stdout)
    return float(incident[key])


def test_counts_give_the_cost_of_a_step(two_shapes: Cli) -> None:
    assert cost(two_shapes, "share") == pytest.approx(2.5 / 7.5, rel=0.01)
    traffic('calls = { "grouped_gemm G=4,M=64,*" = 10, "grouped_gemm *" = 3 }')
    assert cost(two_shapes) == pytest.approx(10 * 500 + 3 * 2000, rel=0.01)
    assert "costs 1.1e+04 µs per step" in two_shapes("incidents").stdout


def test_the_cost_is_of_the_change_that_an_ab_measured(
    cli: Cli, stored: Stored, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = FakeBench()
    bench.install(monkeypatch)
    stored(suspect(make, ms=1.5))
    bench.plan("different", math.log(1.3))
    assert cli("confirm", "--repo", Path(__file__).parent).exit_code == 0
    cli("gate", "--update")
    traffic('calls = { "*" = 1 }')
    assert cost(cli) == pytest.approx(300, rel=0.01)
    assert cli("incidents").stdout.startswith("1 confirmed: latency +30.0% in ")


def test_a_title_is_of_the_members_in_force(two_shapes: Cli, stored: Stored, make: Any) -> None:
    """After a revert, one of two series is back."""
    for night in (9, 10, 11):
        stored([make(night, ms=1.0, shape=next(iter(SHAPES)), cell={"dims": {"G": 4, "M": 64}})])
        stored([make(night, ms=6.0, shape=[*SHAPES][1], cell={"dims": {"G": 4, "M": 1024}}, run=f"more-{night}")])
        two_shapes("gate", "--update")
    title = "1 new: latency +50.0% in grouped_gemm triton G=4,M=1024,N=8,K=8\n"
    assert two_shapes("incidents").stdout.startswith(title)


def test_an_exact_name_comes_before_wildcards_and_a_file_may_have_it(two_shapes: Cli) -> None:
    Path("calls.csv").write_text('operator,shape,calls\ngrouped_gemm,"G=4,M=1024,N=8,K=8",7\n')
    traffic('calls = { "grouped_gemm *" = 1 }\nfile = "calls.csv"')
    assert cost(two_shapes) == pytest.approx(500 + 7 * 2000, rel=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("operator,shape,calls\na,b,1\na,c,many\n", "calls.csv: line 3: calls is 'many', not a number"),
        ("operator,shape,calls\na,b\n", "calls.csv: line 2: calls is '', not a number"),
        ("operator,shape,number\n", "calls.csv: line 1 has no column calls; give operator, shape, calls"),
        ("operator,shape,calls\na,G=4,M=64,7\n", "calls.csv: line 2 has too many fields; quote a shape with commas"),
        ("operator,shape,calls\na,b,-1\n", "calls.csv: line 2: -1 calls: the number of calls is negative"),
        ("", "calls.csv: line 1 has no column operator"),
        ('calls = { "grouped_gemm *" = -2 }', "[traffic]: grouped_gemm *: -2 calls: the number of calls is negative"),
        ('calls = { "a b" = { calls = nan } }', "the number of calls is not finite"),
        ('calls = { "a b" = { calls = 1, trace = "no.npy" } }', "[traffic]: routing trace "),
        ('calls = { "a b" = "many" }', "[traffic]: a b: expected a number, or a table with calls"),
        ('file = "no.csv"', "no.csv: No such file or directory"),
    ],
)
def test_faults_of_the_traffic_are_named(two_shapes: Cli, text: str, message: str) -> None:
    """A text without a setting is that of the file, whose line is named."""
    Path("calls.csv").write_text(text)
    traffic(text if " = " in text else 'file = "calls.csv"')
    for command in ("incidents", "gate"):
        result = two_shapes(command)
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_a_routing_trace_divides_the_calls_among_the_problems(two_shapes: Cli) -> None:
    """Two of four steps have rows like the small problem, one like the large one, and one none for their experts."""
    rows = [[16] * 4, [10] * 4, [256] * 4, [0, 0, 0, 0, 90]]
    Path("dump.jsonl").write_text("".join(json.dumps({"expert_counts": each}) + "\n" for each in rows))
    traffic('calls = { "grouped_gemm *" = { calls = 40, trace = "dump.jsonl" } }')
    assert cost(two_shapes) == pytest.approx(20 * 500 + 10 * 2000, rel=0.01)


def test_an_entry_of_no_problem_is_named(two_shapes: Cli) -> None:
    traffic('calls = { "grouped_gemm G=4,M=64,*" = 1, "grouped_gem *" = 3, "softmax 7" = 1 }')
    line = "[traffic]: no measured problem is 'grouped_gem *', 'softmax 7'; `groupbench list series` prints them"
    assert two_shapes("incidents").stdout.splitlines()[-1] == line
    assert two_shapes("triage").stdout.splitlines()[-1] == line and line in two_shapes("gains").stderr


@pytest.mark.parametrize(
    ("layers", "moved"),
    [(("moe", "moe"), True), (("moe", "attention"), False), ((None, None), False), (("moe", None), False)],
)
def test_time_that_moved_within_a_layer_is_no_loss(
    cli: Cli, stored: Stored, make: Any, layers: tuple[str | None, str | None], moved: bool
) -> None:
    """A product takes 0.5 ms more, in which it does what another kernel did, which takes 0.45 ms less."""
    stored(level(make, slower(1.0)) + level(make, slower(1.0, 0.55), operator="permute"))
    cli("gate", "--update")
    names = zip(("grouped_gemm *", "permute *"), layers, strict=True)
    calls = [f'"{name}" = {{ calls = 2{f", layer = {layer!r}" if layer else ""} }}' for name, layer in names]
    traffic(f"calls = {{ {', '.join(calls)} }}".replace("'", '"'))
    assert (cost(cli), cost(cli, "moved_us")) == pytest.approx((1000, 900 if moved else 0), rel=0.01)
    assert cli("incidents").stdout.startswith("1 new: moved: " if moved else "1 new: latency ")


def test_only_as_much_moves_as_was_gained_and_only_of_the_backend(cli: Cli, stored: Stored, make: Any) -> None:
    stored(level(make, slower(1.0)) + level(make, slower(1.0, 0.9), operator="permute"))
    stored(level(make, slower(1.0, 0.1), operator="permute", backend="another"))
    cli("gate", "--update")
    traffic('calls = { "*" = { calls = 1, layer = "moe" } }')
    assert (cost(cli), cost(cli, "moved_us")) == pytest.approx((500, 100), rel=0.02)
    assert "µs of it moved from other kernels" in cli("incidents").stdout


def test_a_step_runs_one_backend_of_a_problem(cli: Cli, stored: Stored, make: Any) -> None:
    stored(level(make, slower(1.0)) + level(make, slower(1.0), backend="another"))
    cli("gate", "--update")
    traffic('calls = { "*" = 2 }')
    assert cost(cli) == pytest.approx(1000, rel=0.01)


def test_moved_time_is_not_the_most_expensive(cli: Cli, stored: Stored, make: Any) -> None:
    stored(level(make, slower(1.0)) + level(make, slower(1.0, 0.5), operator="permute"))
    stored(level(make, slower(0.5, 1.2), operator="softmax", backend="another"))
    cli("gate", "--update")
    traffic('calls = { "softmax *" = 1, "*" = { calls = 1, layer = "moe" } }')
    assert [line.split(" in ")[1] for line in cli("incidents").stdout.splitlines()[::3]] == [
        "softmax another G=4,N=1024,K=1024", "grouped_gemm triton G=4,N=1024,K=1024",
    ]  # fmt: skip


def test_the_last_line_is_of_the_whole_night(cli: Cli, stored: Stored, make: Any) -> None:
    """A night has two runs; a cell that one of them measured is not listed."""
    stored([make(0)])
    facts = {"commit": commit(1)}
    failed = [make(1, backend=name, status=status, **facts) for name, status in (("a", "error"), ("b", "oom"))]
    stored([make(1, **facts), *failed])
    stored([make(1, backend="a", run="run-001-more", **facts)])
    oom = "not measured: 1 oom of grouped_gemm b, never measured before; `groupbench gate` lists them"
    assert oom in cli("incidents").stdout
    stored([make(2, status="timeout")])
    assert "1 timeout of grouped_gemm triton, last measured 2026-01-02 at 001cccccc" in cli("incidents").stdout


def test_an_incident_has_three_lines_whatever_a_reason_contains(two_shapes: Cli) -> None:
    two_shapes("incidents", "ack", "1", "--reason", "on it:\n\n- first\n\tthen the rest")
    lines = two_shapes("incidents").stdout.splitlines()
    assert len(lines) == 3
    assert lines[2] == "  next: nothing: acknowledged by Ada: on it: - first then the rest"
    assert "\n  next: nothing: acknowledged by Ada: on it: - first then the rest\n" in two_shapes("triage").stdout


def test_a_summary_begins_in_the_past(two_shapes: Cli) -> None:
    result = two_shapes("triage", "--since", "2999-01-01")
    assert result.exit_code == 2
    assert "Invalid value for --since: 2999-01-01 00:00 is in the future" in result.stderr
    assert two_shapes("triage", "--since", "2026-01-01").stdout.startswith("# Performance triage since 2026-01-01\n")


def test_a_note_about_an_old_incident_is_no_news(two_shapes: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    two_shapes("incidents", "close", "1", "--as", "fixed", "--reason", "done")
    assert "## Fixed" in two_shapes("triage", "--since", "1d").stdout
    later = datetime.now(UTC) + timedelta(days=30)
    monkeypatch.setattr("groupbench.tracker.cli.incidents._now", lambda: later)
    two_shapes("incidents", "note", "1", "--reason", "it was a cable")
    assert "; note by Ada: it was a cable\n" in two_shapes("incidents", "--all").stdout
    assert "## Fixed" not in two_shapes("triage", "--since", f"{later - timedelta(days=7):%Y-%m-%d}").stdout
