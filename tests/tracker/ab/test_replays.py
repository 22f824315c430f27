"""Replayed nights on the whole path, from `ingest` by `confirm` and `gate --update` to `incidents`.

A night measures each series with noise of its own. Some backends become slower with one commit. The environment
variable REPLAY_SEEDS sets how often each case is replayed.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from nights import commit
from planned_ab import FakeBench
from repositories import git

Cli = Callable[..., Result]
BACKENDS = ("triton", "helion", "cutlass", "cuda", "cute", "gluon")
NOISES = {
    "0.1 %": (0.001, "normal"),
    "0.3 %": (0.003, "normal"),
    "1 %": (0.01, "normal"),
    "3 %": (0.03, "normal"),
    "tails": (0.003, "tails"),
    "drift": (0.003, "drift"),
}
"""Scatter of a series' results, and its kind: Student's t with 3 degrees of freedom, or a drift over some nights."""
MISSED = ("1 %", "3 %")
"""Noises at which some replays miss a target: a history of 12 nights then has late and false suspects."""
QUIET, NIGHTS = 12, 14
MOST_AB = 5
AB_S = 30
"""Seconds of the device that a comparison takes."""
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
    owners: set[str | None]  # of those of a cause


class _Truth(dict[str, Any]):
    """The answers of A/Bs by backend: those of two commits across the change find it."""

    def __init__(self, bench: FakeBench, causes: dict[str, float]) -> None:
        self.bench, self.causes = bench, causes

    def __getitem__(self, backend: str) -> dict[str, Any]:
        base, head = (int(name[:3], 16) for name in self.bench.compared[-1][:2])
        effect = math.log1p(self.causes.get(backend, 0.0)) if base < QUIET <= head else 0.0
        ends = {"low": effect - 0.002, "high": effect + 0.002, "blocks": 12}
        return {"verdict": "different" if effect else "same", "effect": effect, **ends}


def noisy(rng: random.Random, sd: float, kind: str) -> Iterator[float]:
    """Yield the noise of a series' results."""
    level = rng.gauss(0, sd)
    while True:
        if kind == "drift":
            level = 0.8 * level + 0.6 * rng.gauss(0, sd)
        else:
            level = rng.gauss(0, sd) / (math.sqrt(rng.gammavariate(1.5, 2) / 3) if kind == "tails" else 1)
        yield level


def replay(nights: Nights, seed: int, number: int, noise: str, causes: dict[str, float]) -> Replay:
    """Replay nights in which backends become slower at night QUIET, by the factors of `causes`."""
    rng = random.Random(f"{seed} {number} {noise}")
    shapes = [f"G=4,N={64 * (1 + i)},K=64" for i in range(-(-number // len(causes)))]
    cells = [(backend, shape) for shape in shapes for backend in causes][:number]
    cells += [(f"quiet-{backend}", shape) for backend, shape in cells]
    nights.begin(causes)
    sd, kind = NOISES[noise]
    noises = {cell: noisy(rng, sd * rng.uniform(0.5, 1.5), kind) for cell in cells}
    records: list[Any] = []
    for night in range(NIGHTS):
        facts = {"parents": [commit(night - 1)] if night else [], "author": f"author-{night}", "subject": f"C{night}"}
        for backend, shape in cells:
            ms = (1.0 + causes.get(backend, 0.0) * (night >= QUIET)) * (1 + next(noises[backend, shape]))
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
    owners = {each["owner"] for each, part in zip(incidents, parts, strict=True) if part & causes.keys()}
    return Replay(sorted(map(sorted, parts)), needed, owners)


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


def drawn(seed: int, number: int) -> tuple[list[str], float]:
    """Return backends in random order, and a size."""
    rng = random.Random(seed)
    return rng.sample(BACKENDS, len(BACKENDS))[: min(number, rng.randint(1, 4))], rng.choice((0.05, 0.12, 0.4))


@dataclass(frozen=True)
class Replays:
    """The outcome of several replays."""

    right: int  # each cause has one incident; others are the gate's false alarms
    wrong_owners: int
    most_ab: int  # for one cause

    def check(self, noise: str, least: float, seeds: int) -> None:
        assert not self.wrong_owners
        if noise in MISSED:
            return
        assert self.right >= least * seeds
        assert self.most_ab <= MOST_AB


def replays(
    nights: Nights, number: int, noise: str, seeds: int, causes_of: Callable[[int], dict[str, float]]
) -> Replays:
    """Replay nights with the causes of each seed, and print the outcome."""
    right, wrong, comparisons, others = 0, 0, Counter[int](), []
    for seed in range(seeds):
        causes = causes_of(seed)
        sizes = {size: sorted(each for each in causes if causes[each] == size) for size in causes.values()}
        seen = replay(nights, seed, number, noise, causes)
        of_causes = [[backend for backend in part if backend in causes] for part in seen.parts]
        right += sorted(filter(None, of_causes)) == sorted(sizes.values())
        others += [(seed, causes, seen.parts)] * (seen.parts != sorted(sizes.values()))
        wrong += len(seen.owners - {f"author-{QUIET}", None})  # an owner may be unknown
        comparisons[math.ceil(seen.comparisons / len(sizes))] += 1
    text = ", ".join(f"{ab} in {count} ({AB_S * ab} s)" for ab, count in sorted(comparisons.items()))
    print(
        f"REPLAY {number} series, {noise}: {right} of {seeds}, owners wrong {wrong}, A/Bs of a cause: {text}; {others}"
    )
    return Replays(right, wrong, max(comparisons))


MORE = pytest.mark.exhaustive


def cases(seeds_of: dict[int, int]) -> list[Any]:
    """Return the parameters of a quick case, and of each size and noise."""
    many = int(os.environ.get("REPLAY_SEEDS", "0"))
    every = [
        (number, noise, many or seeds)
        for number, seeds in seeds_of.items()
        for noise in NOISES
        if number <= 100 or noise == "0.3 %" or many
    ]
    return [(10, "0.3 %", 1), *(pytest.param(*each, marks=MORE) for each in every)]


@pytest.mark.parametrize(("number", "noise", "seeds"), cases({1: 12, 10: 12, 100: 2, 2000: 1}))
def test_one_cause_is_one_incident_of_its_author_after_few_comparisons(
    nights: Nights, number: int, noise: str, seeds: int
) -> None:
    def causes_of(seed: int) -> dict[str, float]:
        backends, size = drawn(seed, number)
        return dict.fromkeys(backends, size)

    replays(nights, number, noise, seeds, causes_of).check(noise, 0.98, seeds)


@pytest.mark.parametrize(("number", "noise", "seeds"), cases({2: 10, 20: 10}))
def test_two_causes_of_one_night_are_two_incidents(nights: Nights, number: int, noise: str, seeds: int) -> None:
    def causes_of(seed: int) -> dict[str, float]:
        return dict(zip(random.Random(seed).sample(BACKENDS, 2), (0.12, 0.4), strict=True))

    replays(nights, number, noise, seeds, causes_of).check(noise, 0.9, seeds)
