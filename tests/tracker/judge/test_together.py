"""Metrics that depend on the latency, or on a measurement of the whole run: one cause has one row."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from groupbench.tracker.facts.record import Record
from groupbench.tracker.judge import further
from groupbench.tracker.judge.parts import Q

pytestmark = pytest.mark.sqlite

Cli = Callable[..., Result]

SERIES, NIGHTS = 8, 16
PEAK, BANDWIDTH = 1e12, 1e9  # per ms, of the machine


@pytest.fixture
def store(stored: Callable[..., Any], make: Callable[..., Record]) -> Callable[..., None]:
    """Store nights of eight series with `sol_gap` and energy. The newest nights have the changes of the arguments.

    machine  factor of all latencies, and of the ceilings' times
    own      factor of the latency of the first series
    power    factor of its power
    canary   error of the canaries, which sets the ceilings too high
    few      number of series
    last     number of newest nights
    """

    def nights(
        machine: float = 1.0,
        own: float = 1.0,
        power: float = 1.0,
        canary: float = 1.0,
        few: int = SERIES,
        last: int = 1,
    ) -> None:
        random = np.random.default_rng(7)
        records = []
        for night in range(NIGHTS + last):
            new = night >= NIGHTS
            error = np.exp(0.01 * random.standard_normal()) * (canary if new else 1.0)
            for series in range(few):
                base = 1.0 + 0.3 * series
                scatter = np.exp(0.001 * random.standard_normal(2))
                ms = base * scatter[0] * (machine if new else 1.0) * (own if new and series == 0 else 1.0)
                watts = 500 * scatter[1] * (power if new and series == 0 else 1.0)
                gap = 1.5 * ms / base / (machine if new else 1.0) * error
                amounts = {"flops": int(PEAK * base / 1.5), "min_bytes": int(0.4 * BANDWIDTH * base / 1.5)}
                metrics = {"sol_gap": float(gap), "energy_j": float(watts * ms / 1e3)}
                records.append(make(night, ms=ms, backend=f"b{series}", cell=amounts, metrics=metrics))
        stored(records)

    return nights


def rows_of(cli: Cli, *args: str) -> list[dict[str, Any]]:
    rows = json.loads(cli("gate", "--format=json", *args).stdout)["series"]
    return [row for row in rows if row["verdict"] not in ("ok", "new", "insufficient")]


def test_the_error_of_a_canary_is_not_a_change_of_its_series(store: Callable[..., None], cli: Cli) -> None:
    store(canary=1.15)
    assert rows_of(cli) == []


def test_a_slower_kernel_has_one_row_that_names_both(store: Callable[..., None], cli: Cli) -> None:
    store(own=1.1)
    (row,) = rows_of(cli)
    assert (row["backend"], row["metric"]) == ("b0", "latency")
    assert re.search(r"sol_gap 1\.5\d? → 1\.6[456]\b", row["note"])
    assert re.search(r"energy_j 0\.5(00)? J → 0\.55\d? J", row["note"])


def test_the_change_is_named_as_long_as_the_latency_is_slow(store: Callable[..., None], cli: Cli) -> None:
    store(own=1.1, last=7)
    (row,) = rows_of(cli)
    assert (row["metric"], "sol_gap" in row["note"]) == ("latency", True)


def test_more_energy_than_the_latency_explains_is_a_change_of_its_own(store: Callable[..., None], cli: Cli) -> None:
    store(own=1.1, power=1.2)
    rows = {row["metric"]: row["note"] for row in rows_of(cli)}
    assert set(rows) == {"latency", "energy_j"}
    assert "sol_gap" in rows["latency"] and "energy_j" not in rows["latency"]


def test_less_energy_does_not_follow_a_slower_kernel(store: Callable[..., None], cli: Cli) -> None:
    store(own=1.1, power=0.8)
    (row,) = rows_of(cli)
    assert (row["metric"], "energy_j" in row["note"]) == ("latency", False)


def test_a_kernel_that_stays_behind_a_faster_machine_is_a_suspect(store: Callable[..., None], cli: Cli) -> None:
    """Its latency is unchanged, so that only the distance to the speed of light shows the loss."""
    store(machine=0.9, own=1 / 0.9)
    (row,) = [row for row in rows_of(cli) if row["backend"] == "b0"]
    assert (row["metric"], row["verdict"]) == ("sol_gap", "suspect")
    assert "sol_gap 1.5 → 1.67; unlike the other cells of the run" in row["note"]
    assert "groupbench ab" in row["repro"], "an A/B of the latency decides it"


def test_a_slower_machine_is_not_a_change_of_the_gap(store: Callable[..., None], cli: Cli) -> None:
    store(machine=1.1)
    assert {row["metric"] for row in rows_of(cli)} == {"latency"}


def test_an_accepted_latency_is_an_accepted_gap(store: Callable[..., None], cli: Cli) -> None:
    store(own=1.1, last=7)
    cli("gate", "--update")
    (alert,) = json.loads(cli("alerts", "--format=json").stdout)
    assert alert["metric"] == "latency"
    assert cli("alerts", "expect", "1", "--reason", "a safer kernel").exit_code == 0
    assert cli("gate").exit_code == 0


def test_two_series_keep_their_common_deviation(store: Callable[..., None], cli: Cli) -> None:
    """Two series do not show which of them an error belongs to."""
    store(canary=1.15, few=2)
    assert {row["metric"] for row in rows_of(cli)} == {"sol_gap"}


def test_metrics_share_the_chance_of_a_false_suspect(
    store: Callable[..., None], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    chances: dict[str, float] = {}
    monkeypatch.setattr(further, "_scattered_steps", lambda metric, _, q: chances.update({metric.name: q}) or [])
    store(few=1)
    cli("gate")
    assert chances["energy_j"] == 4 * chances["sol_gap"]
    assert sum(chances.values()) == pytest.approx(Q)
