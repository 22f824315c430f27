"""Diffs of TTGIR and PTX ignore names."""

from __future__ import annotations

import re

import pytest

from groupbench.tracker.compare.ir import compare, instructions, source_changes
from groupbench.tracker.facts.record import Code

TTGIR = """#blocked = #ttg.blocked<{sizePerThread = [1]}>
#blocked1 = #ttg.blocked<{sizePerThread = [8]}>
module attributes {"ttg.num-warps" = 4 : i32} {
  tt.func public @gemm(%a: !tt.ptr<bf16>, %K: i32) {
    %c0 = arith.constant 0 : i32
    %x = tt.load %a : tensor<64x64xbf16, #blocked1>
    %y = ttg.local_alloc %x : (tensor<64x64xbf16, #blocked1>)
    tt.return
  }
}"""
PTX = """.version 8.7
.target sm_90a
.reg .b32 %r<9>;
mov.u32 %r1, %ctaid.x;
@%p1 bra $L__BB0_2;
add.s32 %r2, %r1, 1;
$L__BB0_2:
ret;"""


def code(ttgir: str = TTGIR, ptx: str = PTX, source: str = "def gemm():\n    pass") -> Code:
    return Code(hash="a" * 16, name="gemm", source=source, ttgir=ttgir, ptx=ptx)


def test_names_layouts_registers_and_labels_do_not_differ() -> None:
    renamed = TTGIR.replace("%x", "%37").replace("%c0", "%c0_i32_5").replace("blocked1", "blocked7")
    registers = PTX.replace("%r2", "%r7").replace("%r1", "%r6").replace("BB0_2", "BB0_9").replace("<9>", "<12>")
    assert compare(code(), code(renamed, registers)) == []


def test_an_instruction_more_is_one_line() -> None:
    alloc = "    %z = ttg.local_alloc %x : (tensor<64x64xbf16, #blocked1>)\n"
    more = TTGIR.replace("    tt.return", f"{alloc}    tt.return")
    (diff,) = compare(code(), code(more))
    assert (diff.language, diff.summary, diff.added, diff.removed) == ("ttgir", ("ttg.local_alloc 1 → 2",), 1, 0)


LONG_TTGIR = """tt.func public @gemm(%a: !tt.ptr<bf16>) {
%0 = arith.constant 3 : i32
%1 = tt.load %a : tensor<64xbf16, #blocked>
%2 = "tt.reduce"(%1) <{axis = 0 : i32}> ({
^bb0(%3: bf16, %4: bf16):
%5 = arith.addf %3, %4 : bf16
tt.reduce.return %5 : bf16
}) : (tensor<64xbf16, #blocked>) -> bf16
%3 = tt.splat %2 : bf16 -> tensor<64xbf16, #blocked>
%4 = arith.mulf %3, %1 : tensor<64xbf16, #blocked>
tt.store %a, %4 : tensor<64x!tt.ptr<bf16>, #blocked>
tt.return
}"""
LONG_PTX = """mov.u32 %r1, %ctaid.x;
add.s32 %r2, %r1, 4;
shl.b32 %r3, %r2, 1;
@%p1 bra $L__BB0_1;
$L__BB0_1:
mad.lo.s32 %r4, %r3, %r2, %r1;
st.global.b32 [%rd1], %r4;
ret;"""


def shifted(text: str, prefix: str, first: int) -> str:
    """Return the text with the numbers of a prefix's names increased from `first` on, as after one name more."""
    return re.sub(rf"{prefix}(\d+)\b", lambda match: f"{prefix}{int(match[1]) + (int(match[1]) >= first)}", text)


@pytest.mark.parametrize(
    ("language", "text", "prefix", "before", "more"),
    [
        ("ttgir", LONG_TTGIR, "%", "%1 = tt.load", "%1 = arith.constant 4 : i32\n"),
        ("ptx", LONG_PTX, "%r", "shl.b32", "add.s32 %r3, %r1, 8;\n"),
    ],
    ids=["ttgir", "ptx"],
)
def test_an_instruction_more_renames_none_of_those_after_it(
    language: str, text: str, prefix: str, before: str, more: str
) -> None:
    number = int(more.partition(f" {prefix}" if language == "ptx" else prefix)[2][0])
    start, end = text.split(before)
    longer = start + more + shifted(before + end, prefix, number)
    pair = [Code(hash="a" * 16, name="gemm", **{language: each}) for each in (text, longer)]
    for sides, expected in ((pair, (1, 0)), (pair[::-1], (0, 1))):
        (diff,) = compare(*sides)
        assert (diff.added, diff.removed) == expected, diff.lines


def test_each_language_has_its_diff() -> None:
    diffs = compare(code(), code(TTGIR, PTX.replace("add.s32 %r2, %r1, 1;\n", ""), "def gemm():\n    return"))
    assert [diff.language for diff in diffs] == ["source", "ptx"] and diffs[1].summary == ("add.s32 1 → 0",)


def test_a_value_that_is_used_elsewhere_is_a_difference() -> None:
    swapped = TTGIR.replace("ttg.local_alloc %x", "ttg.local_alloc %a")
    assert [diff.language for diff in compare(code(), code(swapped))] == ["ttgir"]


def test_a_language_missing_on_one_side_is_not_compared() -> None:
    assert compare(code(), Code(hash="b" * 16, name="gemm", ptx=PTX)) == []
    assert instructions("source", "a\n\n  b  \n") == ["a", "  b"]


SOURCES = {
    "the same": ("x = 1\n", "x = 1\n", []),
    "a comment": ("x = 1\n", "# why\nx = 1  # how\n", []),
    "indentation and blank lines": ("if x:\n    y = 1\n", "if x:\n\n  y  = 1\n", []),
    "a changed line": ("a\nx = 1\nb\n", "a\nx = 2\nb\n", ["x = 1 → x = 2"]),
    "an added line": ("a\nb\n", "a\nx = 1\nb\n", ["added: x = 1"]),
    "a removed line": ("a\nx = 1\nb\n", "a\nb\n", ["removed: x = 1"]),
    "one line becomes two": ("a\nx\nb\n", "a\ny\nz\nb\n", ["x → y", "added: z"]),
    "a source that is not kept": (None, "a\n", []),
}


@pytest.mark.parametrize(("before", "after", "changes"), SOURCES.values(), ids=SOURCES)
def test_changes_of_the_source(before: str | None, after: str | None, changes: list[str]) -> None:
    old, new = (Code(hash="0" * 16, name="k", source=source) for source in (before, after))
    assert source_changes(old, new) == changes
