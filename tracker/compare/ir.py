"""TTGIR and PTX of two kernels compared: what is a matter of naming is made equal first.

Names of values, layouts, labels and registers are numbered by their first use, places in the source and comments are
left out, so that an instruction that is added shows as one line and not as every line after it.
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
    """What two texts of one language differ in."""

    language: str  # ttgir, ptx or source
    summary: tuple[str, ...]  # operations that one has more of: "ttg.local_alloc 8 → 6", the largest change first
    lines: tuple[str, ...]  # of a unified diff

    @property
    def added(self) -> int:
        return sum(line.startswith("+") for line in self.lines)

    @property
    def removed(self) -> int:
        return sum(line.startswith("-") for line in self.lines)


def compare(before: Code, after: Code, context: int = 1) -> list[IrDiff]:
    """Return a diff for each language that both kernels are kept in and differ in."""
    found = []
    for language in ("source", "ttgir", "ptx"):
        texts = [getattr(code, language) for code in (before, after)]
        if None in texts:
            continue
        old, new = (normalised(language, text) for text in texts)
        if old == new:
            continue
        diff = difflib.unified_diff(old, new, n=context, lineterm="")
        lines = tuple(line for line in diff if not line.startswith(("---", "+++")))
        found.append(IrDiff(language, () if language == "source" else tuple(operations(language, old, new)), lines))
    return found


def normalised(language: str, text: str) -> list[str]:
    """Return the lines of a text with what is only a name numbered by its first use."""
    if language == "source":
        return [line.rstrip() for line in text.splitlines() if line.strip()]
    names: dict[str, dict[str, int]] = {}

    def number(kind: str, name: str) -> str:
        known = names.setdefault(kind, {})
        return f"{kind}{known.setdefault(name, len(known))}"

    if language == "ptx":
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith((".reg", ".version", "//"))]
        return [_PTX_NAME.sub(lambda match: number(_register(match[0]), match[0]), line) for line in lines]
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("#", "module"))]
    lines = [_TTGIR_NAME.sub(lambda match: number("%", match[0]), line) for line in lines]
    return [_LAYOUT.sub(lambda match: number(match[0].rstrip("0123456789"), match[0]), line) for line in lines]


def _register(name: str) -> str:
    """`%r` of `%r12`; `$L` of a label."""
    return "$L" if name.startswith("$L") else name.rstrip("0123456789")


def operations(language: str, before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return what one side has more of, the largest change first: `ttg.local_alloc 8 → 6`."""
    pattern = _PTX_OP if language == "ptx" else _MLIR_OP
    old, new = (Counter(match[1] for line in side if (match := pattern.match(line))) for side in (before, after))
    names = sorted({*old, *new}, key=lambda name: (-abs(new[name] - old[name]), name))
    return [f"{name} {old[name]} → {new[name]}" for name in names if old[name] != new[name]]
