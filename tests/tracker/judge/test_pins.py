"""Pinned commits: many small steps that no night shows, the limit, and the end of a pin."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from groupbench.tracker.facts.record import UNKNOWN_COMMIT
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import Compared
from groupbench.tracker.store.engine import open_store

Cli = Callable[..., Result]
Stored = Callable[..., Any]


def creeping(make: Any, nights: int, a_night: float) -> list[Any]:
    """Nights of which each is a little slower than the one before."""
    return [make(night, ms=(1 + a_night) ** night) for night in range(nights)]


def rows(cli: Cli) -> list[dict[str, Any]]:
    return json.loads(cli("gate", "--format=json").stdout)["series"]


def measured_between(database: Path, base: int, head: int, effect: float) -> None:
    """Store an A/B of two nights' commits."""
    compared = Compared(
        f"{base:03x}" + "c" * 37, f"{head:03x}" + "c" * 37, "different" if effect else "same",
        datetime(2026, 1, 9, tzinfo=UTC), effect, effect - 0.002, effect + 0.002,
    )  # fmt: skip
    with open_store(database, create=False) as store, store.write() as session:
        comparisons.store(session, 1, compared)


def test_below_the_limit_nothing_is_reported(cli: Cli, stored: Stored, make: Any) -> None:
    stored(creeping(make, 12, 0.0008))
    cli("pins", "add", "000ccc", "--max-slowdown", "3")
    assert cli("gate").exit_code == 0


def test_many_small_steps_pass_the_limit(cli: Cli, stored: Stored, make: Any) -> None:
    stored(creeping(make, 46, 0.0008))
    assert cli("pins", "add", "000ccc", "--max-slowdown", "3%", "--name", "v1").exit_code == 0
    result = cli("gate")
    assert result.exit_code == 1
    (row,) = [row for row in rows(cli) if row["metric"] == "pin"]
    assert (row["verdict"], row["cause"]) == ("regressed", "pin")
    assert row["change"] == pytest.approx(0.035, abs=0.002)
    assert row["low"] > 0.03
    assert row["commits"].startswith("000ccccccc..")
    assert "since v1; the limit is +3.0%" in row["note"]
    assert "0 opened" not in cli("gate", "--update").stderr
    assert cli("incidents").stdout.count("pin") == 0
    assert cli("pins", "remove", "v1").exit_code == 0
    assert [row for row in rows(cli) if row["metric"] == "pin"] == []


@pytest.mark.parametrize("since", [1, 2, 4])
def test_a_reverted_slowdown_since_the_pin_is_over(since: int, cli: Cli, stored: Stored, make: Any) -> None:
    """An A/B of the pinned commit and the slow one does not decide about the commits since the revert."""
    levels = [1.0, 1.0, 1.5, *[1.0] * since]
    database = stored([make(night, ms=ms) for night, ms in enumerate(levels)])
    measured_between(database, 0, 2, math.log(1.5))
    cli("pins", "add", "000ccc", "--max-slowdown", "5%")
    assert [row for row in rows(cli) if row["metric"] == "pin"] == []


@pytest.mark.parametrize("since", [1, 2])
def test_an_ab_from_before_a_slowdown_does_not_hide_it(since: int, cli: Cli, stored: Stored, make: Any) -> None:
    database = stored([make(night, ms=ms) for night, ms in enumerate([1.0, 1.0, 1.0, *[1.5] * since])])
    measured_between(database, 0, 2, 0.0)
    cli("pins", "add", "000ccc", "--max-slowdown", "5%")
    (row,) = [row for row in rows(cli) if row["metric"] == "pin"]
    assert row["change"] == pytest.approx(0.5, rel=0.01)


def test_a_series_that_cannot_be_compared_with_a_pin_is_reported(cli: Cli, stored: Stored, make: Any) -> None:
    other_card = {"environment": {"gpu_uuid": "GPU-other"}}
    stored([make(0), *[make(night, ms=2.0, **other_card) for night in range(1, 6)]])
    cli("pins", "add", "000ccc", "--max-slowdown", "3%", "--name", "v1")
    line = "pin v1: 1 series have no result at that commit in this environment"
    assert line in cli("gate").stderr
    assert line in json.loads(cli("gate", "--format=json").stdout)["notes"]


def _night_of(toolchain: str, night: int, ms: float, make: Any) -> Any:
    return make(night, ms=ms, run=f"{toolchain}-{night}", plan=f"nightly@{toolchain}")


def test_a_toolchain_is_not_judged_by_the_level_of_another(cli: Cli, stored: Stored, make: Any) -> None:
    """Two toolchains of one plan report the same versions, as two builds of one Triton do."""
    stored([_night_of("stable", night, 1.0, make) for night in range(6)])
    stored([_night_of("nightly", night, 1.1, make) for night in range(1, 6)])
    cli("pins", "add", "000ccc", "--max-slowdown", "3%", "--name", "v1")
    result = cli("gate", "--run", "nightly-5", "--format=json")
    read = json.loads(result.stdout)
    assert [row for row in read["series"] if row["metric"] == "pin"] == []
    (line,) = [note for note in read["notes"] if note.startswith("pin v1")]
    assert "; all have one with another toolchain (toolchain stable → toolchain nightly): pin a commit" in line
    cli("pins", "add", "001ccc", "--max-slowdown", "3%", "--name", "v1")
    read = json.loads(cli("gate", "--run", "nightly-5", "--format=json").stdout)
    assert [row for row in read["series"] if row["metric"] == "pin"] == []
    assert not [note for note in read["notes"] if note.startswith("pin")]


def test_a_run_without_a_plan_at_the_pinned_commit_goes_with_any_toolchain(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0, plan=None), *[_night_of("nightly", night, 1.1, make) for night in range(1, 6)]])
    cli("pins", "add", "000ccc", "--max-slowdown", "3%", "--name", "v1")
    (row,) = [row for row in rows(cli) if row["metric"] == "pin"]
    assert row["verdict"] == "regressed"


def test_an_upgrade_ends_the_comparison_with_a_pin_and_is_named(cli: Cli, stored: Stored, make: Any) -> None:
    upgraded = {"environment": {"triton": "3.8.0"}}
    stored([make(0), *[make(night, ms=1.1, **upgraded) for night in range(1, 6)]])
    cli("pins", "add", "000ccc", "--max-slowdown", "3%", "--name", "v1")
    read = json.loads(cli("gate", "--format=json").stdout)
    assert [row for row in read["series"] if row["metric"] == "pin"] == []
    (line,) = [note for note in read["notes"] if note.startswith("pin v1")]
    assert "all have one with another toolchain (triton 3.7.1 → 3.8.0)" in line


def test_a_level_that_may_be_past_the_limit_is_a_suspect(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0), *[make(night, ms=1.0304) for night in range(1, 8)]])
    cli("pins", "add", "000ccc", "--max-slowdown", "3%")
    (row,) = [row for row in rows(cli) if row["metric"] == "pin"]
    assert row["verdict"] == "suspect"
    assert row["low"] < 0.03 < row["high"]


def test_an_unknown_commit_cannot_be_pinned(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0, commit=UNKNOWN_COMMIT)])
    done = cli("pins", "add", UNKNOWN_COMMIT, "--max-slowdown", "3%")
    assert done.exit_code == 2 and "is not a commit" in done.stderr


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
        (("add", "beef", "--max-slowdown", "3%"), "beef"),
        (("add", "000ccc", "--max-slowdown", "0%"), "larger than 0"),
        (("add", "000ccc"), "--max-slowdown'. Give a percentage, such as 3 or 3%."),
        (("add", "000ccc", "--max-slowdown", "some"), "give for example 3 or 3%"),
        (("add", "000ccc", "--max-slowdown", "3", "--name", ""), "--name is empty"),
        (("remove", "v9"), "no pin 'v9'; known: none"),
    ],
    ids=["unknown commit", "no limit", "no option", "no percentage", "empty name", "unknown pin"],
)
def test_mistakes_are_one_line(cli: Cli, stored: Stored, make: Any, args: tuple[str, ...], reason: str) -> None:
    stored([make()])
    result = cli("pins", *args)
    assert result.exit_code == 2
    assert reason in result.stderr


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
