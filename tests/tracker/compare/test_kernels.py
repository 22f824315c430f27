"""The differences between compiled kernels, in one line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.compare.kernels import differences, pairs
from groupbench.tracker.facts.record import Kernel


def kernel(name: str = "gemm", hash_: str = "a", **fields: Any) -> Kernel:
    facts: dict[str, Any] = {"registers": 168, "spills": 0, "shared_bytes": 1024, "occupancy": 0.125}
    facts |= {"counted_in": "sass", "counts": {"instructions": 100, "wgmma m64n256k16": 4, "barrier": 2}}
    facts |= {"config": {"num_stages": 4, "num_warps": 8}}
    return Kernel(name=name, hash=hash_, **facts | fields)


CASES: dict[str, tuple[Kernel, list[str]]] = {
    "nothing": (kernel(), []),
    "one fewer stage": (
        kernel(hash_="b", config={"num_stages": 3, "num_warps": 8}, shared_bytes=768),
        ["4 stages → 3", "shared memory 1 → 0.75 KiB"],
    ),
    "spills come first": (
        kernel(hash_="b", spills=24, registers=255),
        ["96 B spilled", "168 registers → 255"],
    ),
    "another instruction": (
        kernel(hash_="b", counts={"instructions": 100, "wgmma m64n128k16": 8, "barrier": 2}),
        ["wgmma m64n256k16 → m64n128k16"],
    ),
    "another kind of instruction": (
        kernel(hash_="b", counts={"instructions": 100, "mma m16n8k16": 64, "barrier": 2}),
        ["wgmma m64n256k16 → mma m16n8k16"],
    ),
    "more of the same": (
        kernel(hash_="b", counts={"instructions": 104, "wgmma m64n256k16": 8, "barrier": 2}),
        ["wgmma m64n256k16 × 4 → × 8", "instructions 100 → 104"],
    ),
    "other barriers": (
        kernel(hash_="b", counts={"instructions": 101, "wgmma m64n256k16": 4, "barrier": 3}),
        ["barriers 2 → 3", "instructions 100 → 101"],
    ),
    "counted in PTX": (kernel(hash_="b", counted_in="ptx", counts={"instructions": 9, "wgmma m64n256k16": 4}), []),
    "its own constants": (
        kernel(hash_="b", config={"num_stages": 4, "num_warps": 4, "BLOCK_M": 64}),
        ["num_warps 8 → 4", "BLOCK_M absent → 64"],
    ),
    "renamed": (kernel("fused", "b"), ["gemm → fused"]),
    "no Triton kernel": (kernel("nvjet", "b", config={}), ["gemm → nvjet"]),
}  # fmt: skip


@pytest.mark.parametrize(("after", "expected"), CASES.values(), ids=CASES)
def test_differences(after: Kernel, expected: list[str]) -> None:
    assert differences([kernel()], [after]) == expected


def test_kernels_are_compared_by_name_and_named_where_there_are_several() -> None:
    two = [kernel("a", "1"), kernel("b", "2")]
    assert differences(two, [kernel("a", "1"), kernel("b", "3", spills=1)]) == ["b: 4 B spilled"]
    assert differences(two, [kernel("a", "1")]) == ["b removed"] and differences(two[:1], two) == ["b added"]
    assert differences([], two) == differences(two, []) == []


@given(st.lists(st.sampled_from("abc"), max_size=5), st.lists(st.sampled_from("abc"), max_size=5))
def test_every_kernel_is_in_one_pair(before: list[str], after: list[str]) -> None:
    sides = ([kernel(name, str(i)) for i, name in enumerate(side)] for side in (before, after))
    old, new = map(list, sides)
    matched = pairs(old, new)
    assert sorted(p.before.hash for p in matched if p.before) == sorted(k.hash for k in old)
    assert sorted(p.after.hash for p in matched if p.after) == sorted(k.hash for k in new)
