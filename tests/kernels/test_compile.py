"""Compile kernels for Hopper (sm_90) without one: no spills, shared memory as computed, wgmma in the code.

A process of its own compiles them: this file run as a script, since the tests' process interprets. Of each kernel a few
configs are compiled: those that fill registers or shared memory most, and one for each path through the code. Of
split-K, each config that the rule gives for a typical shape.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import pytest
import sources
import torch
from sources import CASES, DTYPES, HOPPER

from groupbench.kernels import elementwise
from groupbench.kernels.bias_add_permute import fused
from groupbench.kernels.grouped_gemm import flat_pointers, wgrad
from groupbench.kernels.split_k import stream

REGISTERS = 65536
# These combine parts that other cases compile: a config, the layout of weights, sizes, a dtype, a schedule.
COMBINED = {
    *("flat_specialized_alone", "wgrad_wide_and_dynamic", "wgrad_specialized_uneven", "fp8_rowwise_fast"),
    *("fp8_specialized_rowwise_256", "gate_up_large_training", "moe_combine_of_two"),
    *("flat_large_nk", "flat_specialized_256", "flat_specialized_192_nk", "flat_specialized_192_columns"),
    *("wgrad_specialized_192_lockstep", "wgrad_specialized_alone", "fp8_specialized_rowwise"),
    *("fp8_specialized_blockwise_256", "gate_up_many_256_training", "moe_place_and_spread_of_wide"),
    *("seed_long", "square", "decode_32", "stream_router", "stream_long", "stream_long_64", "stream_narrow"),
    *("stream_decode", "stream_fp16", "stream_split", "seed_fp32", "decode_64", "outer_k_nk", "wide"),
    *("none_ragged", "mul", "pointers_ragged", "specialized_none_ragged", "specialized_mul"),
    *(name for name in CASES if name.startswith("candidate_")),
}


def made_by(*makers: Any) -> list[str]:
    return [name for name, (make, *_) in CASES.items() if make in makers]


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    marks = {True: pytest.mark.exhaustive, False: ()}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name in COMBINED]) for name in names])


@pytest.fixture(scope="module")
def built(compile_for_hopper: Callable[..., Any], pytestconfig: pytest.Config) -> dict[str, Any]:
    names = CASES.keys() if pytestconfig.getoption("exhaustive") else CASES.keys() - COMBINED
    rows: dict[str, Any] = compile_for_hopper(__file__, *sorted(names))
    assert rows.keys() == {*names, "strided"}
    return rows


@pytest.mark.parametrize("error", ["raise SystemExit('spilled')", "from triton.compiler import spilled"])
def test_a_compile_error_fails_and_does_not_skip(error, tmp_path, built, compile_for_hopper) -> None:
    (tmp_path / "script.py").write_text(error)
    with pytest.raises((AssertionError, pytest.skip.Exception), match="spilled") as raised:
        compile_for_hopper(str(tmp_path / "script.py"))
    assert raised.type is AssertionError


@each(CASES)
def test_a_config_compiles_for_hopper_without_spills(name: str, built: dict[str, Any], spills: dict[str, int]) -> None:
    make, *arguments = CASES[name]
    row, config = built[name], make(*arguments)[3] if name != "helion_barrier" else None
    assert row["spilled_bytes"] <= spills.get(name, 0), row
    # Programs per SM; the rule for splits assumes two if B is streamed.
    at_once = 1 + config.streamed if make is sources.of_split_k else getattr(config, "per_sm", 1)
    at_once = 2 if make in (sources.of_stream, sources.of_outer_k) else at_once
    assert row["shared_bytes"] <= HOPPER.room(at_once), row
    if make is sources.of_wgrad and "pointers" not in name:
        assert row["shared_bytes"] <= wgrad.shared_bytes(config, DTYPES[(*arguments, "bf16")[1]]) + 1024, (
            "with barriers"
        )
    if make is sources.of_split_k:
        assert (row["wgmma"] > 0) == (arguments[0] >= 64 and "fp32" not in arguments)
    elif make in MULTIPLYING:
        assert (row["wgmma"] > 0) == ("fp32" not in arguments), row


MULTIPLYING = (
    *(sources.of_flat, sources.of_wgrad, sources.of_fp8, sources.of_gate_up, sources.of_outer_k, sources.of_fused),
    *(sources.of_flat_specialized, sources.of_wgrad_specialized, sources.of_fp8_specialized),
    sources.of_fused_specialized,
)
"""Without those of pointers, whose 16 rows go to mma.sync."""


@each(made_by(sources.of_stream))
def test_a_stream_passes_through_registers_alone(name: str, built: dict[str, Any]) -> None:
    """Loads take 16 bytes, those of B are marked, and only the sums of the warps use shared memory."""
    row, config = built[name], sources.of_stream(*CASES[name][1:])[3]
    assert [load.split(".")[-2:] for load in row["once_loads"]] == [["v4", "b32"]]
    assert row["async_copies"] == []
    assert row["shared_bytes"] == config.num_warps * stream.ROWS * config.block_n * 4
    assert row["registers"] * config.num_warps * 32 <= REGISTERS
    assert row["local_bytes"] == 0


@each(made_by(sources.of_split_k))
def test_streamed_loads_are_marked_for_the_l2_to_drop(name: str, built: dict[str, Any]) -> None:
    """Triton drops the policy of loads that it makes asynchronous copies, as those of A remain."""
    row = built[name]
    assert bool(row["once_loads"]) == sources.of_split_k(*CASES[name][1:])[3].streamed
    assert all(".v4." in load for load in row["once_loads"])
    assert row["async_copies"] == ["0x10"], "16 bytes each"


def test_the_strided_sum_compiles_with_tuples(built: dict[str, Any]) -> None:
    assert built["strided"] == 0


# --- bias_add_permute -------------------------------------------------------------------------------------------------


@each(made_by(sources.of_fused))
def test_a_fused_kernel_compiles_without_local_memory(name: str, built: dict[str, Any], spills: dict[str, int]) -> None:
    config, op, *more = CASES[name][1:]
    row, spilled = built[name], spills.get(name, 0)
    assert row["local_bytes"] <= -(-spilled // 8) * 8, row
    assert row["registers"] * 32 * config.num_warps * config.per_sm <= REGISTERS, row
    assert row["stores"] == ["st.global.cs.v4.b32"], row
    # TMA copies all of a, b and e. Pointers copy a and b, and load e, by 16 bytes per thread.
    assert row["async_copies"] == ([] if config.tma else ["0x10"]), row
    assert len(row["once_loads"]) == (op != "none" and not config.tma), row
    assert all(load.endswith(".v4.b32") for load in row["once_loads"]), row
    if "fp32" not in more:  # legality counts all shared memory except barriers, which take 64 bytes at most
        reason = str(fused.illegal(replace(config, per_sm=1000), torch.bfloat16, op))
        counted = int(reason.split(" bytes of ")[0].split()[-1])
        assert counted <= row["shared_bytes"] <= counted + 64


@each(made_by(sources.of_fused_specialized))
def test_the_specialised_fused_kernel_compiles_without_local_memory(name: str, built: dict[str, Any]) -> None:
    row = built[name]
    assert row["local_bytes"] == 0, row
    # 12 warps: the three loading warps take the place of four, so one is idle.
    assert row["registers"] * 32 * 12 <= REGISTERS, row
    assert row["stores"] == ["st.global.cs.v4.b32"], row
    assert (row["async_copies"], row["once_loads"]) == ([], []), row
    assert row["barriers_shared"] == [], "a barrier's state may overwrite data that shares its memory"


def strided_add() -> int:
    """Return the shared memory in bytes of the kernel over two dimensions, whose sizes and strides are tuples."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = elementwise._strided_kernel
    signature = dict.fromkeys(kernel.arg_names, "constexpr") | {"n": "i32", "sizes": ("i32", "i32")}
    signature |= dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), "*bf16")
    signature |= {"x_strides": ("i32", "constexpr"), "y_strides": ("constexpr", "i32")}
    at = {name: i for i, name in enumerate(kernel.arg_names)}
    constants = {(at["x_strides"], 1): 1, (at["y_strides"], 0): 1, (at["NDIM"],): 2, (at["WIDE"],): False}
    constants[(at["BLOCK"],)] = elementwise.CONFIGS["strided"].block
    built = triton.compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    return int(built.metadata.shared)


def main() -> None:
    from compiling import compiled

    rows: dict[str, Any] = {"strided": strided_add()} if len(sys.argv) > 1 else {}
    for name in sys.argv[1:]:
        make, *arguments = CASES[name]
        odd = flat_pointers._flat_pointer_kernel.arg_names if make is sources.of_pointers else ("G",)
        rows[name] = compiled(*make(*arguments), odd=odd)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
