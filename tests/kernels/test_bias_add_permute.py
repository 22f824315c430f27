"""Compare the fused kernel of bias_add_permute with the reference, and the reference with torch's own steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from groupbench.kernels.bias_add_permute import fused
from groupbench.kernels.bias_add_permute.fused import FusedConfig, prepare_fused
from groupbench.kernels.bias_add_permute.problem import OPS, Group, bias_add_permute_reference
from groupbench.kernels.device import KNOWN

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Sizes = tuple[tuple[int, int, int], tuple[int, int], int]
SMALL = FusedConfig(16, 16, 16, num_warps=4, num_stages=1)
TMA = replace(SMALL, tma=True)

# sizes of each group: (M0, M1, M2), (N0, N1), K
CASES: dict[str, list[Sizes]] = {
    "one_group": [((2, 2, 16), (2, 16), 32)],
    "whole_tiles": [((2, 1, 32), (2, 32), 32), ((1, 2, 64), (1, 32), 64)],
    "sweeps_over_n0": [((2, 3, 16), (4, 16), 16), ((1, 2, 32), (3, 32), 24)],
    "unlike_groups": [((2, 3, 8), (2, 24), 40), ((1, 5, 16), (3, 8), 16), ((4, 1, 4), (1, 40), 8)],
    "nothing_a_multiple": [((3, 5, 7), (3, 11), 33), ((1, 2, 37), (5, 3), 45)],
    "empty_group_first": [((0, 4, 8), (2, 8), 16), ((2, 2, 8), (2, 8), 16)],
    "empty_group_between": [((2, 2, 8), (2, 8), 16), ((2, 2, 8), (2, 0), 16), ((1, 1, 9), (1, 9), 9)],
    "empty_group_last": [((2, 2, 8), (2, 8), 16), ((2, 2, 0), (2, 8), 16)],
    "empty_in_the_middle": [((1, 0, 8), (2, 8), 16), ((2, 2, 8), (0, 8), 16), ((3, 1, 17), (2, 19), 31)],
    "no_rows_at_all": [((0, 4, 256), (8, 128), 64)],
    "one_row": [((1, 1, 1), (2, 24), 40), ((2, 2, 8), (1, 24), 40)],
    "one_column": [((2, 3, 8), (1, 1), 40)],
    "one_element": [((1, 1, 1), (1, 1), 1)],
    "no_sum": [((1, 2, 16), (2, 8), 0), ((1, 2, 16), (2, 8), 16)],
    "one_past_a_tile": [((1, 1, 33), (1, 33), 33)],
    "many_groups": [((1, 1 + g % 3, 4), (1 + g % 2, 4), 8 + g) for g in range(11)],
}  # fmt: skip


def make(sizes: list[Sizes], op: str, dtype: torch.dtype, seed: int = 0) -> list[Group]:
    generator = torch.Generator().manual_seed(seed)

    def values(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    groups = []
    for m, n, K in sizes:
        M, N = prod(m), prod(n)
        e = None if op == "none" else values(M, N)
        groups.append(Group(values(M, K), values(N, K), values(N), e, m, n))
    return groups


@pytest.fixture
def check_groups(check, poisoned) -> Callable[..., None]:
    """Return a function that compares the outputs of groups, unwritten elements included, with the reference."""

    def compare(groups: list[Group], op: str, config: FusedConfig | None = None) -> None:
        with poisoned():
            outputs = prepare_fused(groups, op, config)()
        for out, right in zip(outputs, bias_add_permute_reference(groups, op), strict=True):
            assert out.is_contiguous()
            check(out, right, groups[0].a.dtype)

    return compare


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["unlike_groups", "nothing_a_multiple", "no_sum", "one_row"])
def test_reference_matches_its_formula(name: str, op: str) -> None:
    groups = make(CASES[name], op, torch.float32)
    for group, out in zip(groups, bias_add_permute_reference(groups, op), strict=True):
        (_, M1, M2), (_, N1) = group.m, group.n
        ends = tuple(size - 1 for size in group.permuted)
        for at in ((0, 0, 0, 0, 0), ends, tuple(end // 2 for end in ends), (0, ends[1], 0, 0, ends[4])):
            m0, n0, m1, n1, m2 = at
            m, n = (m0 * M1 + m1) * M2 + m2, n0 * N1 + n1
            value = group.a[m].double() @ group.b[n].double() + group.d[n]
            if group.e is not None:
                value = value * group.e[m, n] if op == "mul" else value + group.e[m, n]
            torch.testing.assert_close(out[at].double(), value.double())


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str, dtype: torch.dtype, check_groups) -> None:
    for number, op in enumerate(OPS):
        check_groups(make(CASES[name], op, dtype), op, (TMA, SMALL, TMA)[number])


@pytest.mark.parametrize("op", OPS)
def test_matches_the_reference_with_the_chosen_config(op: str, check_groups) -> None:
    for case in ("unlike_groups", "whole_tiles", "nothing_a_multiple"):
        check_groups(make(CASES[case], op, torch.float16), op)


@pytest.mark.skipif(torch.cuda.is_available(), reason="inspects the interpreter's stores")
@pytest.mark.parametrize("M2", [1, 32], ids=["rows_of_many_slabs", "rows_of_one_slab"])
def test_offsets_in_an_output_of_more_than_2_31_elements(M2: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """N0 * M1 is 2**31. The test allocates nothing that large: it inspects the first store, then stops the kernel."""
    M1, N0, config = 1 << 16, 1 << 15, replace(SMALL, block_m=32)
    x, out, stored = torch.zeros(1, 1, dtype=torch.float16), torch.zeros(1, dtype=torch.float16), []
    group = Group(x.expand(2 * M1 * M2, 16), x.expand(N0, 16), x[0].expand(N0), None, (2, M1, M2), (N0, 1))
    n0 = N0 - config.block_n
    monkeypatch.setattr(fused, "sweeps", lambda *_: [(0, M1 * M2, n0, N0)])
    run = prepare_fused([group], "none", config)

    def store(self: Any, pointers: Any, *_: Any) -> None:
        stored.append((pointers.data.astype("int64") - out.data_ptr()) // 2)
        raise RuntimeError("seen")

    for name in ("create_store", "create_masked_store"):
        monkeypatch.setattr(interpreter.InterpreterBuilder, name, store)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: out)
    with pytest.raises(interpreter.InterpreterError, match="seen"):
        run()
    assert stored[0].shape == (config.block_n, config.block_m)
    assert stored[0].min() == (N0 + n0) * M1 * M2  # at m0 = 1, n0, m1 = 0


# --- layouts ----------------------------------------------------------------------------------------------------------


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def padded(x: Tensor) -> Tensor:
    """Return x with NaN in the storage between its rows."""
    wide = x.new_full((x.size(0), x.size(1) + 5), float("nan"))
    wide[:, : x.size(1)] = x
    return wide[:, : x.size(1)]


def shifted(x: Tensor) -> Tensor:
    """Return x one element past an aligned address."""
    room = x.new_full((x.numel() + 1,), float("nan"))
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


def strided(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)[:, ::2]


LAYOUTS = {"transposed": transposed, "padded": padded, "shifted": shifted, "strided": strided}


@pytest.mark.parametrize("operand", ["a", "b", "e"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, operand: str, check_groups) -> None:
    groups = make(CASES["unlike_groups"], "mul", torch.float16)
    other = LAYOUTS[layout](getattr(groups[1], operand))
    changed = [groups[0], replace(groups[1], **{operand: other}), groups[2]]
    assert not fused.tma_reads(changed)
    check_groups(changed, "mul", TMA)


@pytest.mark.parametrize("operand", ["a", "b", "e"])
def test_one_row_for_all(operand: str, check_groups) -> None:
    """Expanded rows have a stride of 0, which TMA cannot read."""
    groups = make(CASES["one_group"], "add", torch.float16)
    matrix = getattr(groups[0], operand)
    changed = [replace(groups[0], **{operand: matrix[:1].expand(matrix.shape)})]
    assert fused.tma_reads(groups) and not fused.tma_reads(changed)
    check_groups(changed, "add", TMA)


def test_tma_reads_strided_rows(check_groups) -> None:
    """TMA skips the storage between rows, as long as rows start at multiples of 16 bytes."""
    groups = make(CASES["one_group"], "mul", torch.float16)

    def wide(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_full((x.size(0), 8), float("nan"))], 1)[:, : x.size(1)]

    changed = [replace(groups[0], a=wide(groups[0].a), b=wide(groups[0].b), e=wide(groups[0].e))]
    assert fused.tma_reads(changed)
    check_groups(changed, "mul", TMA)


def test_one_bias_for_all_columns_and_a_strided_one(check_groups) -> None:
    groups = make(CASES["unlike_groups"], "add", torch.float16)
    changed = [
        replace(groups[0], d=groups[0].d[:1].expand(48)),
        replace(groups[1], d=groups[1].d.repeat_interleave(3)[::3]),
        groups[2],
    ]
    check_groups(changed, "add", SMALL)


def test_reads_its_operands_on_every_call_into_new_tensors() -> None:
    groups = make(CASES["one_group"], "mul", torch.float16)
    run = prepare_fused(groups, "mul", SMALL)
    first = run()[0]
    kept = first.clone()
    assert torch.equal(run()[0], kept)
    assert groups[0].e is not None
    groups[0].e.mul_(2)
    assert torch.equal(run()[0], 2 * kept)
    assert torch.equal(first, kept)
    del groups  # the callable owns its operands: the allocator would reuse freed memory here
    junk = [torch.full((64, 32), float("nan"), dtype=torch.float16, device=DEVICE) for _ in range(64)]
    assert torch.equal(run()[0], 2 * kept)
    del junk


# --- constants and the choice of a config -----------------------------------------------------------------------------


def test_constants_name_the_divisors() -> None:
    groups = make([((2, 2, 16), (2, 16), 32), ((1, 1, 48), (1, 32), 64)], "mul", torch.float16)
    constants = fused.constants_of(groups, SMALL)
    assert constants == {
        **dict.fromkeys(("A_UNIT", "B_UNIT", "E_UNIT", "EVEN_M", "EVEN_N", "EVEN_K", "WHOLE_M", "WHOLE_N"), True),
        **dict.fromkeys(("ALIGN_K", "ALIGN_M", "ALIGN_N"), 8),
    }
    odd = [*groups, *make([((1, 1, 20), (1, 34), 36)], "mul", torch.float16)]
    constants = fused.constants_of(odd, SMALL)
    assert (constants["ALIGN_K"], constants["ALIGN_M"], constants["ALIGN_N"]) == (4, 4, 2)
    assert not any(constants[name] for name in ("EVEN_M", "EVEN_N", "EVEN_K", "WHOLE_M", "WHOLE_N"))
    # Whole tiles of rows that extend over two n0, and a K of 0, which has no whole step.
    across = fused.constants_of(make([((2, 2, 8), (4, 8), 0)], "mul", torch.float16), SMALL)
    assert (across["EVEN_M"], across["EVEN_N"], across["EVEN_K"]) == (True, True, False)
    assert not (across["WHOLE_M"] or across["WHOLE_N"])
    # An empty group does not count.
    assert fused.constants_of([*groups, *make([((0, 1, 3), (1, 3), 3)], "mul", torch.float16)], SMALL)["EVEN_K"] is True


@pytest.mark.parametrize("op", OPS)
def test_candidates_and_defaults_are_legal(op: str) -> None:
    for config in fused.candidates(op):
        assert fused.illegal(config, torch.bfloat16, op) is None, config
    assert len(set(fused.candidates(op))) == len(fused.candidates(op)) <= 16
    for name, config in fused.CONFIGS.items():
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        assert fused.illegal(config, dtype, "none" if name == "none" else op) is None, name


@pytest.mark.parametrize(
    ("sizes", "op", "tuned", "name"),
    [
        (((8, 8, 256), (16, 128), 64), "none", None, "pointers"),
        (((16, 64, 256), (16, 128), 64), "none", None, "none"),
        (((16, 64, 256), (16, 128), 64), "add", None, "operand"),
        (((16, 64, 256), (16, 128), 65), "mul", None, "pointers"),
        (((16, 64, 256), (16, 128), 64), "mul", "fp32", "fp32"),
        (((16, 64, 256), (16, 128), 65), "mul", "operand", "pointers"),
    ],
    ids=["few_tiles", "without_e", "with_e", "no_tma", "tuned", "tuned_for_tma"],
)
def test_chooses(sizes: Sizes, op: str, tuned: str | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, K = sizes
    M, N = prod(m), prod(n)

    def on_no_cpu(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.bfloat16, device="meta")

    group = Group(on_no_cpu(M, K), on_no_cpu(N, K), on_no_cpu(N), None if op == "none" else on_no_cpu(M, N), m, n)
    fields = None if tuned is None else fused.CONFIGS[tuned].__dict__
    monkeypatch.setattr("groupbench.kernels.grouped_gemm.tuned.tuned_config", lambda *key: fields)
    assert fused.choose_config([group], op, KNOWN["sm_90"]) == fused.CONFIGS[name]


# --- sweeps -----------------------------------------------------------------------------------------------------------


@given(
    shapes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=4),
    programs=st.integers(1, 12),
)
def test_sweeps_take_every_tile_once_in_falling_shares(shapes: list[tuple[int, int]], programs: int) -> None:
    groups = make([((1, 1, M), (1, N), 1) for M, N in shapes], "none", torch.float32)
    planned = fused.sweeps(groups, SMALL, programs)
    taken = [(g, row, n) for g, row, start, end in planned for n in range(start, end, 16)]
    assert taken == [(g, m, n) for g, (M, N) in enumerate(shapes) for m in range(0, M, 16) for n in range(0, N, 16)]
    assert all(end <= shapes[g][1] and (end % 16 == 0 or end == shapes[g][1]) for g, _, _, end in planned)
    left = fused.tiles_of(groups, SMALL)
    rows: dict[tuple[int, int], list[int]] = {}
    for g, row, start, end in planned:
        rows.setdefault((g, row), []).append(-(-(end - start) // 16))
    for widths in rows.values():
        assert max(widths) <= max(1, left // programs)
        assert max(widths) - min(widths) <= 1
        left -= sum(widths)


def group(**changes: Any) -> Group:
    return replace(make(CASES["one_group"], "mul", torch.float16)[0], **changes)


@pytest.mark.parametrize(
    ("build", "op", "message"),
    [
        (list, "mul", "groups is empty"),
        (lambda: [group()], "div", "'div' is not one of mul, add, none"),
        (lambda: [group()], "none", "group 0 has an e"),
        (lambda: [group(), group(e=None)], "mul", "group 1 has no e"),
        (lambda: [group(m=(2, 2, 15))], "mul", r"expected \[60, 32\]"),
        (lambda: [group(n=(2, -16))], "mul", "N0, N1"),
        (lambda: [group(d=torch.ones(5))], "mul", "d of shape"),
        (lambda: [group(e=torch.ones(5, 5))], "mul", "e of shape"),
        (lambda: [group(e=torch.ones(64, 32, device=DEVICE))], "mul", "one dtype"),
    ],
    ids=["none", "op", "e_too_many", "e_missing", "rows", "columns", "bias", "e_shape", "dtypes"],
)
def test_refuses(build: Callable[[], list[Group]], op: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_fused(build(), op)


def test_refuses_tiles_that_do_not_compile() -> None:
    with pytest.raises(ValueError, match="block_n=24"):
        prepare_fused([group()], "mul", replace(SMALL, block_n=24))
    with pytest.raises(ValueError, match="bytes of"):
        prepare_fused([group()], "mul", FusedConfig(256, 256, 64, 8, 4))
