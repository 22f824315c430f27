"""Compile the fused kernel of bias_add_permute for Hopper (sm_90), as test_compile.py compiles the others.

No spills, no local memory, shared memory and registers with room for as many programs per SM as the config demands,
loads and stores of 16 bytes, wgmma in the code.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import pytest
import torch

from groupbench.kernels.bias_add_permute import fused, fused_specialized
from groupbench.kernels.bias_add_permute.fused import CONFIGS, FusedConfig, candidates, illegal
from groupbench.kernels.device import KNOWN

HOPPER = KNOWN["sm_90"]
REGISTERS = 65536
# config, op, dtype, whether every size is a multiple of the tile's
CASES: dict[str, tuple[FusedConfig, str, str, bool]] = {
    "none": (CONFIGS["none"], "none", "bf16", True),
    "none_ragged": (CONFIGS["none"], "none", "bf16", False),
    "mul": (CONFIGS["operand"], "mul", "bf16", True),
    "mul_ragged": (CONFIGS["operand"], "mul", "bf16", False),
    "add": (CONFIGS["operand"], "add", "fp16", True),
    "pointers_ragged": (CONFIGS["pointers"], "none", "bf16", False),
    "pointers_mul_ragged": (CONFIGS["pointers"], "mul", "bf16", False),
    "fp32_ragged": (CONFIGS["fp32"], "mul", "fp32", False),
}
# The configs that tuning may choose, including the kernel's own above.
CANDIDATES: dict[str, tuple[FusedConfig, str, str, bool]] = {
    f"candidate_{op}_{i}": (c, op, "bf16", True) for op in ("none", "mul") for i, c in enumerate(candidates(op))
}
ALL = CASES | CANDIDATES
# These combine what other cases compile apart: an operation, and whether sizes are multiples.
COMBINED = {"none_ragged", "mul", "pointers_ragged", "specialized_none_ragged", "specialized_mul"}
LONGER = COMBINED | CANDIDATES.keys()


def all_of(names: Collection[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.exhaustive if name in LONGER else ()) for name in names]


# fused_specialized.py's: op, dtype, whether every size is a multiple of the tile's
SPECIALIZED: dict[str, tuple[str, str, bool]] = {
    "specialized_none": ("none", "bf16", True),
    "specialized_none_ragged": ("none", "fp16", False),
    "specialized_mul": ("mul", "bf16", True),
    "specialized_mul_ragged": ("mul", "bf16", False),
    "specialized_add": ("add", "fp16", True),
}


def inputs_of(
    config: FusedConfig, op: str, dtype: str, even: bool
) -> tuple[Any, dict[str, str], dict[str, Any], FusedConfig]:
    """Return (kernel, types of its arguments, constants, config)."""
    types = {"table_ptr": "*i64", "sweeps_ptr": "*i32", "out_ptr": f"*{dtype}"}
    align = 4 if dtype == "fp32" else 8
    names = ("block_m", "block_n", "block_k", "tma")
    constants = {name.upper(): getattr(config, name) for name in names}
    constants |= {"OP": op, "NUM_FIELDS": len(fused.FIELDS), "PRECISION": "ieee"}
    constants |= dict.fromkeys(("A_UNIT", "B_UNIT", "E_UNIT"), True)
    constants |= dict.fromkeys(("ALIGN_K", "ALIGN_M", "ALIGN_N"), align)
    constants |= dict.fromkeys(("EVEN_M", "EVEN_N", "EVEN_K", "WHOLE_M", "WHOLE_N"), even)
    return fused._fused_kernel, types, constants, config


def specialized_inputs_of(op: str, dtype: str, even: bool) -> tuple[Any, dict[str, str], dict[str, Any], FusedConfig]:
    types = {"sweeps_ptr": "*i64", "taken_ptr": "*i32", "out_ptr": f"*{dtype}"}
    config = fused_specialized.CONFIG
    constants = {name.upper(): getattr(config, name) for name in ("block_m", "block_n", "block_k")}
    constants |= {"STAGES": config.num_stages, "A_TILES": fused_specialized.A_TILES}
    constants |= {"OP": op, "WIDTH": fused_specialized.WIDTH}
    constants |= dict.fromkeys(("EVEN", "WHOLE_M", "WHOLE_N"), even)
    return fused_specialized._fused_specialized_kernel, types, constants, config


@pytest.fixture(scope="module")
def built(compile_for_hopper: Callable[..., Any], pytestconfig: pytest.Config) -> dict[str, dict[str, Any]]:
    names = ALL.keys() | SPECIALIZED.keys()
    if not pytestconfig.getoption("exhaustive"):
        names -= LONGER
    rows: dict[str, dict[str, Any]] = compile_for_hopper(__file__, *sorted(names))
    assert rows.keys() == names
    return rows


@pytest.mark.parametrize("name", all_of(ALL))
def test_compiles_for_hopper_without_local_memory(
    name: str, built: dict[str, dict[str, Any]], spills: dict[str, int]
) -> None:
    config, op, dtype, _ = ALL[name]
    row, spilled = built[name], spills.get(name, 0)
    assert row["spilled_bytes"] <= spilled and row["local_bytes"] <= -(-spilled // 8) * 8, row
    assert row["shared_bytes"] <= HOPPER.room(config.per_sm), row
    assert row["registers"] * 32 * config.num_warps * config.per_sm <= REGISTERS, row
    assert (row["wgmma"] > 0) == (dtype != "fp32"), row
    assert row["stores"] == ["st.global.cs.v4.b32"], row
    # TMA copies all of a, b and e. Pointers copy a and b, and load e, by 16 bytes per thread.
    assert row["async_copies"] == ([] if config.tma else ["0x10"]), row
    assert len(row["once_loads"]) == (op != "none" and not config.tma), row
    assert all(load.endswith(".v4.b32") for load in row["once_loads"]), row


@pytest.mark.parametrize("name", all_of([name for name in ALL if name != "fp32_ragged"]))
def test_shared_memory_matches_the_legality_check(name: str, built: dict[str, dict[str, Any]]) -> None:
    """Legality counts all shared memory except barriers, which take 64 bytes at most."""
    config, op, _, _ = ALL[name]
    reason = illegal(replace(config, per_sm=1000), torch.bfloat16, op)
    assert reason is not None
    counted = int(reason.split(" bytes of ")[0].split()[-1])
    assert counted <= built[name]["shared_bytes"] <= counted + 64


@pytest.mark.parametrize("name", all_of(SPECIALIZED))
def test_the_specialised_kernel_compiles_for_hopper_without_local_memory(
    name: str, built: dict[str, dict[str, Any]]
) -> None:
    row = built[name]
    assert (row["spilled_bytes"], row["local_bytes"]) == (0, 0), row
    assert row["shared_bytes"] <= HOPPER.room(), row
    # 12 warps: the three loading warps take the place of four, so one is idle.
    assert row["registers"] * 32 * 12 <= REGISTERS, row
    assert row["wgmma"] > 0, row
    assert row["stores"] == ["st.global.cs.v4.b32"], row
    assert (row["async_copies"], row["once_loads"]) == ([], []), row
    assert row["barriers_shared"] == [], "a barrier's state may overwrite data that shares its memory"


def main() -> None:
    from compiling import compiled

    rows = {}
    for name in sys.argv[1:]:
        inputs = specialized_inputs_of(*SPECIALIZED[name]) if name in SPECIALIZED else inputs_of(*ALL[name])
        rows[name] = compiled(*inputs)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
