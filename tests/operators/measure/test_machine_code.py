"""Analysis of compiled kernels: kernels that Triton compiles for Hopper, and hand-written code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from groupbench.operators.measure import machine_code
from groupbench.operators.measure.machine_code import counts_in_sass, metrics_of, occupancy
from groupbench.tracker.facts.record import Code, Kernel

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
        /*0020*/                   UTMALDG.2D [UR8], [UR4], desc[UR16] ;
        /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], !UPT ;
        /*0040*/               @P1 HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0060*/                   HMMA.1688.F32.TF32 R4, R8, R12, R4 ;
        /*0070*/                   STL.128 [R1], R4 ;
        /*0080*/                   LDL R4, [R1+0x10] ;
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*00b0*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR6][R2.64] ;
        /*00c0*/                   UTMASTG.2D [UR8], [UR4] ;
"""


def test_instructions_are_counted_in_machine_code() -> None:
    assert counts_in_sass(SASS) == {
        "instructions": 13,
        "TMA load": 1,
        "TMA store": 1,
        "async copy": 1,
        "barrier": 1,
        "local load": 1,
        "local store": 1,
        "mbarrier wait": 1,
        "mma m16n8k16": 1,
        "mma m16n8k8": 1,
        "wgmma m64n256k16": 2,
    }


@pytest.mark.parametrize(
    ("arch", "warps", "registers", "shared", "share"),
    [
        pytest.param("sm_90a", 8, 168, 229_512, 0.125, id="shared memory"),
        pytest.param("sm_90a", 8, 168, 0, 0.125, id="registers"),
        pytest.param("sm_90a", 4, 32, 0, 1.0, id="all of it"),
        pytest.param("sm_90a", 1, 16, 0, 0.5, id="programs"),
        pytest.param("sm_80", 4, 128, 40_000, 0.25, id="sm_80"),
        pytest.param("sm_90a", 8, 255, 0, 0.125, id="most registers"),
        pytest.param("sm_42", 8, 168, 0, None, id="unknown"),
        pytest.param("sm_90a", 8, None, 0, None, id="registers unknown"),
    ],
)
def test_occupancy(arch: str, warps: int, registers: int | None, shared: int, share: float | None) -> None:
    kernel = Kernel(name="k", registers=registers, shared_bytes=shared, config={"num_warps": warps})
    assert occupancy(kernel, arch) == share


def test_metrics_of_a_cell() -> None:
    product: dict[str, Any] = {"counted_in": "sass", "counts": {"wgmma m64n256k16": 4, "TMA load": 8, "local load": 2}}
    main = Kernel(
        name="m", registers=255, spills=2, shared_bytes=2048, occupancy=0.125, config={"num_stages": 4}, **product
    )
    helper = Kernel(
        name="h", registers=32, spills=0, shared_bytes=0, occupancy=1.0, config={"num_stages": 1}, counted_in="sass",
        counts={"barrier": 3},
    )  # fmt: skip
    assert metrics_of([main, helper]) == {
        "spills": 8,
        "registers": 255,
        "shared_kib": 2,
        "occupancy": 0.125,
        "stages": 4,
        "matrix_ops": 4,
        "tma_loads": 8,
        "barriers": 3,
        "local_ops": 2,
    }
    assert metrics_of([]) == {}
    assert set(metrics_of([Kernel(name="k")])) == set()


@pytest.mark.parametrize("has_disassembler", [False, True], ids=["no disassembler", "no readable cubin"])
def test_without_machine_code_nothing_is_counted(has_disassembler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_disassembler:
        monkeypatch.setattr(machine_code, "disassembler", lambda: None)
    machine_code.count.cache_clear()
    code = Code(hash="h", ptx=".target sm_90a\n", cubin=b"no cubin")
    (kernel,) = machine_code.described([Kernel(name="k", hash="h")], [code])
    assert (kernel.counted_in, kernel.arch, kernel.counts) == (None, "sm_90a", {})


SCRIPT = """
import json
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from groupbench.operators.measure import compiled, machine_code

@triton.jit
def kernel(a, b, c, K, BLOCK: tl.constexpr):
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        x = tl.load(a + rows[:, None] * K + k + cols[None, :])
        y = tl.load(b + (k + rows[:, None]) * BLOCK + cols[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + rows[:, None] * BLOCK + cols[None, :], acc)

types = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "K": "i32", "BLOCK": "constexpr"}
found = []
attrs = {(i,): [["tt.divisibility", 16]] for i in range(4)}
for block, stages, registers in ((64, 3, None), (64, 2, None), (128, 3, 160)):
    source = ASTSource(kernel, types, constexprs={(4,): block}, attrs=attrs)
    options = {"num_warps": 4, "num_stages": stages} | ({"maxnreg": registers} if registers else {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    code = compiled._code_of(compiled.code_hash(made.asm["ptx"]), made)
    described = compiled._describe(made, {})
    (analysed,) = machine_code.described([described], [code])
    found.append({"counts": analysed.counts, "in": analysed.counted_in, "arch": analysed.arch, "hash": analysed.hash,
                  "stages": machine_code.stages(analysed), "located": ".loc" in code.ptx,
                  "cubin": len(code.cubin)})
print(json.dumps(found))
"""


def test_a_kernel_that_triton_compiles_for_hopper(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    three, two, spilled = json.loads(done.stdout)
    assert (three["in"], three["arch"], three["stages"], two["stages"]) == ("sass", "sm_90a", 3, 2)
    assert sum(number for name, number in three["counts"].items() if name.startswith("wgmma")) > 0
    assert three["counts"]["async copy"] > 0
    assert three["hash"] != two["hash"]
    assert not three["located"] and three["cubin"] > 1000
    assert three["counts"].get("local store", 0) == 0 < spilled["counts"]["local store"]
