"""Test the flat kernel's configs, its schedule on the device, and its fallback to pointers."""

from __future__ import annotations

import pytest
import torch

from groupbench.kernels.device import KNOWN
from groupbench.kernels.grouped_gemm import flat, flat_pointers
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference
from groupbench.kernels.grouped_gemm.support import no_tma
from groupbench.kernels.grouped_gemm.tuned import tuned_configs, tuning_key

GPU_CONFIGS = {
    name: config for name, config in flat.CONFIGS.items() if not name.startswith("cpu") and not config.specialized
}


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name == "fp32" else torch.float16


@pytest.mark.parametrize("name", GPU_CONFIGS)
@pytest.mark.parametrize("weights", ["rows", "columns", "shared"])
def test_every_config_is_right(name, weights, make_case, make_inputs, poisoned, check):
    case = make_case("ragged", (129, 0, 30, 1), n=144, k=72, weights=weights)
    a, b, offs = make_inputs(case, dtype_of(name))
    run = flat.prepare_flat(a, b, offs, flat.CONFIGS[name])
    with poisoned():
        out = run()
    check(out, grouped_gemm_reference(a, b, offs), dtype_of(name))


@pytest.mark.parametrize("name", ["cpu", "cpu_swap", "cpu_halves"])
def test_offsets_are_read_on_the_device_at_every_call(name, make_case, make_inputs, poisoned, check):
    a, b, offs = make_inputs(make_case("three", (40, 24, 36), n=48, k=64), torch.float16)
    run = flat.prepare_flat(a, b, offs, flat.CONFIGS[name])
    for ends in ((40, 64, 100), (0, 0, 100), (100, 100, 100), (1, 2, 3), (0, 0, 0)):
        offs.copy_(torch.tensor(ends))
        with poisoned():
            out = run()
        owned = ends[-1]
        check(out[:owned], grouped_gemm_reference(a, b, offs)[:owned], torch.float16)
        assert (out[owned:] == 0).all()


HALVES = {  # rows of the experts; tiles of 32 rows and 32 of 64 columns, 4 programs
    "ends_of_16_and_17_rows": (16, 17, 1, 31, 32, 33, 0, 48, 49),
    "last_wave_of_2_tiles": (32, 32, 32),
    "last_wave_of_4_tiles": (32, 32, 32, 32),
    "last_wave_halves_an_end": (32, 32, 20),
    "less_than_a_wave": (20,),
}


@pytest.mark.parametrize("rows", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("weights", ["rows", "columns"])
def test_halves(rows, weights, make_case, make_inputs, poisoned, check):
    """Half tiles are right at an expert's end and in a short last wave, next to another expert's rows."""
    a, b, offs = make_inputs(make_case("halves", rows, n=64, k=40, weights=weights, tail=3), torch.float16)
    halves = flat.CONFIGS["cpu_halves"]
    for config in (halves, flat.replace(halves, split_store=True)):
        run = flat.prepare_flat(a, b, offs, config)
        with poisoned():
            out = run()
        check(out, grouped_gemm_reference(a, b, offs), torch.float16)


def test_every_expert_reads_its_own_weights_at_the_tails(make_case, make_inputs, check):
    """NaN in the next expert's weights and rows must not leak through tiles that overhang in N, K and M."""
    a, b, offs = make_inputs(make_case("two", (21, 40), n=40, k=40), torch.float16)
    b[1] = float("nan")
    a[21:] = float("nan")
    out = flat.prepare_flat(a, b, offs)()
    check(out[:21], grouped_gemm_reference(a, b, offs)[:21], torch.float16)
    assert out[21:].isnan().all()


@pytest.mark.parametrize(
    ("n", "k", "pad_a", "reason"),
    [(48, 64, 8, None), (48, 64, 3, "a's address or strides"), (45, 64, 0, "b's"), (48, 33, 0, "a's")],
    ids=["aligned", "odd_stride", "odd_n", "odd_k"],
)
def test_pointers_take_over_if_tma_cannot_read(n, k, pad_a, reason, make_case, make_inputs, poisoned, check):
    a, b, offs = make_inputs(make_case("tail", (21, 0, 40), n=n, k=k, pad_a=pad_a, tail=5), torch.float16)
    why_not = no_tma(n, a=a, b=b)
    assert why_not is None if reason is None else why_not is not None and reason in why_not
    run = flat.prepare_flat(a, b, offs)
    with poisoned():
        out = run()
    check(out, grouped_gemm_reference(a, b, offs), torch.float16)


@pytest.mark.parametrize(
    "views",
    [
        lambda a, b: (a, b),
        lambda a, b: (a.t().contiguous().t(), b),
        lambda a, b: (a.repeat_interleave(2, 1)[:, ::2], b.repeat_interleave(3, 2)[:, :, ::3]),
        lambda a, b: (a, b[0].expand(4, -1, -1)),
    ],
    ids=["odd_sizes", "a_transposed", "strided", "shared"],
)
def test_pointers_read_offsets_on_the_device_too(views, make_case, make_inputs, poisoned, check):
    a, b, offs = make_inputs(make_case("four", (21, 0, 39, 1), n=45, k=33), torch.float16)
    a, b = views(a, b)
    assert no_tma(45, a=a, b=b) is not None
    run = flat.prepare_flat(a, b, offs)
    for sizes in ((61, 0, 0, 0), (0, 0, 0, 0), (0, 33, 20, 2), (21, 0, 39, 1)):
        offs.copy_(torch.tensor(sizes).cumsum(0))
        with poisoned():
            out = run()
        check(out, grouped_gemm_reference(a, b, offs), torch.float16)


@pytest.mark.parametrize("rows", [8, 32, 90, 200])
def test_every_pointer_config_is_right(rows, make_case, make_inputs, device, poisoned, check):
    a, b, offs = make_inputs(make_case("ragged", (129, 0, 30, 1), n=141, k=71, tail=3), torch.float16)
    config = flat_pointers.choose_config(rows, torch.float16, KNOWN["sm_90"])
    with poisoned():
        out = flat_pointers.grouped_gemm_pointers(a, b, offs, config=config)
    check(out, grouped_gemm_reference(a, b, offs), torch.float16)


def test_illegal_configs_have_a_reason():
    large = flat.CONFIGS["large"]
    for change, text in (
        ({"block_m": 48}, "a power of two"),
        ({"num_stages": 5}, "bytes"),
        ({"split_store": False}, "output tile"),
        ({"swap": True}, "stored whole"),
        ({"halves": True}, "do not flatten"),
        ({"per_sm": 2}, "bytes"),
    ):
        reason = flat.illegal(flat.replace(large, **change), torch.float16)
        assert reason is not None, change
        assert text in reason


def test_tuned_configs_are_legal_and_found():
    configs = tuned_configs("flat", "NVIDIA H100 80GB HBM3")
    assert configs
    for key, values in configs.items():
        assert flat.illegal(flat.FlatConfig(**values), torch.bfloat16) is None, key
    values = configs[tuning_key(4096, 4, 1024, 1024, torch.bfloat16, nk=False)]
    chosen = flat.choose_config(4000, 4, 1024, 1024, torch.bfloat16, KNOWN["sm_90"], nk=False)
    assert chosen == flat.FlatConfig(**values)


def test_candidates_are_legal():
    for rows in (1, 16, 17, 96, 97, 5000):
        assert all(flat.illegal(config, torch.bfloat16) is None for config in flat.candidates(rows)), rows
