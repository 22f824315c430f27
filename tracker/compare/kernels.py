"""Describe how the kernels of two calls differ: `4 stages → 3; 96 B spilled; 168 registers → 255`.

Pure functions of the kernels' facts in records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from groupbench.tracker.facts.record import Kernel

LOUD = ("num_stages", "num_warps", "num_ctas", "maxnreg")
"""Config entries to list first. The others are the kernel's own constants."""

_STAGES = ("STAGES", "NUM_STAGES", "num_stages")


@dataclass(frozen=True)
class KernelPair:
    """A kernel before and after; None if a side has no kernel of that name."""

    before: Kernel | None
    after: Kernel | None

    @property
    def name(self) -> str:
        kernel = self.after or self.before
        assert kernel is not None
        return kernel.name

    @property
    def same(self) -> bool:
        """Return whether both sides launch the same code with the same config."""
        before, after = self.before, self.after
        if before is None or after is None or before.hash is None or before.launches != after.launches:
            return before == after
        return (before.hash, before.config) == (after.hash, after.config)


def pairs(before: Sequence[Kernel], after: Sequence[Kernel]) -> list[KernelPair]:
    """Return the kernels of two calls in pairs: by name, and within a name in launch order.

    If each side has exactly one kernel that the other lacks, those two are a pair: a renamed kernel.
    """
    matched: list[KernelPair] = []
    names = dict.fromkeys(kernel.name for kernel in (*before, *after))
    for name in names:
        of_name = ([kernel for kernel in side if kernel.name == name] for side in (before, after))
        matched += [KernelPair(old, new) for old, new in zip_longest(*of_name)]
    removed = [pair for pair in matched if pair.after is None]
    added = [pair for pair in matched if pair.before is None]
    if len(removed) == len(added) == 1:
        matched = [
            KernelPair(removed[0].before, pair.after) if pair is added[0] else pair
            for pair in matched
            if pair is not removed[0]
        ]
    return matched


def differences(before: Sequence[Kernel], after: Sequence[Kernel], *, without: str | None = None) -> list[str]:
    """Return the differences, most informative first, prefixed with the kernel's name if there are several.

    `without` names a metric that the reader sees already: `stages`, `spills` or `occupancy`.
    """
    if not before or not after:
        return []
    changed = [pair for pair in pairs(before, after) if not pair.same]
    several = max(len(before), len(after)) > 1
    unique: list[str] = []
    for pair in changed:
        texts = list(_of_pair(pair, without))
        if texts and several and pair.before is not None and pair.after is not None:
            texts[0] = f"{pair.name}: {texts[0]}"
        unique += (text for text in texts if text not in unique)
    return unique


def _of_pair(pair: KernelPair, without: str | None) -> Iterator[str]:
    before, after = pair.before, pair.after
    if before is None or after is None:
        yield f"{pair.name} {'added' if before is None else 'removed'}"
        return
    if before.name != after.name:
        yield f"{before.name} → {after.name}"
    stages = (_stages(before), _stages(after))
    if stages[0] != stages[1] and None not in stages and without != "stages":
        yield f"{stages[0]} stages → {stages[1]}"
    if without != "spills":
        yield from _spills(before, after)
    yield from _config(before.config, after.config)  # causes, before their consequences
    yield from _products(before.counts, after.counts)
    yield from _numbers(before, after, without)
    yield from _counts(before, after)
    if before.launches != after.launches and None not in (before.launches, after.launches):
        yield f"launched {before.launches} × → {after.launches} ×"


def _stages(kernel: Kernel) -> int | None:
    value = next((kernel.config[name] for name in _STAGES if name in kernel.config), None)
    return value if isinstance(value, int) else None


def _spills(before: Kernel, after: Kernel) -> Iterator[str]:
    old, new = (None if kernel.spills is None else 4 * kernel.spills for kernel in (before, after))
    if old is None or new is None or old == new:
        return
    if not old:
        yield f"{new} B spilled"
    else:
        yield f"{old} B spilled → {new or 'none'}"


def _products(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[str]:
    """Yield changes of matrix instructions: their shapes or their counts."""
    old, new = ([name for name in counts if "mma" in name] for counts in (before, after))
    removed, added = [name for name in old if name not in after], [name for name in new if name not in before]
    if before and after and removed + added:
        yield f"{' + '.join(removed) or 'no matrix instruction'} → {_short(removed, added) or 'no matrix instruction'}"
    for name in old:
        if before[name] != after.get(name, before[name]):
            yield f"{name} × {before[name]} → × {after[name]}"


def _short(removed: Sequence[str], added: Sequence[str]) -> str:
    """Return the new instructions, shortened to the shape (`m64n128k16`) if both are of one kind."""
    if len(removed) == len(added) == 1 and removed[0].split()[0] == added[0].split()[0]:
        return added[0].split()[-1]
    return " + ".join(added)


def _numbers(before: Kernel, after: Kernel, without: str | None) -> Iterator[str]:
    if before.registers != after.registers and before.registers and after.registers:
        yield f"{before.registers} registers → {after.registers}"
    if before.occupancy != after.occupancy and before.occupancy and after.occupancy and without != "occupancy":
        yield f"occupancy {100 * before.occupancy:.0f} % → {100 * after.occupancy:.0f} %"
    if before.shared_bytes != after.shared_bytes and None not in (before.shared_bytes, after.shared_bytes):
        yield f"shared memory {_kib(before.shared_bytes)} → {_kib(after.shared_bytes)} KiB"


def _kib(size: int | None) -> str:
    return f"{(size or 0) / 1024:.4g}"


def _config(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield differences of the configs, without stages if both have them; none if one side is no Triton kernel."""
    if not before or not after:
        return
    names = [*LOUD, *(name for name in (*before, *after) if name not in LOUD)]
    stages = next((name for name in _STAGES if name in before and name in after), None)
    for name in dict.fromkeys(names):
        if name != stages and before.get(name) != after.get(name):
            yield f"{name} {_shown(before, name)} → {_shown(after, name)}"


def _shown(config: Mapping[str, Any], name: str) -> str:
    return str(config[name])[:60] if name in config else "absent"


def _counts(before: Kernel, after: Kernel) -> Iterator[str]:
    """Yield changes of other instruction counts, if both sides were counted in the same language."""
    if before.counted_in is None or before.counted_in != after.counted_in:
        return
    names = [name for name in (*before.counts, *after.counts) if "mma" not in name and name != "instructions"]
    for name in dict.fromkeys(names):
        old, new = before.counts.get(name, 0), after.counts.get(name, 0)
        if old != new:
            yield f"{_plural(name)} {old} → {new}"
    old, new = before.counts.get("instructions", 0), after.counts.get("instructions", 0)
    if old != new:
        yield f"instructions {old:,} → {new:,}"


def _plural(kind: str) -> str:
    return {"async copy": "async copies"}.get(kind, f"{kind}s")
