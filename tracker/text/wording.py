"""Format values on one line, for terminals, Markdown, XML and HTML."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from datetime import datetime

INTERPRETED = "interpreted"
"""The timing of kernels that Triton's interpreter ran."""

FACTOR_FROM = 10
"""Factor from which a change is shown as `60.8×` rather than as `+5980.0%`."""


def printable(text: str) -> str:
    """Return a text on one line without control characters, so that it cannot control a terminal. An indent is kept."""
    flat = " " * (len(text) - len(text.lstrip(" "))) + " ".join(text.split())
    if flat.isprintable():  # most are, and this is ten times faster
        return flat
    return _without_controls(flat)


def printable_lines(text: str) -> str:
    """Return a text without control characters, but with lines, blanks and tabs."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join("\t".join(map(_without_controls, line.split("\t"))) for line in lines)


def _without_controls(text: str) -> str:
    return "".join("�" if unicodedata.category(char) in ("Cc", "Cf", "Cs") else char for char in text)


def counted(number: float, noun: str, many: str | None = None) -> str:
    """Return a number with a noun: `1 cell`, `2,000 cells`, `1.5 minutes`. `many` is a special plural."""
    shown = f"{number:g}" if isinstance(number, float) else f"{number:,}"
    return f"{shown} {noun if number == 1 else many or noun + 's'}"


def some(values: Sequence[str]) -> str:
    """Return the first five values, joined by commas, and `…` for the rest."""
    return ", ".join(values[:5]) + (", …" if len(values) > 5 else "")


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that a mistyped one probably means, or None."""
    from difflib import get_close_matches  # needed only for errors

    return next(iter(get_close_matches(name, list(names), n=1)), None)


def no_such(what: str, name: str, names: Iterable[str]) -> str:
    """Return an error message, such as `no suite 'moo' (did you mean 'moe'?); known: moe, smoke`."""
    names = list(names)
    return f"{what} {name!r}{suggestion(name, names)}; known: {', '.join(names) or 'none'}"


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return ` (did you mean 'moe'?)` for a mistyped name, or an empty text."""
    meant = closest(name, names)
    return f" (did you mean {meant!r}?)" if meant else ""


def milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:#.4g}".rstrip(".") if value < 1000 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """Return a rounded time: `90 s`, `5 min`."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def latency(ms: float | None, timing: str | None) -> str:
    """Return a latency in ms, or `interpreted`: the interpreter's time is not a latency."""
    return INTERPRETED if timing == INTERPRETED else milliseconds(ms)


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}%"


def times(factor: float) -> str:
    """Return a factor as `1.25×`, with two significant digits below 0.1."""
    digits = 0 if factor >= 100 else 1 if factor >= 10 else 2
    return f"{factor:.{digits}f}×" if factor >= 0.1 else f"{factor:.2g}×"


def signed_change(value: float | None, digits: int = 1) -> str:
    """Return a relative change in percent, or as a factor from `FACTOR_FROM` on."""
    return times(value + 1) if value is not None and value + 1 >= FACTOR_FROM else signed_percent(value, digits)


def signed_percent(value: float | None, digits: int = 1) -> str:
    """Return a relative change in percent, for a column, which has one unit. One that rounds to zero is `+0.0%`."""
    zero = f"{0:.{digits}f}%"
    return "" if value is None else f"{100 * value:+.{digits}f}%".replace(f"-{zero}", f"+{zero}")


def signed_ends(low: float, high: float, between: str = " to ") -> str:
    """Return the ends of a range of relative changes in one unit: factors if the higher one is a factor."""
    show = signed_percent if high + 1 < FACTOR_FROM else lambda value: times(value + 1)
    return f"{show(low)}{between}{show(high)}"


def change_in_words(
    change: float, words: tuple[str, str] = ("slower", "faster"), digits: str = ".1f", percent: str = "%"
) -> str:
    """Return a relative change as `5.0% slower`, or `12.5× slower`. The second word is for a decrease."""
    amount = times(change + 1) if change + 1 >= FACTOR_FROM else f"{100 * abs(change):{digits}}{percent}"
    return f"{amount} {words[0] if change > 0 else words[1]}"


def spread(value: float | None) -> str:
    return "" if value is None else f"±{100 * value:.2f}%"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 1000 else ">1000"


def interval(low: float | None, high: float | None) -> str:
    """Return the interval of a ratio: `0.980 .. 1.020`."""
    return "" if low is None or high is None else f"{ratio(low)} .. {ratio(high)}"


def p_value(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value >= 0.001 else "<0.001"


def short_number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def rms_text(before: float | None, now: float | None) -> str:
    """Return two relative errors: `rms 0.001 → 0.0018`."""
    return f"rms {short_number(before)} → {short_number(now)}"


def date(value: datetime | None) -> str:
    return "" if value is None else f"{value:%Y-%m-%d %H:%M}"


def joined(*texts: str | None) -> str | None:
    """Return the non-empty texts as one note."""
    return "; ".join(text for text in texts if text) or None


def commit_text(value: str | None, dirty: bool = False, digits: int = 10) -> str:
    """Return a short hash, with a `+` if the working tree was dirty, as a `+` at the end of `value` says too."""
    return "" if value is None else value[:digits] + ("+" if dirty or value.endswith("+") else "")


def run_text(value: str) -> str:
    """Return the start of a run's id, long enough to find the run by."""
    return value if len(value) <= 15 else value[:15]


def yes_or_no(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def chance(value: float) -> str:
    """Return a probability, never 100 %: errors outside the rates are likelier than the last digit."""
    return "above 99.9 %" if value > 0.999 else f"{100 * value:.1f} %"


def fact_text(value: object) -> str:
    """Return a stored value of any kind for people."""
    if isinstance(value, bool):
        return yes_or_no(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return date(value) + " UTC"
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
