"""The verdicts: every word with severity, exit code, colour and meaning.

To add a verdict, add one line to `Verdict`. The order of the lines is the order of severity.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from groupbench.tracker.facts.exits import ExitCode


@dataclass(frozen=True)
class Tone:
    """The look of a good, bad or neutral word in each output."""

    name: str  # CSS class and variable name
    light: str  # text colour on a light background
    dark: str  # text colour on a dark background
    terminal: str  # terminal colour; empty for the default
    sign: str  # shown next to the word, so that colour is never the only cue
    dot: str  # for outputs that allow only text

    def __str__(self) -> str:
        return self.name


GOOD = Tone("good", light="#176f32", dark="#53c674", terminal="green", sign="✓", dot="🟢")
BAD = Tone("bad", light="#c02626", dark="#ff8278", terminal="red", sign="✕", dot="🔴")
WARN = Tone("warn", light="#8a5d00", dark="#e3b548", terminal="yellow", sign="!", dot="🟡")
FAINT = Tone("faint", light="#5d6670", dark="#9ba5b0", terminal="", sign="·", dot="⚪")
TONES = (GOOD, BAD, WARN, FAINT)


@dataclass(frozen=True)
class _Facts:
    word: str
    meaning: str
    tone: Tone
    exit: ExitCode = ExitCode.OK
    strict: ExitCode = ExitCode.OK
    quiet: bool = False
    changed: bool = False
    of_sides: bool = False
    unjudged: str = ""
    phrase: str = ""


_may = partial(_Facts, tone=WARN, exit=ExitCode.INCOMPLETE, changed=True)
_open = partial(_Facts, tone=FAINT, strict=ExitCode.INCOMPLETE)


class Verdict(StrEnum):
    """The verdict on one series, most severe first."""

    tone: Tone
    meaning: str
    exit: ExitCode
    """Exit code of a run with one such series."""
    strict: ExitCode
    """Exit code under --strict, used where `exit` is OK."""
    quiet: bool
    """The series is only counted, unless its row is news."""
    changed: bool
    """The series has changed, or may have."""
    of_sides: bool
    """`groupbench compare` uses the verdict as well."""
    unjudged: str
    """Why a latency with the verdict was not judged, as in `2 too noisy`; empty if it was."""
    phrase: str
    """The verdict in the gate's first line, after a number of series."""
    severity: int
    """0 is the most severe."""

    def __new__(cls, facts: _Facts) -> Verdict:
        self = str.__new__(cls, facts.word)
        self._value_ = facts.word
        vars(self).update(vars(facts), phrase=facts.phrase or facts.word, severity=len(cls.__members__))
        return self

    WRONG = _Facts(
        "wrong", "its error exceeds the tolerance, or another check failed", BAD, ExitCode.FAILED, of_sides=True
    )
    REGRESSED = _Facts("regressed", "it got worse", BAD, ExitCode.FAILED, changed=True, of_sides=True)
    MISSING = _Facts(
        "missing", "it failed, or the previous run measured it and this one did not", WARN, ExitCode.INCOMPLETE,
        of_sides=True,
    )  # fmt: skip
    UNRESOLVED = _may("unresolved", "it may have changed, but an A/B did not decide, or the machine may be the cause")
    SUSPECT = _may(  # suspected improvements do not set the exit code
        "suspect", "it may have changed; an A/B can decide", phrase="may have regressed"
    )
    UNCONFIRMED = _may(
        "unconfirmed", "its first night far outside all earlier results; an A/B or the next night can decide"
    )
    INCOMPARABLE = _Facts(
        "incomparable", "it changed on a machine that has not measured it before", WARN, ExitCode.INCOMPARABLE,
        of_sides=True, unjudged="on a new machine",
    )  # fmt: skip
    UNDECIDED = _open(
        "undecided", "it may have got worse, but history cannot tell, and no A/B decided", unjudged="undecided"
    )
    IMPROVED = _Facts("improved", "it got better", GOOD, changed=True, of_sides=True)
    NOISY = _open("noisy", "its bursts vary too much to judge the latency", quiet=True, unjudged="too noisy")
    OK = _Facts("ok", "it did not change, or not because of the code", GOOD, quiet=True, of_sides=True)
    NEW = _open("new", "it has no earlier result", quiet=True, of_sides=True, unjudged="new")
    UNAVAILABLE = _Facts("unavailable", "its backend cannot run here", FAINT, quiet=True)
    UNKNOWN = _Facts("~", "`groupbench compare` cannot judge it", FAINT, quiet=True, of_sides=True)

    @property
    def fails(self) -> bool:
        """Return whether the verdict is a certain change for the worse, which opens an incident."""
        return self.exit is ExitCode.FAILED


@dataclass(frozen=True)
class RunOutcome:
    """The verdict on a whole run."""

    word: str
    tone: Tone


UNDECIDED = RunOutcome("undecided", FAINT)
"""The outcome of a run that passed although history alone cannot tell whether a series got worse."""

OUTCOMES = {
    ExitCode.FAILED: RunOutcome("regression", BAD),
    ExitCode.INCOMPLETE: RunOutcome("incomplete", WARN),
    ExitCode.INCOMPARABLE: RunOutcome("incomparable", FAINT),
    ExitCode.OK: RunOutcome("ok", GOOD),
}
"""Outcomes by exit code, most severe first. The first that applies is the run's."""

NOT_JUDGED = RunOutcome("not judged", FAINT)
"""The outcome of a run that passed although none of its latencies could be judged. Its exit code is OK."""

BESIDES_CODE = ("toolchain", "infrastructure", "machine", "environment")
"""Causes of which no author of a commit is to blame."""

INCIDENT_STATES = {
    "new": BAD,
    "confirmed": BAD,
    "acknowledged": WARN,
    "expected": FAINT,
    "fixed": GOOD,
    "invalid": FAINT,
}
"""The states of an incident with their tones. A verdict has the word `new` too, in another tone."""

_OTHER_WORDS = {
    # statuses
    "error": BAD,
    "skipped": FAINT,
    # events of a series
    "alert": BAD,
    "closed": FAINT,
    "note": FAINT,
    "environment": FAINT,
}
"""Tones of words that are not verdicts. Every other word is a warning."""


def most_severe(codes: Iterable[ExitCode]) -> ExitCode:
    """Return the exit code of a run whose series have these codes."""
    held = set(codes)
    return next((code for code in OUTCOMES if code in held), ExitCode.OK)


def tone_of(word: str | None) -> Tone:
    """Return the tone of a verdict, status or event: faint if empty, a warning if unknown."""
    if not word:
        return FAINT
    return _TONE_BY_WORD.get(word, WARN)


def tone_of_count(word: str, number: int, acknowledged: int) -> Tone:
    """Return a verdict count's tone: a warning once all rows are acknowledged."""
    return WARN if acknowledged and acknowledged == number else tone_of(word)


_TONE_BY_WORD = {**_OTHER_WORDS, **{str(verdict): verdict.tone for verdict in Verdict}}


def style_sheet() -> str:
    """Return the tones as CSS variables, for a light and a dark background."""
    light = " ".join(f"--{tone}: {tone.light};" for tone in TONES)
    dark = " ".join(f"--{tone}: {tone.dark};" for tone in TONES)
    return (
        f":root {{ {light} }}\n"
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}\n'
        f':root[data-theme="dark"] {{ {dark} }}\n'
    )
