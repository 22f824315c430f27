"""The gate on the real statistics: quiet on unchanged code, awake to planted changes. Seeds are fixed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import rarely
from hypothesis import given
from hypothesis import strategies as st
from nights import Cli, Stored, by_backend, rows

from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge import gate
from groupbench.tracker.judge.evidence import Evidence
from groupbench.tracker.judge.rules import decide
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.store.engine import open_store

pytestmark = pytest.mark.sqlite
SERIES = 20


def nights(make: Any, count: int, changes: dict[str, tuple[int, float]], noise: float = 0.002) -> list[Any]:
    """Return `count` nights of several backends; `changes` maps a backend to (first slower night, factor)."""
    rng = np.random.default_rng(3)
    made = []
    for number in range(SERIES):
        backend = f"b{number}"
        start, factor = changes.get(backend, (count, 1.0))
        for night in range(count):
            ms = 0.1 * 1.3**number * (factor if night >= start else 1.0) * np.exp(rng.normal(0, noise))
            made.append(make(night, ms=float(ms), backend=backend))
    return made


def test_unchanged_code_is_left_alone(cli: Cli, stored: Stored, make: Any) -> None:
    stored(nights(make, 25, {}))
    for night in (12, 18, 24):
        code, rows = by_backend(cli, "--run", f"run-{night:03d}")
        assert (code, Counter(row["verdict"] for row in rows.values())) == (0, {"ok": SERIES})


def test_a_young_series_is_less_accurate_from_the_first_commit_that_is(cli: Cli, stored: Stored, make: Any) -> None:
    """However many nights were stored together, before and after."""
    sides = [(before, after) for before in range(1, 7) for after in range(1, 6)]
    errors = {"b": [4e-3, 2e-3] * 3 + [4e-3, 4e-3]}  # two levels, of which neither is news
    errors |= {f"{before} {after}": [2e-3] * before + [4e-3] * after for before, after in sides}
    for name, of in errors.items():
        stored([make(20 - len(of) + n, backend=name, rms=rms) for n, rms in enumerate(of)])
    _, rows = by_backend(cli)
    assert rows.pop("b")["verdict"] == "ok"
    for name, row in rows.items():
        after = int(name.split()[1])
        assert (row["verdict"], row["metric"]) == ("regressed", "accuracy"), name
        assert row["before_rms"] == pytest.approx(2e-3), name
        assert row["commits"] == f"{19 - after:03x}ccccccc..{20 - after:03x}ccccccc", name


def test_one_night_off_is_unconfirmed_and_many_are_a_change(cli: Cli, stored: Stored, make: Any) -> None:
    stored(nights(make, 31, {"b3": (30, 1.04), "b4": (30, 0.96), "b7": (22, 1.03), "b8": (22, 0.97)}))
    code, rows = by_backend(cli)
    assert code == 1
    verdicts = {name: row["verdict"] for name, row in rows.items() if row["verdict"] != "ok"}
    assert verdicts == {"b3": "unconfirmed", "b7": "regressed", "b8": "improved"}
    assert rows["b7"]["commits"] == "015ccccccc..016ccccccc"
    assert rows["b7"]["change"] == pytest.approx(0.03, abs=0.006) and rows["b7"]["rule"] == "three nights"


@pytest.mark.parametrize("slow_nights", [8, *rarely(4)])
def test_half_a_fix_does_not_hide_the_rest_of_a_slowdown(slow_nights: int, cli: Cli, stored: Stored, make: Any) -> None:
    """No alert is stored, so the history alone shows the level before."""
    fixed, end = 30 + slow_nights, 30 + slow_nights + 6
    records = nights(make, end, {})
    rng = np.random.default_rng(8)
    for night in range(end):
        factor = 1.0 if night < 30 else 1.2 if night < fixed else 1.1
        records.append(make(night, ms=float(factor * np.exp(rng.normal(0, 0.002))), backend="half"))
    stored(records)
    for night in (fixed + 2, end - 1):
        code, of = by_backend(cli, "--run", f"run-{night:03d}")
        left = of["half"]
        assert (code, left["verdict"]) == (1, "regressed"), night
        assert left["commits"].endswith("..01eccccccc")
        assert left["low"] < left["change"] < left["high"] and abs(left["change"] - 0.1) < 0.01
        assert left["before_ms"] == pytest.approx(1.0, rel=0.005) and "partly taken back" in left["note"]


def test_accuracy_is_judged_by_its_own_history(cli: Cli, stored: Stored, make: Any) -> None:
    rms = [2e-3 * (1 + 0.01 * (night % 3)) * (1.6 if night >= 18 else 1.0) for night in range(24)]
    stored([make(night, rms=value) for night, value in enumerate(rms)])
    assert cli("gate", "--run", "run-017").exit_code == 0
    for night in ("018", "019", "023"):
        code, rows = by_backend(cli, "--run", f"run-{night}")
        row = rows["triton"]
        assert (code, row["metric"], row["commits"][-10:]) == (1, "accuracy", "012ccccccc"), night


@pytest.mark.parametrize(
    ("machine", "kernel", "verdict", "cause"),
    [
        (1.05, 1.1, "unresolved", "machine"),
        (0.95, 1.1, "regressed", "code"),
        *rarely((0.95, 0.9, "improved", "machine"), (1.05, 0.9, "improved", "code")),
    ],
)
def test_a_canary_explains_changes_in_the_same_direction(
    cli: Cli, stored: Stored, make: Any, machine: float, kernel: float, verdict: str, cause: str
) -> None:
    rng = np.random.default_rng(5)
    for backend, operator, factor in (("copy", "canary", machine), ("triton", "grouped_gemm", kernel)):
        ms = [float((factor if night >= 30 else 1.0) * np.exp(rng.normal(0, 0.002))) for night in range(36)]
        stored([make(night, ms=value, backend=backend, operator=operator) for night, value in enumerate(ms)])
    _, rows = by_backend(cli)
    assert (rows["copy"]["verdict"], rows["copy"]["cause"]) == ("suspect", "machine")
    assert (rows["triton"]["verdict"], rows["triton"]["cause"]) == (verdict, cause)


@pytest.mark.parametrize("earlier", [5, 25, *rarely(12)])
def test_five_per_cent_for_one_night_is_never_overlooked(cli: Cli, stored: Stored, make: Any, earlier: int) -> None:
    """The step is found even if few series share their noise, where significance tests have little power."""
    stored(nights(make, earlier + 2, {"b3": (earlier, 1.06)}))
    for night, expected in ((earlier, "unconfirmed"), (earlier + 1, "suspect")):
        code, rows = by_backend(cli, "--run", f"run-{night:03d}")
        assert (code, [name for name, row in rows.items() if row["verdict"] == expected]) == (3, ["b3"])


@pytest.mark.parametrize(("spikes", "ms", "verdict"), [((6,), 2.0, "unconfirmed"), ((6, 9), 2.0, "undecided"),
                                                        ((6, 9), 1.04, "unconfirmed")], ids=str)  # fmt: skip
def test_first_nights_that_came_back_twice_prove_nothing(
    spikes: tuple[int, ...], ms: float, verdict: str, cli: Cli, stored: Stored, make: Any
) -> None:
    """Two results about as far are more than 0.5 % of the recent ones; one alone, or smaller ones, do not count."""
    spiky = [make(n, ms=ms if n == at else 1.0, backend=f"spike{at}") for at in spikes for n in range(12)]
    stored([*nights(make, 12, {"b3": (11, 1.06)}), *spiky])
    code, rows = by_backend(cli)
    assert (code, rows["b3"]["verdict"]) == (3 if verdict == "unconfirmed" else 0, verdict)


def test_a_night_back_on_the_level_before_is_not_a_regression(cli: Cli, stored: Stored, make: Any) -> None:
    """Its alert closes, and the next slow night begins another change."""
    made = nights(make, 34, {"b3": (25, 1.05)})
    kept = [r for r in made if (r.cell.backend, r.run.id) != ("b3", "run-032")]
    stored([*kept, make(32, ms=0.1 * 1.3**3, backend="b3")])
    assert cli("gate", "--update", "--run", "run-031").exit_code == 1
    result = cli("gate", "--update", "--run", "run-032")
    assert (result.exit_code, "1 fixed (1)" in result.stderr) == (0, True)
    assert "back on the level before" in result.stdout
    assert cli("gate", "--update", "--run", "run-033").exit_code == 3  # another change, of which one night is known


def test_results_before_an_alert_do_not_close_it(cli: Cli, stored: Stored, make: Any) -> None:
    """Several results of a noisy series must be back together, and results before the change do not count."""
    made = nights(make, 34, {"b3": (25, 1.05)}, noise=0.012)
    stored(made)
    assert "1 opened (1)" in cli("gate", "--update", "--run", "run-030").stderr
    for night in range(31, 34):
        assert "nothing new" in cli("gate", "--update", "--run", f"run-{night:03d}").stderr, night


def verdicts(cli: Cli) -> list[tuple[str, str, int | None]]:
    return [(row["verdict"], row["metric"], row["incident"]) for row in rows(cli)]


def levels(make: Any, *parts: tuple[int, float, float]) -> list[Any]:
    """Return nights of one series with 0.1 % of noise. Each part is a number of nights and their ms and rms."""
    rng = np.random.default_rng(11)
    wanted = [(ms, rms) for number, ms, rms in parts for _ in range(number)]
    return [make(n, ms=float(ms * np.exp(rng.normal(0, 0.001))), rms=rms) for n, (ms, rms) in enumerate(wanted)]


def test_an_alert_is_listed_once_next_to_an_old_change(cli: Cli, stored: Stored, make: Any) -> None:
    """Faster long ago, and less accurate now."""
    stored(levels(make, (30, 1.0, 2e-3), (30, 0.8, 2e-3), (3, 0.8, 9e-3)))
    first = cli("gate", "--update")
    assert first.stdout.startswith("GATE regression: 1 series regressed. 1 regressed\n")
    assert verdicts(cli) == [("regressed", "accuracy", 1)]


def test_the_gravest_of_two_changes_is_the_verdict_on_a_series(cli: Cli, stored: Stored, make: Any, db: Path) -> None:
    stored(levels(make, (30, 1.0, 2e-3), (30, 1.0, 9e-3), (7, 1.1, 9e-3)))
    assert verdicts(cli) == [("regressed", "latency", None)]
    with open_store(db, create=False) as store, store.read() as session:
        assert gate.judge_run(session, find_run(session, None)).by_series == {1: "regressed"}


def test_an_acknowledged_alert_does_not_hide_an_open_one(cli: Cli, stored: Stored, make: Any) -> None:
    made = levels(make, (30, 1.0, 2e-3), (120, 1.1, 2e-3), (4, 1.1, 9e-3))
    stored(made[:36])
    assert "1 opened (1)" in cli("gate", "--update").stderr
    stored(made[36:])
    assert "1 opened (2)" in cli("gate", "--update").stderr
    assert cli("incidents", "ack", "2", "--reason", "known").exit_code == 0
    assert cli("gate").exit_code == 1
    assert verdicts(cli) == [("regressed", "latency", 1), ("regressed", "accuracy", 2)]


@given(
    st.builds(
        Evidence,
        kind=st.sampled_from(["tonight", "step", "gain"]),
        ab=st.sampled_from([None, "same", "better", "undecided"]),
        distance=st.floats(-1, 0),
        alert=st.sampled_from([None, "new"]),
        since=st.integers(0, 30),
        nights=st.integers(-3, 0),
        cause=st.sampled_from([None, "code"]),
        decidable=st.booleans(),
        drifts=st.booleans(),
    )
)
def test_no_change_for_the_better_is_a_regression(evidence: Evidence) -> None:
    """Not even with an open incident: the results and an A/B may contradict each other."""
    assert decide(evidence).verdict is not Verdict.REGRESSED
