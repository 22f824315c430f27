"""Recognise name parts which change with each run: container ids, memory addresses, temporary paths, dates.

Such a part never identifies a series: each run would begin a new one. `spelling` removes them from every cell and every
machine that is stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache

_NEAR = timedelta(days=3)
"""Largest distance between a run and a date in its names. Another date is a parameter of the benchmark."""

_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_HEX = r"(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])"  # both digits and letters: not a number, not a word
_TEMPORARY = re.compile(
    r"(?:(?:/private)?/(?:var/)?tmp|(?:/private)?/var/folders|/dev/shm|[A-Za-z]:[/\\]+(?:[^,;|\s]*[/\\])?Temp)"
    r"((?:[/\\]+[^/\\\s,;:|'\"()<>\[\]{}]+)+)[/\\]*",
    re.IGNORECASE,
)
_RANDOM = re.compile(
    r"tmp[._-]?(?=[a-z0-9_]*\d)[a-z0-9_]{6,10}|tmp\.[A-Za-z0-9]{6,12}|.*-of-.*|.*[._-](?=[A-Za-z0-9]*\d)[A-Za-z0-9]{6,}"
)

_PARTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("memory address", re.compile(r"(?:\s*\bat\s+|\s*@\s*)0x[0-9a-fA-F]{5,16}\b|\b0x(?:0000)?[57][0-9a-fA-F]{11}\b")),
    ("UUID", re.compile(rf"(?<![0-9A-Za-z]){_UUID}(?![0-9A-Za-z])")),
    (
        "container id",
        re.compile(
            rf"(?<![0-9a-zA-Z]){_HEX}(?:[0-9a-f]{{64}}|[0-9a-f]{{40}})(?![0-9a-zA-Z])"
            rf"|\b(?:host|hostname|container|runner|node|docker)[=:_-]{_HEX}[0-9a-f]{{12}}(?![0-9a-zA-Z])"
        ),
    ),
    ("process id", re.compile(r"(?<![A-Za-z0-9])pid[ =:_-]?\d+(?![A-Za-z0-9])", re.IGNORECASE)),
    ("temporary name", re.compile(r"(?<![A-Za-z0-9])tmp(?=[a-z0-9_]{0,7}\d)[a-z0-9_]{8}(?![A-Za-z0-9_])")),
)

_DATE = re.compile(
    r"(?<!\d)(20\d\d)([-_.]?)(0[1-9]|1[0-2])\2(0[1-9]|[12]\d|3[01])"
    r"(?:[T _-]?(?:\d{2}[:.h-]\d{2}(?:[:.-]\d{2}(?:[.,]\d+)?)?|(?<=T)\d{4,6}|\d{6})(?:Z|[+-]\d{2}:?\d{2})?)?(?!\d)"
)
_EPOCH = re.compile(r"(?<![\d.])(1[5-9]\d{8})(?:\d{3})?(?![\d.])")

_SUSPECT = re.compile(
    r"0x|[/\\]temp[/\\]|tmp|pid|/var/|/dev/shm|[0-9a-f]{8}-|20\d\d|1[5-9]\d{8}|[0-9a-f]{40}"
    r"|(?:host|hostname|container|runner|node|docker)[=:_-][0-9a-f]{12}",
    re.IGNORECASE,
)
"""Matches every text in which a part could change. A cheap pre-filter, because it rarely does."""

_LOOSE_ENDS = re.compile(r"^(?:[\s,_/#@:.]|-(?!\d))+|[\s,_/#@:=.-]+$")
_DOUBLED = re.compile(r"([,/_-])(?:\s*\1)+")
_BEFORE_END = re.compile(r"[\s_/-]+(?=[,)\]>])")
_NO_VALUE = re.compile(r"(?:^|(?<=,))\w+=(?=,|$)")


def settled(text: str, when: datetime | None = None) -> tuple[str, dict[str, str]]:
    """Return a name's lasting parts, and an example for each kind of dropped part.

    Args:
        text: Such as `f=<Net at 0x7f31c0de4a90>,n=8`.
        when: The start of the run. A date in the text counts only if it is close to it.
    """
    return _settled(text, when and when.date()) if suspect(text) else (text, {})


@lru_cache(maxsize=1 << 14)  # a file has the same backend in each result
def _settled(text: str, day: date | None) -> tuple[str, dict[str, str]]:
    dropped: dict[str, str] = {}

    def drop(kind: str) -> Callable[[re.Match[str]], str]:
        def replace(match: re.Match[str]) -> str:
            dropped.setdefault(kind, match[0].strip())
            return ""

        return replace

    def path(match: re.Match[str]) -> str:
        dropped.setdefault("temporary path", match[0])
        last = re.split(r"[/\\]+", match[1])[-1]
        return "" if _RANDOM.fullmatch(last.partition(".")[0]) or last.startswith("tmp") else last

    def dated(match: re.Match[str]) -> str:
        if day is None or not _near(_date_of(match), day):
            return match[0]
        dropped.setdefault("date", match[0])
        return ""

    changed = _TEMPORARY.sub(path, text)
    for kind, pattern in _PARTS:
        changed = pattern.sub(drop(kind), changed)
    changed = _EPOCH.sub(dated, _DATE.sub(dated, changed))
    return (_tidy(changed), dropped) if dropped else (text, dropped)


@lru_cache(maxsize=1 << 16)
def suspect(text: str) -> bool:
    """Return whether a part of a name could change with each run."""
    return _SUSPECT.search(text) is not None


def _date_of(match: re.Match[str]) -> date | None:
    try:
        if match.re is _EPOCH:
            return datetime.fromtimestamp(int(match[1]), UTC).date()
        return date(int(match[1]), int(match[3]), int(match[4]))
    except (ValueError, OverflowError):
        return None


def _near(dated: date | None, day: date) -> bool:
    return dated is not None and abs(dated - day) <= _NEAR


def _tidy(text: str) -> str:
    """Return text without separators around dropped parts."""
    text = _DOUBLED.sub(r"\1", _NO_VALUE.sub("", text))
    for empty in ("()", "[]", "{}", "''", '""'):
        text = text.replace(empty, "")
    return _LOOSE_ENDS.sub("", _BEFORE_END.sub("", _DOUBLED.sub(r"\1", text)))


_MACHINE = re.compile(
    rf"[0-9a-f]{{12}}|[0-9a-f]{{32}}|[0-9a-f]{{40}}|[0-9a-f]{{64}}|{_UUID}"  # Docker, Kubernetes
    r"|GitHub[ _-]Actions[ _-]\d+|Hosted Agent( \d+)?|fv-az[\w-]*|pkrvm\w{6,}|runnervm\w{4,}|Mac-\d{10,}(\.local)?"
    r"|runner-[\w-]+-project-\d+-concurrent-\d+|runner-[a-z0-9_-]{6,}-\d+-[\w-]*"  # GitLab
    r"|ip-\d+-\d+-\d+-\d+(\.[\w.-]+)?|\d+\.\d+\.\d+\.\d+|i-[0-9a-f]{8,17}"  # Amazon
    r"|(appveyor|travis|circleci|cirrus|buildkite|jenkins|azure|gha|arc)\b[\w-]*[-_](?=[\w-]*\d)[\w-]+"
    r"|build-[0-9]+-project-[0-9]+[\w-]*|DESKTOP-[A-Z0-9]{7}-\d+|localhost(\.localdomain)?|buildkitsandbox",
    re.IGNORECASE,
)
_POD = re.compile(
    r"(?P<name>.+?)(?:-[a-z0-9]{5})?-runner-(?=[a-z0-9]*\d)[a-z0-9]{5}"
    r"|(?P<deployment>.+?)-(?=[a-z0-9]*\d)[bcdf-hj-np-tv-z2-9]{8,10}-[bcdf-hj-np-tv-z2-9]{5}"
    rf"|(?P<id>.+?)[-_.](?:{_UUID}|{_HEX}[0-9a-f]{{12,64}})"
)
"""Names ending in an id, such as Kubernetes pods: `linux.aws.a100-x7b2p-runner-8kz5h`."""


def settled_machine(name: str | None) -> str | None:
    """Return the lasting parts of a machine's name, or None."""
    name = (name or "").strip()
    if not name or _MACHINE.fullmatch(name):
        return None
    pod = _POD.fullmatch(name)
    if pod:
        return settled_machine(pod["name"] or pod["deployment"] or pod["id"])
    return settled(name)[0] or None
