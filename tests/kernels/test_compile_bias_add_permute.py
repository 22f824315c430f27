"""The fused kernel of bias_add_permute compiled for Hopper (sm_90), as test_compile.py compiles the others.

Nothing spilled, no local memory, shared memory and registers with room for as many programs an SM as a config asks for,
loads and stores of 16 bytes, wgmma in the code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import pytest

from groupbench.kernels.bias_add_permute import fused
from groupbench.kernels.bias_add_permute.fused import CONFIGS, FusedConfig
from groupbench.kernels.grouped_gemm.support import SHARED_MEMORY_BYTES

SMS = 132
REGISTERS = 65536
# config, op, dtype, whether every size is a multiple of the tile's
CASES: dict[str, tuple[FusedConfig, str, str, bool]] = {
    "none": (CONFIGS["none"], "none", "bf16", True),
    "none_ragged": (CONFIGS["none"], "none", "bf16", False),
    "mul": (CONFIGS["operand"], "mul", "bf16", True),
    "add": (CONFIGS["operand"], "add", "fp16", True),
    "fp32_ragged": (CONFIGS["fp32"], "mul", "fp32", False),
    "slim_early": (FusedConfig(128, 64, 64, 4, 3, early=True, per_sm=3, registers=168), "mul", "bf16", True),
    "wide": (FusedConfig(256, 128, 64, 8, 3), "none", "bf16", True),
    "early": (FusedConfig(128, 128, 64, 8, 3, early=True), "mul", "bf16", True),
}


def inputs_of(
    config: FusedConfig, op: str, dtype: str, even: bool
) -> tuple[Any, dict[str, str], dict[str, Any], FusedConfig]:
    """(kernel, types of its arguments, constants, config)."""
    types = {"table_ptr": "*i64", "ends_ptr": "*i32", "out_ptr": f"*{dtype}", "tiles": "i32"}
    align = 4 if dtype == "fp32" else 8
    names = ("block_m", "block_n", "block_k", "group_m", "early")
    constants = {name.upper(): getattr(config, name) for name in names}
    constants |= {"OP": op, "G": 8, "G_POW2": 8, "NUM_FIELDS": len(fused.FIELDS), "PRECISION": "ieee"}
    constants |= dict.fromkeys(("A_UNIT", "B_UNIT", "E_UNIT"), True)
    constants |= dict.fromkeys(("ALIGN_K", "ALIGN_M", "ALIGN_N"), align)
    constants |= dict.fromkeys(("EVEN_M", "EVEN_N", "EVEN_K"), even)
    constants |= {"NUM_PROGRAMS": SMS * config.per_sm or 22912}
    return fused._fused_kernel, types, constants, config


@pytest.fixture(scope="module")
def built(compile_for_hopper: Callable[[str], Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compile_for_hopper(__file__)
    assert found.keys() == CASES.keys()
    return found


@pytest.mark.parametrize("name", CASES)
def test_compiles_for_hopper_without_local_memory(name: str, built: dict[str, dict[str, Any]]) -> None:
    config, op, dtype, _ = CASES[name]
    row = built[name]
    programs = max(config.per_sm, 1)
    assert (row["spilled_bytes"], row["local_bytes"]) == (0, 0), row
    assert row["shared_bytes"] <= SHARED_MEMORY_BYTES // programs, row
    assert row["registers"] * 32 * config.num_warps * programs <= REGISTERS, row
    assert (row["wgmma"] > 0) == (dtype != "fp32"), row
    assert row["stores"] == ["st.global.v4.b32"], row
    assert row["async_copies"] == ["0x10"], row
    assert len(row["once_loads"]) == (op != "none"), row
    assert all(load.endswith(".v4.b32") for load in row["once_loads"]), row


def main() -> None:
    from hopper import compiled

    print(json.dumps({name: compiled(*inputs_of(*case), odd=("tiles",)) for name, case in CASES.items()}))


if __name__ == "__main__":
    main()
