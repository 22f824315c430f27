"""The gate on the real statistics: quiet on unchanged code, awake to planted changes. Seeds are fixed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import Result

Cli = Callable[..., Result]
Stored = Callable[..., Any]

pytestmark = pytest.mark.sqlite
SERIES = 20


def nights(make: Any, count: int, changes: dict[str, tuple[int, float]], noise: float = 0.002) -> list[Any]:
    """Of each of some backends, `count` nights; `changes` says from which night on which is how much slower."""
    rng = np.random.default_rng(3)
    made = []
    for number in range(SERIES):
        backend = f"b{number}"
        start, factor = changes.get(backend, (count, 1.0))
        for night in range(count):
            ms = 0.1 * 1.3**number * (factor if night >= start else 1.0) * np.exp(rng.normal(0, noise))
            made.append(make(night, ms=float(ms), backend=backend))
    return made


def judged(cli: Cli, *args: str) -> tuple[int, dict[str, dict[str, Any]]]:
    done = cli("gate", "--json", *args)
    return done.exit_code, {row["backend"]: row for row in json.loads(done.stdout)["series"]}


def test_unchanged_code_is_left_alone(cli: Cli, stored: Stored, make: Any) -> None:
    stored(nights(make, 25, {}))
    for night in (12, 18, 24):
        code, rows = judged(cli, "--run", f"run-{night:03d}")
        assert (code, Counter(row["verdict"] for row in rows.values())) == (0, {"ok": SERIES})


def test_one_night_off_is_a_suspect_and_many_are_a_change(cli: Cli, stored: Stored, make: Any) -> None:
    stored(nights(make, 31, {"b3": (30, 1.04), "b4": (30, 0.96), "b7": (22, 1.03), "b8": (22, 0.97)}))
    code, rows = judged(cli)
    assert code == 1
    told = {name: row["verdict"] for name, row in rows.items() if row["verdict"] != "ok"}
    assert told == {"b3": "suspect", "b4": "suspect", "b7": "regressed", "b8": "improved"}
    assert rows["b7"]["commits"] == "015ccccccc..016ccccccc"
    assert rows["b7"]["low"] < 0.03 < rows["b7"]["high"]
    assert rows["b7"]["q"] < 0.05


def test_a_change_is_one_alert_and_closes_itself(cli: Cli, stored: Stored, make: Any) -> None:
    stored(nights(make, 40, {"b3": (25, 1.05)}))
    for night in range(30, 40):
        assert cli("gate", "--update", "--run", f"run-{night:03d}").exit_code == 1
    (alert,) = json.loads(cli("alerts", "--all", "--json").stdout)
    assert (alert["backend"], alert["state"], alert["commits"]) == ("b3", "new", "018ccccccc..019ccccccc")
    assert cli("expect", "1", "--reason", "so be it", "--who", "Ada").exit_code == 0
    code, rows = judged(cli)
    assert (code, {row["verdict"] for row in rows.values()}) == (0, {"ok"})
    stored([make(40, ms=0.1 * 1.3**3, backend="b3")])
    assert "1 fixed (1)" in cli("gate", "--update").stderr


def test_accuracy_is_judged_by_its_own_history(cli: Cli, stored: Stored, make: Any) -> None:
    rms = [2e-3 * (1 + 0.01 * (night % 3)) * (1.6 if night >= 18 else 1.0) for night in range(24)]
    stored([make(night, rms=value) for night, value in enumerate(rms)])
    assert cli("gate", "--run", "run-017").exit_code == 0
    for night in ("018", "019", "023"):
        code, rows = judged(cli, "--run", f"run-{night}")
        assert (code, rows["triton"]["what"], rows["triton"]["commits"][-10:]) == (
            *(1, "accuracy"),
            "012ccccccc",
        ), night


def test_a_canary_tells_of_the_machine_whatever_the_code(cli: Cli, stored: Stored, make: Any) -> None:
    """The newest night is of the same commit as the one before, on a machine that became slower."""
    rng = np.random.default_rng(5)
    for backend, operator in (("copy", "canary"), ("triton", "grouped_gemm")):
        for night in range(31):
            ms = float((1.05 if night == 30 else 1.0) * np.exp(rng.normal(0, 0.002)))
            code = {"commit": f"{min(night, 29):03x}" + "c" * 37}
            stored([make(night, ms=ms, backend=backend, operator=operator, **code)])
    code, rows = judged(cli)
    assert code == 3
    assert (rows["copy"]["verdict"], rows["copy"]["cause"]) == ("suspect", "machine")
    assert (rows["triton"]["verdict"], rows["triton"]["cause"]) == ("unresolved", "machine")
