"""Play stories night by night through the store, the gate and simulated A/Bs, and count the nights that are right.

A night is right if the exit code is that of the code's true level, the failing rows name the commits whose slowdowns
are in force, and the newest one shows tonight's latency. The steps are of 3 % on a GPU with a scatter of 0.2 %, and of
50 % on a CPU with a scatter of 5 %. A simulated A/B has an error and a share of unknown answers, and the budget is that
of `night`.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from groupbench.tracker.ab.confirm import enough
from groupbench.tracker.facts.record import Record
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge import incident_moves
from groupbench.tracker.judge.gate import judge_run
from groupbench.tracker.judge.verdicts import Gate, Judged
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.stats.thresholds import least_effect
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import Compared
from groupbench.tracker.store.engine import Store, open_store
from groupbench.tracker.store.ingest import ingest

Rows = Iterator[tuple[object, ...]]
FIRST = datetime(2026, 1, 1, 3, tzinfo=UTC)
QUIET = 12
"""Number of nights before a story begins."""
AB_S = 30.0


@dataclass(frozen=True)
class Machine:
    """A kind of machine: its noise, the size of a step, and its A/Bs."""

    timing: str
    ms: float
    scatter: float  # of one result
    step: float  # logarithm
    cells: int
    ab_error: float
    unknown: float  # share of A/Bs


GPU = Machine("gpu", 0.6, 0.002, math.log(1.03), 11, 0.003 / 4, 0.01)
CPU = Machine("cpu", 0.6, 0.05, math.log(1.5), 6, 0.03, 0.1)


@dataclass(frozen=True)
class Story:
    """A change, or several, after the quiet nights.

    Attributes:
        levels: The code's level by night, in steps.
        common: Factor of all results of a night.
        outliers: Factor of the first cell's result by night.
        absent: Nights without a result of the first cell.
        twice: Each commit is measured twice.
        split: Each night has two runs.
        card: First night on another card.
        moves: Alerts that are acknowledged or expected after a night.
        changed: Number of cells that change.
        size: Size of a step, instead of the machine's.
        only: The timing for which it makes sense.
    """

    levels: Sequence[float]
    common: Mapping[int, float] = field(default_factory=dict)
    outliers: Mapping[int, float] = field(default_factory=dict)
    absent: Collection[int] = ()
    twice: bool = False
    split: bool = False
    card: int | None = None
    moves: Mapping[int, str] = field(default_factory=dict)
    changed: int = 1
    size: float | None = None
    only: str | None = None


def _drift(rate: float, nights: int) -> Story:
    return Story([math.log1p(rate) * max(night - 2, 0) for night in range(nights)], size=1.0, only="gpu")


STORIES: dict[str, Story] = {
    "quiet": Story([0] * 20),
    "one step": Story([0, 1, 1, 1, 1, 1]),
    "three cells": Story([0, 1, 1, 1, 1], changed=3),
    "two steps": Story([0, 1, 1, 1, 1, 2, 2, 2]),
    "two steps at once": Story([0, 1, 2, 2, 2, 2]),
    "growth": Story([0, 1, 1, 1, 3, 3, 3]),
    "revert": Story([0, 1, 1, 1, 0, 0, 0, 0]),
    "revert at once": Story([0, 1, 0, 0, 0, 0]),
    "the same again": Story([0, 1, 1, 0, 0, 1, 1, 1]),
    "revert, smaller": Story([0, 2, 2, 0, 0, 1, 1, 1]),
    "revert, larger": Story([0, 1, 1, 0, 2, 2, 2]),
    "revert of the second": Story([0, 1, 1, 2, 2, 1, 1, 1]),
    "revert of both": Story([0, 1, 1, 2, 2, 0, 0, 0]),
    "half taken back": Story([0, 2, 2, 2, 1, 1, 1, 1]),
    "half, then all": Story([0, 2, 2, 1, 1, 1, 0, 0, 0]),
    "improvement": Story([0, -1, -1, -1, -1]),
    "improvement, loss": Story([0, -2, -2, -2, -1, -1, -1]),
    "improvement, revert": Story([0, -1, -1, -1, 0, 0, 0]),
    "step, improvement": Story([0, 1, 1, 1, -1, -1, -1]),
    "drift of 0.08 %": _drift(0.0008, 30),
    "drift of 0.5 %": _drift(0.005, 20),
    "drift of 2 %": _drift(0.02, 10),
    "creep": Story([0.3 * (night // 4) for night in range(20)]),
    "outlier": Story([0] * 8, outliers={3: 1.3}),
    "outlier, step": Story([0, 0, 0, 0, 0, 0, 1, 1, 1], outliers={2: 1.3}),
    "outlier, step next": Story([0, 0, 0, 1, 1, 1], outliers={2: 1.3}),
    "weekends": Story([0] * 16, common={n: 1.015 for n in range(16) if n % 7 in (5, 6)}, only="gpu"),
    "slower clock": Story([0] * 8, common=dict.fromkeys(range(3, 8), 1.015), only="gpu"),
    "slower clock, step": Story([0, 0, 0, 2, 2, 2], common=dict.fromkeys(range(3, 6), 1.015), only="gpu"),
    "absent": Story([0, 0, 0, 1, 1, 1, 1], absent={1, 4}),
    "measured twice": Story([0, 0, 1, 1, 1, 0, 0], twice=True),
    "split nights": Story([0, 0, 1, 1, 1, 0, 0], split=True),
    "another card": Story([0, 0, 0, 0, 0, 0, 0, 0, 1, 1], card=1, only="gpu"),
    "ack, growth": Story([0, 1, 1, 1, 2, 2, 2], moves={2: "ack"}),
    "expect, growth": Story([0, 1, 1, 1, 2, 2, 2], moves={2: "expect"}),
    "expect, revert, step": Story([0, 1, 1, 1, 0, 0, 1, 1], moves={2: "expect"}),
}


class World:
    """A database that is filled night by night."""

    def __init__(self, path: Path, machine: Machine, story: Story, seed: int) -> None:
        self.rng, self.machine, self.story = np.random.default_rng(seed), machine, story
        self.store: Store = open_store(path, create=True)
        size = machine.step if story.size is None else story.size
        self.levels = [0.0] * QUIET + [size * level for level in story.levels]
        self.least = math.log1p(least_effect(machine.timing, machine.ms))
        self.asked: set[tuple[int, str, str]] = set()
        self.seconds = 0.0
        self.count = 0

    def _common(self, night: int) -> float:
        return math.log(self.story.common.get(night - QUIET, 1.0))

    def measure(self, night: int) -> str:
        """Store a night, and return the id of its newest run."""
        split = [range(4), range(4, self.machine.cells)] if self.story.split else [range(self.machine.cells)]
        for part, cells in enumerate(split * 2 if self.story.twice else split):
            run = f"run-{night:03d}-{part}"
            ingest(self.store, enumerate(self._records(night, run, part, cells), 1), "generated")
        return run

    def _records(self, night: int, run: str, part: int, cells: Sequence[int]) -> Iterator[Record]:
        story, machine, at = self.story, self.machine, night - QUIET
        card = "GPU-2" if story.card is not None and at >= story.card else "GPU-1"
        where: dict[str, Any] = {"device": machine.timing.replace("gpu", "cuda"), "cpu": "EPYC", "python": "3.11.9"}
        if machine.timing == "gpu":
            where |= {"gpu": "NVIDIA H100 80GB HBM3", "gpu_uuid": card, "driver": "570.1", "cuda": "13.0"}
        for cell in cells:
            if cell == 0 and at in story.absent:
                continue
            noise = self.rng.normal(0, 1) if machine.timing == "gpu" else self.rng.exponential(1) - 1
            log = (self.levels[night] if cell < story.changed else 0.0) + self._common(night) + machine.scatter * noise
            ms = machine.ms * math.exp(log) * (story.outliers.get(at, 1.0) if cell == 0 else 1.0)
            bursts = ms * np.exp(self.rng.normal(0, machine.scatter / 10, 5))
            yield msgspec.convert(
                {
                    "schema": 1,
                    "run": {
                        "id": run, "started": FIRST + timedelta(days=night, minutes=10 * part), "trigger": "nightly",
                        "plan": "nightly", "commit": {"hash": f"{night:03x}" + "c" * 37},
                    },
                    "environment": where,
                    "cell": {"operator": "op", "backend": f"b{cell:02d}", "shape": "M=1", "dtype": "fp32"},
                    "status": "ok",
                    "latency": {"timing": machine.timing, "bursts_ms": [[each] for each in bursts.tolist()]},
                },
                Record,
            )  # fmt: skip

    def night(self, night: int) -> Gate:
        """Measure, judge, compare and judge a night, as `groupbench night` does."""
        run = self.measure(night)
        with self.store.write() as session:
            gate = judge_run(session, find_run(session, run))
            spent, budget = 0.0, enough(3.0 * self.machine.cells)
            for row in gate.suspects:
                if spent >= budget:
                    break
                spent += AB_S * self.compare(session, row, night)
            self.seconds += spent
            if spent:
                gate = judge_run(session, find_run(session, run))
            incident_moves.update(session, gate)
            if (move := self.story.moves.get(night - QUIET)) is not None:
                keys = list(
                    {row.alert.incident.pk for row in judge_run(session, find_run(session, run)).rows if row.alert}
                )
                state = "acknowledged" if move == "ack" else "expected"
                incident_moves.change(session, keys, state, "Ada", "known", datetime.now(UTC))
        return gate

    def compare(self, session: Any, row: Judged, night: int) -> int:
        """Store the A/B of a suspect. Returns how often it was made."""
        assert row.ab_base is not None and row.point is not None
        base, head = row.ab_base.commit, row.point.run.commit
        old, new = (int(commit[:3], 16) for commit in (base, head))
        changed = int(row.series.backend[1:]) < self.story.changed
        true = self.levels[new] - self.levels[old] if changed else 0.0
        effect, verdict = self._compared(true)
        number, ends = 1, (row.series.pk, base, head)
        if verdict == "unknown" or (verdict == "different" and ends not in self.asked):
            number, again = 2, self._compared(true)
            if again[1] != "unknown" or verdict == "unknown":
                effect, verdict = again
        self.asked.add(ends)
        self.count += 1
        half = 3 * self.machine.ab_error
        level = self.machine.ms * math.exp((self.levels[new] if changed else 0.0) + self._common(night))
        at = FIRST + timedelta(days=night, hours=1, seconds=self.count)
        one = Compared(
            base, head, verdict, at, effect, effect - half, effect + half, level * math.exp(-effect), level
        )  # fmt: skip
        comparisons.store(session, row.series.pk, one)
        return number

    def _compared(self, true: float) -> tuple[float, str]:
        """Return the effect and the verdict of one A/B of a true effect."""
        effect = true + self.rng.normal(0, self.machine.ab_error)
        if self.rng.random() < self.machine.unknown:
            return effect, "unknown"
        return effect, "different" if abs(effect) > self.least else "same"

    # ---- the right verdict

    def in_force(self, night: int) -> list[tuple[float, set[int]]]:
        """Return the levels in force: the reference, and the slowdowns on it with the commits that may be named."""
        stack: list[tuple[float, set[int]]] = [(0.0, set())]
        for at in range(QUIET, night + 1):
            level = self.levels[at]
            if level > stack[-1][0] + 1e-9:
                stack.append((level, {at}))
            while len(stack) > 1 and level <= stack[-2][0] + 1e-9:
                stack.pop()
            if len(stack) > 1 and level < stack[-1][0] - 1e-9:
                stack[-1] = level, stack[-1][1] | {at}
            elif len(stack) == 1:
                stack[0] = min(level, stack[0][0]), set()
            if self.story.moves.get(at - QUIET) == "expect" and at < night:
                stack = [(level, set())]
        return stack

    def faults(self, night: int, gate: Gate) -> list[str]:
        """Return the faults of the verdict on a night."""
        story, at = self.story, night - QUIET
        stack = self.in_force(night)
        steps = [new - old for old, new in pairwise(self.levels[QUIET:])]
        gradual = story.size is not None or any(0 < step < 1.5 * self.least for step in steps)
        total = self.levels[night] - stack[0][0]
        failing = [row for row in gate.rows if row.verdict is Verdict.REGRESSED]
        codes = {1} if total > self.least else {0}
        if gradual and total > 0:  # the sum may hide in the scatter at first
            codes = {1} if total > self.least + 3 * self.machine.scatter else {0, 1}
        if at in story.absent:
            return [] if gate.exit_code in (1, 3) else [f"exit {gate.exit_code}, though a cell is absent"]
        if story.card is not None and 0 <= at - story.card < 3:
            codes |= {4}
        if codes == {1} and story.moves and "ack" in story.moves.values() and len(stack) == 2:
            codes = {0, 1}
        faults = [] if int(gate.exit_code) in codes else [f"exit {int(gate.exit_code)}, not {codes}"]
        others = [row for row in failing if int(row.series.backend[1:]) >= story.changed]
        faults += [f"{row.series.backend} regressed" for row in others]
        of_changed = [row for row in failing if row not in others]
        if codes == {1} and of_changed and not gradual:
            named = {int(row.span.head.commit[:3], 16) for row in of_changed if row.span}
            allowed = set().union(*(commits for _, commits in stack[1:]))
            newest = stack[-1][1]
            if not named <= allowed or not named & newest:
                faults.append(f"named {named}, not {[commits for _, commits in stack[1:]]}")
            last = max(of_changed, key=lambda row: row.span.head.started if row.span else FIRST)
            if last.point and abs((last.shown.now or 0) / (last.point.median_ms or 1) - 1) > 1e-6:
                faults.append(f"shows {last.shown.now}, not {last.point.median_ms}")
        return faults


def play(machine: Machine, story: Story, seed: int, trace: bool = False) -> tuple[list[list[str]], float]:
    """Return the faults of each night of a story, and the seconds of A/Bs in a night."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "db", machine, story, seed)
        try:
            for night in range(QUIET):
                world.measure(night)
            faults = []
            for night in range(QUIET, len(world.levels)):
                gate = world.night(night)
                faults.append(world.faults(night, gate))
                if trace:
                    rows = [
                        f"{row.verdict} {row.series.backend} {row.change or 0:+.3f} {row.rule} {row.note}"
                        for row in gate.notable
                    ]
                    print(night - QUIET, f"{world.levels[night]:.3f}", gate.exit_code, faults[-1], rows, flush=True)
        finally:
            world.store.close()
        return faults, world.seconds / len(faults)


def stories(options: argparse.Namespace) -> Rows:
    yield "machine", "story", "nights", "right", "seeds all right", "A/B s a night", "first fault"
    for name, machine in (("GPU", GPU), ("CPU", CPU)):
        for title, story in STORIES.items():
            if story.only not in (None, machine.timing) or (options.story and title not in options.story):
                continue
            right = nights = seeds = 0
            seconds, first = 0.0, ""
            number = max(1, round(20 * options.scale))
            for seed in range(number):
                faults, spent = play(machine, story, options.seed + seed, options.trace)
                nights, right = nights + len(faults), right + sum(not each for each in faults)
                seeds, seconds = seeds + (not any(faults)), seconds + spent / number
                first = first or next(
                    (f"seed {seed} night {at}: {each[0]}" for at, each in enumerate(faults) if each), ""
                )
            yield name, title, nights, right, f"{seeds} of {number}", f"{seconds:.0f}", first


def noisy(options: argparse.Namespace) -> Rows:
    """Play a slowdown of 3 of 10 latencies in strong noise: the night that finds it, and nights that are not judged."""
    nights_by = *(f"found by night {n}" for n in (1, 2, 3, 7, 14)), "others", "A/B s a night"
    yield "scatter", "slowdown", "latencies", *nights_by
    for scatter, factor in ((0.1, 1.25), (0.2, 1.25), (0.2, 1.5)):
        machine = replace(CPU, scatter=scatter, step=math.log(factor), cells=10)
        nights: list[float] = []
        false = judged = 0
        seconds, number = 0.0, max(1, round(20 * options.scale))
        for seed in range(number):
            firsts, others, of_world = _played(machine, Story([1] * 14, changed=3), options.seed + seed)
            nights += firsts
            false, judged, seconds = false + others, judged + 14 * (machine.cells - 3), seconds + of_world / number
        shares = (f"{np.mean(np.array(nights) <= n):.0%}" for n in (1, 2, 3, 7, 14))
        yield f"{scatter:.0%}", f"x{factor}", len(nights), *shares, f"{false} of {judged}", f"{seconds:.0f}"


def _played(machine: Machine, story: Story, seed: int) -> tuple[list[float], int, float]:
    """Return the night on which each changed cell regressed, how often another did, and the seconds of A/Bs a night."""
    first: dict[int, float] = dict.fromkeys(range(story.changed), math.inf)
    others = 0
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "db", machine, story, seed)
        try:
            for night in range(QUIET):
                world.measure(night)
            for night in range(QUIET, len(world.levels)):
                for row in world.night(night).rows:
                    cell = int(row.series.backend[1:])
                    if row.verdict is Verdict.REGRESSED and cell in first:
                        first[cell] = min(first[cell], night - QUIET + 1)
                    elif row.verdict is Verdict.REGRESSED:
                        others += 1
        finally:
            world.store.close()
    return list(first.values()), others, world.seconds / len(story.levels)


PARTS = {"stories": stories, "noisy": noisy}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--story", action="append", metavar="NAME", help="play only this story")
    parser.add_argument("--trace", action="store_true", help="print every night")
