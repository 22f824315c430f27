"""Test the worklist kernel's list, its TMA form, its configs, and offsets that change between calls."""

from __future__ import annotations

import dataclasses
import json

import helion
import pytest
import torch
from helion._compiler.compile_environment import CompileEnvironment
from helion.autotuner.config_spec import ConfigSpec

from groupbench.kernels.device import KNOWN
from groupbench.kernels.grouped_gemm import helion_worklist as worklist
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference
from groupbench.kernels.grouped_gemm.tuned import tuned_configs

GPU_CONFIGS = {name: config for name, config in worklist.CONFIGS.items() if not name.startswith("cpu")}
CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that a CPU has TMA")


@pytest.fixture
def tma(monkeypatch):
    """Make Helion emit descriptors for a CPU too, which Triton's interpreter can run, and forget bound kernels."""
    supports = ConfigSpec.supports_config_key
    monkeypatch.setattr(
        ConfigSpec, "supports_config_key", lambda self, key: key == "host_tensor_descriptors" or supports(self, key)
    )
    monkeypatch.setattr("helion._compat._supports_tensor_descriptor", lambda: True)
    monkeypatch.setattr("helion._compat._supports_host_tensor_descriptor", lambda: True)
    monkeypatch.setattr(CompileEnvironment, "tensor_descriptor_base_is_aligned", lambda self, tensor: True)
    worklist.grouped_gemm_worklist.reset()
    yield
    worklist.grouped_gemm_worklist.reset()


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name == "fp32" else torch.float16


# Others than these differ in the sizes of tiles or, apart from Helion's loads, in the strides of weights.
KINDS = (("decode", "columns"), ("large", "rows"), ("fp32", "columns"))


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        pytest.param(*kind, marks=() if kind in KINDS else pytest.mark.exhaustive)
        for kind in (
            *((name, "columns") for name in GPU_CONFIGS),
            *(("decode", "rows"), ("large", "rows"), ("large", "shared")),
        )
    ],
)
def test_every_config_is_right(name, weights, make_case, make_inputs, poisoned, check):
    a, b, offs = make_inputs(make_case("ragged", (129, 0, 30, 1), n=144, k=72, weights=weights), dtype_of(name))
    run = worklist.prepare_helion_worklist(a, b, offs, worklist.CONFIGS[name])
    with poisoned():
        out = run()
    check(out, grouped_gemm_reference(a, b, offs), dtype_of(name))


@on_cpu
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *(("decode", "rows"), ("large", "columns")),
        *(
            pytest.param(*kind, marks=pytest.mark.exhaustive)
            for kind in (("decode", "columns"), ("large", "rows"), ("small", "shared"))
        ),
    ],
)
def test_tma_loads_need_no_masks(name, weights, tma, make_case, make_inputs, poisoned, check):
    """Ragged N and K, tiles that run into other groups' rows, and rows that belong to no group are right."""
    case = make_case("ragged", (129, 0, 30, 1), n=264, k=136, weights=weights, tail=5)
    a, b, offs = make_inputs(case, torch.float16)
    a[160:] = 0  # the interpreter's descriptors read them, and NaN - NaN in a masked row would only warn
    run = worklist.prepare_helion_worklist(a, b, offs, worklist.CONFIGS[name], tma=True)
    with poisoned():
        out = run()
    check(out, grouped_gemm_reference(a, b, offs), torch.float16)
    if weights != "shared":
        check_main_loop(a, b, offs, name)


def check_main_loop(a, b, offs, name):
    """The loop is fast because it has two descriptor loads, a product, and no mask, gather or select between them."""
    config = worklist.CONFIGS[name]
    problem = worklist.make_problem(a, b, offs, config, tma=True)
    code = worklist.grouped_gemm_worklist.bind(problem.specimen()).to_triton_code(config.to_helion(tma=True))
    loop = code[code.index("in tl.range(0, ") :].split("tl.store")[0]
    assert loop.count("_desc.load(") == 2
    assert loop.count("tl.dot(") == 1
    body = [line for line in loop.splitlines()[: loop[: loop.index("tl.dot(")].count("\n") + 1] if "#" not in line]
    assert not any(text in line for line in body for text in ("tl.where", "tl.load", "mask", "[0, 2, 1]")), loop


@pytest.mark.exhaustive  # over ragged tiles, the test before checks the loop too
@on_cpu
@pytest.mark.parametrize(
    ("name", "weights"), [("decode", "rows"), ("decode", "columns"), ("large", "rows"), ("large", "columns")]
)
def test_the_main_loop_over_whole_tiles(name, weights, tma, make_case, make_inputs):
    check_main_loop(*make_inputs(make_case("two", (256, 256), n=512, k=512, weights=weights), torch.float16), name)


@on_cpu
def test_refuses_unmasked_loads_that_are_not_by_tma(make_case, make_inputs, tma, monkeypatch):
    a, b, offs = make_inputs(make_case("two", (64, 64), n=64, k=64), torch.float16)
    monkeypatch.setattr(CompileEnvironment, "tensor_descriptor_base_is_aligned", lambda self, tensor: False)
    with pytest.raises(RuntimeError, match="no TMA loads"):
        worklist.prepare_helion_worklist(a, b, offs, worklist.CONFIGS["cpu"], tma=True)


# The tests of all backends have those of the other order.
@pytest.mark.parametrize("name", [pytest.param("cpu", marks=pytest.mark.exhaustive), "cpu_swap"])
def test_offsets_are_read_on_the_device_at_every_call(name, make_case, make_inputs, poisoned, check):
    a, b, offs = make_inputs(make_case("three", (40, 24, 36), n=48, k=64), torch.float16)
    run = worklist.prepare_helion_worklist(a, b, offs, worklist.CONFIGS[name])
    for ends in ((40, 64, 100), (0, 0, 100), (100, 100, 100), (1, 2, 3), (0, 0, 0)):
        offs.copy_(torch.tensor(ends))
        with poisoned():
            out = run()
        owned = ends[-1]
        check(out[:owned], grouped_gemm_reference(a, b, offs)[:owned], torch.float16)
        assert (out[owned:] == 0).all()


@pytest.mark.parametrize(
    "sizes",
    [(32, 32), (0, 17, 0), (1,), (70, 0, 1, 33, 5), (0, 0), (4200, 3)],
    ids=["even", "empty_around", "one_row", "ragged", "no_rows", "more_than_a_chunk"],
)
@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
def test_the_list_has_each_tile_once_and_in_order(sizes, wide, device):
    G, M, BLOCK_M = len(sizes), sum(sizes), 16
    offs = torch.tensor(sizes, device=device).cumsum(0)
    tiles = torch.full((M // BLOCK_M + 1 + G, 3), -1, dtype=torch.int64 if wide else torch.int32, device=device)
    count = torch.full((1,), -1, dtype=torch.int32, device=device)
    out = torch.empty(M, 8, device=device)
    sizes_of = {"G": G, "G_POW2": 8, "ENTRY": 3, "SHARED_B": False, "BLOCK_M": BLOCK_M, "CHUNK": 128}
    worklist._list_tiles[(G,)](offs, tiles, count, out, M, 8, **sizes_of)
    ends = offs.tolist()
    expected = [
        [g, row, end]
        for g, (size, end) in enumerate(zip(sizes, ends, strict=True))
        for row in range(end - size, end, BLOCK_M)
    ]
    assert tiles[: count.item()].tolist() == expected
    assert (tiles[count.item() :] == -1).all(), "no entries past the list are written"


@pytest.mark.parametrize("groups", [130, pytest.param(1023, marks=pytest.mark.exhaustive)])
def test_many_groups(groups, make_case, make_inputs, poisoned, check):
    """Test more groups than a chunk of the list has entries, and as many as torch allows."""
    sizes = tuple(g % 3 if g % 64 < 2 or g > groups - 3 else 0 for g in range(groups))
    a, b, offs = make_inputs(make_case("many", sizes, n=16, k=16), torch.float16)
    run = worklist.prepare_helion_worklist(a, b, offs, dataclasses.replace(worklist.CONFIGS["cpu"], block_n=16))
    with poisoned():
        out = run()
    check(out, grouped_gemm_reference(a, b, offs), torch.float16)


def test_another_number_of_rows_compiles_nothing(make_case, make_inputs, monkeypatch):
    """Routing changes M at every step; K, N and the tiles belong to the layer."""
    worklist.prepare_helion_worklist(*make_inputs(make_case("two", (41, 40), n=40, k=24), torch.float16))
    bound = []
    original = CompileEnvironment.__init__
    monkeypatch.setattr(
        CompileEnvironment,
        "__init__",
        lambda self, *args, **kwargs: (bound.append(1), original(self, *args, **kwargs))[1],
    )
    worklist.prepare_helion_worklist(*make_inputs(make_case("two", (30, 77), n=40, k=24), torch.float16))()
    assert not bound


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        ((4, 64, 1024, 1024), "decode"),
        ((4, 1024, 1024, 1024), "medium"),
        ((256, 1024, 4096, 7168), "decode"),
        ((128, 4096, 1536, 2048), "decode_32"),
        ((128, 8192, 1536, 2048), "small"),
        ((4, 32768, 4096, 7168), "large"),
    ],
)
def test_untuned_problems_get_configs_by_mean_rows(problem, name):
    G, M, N, K = problem
    config = worklist.choose_config(M, G, N, K, torch.bfloat16, dataclasses.replace(KNOWN["sm_90"], name="Some GPU"))
    assert config == worklist.CONFIGS[name]
    assert K % config.block_k == 0


def test_tuned_configs_are_found_by_problem_and_fit():
    tuned = tuned_configs("worklist", "NVIDIA H100 80GB HBM3")
    assert tuned
    for key, values in tuned.items():
        config = worklist.config_from(values)
        assert worklist.illegal(config, torch.bfloat16) is None, key
        assert worklist.config_from(json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize("mean_rows", [1, 16, 17, 96, 97, 1200, 5000])
@pytest.mark.parametrize("K", [768, 2880, 7168])
def test_candidates_can_be_compiled(mean_rows, K):
    configs = worklist.candidates(mean_rows, K)
    assert configs
    assert len(set(configs)) == len(configs)
    for config in configs:
        assert worklist.illegal(config, torch.bfloat16) is None
        assert isinstance(config.to_helion(tma=True), helion.Config)


def test_settings_of_a_search_override_the_fields():
    config = dataclasses.replace(worklist.CONFIGS["large"], helion=(("num_warps", 4), ("l2_groupings", [1])))
    assert config.to_helion(tma=False)["num_warps"] == 4
    assert config.to_helion(tma=True)["host_tensor_descriptors"] is True


def test_illegal_configs_have_a_reason(device):
    config = dataclasses.replace(worklist.CONFIGS["large"], num_stages=6)
    assert "bytes" in (worklist.illegal(config, torch.bfloat16) or "")
    a, b = (torch.ones(*shape, dtype=torch.float16, device=device) for shape in ((4, 8), (1, 8, 8)))
    with pytest.raises(ValueError, match="bytes"):
        worklist.prepare_helion_worklist(a, b, torch.tensor([4]), config)


@pytest.mark.parametrize("far", ["a", "b"])
def test_pointers_past_int32_are_refused(far):
    a, b = torch.empty(6, 16, device="meta"), torch.empty(3, 16, 32, device="meta")
    if far == "a":
        a = torch.empty(6, 2**29, device="meta")[:, :16]
    else:
        b = torch.empty(3, 2**30, device="meta")[:, : 16 * 32].unflatten(1, (16, 32))
    offs = torch.tensor([2, 4, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"^{far} .* reaches element"):
        worklist._prepare_with(a, b, offs, worklist.CONFIGS["cpu"], tma=False)
