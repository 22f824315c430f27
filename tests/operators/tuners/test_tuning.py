"""How the configs of a problem are timed. A simulated clock replaces the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from groupbench.operators.tuners import tuning


@dataclass(frozen=True)
class Tile:
    rows: int


def test_a_config_that_does_not_run_is_printed_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "burst_of", lambda run: run)

    def prepare(config: Tile) -> Callable[[], float]:
        if config.rows == 2:
            raise RuntimeError("no\nroom")
        return lambda: 1 / config.rows

    times = tuning.time_each(map(Tile, (1, 2, 4)), prepare)
    assert times == [(1.0, Tile(1)), (0.25, Tile(4))]
    assert capsys.readouterr().err == "  Tile(rows=2) does not run: RuntimeError: no / room\n"


def test_configs_are_timed_in_turns_until_they_are_clearly_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    bursts = {1: [1.0, 1.3, 1.0, 1.0], 2: [1.2], 3: [1.05, 1.05], 4: [0.99, 1.02, 1.02, 1.02]}
    order: list[int] = []

    def burst_of(rows: int) -> Callable[[], float]:
        def burst() -> float:
            order.append(rows)
            return bursts[rows].pop(0)

        return burst

    monkeypatch.setattr(tuning, "burst_of", burst_of)
    times = tuning.time_each(map(Tile, (1, 2, 3, 4)), lambda config: config.rows)  # type: ignore[arg-type, return-value]
    assert times == [(1.0, Tile(1)), (1.2, Tile(2)), (1.05, Tile(3)), (1.02, Tile(4))]
    assert order == [1, 2, 3, 4, 1, 3, 4, 1, 4, 1, 4]
