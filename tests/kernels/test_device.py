"""Test the limits and features of GPUs, and configs that fit them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from groupbench.kernels.device import INTERPRETER, KNOWN, device_of, fitted, halved
from groupbench.kernels.grouped_gemm import flat, fp8, pointer, wgrad
from groupbench.kernels.moe import gate_up
from groupbench.kernels.split_k import tiled


def test_the_ridge_is_where_products_and_memory_take_as_long() -> None:
    h100 = KNOWN["sm_90"]
    assert round(h100.ridge) == 319
    assert round(replace(h100, gb_per_s=4917).ridge) == 218
    assert INTERPRETER.ridge == KNOWN["sm_80"].ridge == math.inf


@pytest.mark.parametrize(
    ("arch", "facts"),
    [  # capability, hopper, tma, clusters, chains
        ("sm_80", ((8, 0), False, False, False, False)),
        ("sm_89", ((8, 9), False, False, False, False)),
        ("sm_90", ((9, 0), True, True, True, True)),
        ("sm_100", ((10, 0), False, True, True, True)),
        ("sm_120", ((12, 0), False, True, False, True)),
        ("gfx942", ((0, 0), False, False, False, False)),
    ],
)
def test_features_of_a_gpu(arch: str, facts: tuple[object, ...]) -> None:
    gpu = KNOWN[arch]
    assert (gpu.capability, gpu.hopper, gpu.tma, gpu.clusters, gpu.chains) == facts


@pytest.mark.parametrize(
    ("arch", "per_sm", "room"),
    [("sm_90", 1, 232448), ("sm_90", 2, 115712), ("sm_120", 1, 101376), ("sm_80", 1, 166912), ("gfx942", 1, 65536)],
)
def test_room_for_each_program_of_an_sm(arch: str, per_sm: int, room: int) -> None:
    assert KNOWN[arch].room(per_sm) == room


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_interpreter_is_a_hopper_without_gluon() -> None:
    device = device_of(torch.device("cpu"))
    assert (device, device.tma, device.hopper) == (INTERPRETER, True, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: the limits that a driver reports. No GPU")
def test_this_gpu_has_the_listed_limits() -> None:
    gpu = device_of(torch.device("cuda"))
    assert gpu.name == torch.cuda.get_device_name()
    if gpu.arch in KNOWN:
        listed = KNOWN[gpu.arch]
        assert (gpu.shared_bytes, gpu.shared_per_sm) == (listed.shared_bytes, listed.shared_per_sm)
        if gpu.name == listed.name and listed.ghz:
            assert (round(gpu.gb_per_s), gpu.ghz) == (listed.gb_per_s, listed.ghz)


def test_fitting_drops_stages_before_it_shrinks_the_tile() -> None:
    large = replace(flat.CONFIGS["large"], split_store=False)
    limits = {228: 3, 160: 2}
    for kib, stages in limits.items():
        gpu = replace(KNOWN["sm_90"], shared_bytes=kib * 1024)
        assert fitted(large, lambda c, gpu=gpu: flat.illegal(c, torch.bfloat16, gpu)) == replace(
            large, num_stages=stages
        )
    small = fitted(large, lambda c: flat.illegal(c, torch.bfloat16, KNOWN["sm_120"]))
    assert (small.block_m, small.block_n, small.num_stages) == (128, 128, 3)


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("mean_rows", [1, 20, 60, 500, 5000])
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_every_default_config_is_legal(arch: str, mean_rows: int, of: torch.of) -> None:
    for gpu in (KNOWN[arch], halved(KNOWN[arch])):
        M, G = 8 * mean_rows, 8
        assert pointer.illegal(pointer.default_config(gpu, of), of, gpu) is None
        assert wgrad.illegal(wgrad.pointer_config(of, gpu), of, gpu) is None
        assert wgrad.illegal(wgrad.default_config(M, G, 4096, 4096, of, gpu), of, gpu) is None
        split_k = tiled.default_config(mean_rows, 4096, 14336, of, gpu)
        assert tiled.illegal(split_k, 14336, of, gpu) is None
        if not gpu.tma:
            continue
        assert flat.illegal(flat.default_config(M, G, of, gpu), of, gpu) is None
        assert gate_up.illegal(gate_up.choose_config(M, G, 4096, 4096, of, gpu), of, gpu) is None
        for mode in fp8.MODES:
            configs = fp8.configs_for(mode, M, G, 4096, 4096, gpu)
            assert all(reason is None for name, _, reason in configs if name != "tuned"), configs


def test_a_hopper_keeps_the_configs_measured_on_one() -> None:
    gpu = replace(KNOWN["sm_90"], name="a GPU without tuned configs")
    assert flat.default_config(40000, 8, torch.bfloat16, gpu) == flat.CONFIGS["large"]
    assert wgrad.default_config(80000, 8, 4096, 7168, torch.bfloat16, gpu) == wgrad.CONFIGS["large"]
    assert pointer.default_config(gpu, torch.bfloat16) == pointer.CONFIGS["cuda"]
    assert fp8.choose_config(fp8.ROWWISE, 40000, 8, 4096, 7168, gpu) == fp8.SPECIALIZED
    rule = tiled.choose_config(16, 4096, 4096, torch.bfloat16, gpu.sms)
    assert tiled.default_config(16, 4096, 4096, torch.bfloat16, gpu) == rule
