"""Files and order of a backfill, which measures past commits on this machine to give a repository a history.

Each commit has a file of records, and a second file once they are measured and stored, which names the plan. If a
backfill ends early for any reason, even a killed process, the same command continues it: cells with a record are not
measured again, and records that were not stored are stored.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.project import NAME, Project
from groupbench.tracker.text.files import whole_file
from groupbench.tracker.text.scratch import Scratch
from groupbench.tracker.tools import git


class BackfillError(TrackerError):
    """The range is unknown to git or has no commits, or a file cannot be written."""


@dataclass(frozen=True)
class BackfillCommit:
    hash: str
    subject: str

    def __str__(self) -> str:
        return f"{self.hash[:10]} {self.subject}"


def commits_of(folder: Path, text: str, every: int = 1) -> list[BackfillCommit]:
    """Return the commits of `A..B` on the first-parent line, without A, newest first; `A..` ends at HEAD.

    A commit alone means the whole history, with the root.

    Args:
        every: Return only every Nth commit, counted from the newest.

    Raises BackfillError.
    """
    first, dots, last = text.partition("..")
    if not first or last.startswith("."):
        raise BackfillError(f"{text!r} is not a range of commits, such as v1.0..main or HEAD~20..")
    git.require_repository(folder)
    ends = [git.rev_parse(name, folder) for name in (first, last or "HEAD")]
    for name, commit in zip((first, last or "HEAD"), ends, strict=True):
        if commit is None:
            raise BackfillError(git.unknown_commit(name, folder, "check the spelling, or fetch it"))
    form = "--format=%H%x00%s"
    try:
        log = git.run(
            folder,
            "log",
            "--first-parent",
            form,
            "--end-of-options",
            f"{ends[0]}..{ends[1]}" if dots else str(ends[0]),
            "--",
        )
    except git.GitError as error:
        raise BackfillError(error.reason) from error
    commits = [BackfillCommit(*line.split("\0", 1)) for line in log.split("\n") if line]
    if not commits:
        raise BackfillError(f"{text} contains no commits: give the older one first")
    return commits[::every]


def require_writable(folder: Path) -> None:
    """Raise BackfillError if git cannot write to the repository. Otherwise every commit would count as failed."""
    common = Path(folder, git.run(folder, "rev-parse", "--git-common-dir").strip())
    if not os.access(common, os.W_OK):
        raise BackfillError(f"cannot write to the folder {common}: git needs it to check out past commits")


def by_halving(commits: Sequence[BackfillCommit]) -> list[BackfillCommit]:
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
    """The record files of past commits, in one folder for each device and toolchain of groupbench.toml."""

    def __init__(self, records: Path, device: str, project: Project, toolchain: str | None = None) -> None:
        self._folder = records / f"backfill-{device if toolchain is None else f'{device}@{toolchain}'}"
        plan = msgspec.json.encode((project.settings.name, project.settings.plugins, project.settings.measure))
        self._plan = _digest(plan)
        self._recipe = _digest(*_recipe(project))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BackfillError(f"cannot write {self._folder}: {error.strerror}") from error

    def records(self, commit: BackfillCommit) -> Path:
        return self._folder / f"{commit.hash}.jsonl"

    def outcome(self, commit: BackfillCommit) -> str | None:
        """Return the outcome of a commit under this plan, "measured" or "failed"; None if it is not done."""
        plan, outcome, _ = self._marked(commit)
        return outcome if plan == self._plan else None

    def has_new_recipe(self, commit: BackfillCommit) -> bool:
        """Return whether `setup`, the folders of modules or the benchmarks changed since a commit failed."""
        return self._marked(commit)[2] not in ("", self._recipe)

    def has_begun(self, commit: BackfillCommit) -> bool:
        """Return whether there are records of a commit, or an outcome under this plan."""
        return self.records(commit).exists() or self.outcome(commit) is not None

    def done(self, commit: BackfillCommit, outcome: str) -> None:
        """Mark a commit as stored, with an outcome. Raises BackfillError."""
        with whole_file(self._mark(commit), BackfillError) as file:
            file.write(f"{self._plan} {outcome} {self._recipe}\n".encode())

    def set_aside(self, commit: BackfillCommit) -> None:
        """Rename records that cannot be continued, for example because the environment changed."""
        path = self.records(commit)
        names = (path.with_name(f"{commit.hash}-{number}.jsonl") for number in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))

    def again(self, commit: BackfillCommit) -> None:
        """Forget that a commit failed, so that it is measured again. The records stay in the database."""
        if self.records(commit).exists():
            self.set_aside(commit)
        self._mark(commit).unlink(missing_ok=True)

    def _mark(self, commit: BackfillCommit) -> Path:
        return self._folder / f"{commit.hash}.done"

    def _marked(self, commit: BackfillCommit) -> tuple[str, str, str]:
        """Return the digest of the plan, the outcome, and the digest of the recipe; empty texts without a mark."""
        try:
            words = self._mark(commit).read_text().split()
        except OSError:
            words = []
        plan, outcome, recipe = (*words, "", "", "")[:3]
        return plan, outcome, recipe


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _recipe(project: Project) -> Iterator[bytes]:
    """Yield the parts of the plan on which it depends whether a commit builds and loads."""
    settings = project.settings
    yield msgspec.json.encode((settings.setup, settings.pythonpath, settings.benchmarks))
    for name in settings.benchmarks:
        path = project.folder / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield file.read_bytes() if file.is_file() else b""


@contextmanager
def plan_of(project: Project) -> Iterator[Path]:
    """Yield a copy of the project's file in an empty folder.

    Python looks for plugins in the plan's folder, where today's code would hide that of an old commit.
    """
    assert project.file is not None
    with Scratch("plan") as folder:
        path = folder / NAME
        shutil.copyfile(project.file, path)
        yield path
