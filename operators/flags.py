"""TritonBench's own flags on the built-in host: each in this host's terms, where it has a meaning here.

Sources: TritonBench's utils/parser.py (10b14473).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from groupbench.operators.errors import UsageError

MODES = {"--bwd": "bwd", "--fwd-bwd": "fwd_bwd", "--fwd-no-grad": "fwd_no_grad"}
"""Flags that say --mode in another way; of several TritonBench takes the last."""

SWITCHES: dict[str, dict[str, Any]] = {
    **{flag: {"mode": mode} for flag, mode in MODES.items()},
    "--fwd-no-grad": {"mode": "fwd"},
    "--simple-output": {"quiet": True},
    "--test-only": {"bursts": 1, "samples": 1, "test_only": True},
}
ALWAYS = ("--force", "--bypass-fail", "--gpu-telemetry", "--isolate")
"""What this host does anyway."""

VALUES = {"--repcnt": ("samples", int), "--sleep": ("idle", float)}
"""Flags with a value: the option of this host that it is."""

IN_MS = ("--warmup", "--rep")
"""Durations that say how many runs TritonBench makes; this host has a number of runs."""


def translated(rest: Sequence[str]) -> dict[str, Any]:
    """Return the options that TritonBench's flags stand for.

    Raises UsageError for a flag without a meaning here, or without its value.
    """
    options: dict[str, Any] = {}
    unknown: list[str] = []
    words = iter(rest)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in SWITCHES and not equals:
            options |= SWITCHES[flag]
        elif flag in VALUES or flag in IN_MS:
            number = _number(flag, value if equals else next(words, ""))
            if flag in IN_MS:
                print(f"{flag} has no effect: this host takes --bursts of --samples runs each", file=sys.stderr)
            else:
                name, kind = VALUES[flag]
                options[name] = kind(number)
        elif word not in ALWAYS:
            unknown.append(word)
    if unknown:
        raise UsageError(f"unknown option or argument: {' '.join(unknown)} (not a flag of the built-in host)")
    return options


def _number(flag: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e6:
        raise UsageError(f"{flag} {text}: not a number from 0 to a million")
    return number
