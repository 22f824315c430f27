"""Pinned commits: many small steps that no night shows, the limit, and the end of a pin."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from nights import Cli, Stored, commit, keep, measured, rows

from groupbench.tracker.facts.record import UNKNOWN_COMMIT


def creeping(make: Any, nights: int) -> list[Any]:
    """Nights of which each is a little slower than the one before."""
    return [make(night, ms=1.0008**night) for night in range(nights)]


def pinned(cli: Cli, *args: str) -> list[dict[str, Any]]:
    """Return the rows of pins."""
    return [row for row in rows(cli, *args) if row["metric"] == "pin"]


def notes(cli: Cli, *args: str) -> list[str]:
    read = json.loads(cli("gate", "--format=json", *args).stdout)
    return [note for note in read["notes"] if note.startswith("pin ")]


def test_below_the_limit_nothing_is_reported(cli: Cli, stored: Stored, make: Any) -> None:
    stored(creeping(make, 12))
    cli("pins", "add", "000ccc", "--max-slowdown", "3")
    assert cli("gate").exit_code == 0


@pytest.mark.parametrize(
    ("levels", "effect", "change"),
    [
        *(([1, 1, 1.5, *[1] * since], math.log(1.5), None) for since in (1, 2, 4)),
        *(([1, 1, 1, *[1.5] * since], 0.0, 0.5) for since in (1, 2)),
    ],
)
def test_an_ab_with_the_pinned_commit_does_not_decide_about_later_ones(
    levels: list[float], effect: float, change: float | None, cli: Cli, stored: Stored, make: Any
) -> None:
    """A slowdown that the A/B measured may be reverted since, and one may have come."""
    database = stored([make(night, ms=ms) for night, ms in enumerate(levels)])
    keep(database, measured(commit(0), commit(2), "different" if effect else "same", effect, 0.002))
    cli("pins", "add", "000ccc", "--max-slowdown", "5%")
    assert [row["change"] for row in pinned(cli)] == ([] if change is None else [pytest.approx(change, rel=0.01)])


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        *((moving, "000ccccccc") for moving in ("latest", "HEAD", "HEAD~2", "main^", "@", "main@{1}", "ORIG_HEAD")),
        *((fixed, fixed) for fixed in ("000ccc", "v1.2", "release/2", "ahead", "me@home")),
    ],
)
def test_the_name_of_a_pin_does_not_move(
    cli: Cli, stored: Stored, make: Any, typed: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored([make()])
    monkeypatch.setattr("groupbench.tracker.tools.git.rev_parse", lambda _: "000" + "c" * 37)
    assert f"pinned {name}: 000ccccccc, at most" in cli("pins", "add", typed, "--max-slowdown", "3").stdout


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ("add beef --max-slowdown 3%", "beef"),
        ("add 000ccc --max-slowdown 0%", "larger than 0"),
        ("add 000ccc", "--max-slowdown'. Give a percentage, such as 3 or 3%."),
        ("add 000ccc --max-slowdown some", "give for example 3 or 3%"),
        ("add 000ccc --max-slowdown 3 --name=", "--name is empty"),
        (f"add {UNKNOWN_COMMIT} --max-slowdown 3%", "is not a commit"),
        ("remove v9", "no pin 'v9'; known: none"),
    ],
)
def test_mistakes_are_one_line(cli: Cli, stored: Stored, make: Any, args: str, reason: str) -> None:
    stored([make(), make(1, commit=UNKNOWN_COMMIT)])
    result = cli("pins", *args.split())
    assert (result.exit_code, reason in result.stderr) == (2, True)


def test_many_small_steps_pass_the_limit(cli: Cli, stored: Stored, make: Any) -> None:
    stored(creeping(make, 46))
    assert cli("pins", "add", "000ccc", "--max-slowdown", "3%", "--name", "v1").exit_code == 0
    result = cli("gate")
    assert result.exit_code == 1
    (row,) = pinned(cli)
    assert (row["verdict"], row["cause"]) == ("regressed", "pin")
    assert row["change"] == pytest.approx(0.035, abs=0.002) and row["low"] > 0.03
    assert row["commits"].startswith("000ccccccc..") and "since v1; the limit is +3.0%" in row["note"]
    assert "0 opened" not in cli("gate", "--update").stderr
    assert cli("incidents").stdout.count("pin") == 0
    assert cli("pins", "remove", "v1").exit_code == 0
    assert pinned(cli) == []


def test_a_slowdown_that_is_undone_meets_its_pin_at_once(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(night, ms=1.05 if night in range(6, 12) else 1.0) for night in range(12)])
    cli("pins", "add", "000ccc", "--max-slowdown", "3%", "--name", "v1")
    assert len(pinned(cli)) == 1
    for night in (12, 13):
        stored([make(night)])
        assert pinned(cli) == []


@pytest.mark.parametrize(
    ("environment", "why"),
    [({"gpu_uuid": "GPU-other"}, ""), ({"triton": "3.8.0"}, "; all have one with another toolchain (triton 3.7.1 → ")],
    ids=["card", "toolchain"],
)
def test_a_series_that_cannot_be_compared_with_a_pin_is_reported(
    cli: Cli, stored: Stored, make: Any, environment: dict[str, str], why: str
) -> None:
    stored([make(0), *[make(night, ms=2.0, environment=environment) for night in range(1, 6)]])
    cli("pins", "add", "000ccc", "--max-slowdown", "3%", "--name", "v1")
    (line,) = notes(cli)
    assert line.startswith(f"pin v1: 1 series have no result at that commit in this environment{why}")
    assert line in cli("gate").stderr and pinned(cli) == []


def _night_of(toolchain: str, night: int, ms: float, make: Any) -> Any:
    return make(night, ms=ms, run=f"{toolchain}-{night}", plan=f"nightly@{toolchain}")


def test_a_toolchain_is_not_judged_by_the_level_of_another(cli: Cli, stored: Stored, make: Any) -> None:
    """Two toolchains of one plan report the same versions, as two builds of one Triton do."""
    stored([_night_of("stable", night, 1.0, make) for night in range(6)])
    stored([_night_of("nightly", night, 1.1, make) for night in range(1, 6)])
    cli("pins", "add", "000ccc", "--max-slowdown", "3%", "--name", "v1")
    newest = "--run", "nightly-5"
    assert pinned(cli, *newest) == []
    (line,) = notes(cli, *newest)
    assert "; all have one with another toolchain (toolchain stable → toolchain nightly): pin a commit" in line
    cli("pins", "add", "001ccc", "--max-slowdown", "3%", "--name", "v1")
    assert pinned(cli, *newest) == notes(cli, *newest) == []


def test_a_run_without_a_plan_at_the_pinned_commit_goes_with_any_toolchain(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0, plan=None), *[_night_of("nightly", night, 1.1, make) for night in range(1, 6)]])
    cli("pins", "add", "000ccc", "--max-slowdown", "3%", "--name", "v1")
    (row,) = pinned(cli)
    assert row["verdict"] == "regressed"


def test_a_level_that_may_be_past_the_limit_is_a_suspect(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0), *[make(night, ms=1.0304) for night in range(1, 8)]])
    cli("pins", "add", "000ccc", "--max-slowdown", "3%")
    (row,) = pinned(cli)
    assert row["verdict"] == "suspect" and row["low"] < 0.03 < row["high"]


@pytest.mark.sqlite  # which `backup` copies
def test_a_pin_is_replaced_listed_kept_from_pruning_and_merged(
    cli: Cli, stored: Stored, make: Any, tmp_path: Any
) -> None:
    stored([make(night, ms=1.0) for night in range(0, 400, 20)])
    cli("pins", "add", "028ccc", "--max-slowdown", "3%", "--name", "base")
    cli("pins", "add", "03cccc", "--max-slowdown", "2%", "--name", "base")
    (row,) = json.loads(cli("pins", "--format=json").stdout)
    assert (row["commit"][:3], row["max_slowdown"]) == ("03c", 0.02)
    assert len(json.loads(cli("pins", "--all", "--format=json").stdout)) == 2
    assert ", 1 evidence," in cli("db", "prune", "--all", "1", "--every", "4000").stdout
    other = tmp_path / "other.db"
    cli("db", "backup", str(other))
    before = cli("pins", "--all", "--format=json").stdout
    assert cli("db", "merge", str(other)).exit_code == 0
    assert cli("pins", "--all", "--format=json").stdout == before


def test_improvements_are_acknowledged(cli: Cli, stored: Stored, make: Any) -> None:
    stored([*[make(night) for night in range(30)], *[make(night, ms=0.8) for night in range(30, 36)]])
    assert "1 improved" in cli("gate").stdout
    done = cli("incidents", "ack", "--improvements")
    assert done.exit_code == 0, done.stderr
    assert cli("gate").stdout.startswith("GATE ok: no change above ")
    stored([make(night) for night in range(36, 40)])
    assert cli("gate").exit_code != 0
    assert cli("incidents", "ack").exit_code == cli("incidents", "ack", "1", "--improvements").exit_code == 2
