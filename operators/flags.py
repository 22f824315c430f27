"""Translate TritonBench's flags to built-in host options.

Sources: TritonBench's utils/parser.py (10b14473).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from groupbench.operators.errors import UsageError
from groupbench.tracker.text.wording import closest

MODES = {"--bwd": "bwd", "--fwd-bwd": "fwd_bwd", "--fwd-no-grad": "fwd_no_grad"}
"""Flags that set --mode; if there are several, TritonBench uses the last."""

SWITCHES: dict[str, dict[str, Any]] = {
    **{flag: {"mode": mode} for flag, mode in MODES.items()},
    "--fwd-no-grad": {"mode": "fwd"},
    "--simple-output": {"quiet": True},
    "--test-only": {"bursts": 1, "samples": 1, "test_only": True},
}
ALWAYS = ("--force", "--bypass-fail", "--gpu-telemetry", "--isolate", "--keep-going")
"""Flags for the default behaviour of this host, which ignores them."""

VALUES = {"--repcnt": ("samples", int), "--sleep": ("idle", float)}
"""Flags with a value, with this host's option and its type."""

IN_MS = ("--warmup", "--rep")
"""Durations from which TritonBench derives the number of runs; this host sets the number itself."""


INSTEAD = {
    "--latency-measure-mode": "--protocol chooses how a latency is measured",
    "--entropy-criterion": "--bursts and --samples set the number of runs",
    "--input-sample-mode": "--num-inputs takes the first inputs, and --shapes any others",
    "--output-dir": "--output and --output-json name files",
    "--devices": "--gpus names several GPUs",
    "--exit-on-exception": "a failing cell ends no other cell, and the exit code shows it",
    "--export": "--records writes every result",
}
"""Flags of TritonBench that this host lacks, each with the alternative."""


def unknown(words: Sequence[str], options: Iterable[str]) -> str:
    """Return the error for unknown words on the command line, with the likely option or flag."""
    flag = next((word.partition("=")[0] for word in words if word.startswith("--")), None)
    meant = closest(flag, [*options, *SWITCHES, *ALWAYS, *VALUES, *IN_MS]) if flag is not None else None
    return f"unknown option or argument: {' '.join(words)}" + (f" (did you mean {meant}?)" if meant else "")


def translated(rest: Sequence[str], host_options: Iterable[str] = ()) -> dict[str, Any]:
    """Return this host's options for TritonBench's flags.

    Args:
        host_options: This host's own options, to suggest one for an unknown flag.

    Raises UsageError for an unknown flag or a bad value.
    """
    options: dict[str, Any] = {}
    others: list[str] = []
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
            others.append(word)
    if others:
        flag = others[0].partition("=")[0]
        if flag in INSTEAD:
            raise UsageError(f"{flag} is a flag of TritonBench's host; on the built-in host, {INSTEAD[flag]}")
        raise UsageError(f"{unknown(others, host_options)} (not a flag of the built-in host)")
    return options


def _number(flag: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e6:
        raise UsageError(f"{flag} {text}: not a number from 0 to a million")
    return number
