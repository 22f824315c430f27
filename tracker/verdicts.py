"""The verdicts: each word once, with how severe it is, what it does to the exit code, its colour and its meaning.

A new verdict is one line of `Verdict`. Its place among the others is its severity.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from groupbench.tracker.exits import ExitCode


@dataclass(frozen=True)
class Tone:
    """How something good, bad or neither looks wherever it is shown."""

    name: str  # class of the style sheets, and name of their variable
    light: str  # text on a light ground
    dark: str  # text on a dark ground
    badge: str  # ground below white text, with a contrast of 4.5
    terminal: str  # colour of the terminal; empty is the terminal's own
    sign: str  # beside the word: colour is never alone
    dot: str  # where nothing but text can be coloured

    def __str__(self) -> str:
        return self.name


GOOD = Tone("good", light="#176f32", dark="#53c674", badge="#2e7d32", terminal="green", sign="✓", dot="🟢")
BAD = Tone("bad", light="#c02626", dark="#ff8278", badge="#c62828", terminal="red", sign="✕", dot="🔴")
WARN = Tone("warn", light="#8a5d00", dark="#e3b548", badge="#8a6100", terminal="yellow", sign="!", dot="🟡")
FAINT = Tone("faint", light="#5d6670", dark="#9ba5b0", badge="#546e7a", terminal="", sign="·", dot="⚪")
TONES = (GOOD, BAD, WARN, FAINT)


@dataclass(frozen=True)
class _Facts:
    word: str
    tone: Tone
    meaning: str
    exit: ExitCode = ExitCode.OK
    strict: ExitCode = ExitCode.OK
    quiet: bool = False
    changed: bool = False
    of_sides: bool = False


class Verdict(StrEnum):
    """What is said of one series, the most severe first."""

    tone: Tone
    meaning: str
    exit: ExitCode
    """What one such series makes of the run's exit code."""
    strict: ExitCode
    """The same under --strict, where `exit` is OK."""
    quiet: bool
    """Only counted, unless there is something to say of the row."""
    changed: bool
    """The series has moved, or may have."""
    of_sides: bool
    """`compare` says it, too."""
    severity: int
    """0 is the most severe."""

    def __new__(cls, facts: _Facts) -> Verdict:
        self = str.__new__(cls, facts.word)
        self._value_ = facts.word
        self.tone, self.meaning, self.exit, self.strict = facts.tone, facts.meaning, facts.exit, facts.strict
        self.quiet, self.changed, self.of_sides = facts.quiet, facts.changed, facts.of_sides
        self.severity = len(cls.__members__)
        return self

    WRONG = _Facts("wrong", BAD, "its result is outside the tolerance table", ExitCode.FAILED, of_sides=True)
    REGRESSED = _Facts("regressed", BAD, "it got worse", ExitCode.FAILED, changed=True, of_sides=True)
    MISSING = _Facts(
        "missing", WARN, "an earlier run measured it, this one did not", ExitCode.INCOMPLETE, of_sides=True
    )
    UNRESOLVED = _Facts("unresolved", WARN, "it moved, and an A/B could not decide", ExitCode.INCOMPLETE, changed=True)
    SUSPECT = _Facts("suspect", WARN, "it may have moved; an A/B would decide", ExitCode.INCOMPLETE, changed=True)
    INCOMPARABLE = _Facts("incomparable", WARN, "its environment is new", ExitCode.INCOMPARABLE, of_sides=True)
    IMPROVED = _Facts("improved", GOOD, "it got better", changed=True, of_sides=True)
    NOISY = _Facts(
        "noisy", FAINT, "its bursts scatter too far to judge its latency", strict=ExitCode.INCOMPLETE, quiet=True
    )
    OK = _Facts("ok", GOOD, "it did not change", quiet=True, of_sides=True)
    NEW = _Facts("new", FAINT, "it has no earlier result", strict=ExitCode.INCOMPLETE, quiet=True, of_sides=True)
    INSUFFICIENT = _Facts("insufficient", FAINT, "few earlier results", strict=ExitCode.INCOMPLETE, quiet=True)
    UNAVAILABLE = _Facts("unavailable", FAINT, "its backend cannot run here", quiet=True)
    UNKNOWN = _Facts("~", FAINT, "nothing can be said of it", quiet=True, of_sides=True)

    @property
    def fails(self) -> bool:
        """Whether it is a change for the worse that is certain: what opens an alert."""
        return self.exit is ExitCode.FAILED


@dataclass(frozen=True)
class RunOutcome:
    """What is said of a whole run."""

    word: str
    tone: Tone


OUTCOMES = {
    ExitCode.FAILED: RunOutcome("regression", BAD),
    ExitCode.INCOMPLETE: RunOutcome("incomplete", WARN),
    ExitCode.INCOMPARABLE: RunOutcome("incomparable", FAINT),
    ExitCode.OK: RunOutcome("ok", GOOD),
}
"""By the run's exit code, the most severe first: where several hold, the first counts."""

OUTCOMES_BY_WORD = {outcome.word: outcome for outcome in OUTCOMES.values()}

_STATUSES = {"error": BAD, "skipped": FAINT}
"""Statuses of a cell that are no verdict's word; the others are warnings."""


def most_severe(codes: Iterable[ExitCode]) -> ExitCode:
    """Return the exit code of a run whose series have these."""
    held = set(codes)
    return next((code for code in OUTCOMES if code in held), ExitCode.OK)


def tone_of(word: str | None) -> Tone:
    """Return the tone of a verdict, a status or a state. Nothing is faint, and a word not known here a warning."""
    if not word:
        return FAINT
    return _TONE_BY_WORD.get(word, WARN)


_TONE_BY_WORD = {**_STATUSES, **{str(verdict): verdict.tone for verdict in Verdict}}


def style_sheet() -> str:
    """Return the tones as variables of CSS, for a light ground and a dark one."""
    light = " ".join(f"--{tone}: {tone.light};" for tone in TONES)
    dark = " ".join(f"--{tone}: {tone.dark};" for tone in TONES)
    return (
        f":root {{ {light} }}\n"
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}\n'
        f':root[data-theme="dark"] {{ {dark} }}\n'
    )
