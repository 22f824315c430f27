"""What differs between the compiled kernels of two calls, in a line: `4 stages → 3; 96 B spilled; 168 registers → 255`.

Pure functions of what records say of kernels; the code itself is compared in `explain`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from groupbench.tracker.record import Kernel

LOUD = ("num_stages", "num_warps", "num_ctas", "maxnreg")
"""What of a config is named first. The rest are the kernel's own constants."""

_STAGES = ("STAGES", "NUM_STAGES", "num_stages")


@dataclass(frozen=True)
class KernelPair:
    """A kernel before and after; None where a side has none of that name."""

    before: Kernel | None
    after: Kernel | None

    @property
    def name(self) -> str:
        kernel = self.after or self.before
        assert kernel is not None
        return kernel.name

    @property
    def same(self) -> bool:
        """Whether both sides launch the same code with the same config."""
        before, after = self.before, self.after
        if before is None or after is None or before.hash is None or before.launches != after.launches:
            return before == after
        return (before.hash, before.config) == (after.hash, after.config)


def pairs(before: Sequence[Kernel], after: Sequence[Kernel]) -> list[KernelPair]:
    """Return the kernels of two calls side by side: by name, and those of one name in the order of their launch.

    Where each side has one kernel that the other lacks, these two are a pair: one that was renamed.
    """
    found: list[KernelPair] = []
    names = dict.fromkeys(kernel.name for kernel in (*before, *after))
    for name in names:
        of_name = ([kernel for kernel in side if kernel.name == name] for side in (before, after))
        found += [KernelPair(old, new) for old, new in zip_longest(*of_name)]
    gone = [pair for pair in found if pair.after is None]
    come = [pair for pair in found if pair.before is None]
    if len(gone) == len(come) == 1:
        found = [
            KernelPair(gone[0].before, pair.after) if pair is come[0] else pair for pair in found if pair is not gone[0]
        ]
    return found


def differences(before: Sequence[Kernel], after: Sequence[Kernel]) -> list[str]:
    """Return what differs, the most telling first; the name of a kernel is in front where there are several."""
    if not before or not after:
        return []
    changed = [pair for pair in pairs(before, after) if not pair.same]
    several = max(len(before), len(after)) > 1
    told: list[str] = []
    for pair in changed:
        texts = list(_of_pair(pair))
        if texts and several and pair.before is not None and pair.after is not None:
            texts[0] = f"{pair.name}: {texts[0]}"
        told += (text for text in texts if text not in told)
    return told


def _of_pair(pair: KernelPair) -> Iterator[str]:
    before, after = pair.before, pair.after
    if before is None or after is None:
        yield f"{pair.name} is {'new' if before is None else 'gone'}"
        return
    if before.name != after.name:
        yield f"{before.name} → {after.name}"
    stages = (_stages(before), _stages(after))
    if stages[0] != stages[1] and None not in stages:
        yield f"{stages[0]} stages → {stages[1]}"
    yield from _spills(before, after)
    yield from _products(before.counts, after.counts)
    yield from _numbers(before, after)
    yield from _config(before.config, after.config)
    yield from _counts(before, after)
    if before.launches != after.launches and None not in (before.launches, after.launches):
        yield f"launched {before.launches} × → {after.launches} ×"


def _stages(kernel: Kernel) -> int | None:
    found = next((kernel.config[name] for name in _STAGES if name in kernel.config), None)
    return found if isinstance(found, int) else None


def _spills(before: Kernel, after: Kernel) -> Iterator[str]:
    old, new = (None if kernel.spills is None else 4 * kernel.spills for kernel in (before, after))
    if old is None or new is None or old == new:
        return
    if not old:
        yield f"{new} B spilled"
    else:
        yield f"{old} B spilled → {new or 'none'}"


def _products(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[str]:
    """Matrix instructions: other shapes, or another number of the same."""
    old, new = ({name: n for name, n in counts.items() if "mma" in name} for counts in (before, after))
    gone, come = [name for name in old if name not in new], [name for name in new if name not in old]
    if before and after and (gone or come):
        yield f"{' + '.join(gone) or 'no matrix instruction'} → {_short(gone, come) or 'no matrix instruction'}"
    for name in (name for name in old if name in new and old[name] != new[name]):
        yield f"{name} × {old[name]} → × {new[name]}"


def _short(gone: Sequence[str], come: Sequence[str]) -> str:
    """`m64n128k16` where both are of one kind."""
    if len(gone) == len(come) == 1 and gone[0].split()[0] == come[0].split()[0]:
        return come[0].split()[-1]
    return " + ".join(come)


def _numbers(before: Kernel, after: Kernel) -> Iterator[str]:
    if before.registers != after.registers and before.registers and after.registers:
        yield f"{before.registers} registers → {after.registers}"
    if before.occupancy != after.occupancy and before.occupancy and after.occupancy:
        yield f"occupancy {100 * before.occupancy:.0f} % → {100 * after.occupancy:.0f} %"
    if before.shared_bytes != after.shared_bytes and None not in (before.shared_bytes, after.shared_bytes):
        yield f"shared memory {_kib(before.shared_bytes)} → {_kib(after.shared_bytes)} KiB"


def _kib(size: int | None) -> str:
    return f"{(size or 0) / 1024:.4g}"


def _config(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """What the configs differ in, stages aside where both have them."""
    names = [*LOUD, *(name for name in (*before, *after) if name not in LOUD)]
    stages = next((name for name in _STAGES if name in before and name in after), None)
    for name in dict.fromkeys(names):
        if name != stages and before.get(name) != after.get(name):
            yield f"{name} {_shown(before, name)} → {_shown(after, name)}"


def _shown(config: Mapping[str, Any], name: str) -> str:
    return str(config[name])[:60] if name in config else "absent"


def _counts(before: Kernel, after: Kernel) -> Iterator[str]:
    """Other instructions, where both sides were counted in the same."""
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
