"""Answers of A/Bs, as a test plans them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from groupbench.tracker.ab import confirm as confirming
from groupbench.tracker.ab.result import AbCell, AbResult
from groupbench.tracker.ab.side import AbError
from groupbench.tracker.ab.worktree import CheckoutError, WorktreeError


class FakeBench:
    """Answers as planned, and records the comparisons."""

    def __init__(self) -> None:
        self.planned: dict[str, dict[str, Any]] = {}  # by backend
        self.compared: list[tuple[str, str, AbCell, float]] = []
        self.trees: list[Path] = []
        self.pythons: list[tuple[str, str]] = []
        self.unknown: set[str] = set()
        self.not_checked_out: set[str] = set()
        self.then: Callable[[], None] = lambda: None  # called after each comparison
        self.unchecked: Callable[[], dict[str, list[str]]] = dict
        self.now = 0.0

    def plan(self, verdict: str, effect: float | None = None, backend: str = "triton", **more: Any) -> None:
        effect = None if effect is None else np.float64(effect)  # as the statistics give it
        interval = {} if effect is None else {"low": effect - 0.002, "high": effect + 0.002, "blocks": 12}
        self.planned[backend] = {"verdict": verdict, "effect": effect, **interval, **more}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @contextmanager
        def checkouts(
            repo: Path, wanted: list[tuple[str, str]], recipe: object, spares: object
        ) -> Iterator[list[Path]]:
            for name, _ in wanted:
                if name in self.unknown:
                    raise WorktreeError(f"git knows no commit {name!r} in {repo}")
                if name in self.not_checked_out:
                    raise CheckoutError(f"git cannot check out {name}: No space left on device")
                self.trees.append(Path(name))
            yield [Path(name) for name, _ in wanted]

        fake = self

        class Bench:
            def __init__(self, base: Any, head: Any) -> None:
                self.base, self.head = base, head

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def compare(self, cell: AbCell, budget_s: float, within_s: float) -> AbResult:
                fake.pythons.append((self.base.python, self.head.python))
                fake.compared.append((self.base.commit, self.head.commit, cell, min(budget_s, within_s)))
                fake.now += 50
                planned = fake.planned[cell.backend]
                fake.then()
                if planned["verdict"] == "raise":
                    raise AbError("no such device: cuda")
                return AbResult(cell, self.base, self.head, seconds=50.0, **{"unchecked": fake.unchecked(), **planned})

        monkeypatch.setattr(confirming, "checkouts", checkouts)
        monkeypatch.setattr(confirming, "Bench", Bench)
