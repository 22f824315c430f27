"""Compare the TTGIR and PTX of two kernels, with names normalised first.

Values, layouts, labels and registers are numbered by first use, and source locations and comments are dropped. So an
added instruction appears as one line of the diff instead of changing every line after it.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from groupbench.tracker.record import Code

_TTGIR_NAME = re.compile(r"%[\w$.]+(?::\d+)?(?:#\d+)?")
_LAYOUT = re.compile(r"#(?:blocked|linear|shared|mma|smem|dot_op|slice)\d*\b")
_PTX_NAME = re.compile(r"%(?:r|rd|rs|f|fd|p|h|hh|b|rh|rq)\d+\b|\$L__\w+")
_MLIR_OP = re.compile(r"^(?:%[^=]*= )?\"?([a-z_]\w*\.[\w.]+)")
_PTX_OP = re.compile(r"^(?:@!?\S+\s+)?([a-z]\w*(?:\.[\w:]+)*)")


@dataclass(frozen=True)
class IrDiff:
    """The differences of two texts in one language."""

    language: str  # ttgir, ptx or source
    summary: tuple[str, ...]  # changed operation counts, largest change first: "ttg.local_alloc 8 → 6"
    lines: tuple[str, ...]  # lines of a unified diff

    @property
    def added(self) -> int:
        return sum(line.startswith("+") for line in self.lines)

    @property
    def removed(self) -> int:
        return sum(line.startswith("-") for line in self.lines)


def compare(before: Code, after: Code, context: int = 1) -> list[IrDiff]:
    """Return a diff for each language in which both kernels are kept and differ."""
    diffs = []
    for language in ("source", "ttgir", "ptx"):
        texts = [getattr(code, language) for code in (before, after)]
        if None in texts:
            continue
        old, new = (normalised(language, text) for text in texts)
        if old == new:
            continue
        diff = difflib.unified_diff(old, new, n=context, lineterm="")
        lines = tuple(line for line in diff if not line.startswith(("---", "+++")))
        diffs.append(IrDiff(language, () if language == "source" else tuple(operations(language, old, new)), lines))
    return diffs


def normalised(language: str, text: str) -> list[str]:
    """Return the lines of a text with names numbered by first use."""
    if language == "source":
        return [line.rstrip() for line in text.splitlines() if line.strip()]
    names: dict[str, dict[str, int]] = {}

    def number(kind: str, name: str) -> str:
        numbers = names.setdefault(kind, {})
        return f"{kind}{numbers.setdefault(name, len(numbers))}"

    if language == "ptx":
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith((".reg", ".version", "//"))]
        return [_PTX_NAME.sub(lambda match: number(_register(match[0]), match[0]), line) for line in lines]
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("#", "module"))]
    lines = [_TTGIR_NAME.sub(lambda match: number("%", match[0]), line) for line in lines]
    return [_LAYOUT.sub(lambda match: number(match[0].rstrip("0123456789"), match[0]), line) for line in lines]


def _register(name: str) -> str:
    """Return the kind of a register or label: `%r` for `%r12`, `$L` for a label."""
    return "$L" if name.startswith("$L") else name.rstrip("0123456789")


def operations(language: str, before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the changed operation counts, largest change first: `ttg.local_alloc 8 → 6`."""
    pattern = _PTX_OP if language == "ptx" else _MLIR_OP
    old, new = (Counter(match[1] for line in side if (match := pattern.match(line))) for side in (before, after))
    names = sorted({*old, *new}, key=lambda name: (-abs(new[name] - old[name]), name))
    return [f"{name} {old[name]} → {new[name]}" for name in names if old[name] != new[name]]
