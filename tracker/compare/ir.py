"""Compare the TTGIR and PTX of two kernels, whatever the compiler named their values.

Lines are aligned without the names of values, layouts, labels and registers. Names at the same places then count as one
name. So an added instruction appears as one line of the diff instead of renaming the values in every line after it.
Source locations and comments are dropped.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from groupbench.tracker.facts.record import Code

_TTGIR_NAME = re.compile(r"%[\w$.]+(?::\d+)?(?:#\d+)?|#(?:blocked|linear|shared|mma|smem|dot_op|slice)\d*\b")
_PTX_NAME = re.compile(r"%(?:r|rd|rs|f|fd|p|h|hh|b|rh|rq)\d+\b|\$L__\w+")
_TTGIR_DEFINED = re.compile(r"^(%[\w$.]+(?::\d+)?)(?= = )")
_PTX_DEFINED = re.compile(r"^(?:@\S+\s+)?(?!st\b|red\b)[a-z][\w.:]*\s+\{?\s*(%(?:r|rd|rs|f|fd|p|h|hh|b|rh|rq)\d+)")
_MLIR_VALUE = re.compile(r"%[\w$.]+")
_MLIR_RESULT = re.compile(r"^(%[\w$.]+)(?=(?::\d+)? = )")
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
        old, new = renamed(language, *(instructions(language, text) for text in texts))
        if old == new:
            continue
        diff = difflib.unified_diff(old, new, n=context, lineterm="")
        lines = tuple(line for line in diff if not line.startswith(("---", "+++")))
        diffs.append(IrDiff(language, () if language == "source" else tuple(operations(language, old, new)), lines))
    return diffs


def source_changes(before: Code, after: Code) -> list[str]:
    """Return the changed lines of the source, without comments: `x = 1 → x = 2`, `added: x = 1`, `removed: x = 1`."""
    if before.source is None or after.source is None:
        return []
    old, new = ([" ".join(line) for line in _statements(code.source or "")] for code in (before, after))
    changes: list[str] = []
    for kind, a, a_end, b, b_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            both = min(a_end - a, b_end - b)
            changes += (f"{x} → {y}" for x, y in zip(old[a : a + both], new[b : b + both], strict=True))
            changes += (f"removed: {line}" for line in old[a + both : a_end])
            changes += (f"added: {line}" for line in new[b + both : b_end])
    return changes


def _statements(source: str) -> Iterator[list[str]]:
    """Yield the words of each line of Python that is more than a comment."""
    for line in source.splitlines():
        words = line.split(" # ")[0].split()
        if words and not words[0].startswith("#"):
            yield words


def instructions(language: str, text: str) -> list[str]:
    """Return the lines of a text that matter, without declarations and blank lines."""
    if language == "source":
        return [line.rstrip() for line in text.splitlines() if line.strip()]
    dropped = (".reg", ".version", "//") if language == "ptx" else ("#", "module")
    lines = [stripped for line in text.splitlines() if (stripped := line.strip()) and not stripped.startswith(dropped)]
    return _each_named_once(lines) if language == "ttgir" else lines


def _each_named_once(lines: Iterable[str]) -> list[str]:
    """Return lines of MLIR with another name for each value. MLIR uses a region's names again after the end."""
    uses: Counter[str] = Counter()

    def name(match: re.Match[str]) -> str:
        return f"{match[0]}.{uses[match[0]]}"

    named = []
    for line in lines:
        uses.update(_MLIR_VALUE.findall(line) if line.startswith("^") else _MLIR_RESULT.findall(line))
        named.append(_MLIR_VALUE.sub(name, line))
    return named


def renamed(language: str, old: Sequence[str], new: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the lines of both texts with common names, which are numbered by first use in the old text.

    A name of the new text is that of the old text at the same place of an aligned line, if possible of the line that
    defines it. Other names get numbers of their own.
    """
    if language not in _NAMES:
        return list(old), list(new)
    pattern, defined, kind = _NAMES[language]
    masked, masked_new = ([pattern.sub(lambda match: kind(match[0]), line) for line in side] for side in (old, new))
    aligned = [
        (old[a + at], new[b + at])
        for a, b, size in difflib.SequenceMatcher(None, masked, masked_new, autojunk=False).get_matching_blocks()
        for at in range(size)
    ]
    old_of: dict[str, str] = {}  # by new name
    taken: set[str] = set()
    for names in (defined, pattern):
        for before, after in aligned:
            for was, now in zip(names.findall(before), names.findall(after), strict=True):
                if now not in old_of and was not in taken:
                    old_of[now] = was
                    taken.add(was)
    numbers: dict[str, dict[tuple[str, bool], int]] = {}

    def numbered(name: str, is_new: bool) -> str:
        of_kind = numbers.setdefault(kind(name), {})
        return f"{kind(name)}{of_kind.setdefault((name, is_new), len(of_kind))}"

    def of_new(name: str) -> str:
        return numbered(old_of[name], False) if name in old_of else numbered(name, True)

    return (
        [pattern.sub(lambda match: numbered(match[0], False), line) for line in old],
        [pattern.sub(lambda match: of_new(match[0]), line) for line in new],
    )


def _ttgir_kind(name: str) -> str:
    """Return `%` for a value, or `#blocked` for a layout."""
    return "%" if name.startswith("%") else name.rstrip("0123456789")


def _ptx_kind(name: str) -> str:
    """Return `%r` for a register `%r12`, or `$L` for a label."""
    return "$L" if name.startswith("$L") else name.rstrip("0123456789")


_NAMES = {"ttgir": (_TTGIR_NAME, _TTGIR_DEFINED, _ttgir_kind), "ptx": (_PTX_NAME, _PTX_DEFINED, _ptx_kind)}
"""By language: patterns of a name and of the name that a line defines, and the function that returns a name's kind."""


def operations(language: str, before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the changed operation counts, largest change first: `ttg.local_alloc 8 → 6`."""
    pattern = _PTX_OP if language == "ptx" else _MLIR_OP
    old, new = (Counter(match[1] for line in side if (match := pattern.match(line))) for side in (before, after))
    names = sorted({*old, *new}, key=lambda name: (-abs(new[name] - old[name]), name))
    return [f"{name} {old[name]} → {new[name]}" for name in names if old[name] != new[name]]
