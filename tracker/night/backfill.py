"""History of commits from before anybody measured them: each is checked out, built and measured on this machine.

A commit's records are a file, and a second file says that it is done: measured, stored, and by which plan. So a
backfill that ends in any way, a killed process included, is continued by the same command: what has a record is not
measured again, and what was not stored is stored.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from groupbench.tracker import git
from groupbench.tracker.errors import TrackerError
from groupbench.tracker.project import NAME, Project
from groupbench.tracker.text.files import whole_file
from groupbench.tracker.text.scratch import Scratch

TRIGGER = "backfill"


class BackfillError(TrackerError):
    """A range that git does not know, or that holds no commit; a place that cannot be written."""


@dataclass(frozen=True)
class Commit:
    hash: str
    subject: str

    def __str__(self) -> str:
        return f"{self.hash[:10]} {self.subject}"


def commits_of(folder: Path, text: str, every: int = 1) -> list[Commit]:
    """Return the commits of `A..B` on the line of first parents, without A, the newest first; of `A`, up to HEAD.

    every  only each so many-th of them, counted from the newest

    Raises BackfillError.
    """
    first, _, last = text.partition("..")
    if not first or last.startswith("."):
        raise BackfillError(f"{text!r} is no range of commits: v1.0..main, or HEAD~20..")
    ends = [git.rev_parse(name, folder) for name in (first, last or "HEAD")]
    for name, found in zip((first, last or "HEAD"), ends, strict=True):
        if found is None:
            raise BackfillError(f"git knows no commit {name!r} in {folder}; is it misspelled, or not fetched?")
    form = "--format=%H%x00%s"
    try:
        said = git.run(folder, "log", "--first-parent", form, "--end-of-options", f"{ends[0]}..{ends[1]}", "--")
    except git.GitError as error:
        raise BackfillError(error.reason) from error
    commits = [Commit(*line.split("\0", 1)) for line in said.splitlines()]
    if not commits:
        raise BackfillError(f"{text} holds no commit: name the older one first")
    return commits[::every]


def by_halving(commits: Sequence[Commit]) -> list[Commit]:
    """Return commits coarse to fine: the ends, the middle, the middles of the halves, and so on."""
    order, spans = [0, len(commits) - 1], deque([(0, len(commits) - 1)])
    while spans:
        low, high = spans.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            spans += [(low, middle), (middle, high)]
    return [commits[at] for at in dict.fromkeys(order)]


class BackfillFiles:
    """The records of past commits, in a folder of their own for each device."""

    def __init__(self, records: Path, device: str, project: Project) -> None:
        self._folder = records / f"backfill-{device}"
        plan = msgspec.json.encode((project.settings.name, project.settings.plugins, project.settings.measure))
        self._plan = hashlib.sha256(plan).hexdigest()[:16]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BackfillError(f"{self._folder}: {error.strerror}") from error

    def records(self, commit: Commit) -> Path:
        return self._folder / f"{commit.hash}.jsonl"

    def outcome(self, commit: Commit) -> str | None:
        """Return what came of a commit under this plan: "measured", or "failed"; None where it is not done."""
        try:
            plan, _, outcome = self._mark(commit).read_text().strip().partition(" ")
        except OSError:
            return None
        return outcome if plan == self._plan else None

    def done(self, commit: Commit, outcome: str) -> None:
        """Note that a commit's records are stored. Raises BackfillError."""
        with whole_file(self._mark(commit), BackfillError) as file:
            file.write(f"{self._plan} {outcome}\n".encode())

    def set_aside(self, commit: Commit) -> None:
        """Keep records that cannot be continued, of another environment say, under another name."""
        path = self.records(commit)
        names = (path.with_name(f"{commit.hash}-{number}.jsonl") for number in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))

    def again(self, commit: Commit) -> None:
        """Forget that a commit has failed; its records stay in the database."""
        if self.records(commit).exists():
            self.set_aside(commit)
        self._mark(commit).unlink(missing_ok=True)

    def _mark(self, commit: Commit) -> Path:
        return self._folder / f"{commit.hash}.done"


@contextmanager
def plan_of(project: Project) -> Iterator[Path]:
    """A copy of the project's file, whose folder holds nothing else.

    Python looks for plugins in a plan's folder, where today's code would hide that of an old commit.
    """
    assert project.file is not None
    with Scratch("plan") as folder:
        path = folder / NAME
        shutil.copyfile(project.file, path)
        yield path
