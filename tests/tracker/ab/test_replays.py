"""Replayed nights on the whole path, from `ingest` by `confirm` and `gate --update` to `incidents`.

A night measures each series with noise of its own. Some backends become slower with one commit.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cases import rarely
from click.testing import Result
from nights import Cli, commit
from planned_ab import FakeBench
from repositories import git

BACKENDS = ("triton", "helion", "cutlass", "cuda", "cute", "gluon")
NOISES = (0.001, 0.003, 0.01)
QUIET, NIGHTS = 12, 14
MOST_AB = 5
MISSED = 0.01
"""Noise at which a cause takes more comparisons: a short history then has more suspects."""
pytestmark = [pytest.mark.sqlite]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "One")
    monkeypatch.chdir(tmp_path)  # a small repository, which git reads quickly


@dataclass(frozen=True)
class Replay:
    """Incidents after some nights."""

    parts: list[list[str]]  # backends of each incident
    comparisons: int  # of a slow backend, across the change
    owners: set[str | None]


class _Truth(dict[str, Any]):
    """The answers of A/Bs by backend: those of two commits across the change find it."""

    def __init__(self, bench: FakeBench, causes: dict[str, float]) -> None:
        self.bench, self.causes = bench, causes

    def __getitem__(self, backend: str) -> dict[str, Any]:
        base, head = (int(name[:3], 16) for name in self.bench.compared[-1][:2])
        effect = math.log1p(self.causes.get(backend, 0.0)) if base < QUIET <= head else 0.0
        ends = {"low": effect - 0.002, "high": effect + 0.002, "blocks": 12}
        return {"verdict": "different" if effect else "same", "effect": effect, **ends}


def replay(nights: Nights, seed: int, number: int, noise: float, causes: dict[str, float]) -> Replay:
    """Replay nights in which backends become slower at night QUIET, by the factors of `causes`."""
    rng = random.Random(f"{seed} {number} {noise}")
    shapes = [f"G=4,N={64 * (1 + i)},K=64" for i in range(-(-number // len(causes)))]
    cells = [(backend, shape) for shape in shapes for backend in causes][:number]
    cells += [(f"quiet-{backend}", shape) for backend, shape in cells]
    nights.begin(causes)
    scatter = {cell: noise * rng.uniform(0.5, 1.5) for cell in cells}
    records: list[Any] = []
    for night in range(NIGHTS):
        facts = {"parents": [commit(night - 1)] if night else [], "author": f"author-{night}", "subject": f"C{night}"}
        for backend, shape in cells:
            ms = (1.0 + causes.get(backend, 0.0) * (night >= QUIET)) * (1 + rng.gauss(0, scatter[backend, shape]))
            records.append(nights.make(night, ms=ms, backend=backend, shape=shape, commit_facts=facts))
        if night >= QUIET:
            nights.run("ingest", nights.write(records, f"{night}.jsonl"))
            records.clear()
            nights.run("confirm")
            nights.run("gate", "--update")
    incidents = json.loads(nights.run("incidents", "--format=json").stdout)
    members = json.loads(nights.run("incidents", "--each", "--format=json").stdout)
    parts = [{row["backend"] for row in members if row["incident"] == each["incident"]} for each in incidents]
    across = [(cell.backend, base, head) for base, head, cell, _ in nights.bench.compared if cell.backend in causes]
    needed = sum(base < commit(QUIET) <= head for _, base, head in across)
    return Replay(sorted(map(sorted, parts)), needed, {each["owner"] for each in incidents})


@dataclass
class Nights:
    """Commands on a database of its own for each replay, and A/Bs that find the causes."""

    cli: Cli
    write: Callable[..., Path]
    make: Callable[..., Any]
    bench: FakeBench
    folder: Path
    number: int = 0

    def begin(self, causes: dict[str, float]) -> None:
        self.number += 1
        self.bench.compared.clear()
        self.bench.planned = _Truth(self.bench, causes)

    def run(self, *words: Any) -> Result:
        return self.cli(*words, db=self.folder / f"{self.number}.db")


@pytest.fixture
def nights(cli: Cli, write: Any, make: Any, bench: FakeBench, tmp_path: Path) -> Nights:
    return Nights(cli, write, make, bench, tmp_path)


def drawn(seed: int, number: int, causes: int) -> dict[str, float]:
    """Return backends in random order, with their slowdowns: one for all, or two backends with one each."""
    rng = random.Random(seed)
    if causes == 2:
        return dict(zip(rng.sample(BACKENDS, 2), (0.12, 0.4), strict=True))
    slow = rng.sample(BACKENDS, len(BACKENDS))[: min(number, rng.randint(1, 4))]
    return dict.fromkeys(slow, rng.choice((0.05, 0.12, 0.4)))


@pytest.mark.parametrize(
    ("causes", "number", "noise", "seeds"),
    [
        *((causes, 10, 0.003, 1) for causes in (1, 2)),
        *rarely(*((1, number, noise, 12) for number in (1, 10) for noise in NOISES)),
        *rarely(*((1, 100, noise, 2) for noise in NOISES), (1, 2000, 0.003, 1)),
        *rarely(*((2, number, noise, 10) for number in (2, 20) for noise in NOISES)),
    ],
)
def test_a_cause_is_one_incident_of_its_author_after_few_comparisons(
    nights: Nights, causes: int, number: int, noise: float, seeds: int
) -> None:
    parted, owners, comparisons = 0, set(), []
    for seed in range(seeds):
        slow = drawn(seed, number, causes)
        seen = replay(nights, seed, number, noise, slow)
        parted += len(seen.parts) == 1 if causes == 1 else seen.parts == sorted([name] for name in slow)
        owners |= seen.owners
        comparisons.append(seen.comparisons)
    print(f"REPLAY {causes}: {number} series, noise {noise}: {parted} of {seeds}, A/Bs {comparisons}, owners {owners}")
    assert parted >= (0.98 if causes == 1 else 0.9) * seeds
    assert owners <= {f"author-{QUIET}"}
    assert max(comparisons) <= causes * MOST_AB or noise >= MISSED
