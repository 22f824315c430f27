"""Test the Helion kernels beyond the shared cases: workers, tiles, offset tables, and the worklist's list and TMA."""

from __future__ import annotations

import dataclasses

import helion
import pytest
import torch
from grouped import BACKENDS, DEVICE, GPU, Case, Kernel, each, products
from helion._compiler.compile_environment import CompileEnvironment
from helion._compiler.type_propagation import TypePropagation
from helion.autotuner.config_spec import ConfigSpec
from helion.runtime import default_launcher

from groupbench.kernels.grouped_gemm import helion_jagged, helion_persistent, helion_wgrad
from groupbench.kernels.grouped_gemm import helion_worklist as worklist
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference
from groupbench.kernels.grouped_gemm.support import worker_count

on_cpu = pytest.mark.skipif(GPU, reason="pretends that a CPU has TMA")
TILED = {name: kernel for name, kernel in BACKENDS.items() if "helion" in name and "worklist" not in name}


@pytest.mark.skipif(GPU, reason="launches fewer programs than Helion compiled for")
def test_workers_share_the_tiles_of_small_groups():
    """Seven groups of one tile go to four workers, two tiles to each and one to the last.

    If the numbering restarted at every group, worker 0 would get all seven.
    """
    a, b, offs = products(Case((16,) * 7, n=16))
    table = torch.cat([offs.new_zeros(1), offs])
    kernel = helion_persistent.grouped_gemm_persistent.bind((a, b, table, a.new_empty(112, 16), 4))
    compiled = kernel.compile_config(helion.Config(block_sizes=[16, 16, 16]))

    def rows_written_by_the_first(workers):
        def launch(kernel, grid, *args, **kwargs):
            return default_launcher(kernel, (workers,), *args, **kwargs)

        out = compiled(a, b, table, torch.full((112, 16), torch.nan, dtype=a.dtype), 4, _launcher=launch)
        return int(out.isfinite().all(1).sum())

    assert [rows_written_by_the_first(workers) for workers in (1, 2, 3, 4)] == [32, 64, 96, 112]


def test_refuses_no_workers():
    with pytest.raises(ValueError, match="workers=0"):
        helion_persistent.prepare_helion_persistent(*products(Case((4,))), workers=0)


@pytest.mark.parametrize("blocks", [(16, 64, 32), (256, 16, 16)], ids=str)
@each(TILED)
def test_any_tile(kernel: Kernel, blocks, check_run):
    operands = kernel.operands(Case((30, 0, 70), n=53, k=45))
    run = kernel.prepare(*operands, config=helion.Config(block_sizes=list(blocks)))
    check_run(run, kernel.reference(*operands), torch.float16)


@pytest.mark.parametrize("table", [torch.int32, torch.int64], ids=["int32", "int64"])
@each(TILED)
def test_offset_tables_of_either_width(kernel: Kernel, table, check):
    a, b, offs = kernel.operands(Case((21, 40)))
    out, table = a.new_empty(61, b.size(-1)), torch.cat([offs.new_zeros(1), offs]).to(table)
    module, bound, args = {
        TILED["helion_jagged"]: (helion_jagged, helion_jagged.grouped_gemm_jagged, (a, b, table, out)),
        TILED["helion_persistent"]: (
            *(helion_persistent, helion_persistent.grouped_gemm_persistent),
            (a, b, table, out, worker_count(DEVICE)),
        ),
        TILED["helion_wgrad"]: (helion_wgrad, helion_wgrad.grouped_gemm_wgrad, (a, b, table)),
    }[kernel]
    compiled = bound.bind(args).compile_config(module.CHOICES.default(a, 2048))
    check(compiled(*args), kernel.reference(a, b, offs), torch.float16)


def test_types_that_are_inferred_once_give_the_same_code(monkeypatch):
    """These tests bind kernels faster than Helion does."""
    a, b, offs = products(Case((21, 40)))
    args = (a, b, torch.cat([offs.new_zeros(1), offs]), a.new_empty(61, b.size(2)))
    kernel, codes = helion_jagged.grouped_gemm_jagged, []
    for infer in (TypePropagation._loop_body, TypePropagation._loop_body.__wrapped__):
        monkeypatch.setattr(TypePropagation, "_loop_body", infer)
        kernel.reset()
        codes.append(kernel.bind(args).to_triton_code(helion_jagged.CHOICES.cpu))
    assert codes[0] == codes[1]


# --- the worklist -----------------------------------------------------------------------------------------------------


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


@on_cpu
@pytest.mark.parametrize(("name", "weights"), [("decode", "rows"), ("large", "columns")])
def test_tma_loads_need_no_masks(name, weights, tma, check_run):
    """Ragged N and K, tiles that run into other groups' rows, and rows that belong to no group are right.

    The loop is fast because it has two descriptor loads, a product, and no mask, gather or select between them.
    """
    a, b, offs = products(Case((129, 0, 30, 1), n=264, k=136, weights=weights, tail=5))
    a[160:] = 0  # the interpreter's descriptors read them, and NaN - NaN in a masked row would only warn
    config = worklist.CONFIGS[name]
    run = worklist.prepare_helion_worklist(a, b, offs, config, tma=True)
    check_run(run, grouped_gemm_reference(a, b, offs), torch.float16)
    problem = worklist.make_problem(a, b, offs, config, tma=True)
    code = worklist.grouped_gemm_worklist.bind(problem.specimen()).to_triton_code(config.to_helion(tma=True))
    loop = code[code.index("in tl.range(0, ") :].split("tl.store")[0]
    assert loop.count("_desc.load(") == 2
    assert loop.count("tl.dot(") == 1
    body = [line for line in loop.splitlines()[: loop[: loop.index("tl.dot(")].count("\n") + 1] if "#" not in line]
    assert not any(text in line for line in body for text in ("tl.where", "tl.load", "mask", "[0, 2, 1]")), loop


@on_cpu
def test_refuses_unmasked_loads_that_are_not_by_tma(tma, monkeypatch):
    monkeypatch.setattr(CompileEnvironment, "tensor_descriptor_base_is_aligned", lambda self, tensor: False)
    with pytest.raises(RuntimeError, match="no TMA loads"):
        worklist.prepare_helion_worklist(*products(Case((64, 64), 64, 64)), worklist.CONFIGS["cpu"], tma=True)


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
    rows = [(g, end, size) for g, (size, end) in enumerate(zip(sizes, offs.tolist(), strict=True))]
    expected = [[g, row, end] for g, end, size in rows for row in range(end - size, end, BLOCK_M)]
    assert tiles[: count.item()].tolist() == expected
    assert (tiles[count.item() :] == -1).all(), "no entries past the list are written"


def test_more_groups_than_a_chunk_of_the_list_has_entries(check_run):
    sizes = tuple(g % 3 if g % 64 < 2 or g > 127 else 0 for g in range(130))
    operands = products(Case(sizes, n=16, k=16))
    run = worklist.prepare_helion_worklist(*operands, dataclasses.replace(worklist.CONFIGS["cpu"], block_n=16))
    check_run(run, grouped_gemm_reference(*operands), torch.float16)


def test_another_number_of_rows_compiles_nothing(monkeypatch):
    """Routing changes M at every step; K, N and the tiles belong to the layer."""
    worklist.prepare_helion_worklist(*products(Case((41, 40), n=40, k=24)))

    def refuse(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr(CompileEnvironment, "__init__", refuse)
    worklist.prepare_helion_worklist(*products(Case((30, 77), n=40, k=24)))()


def test_refuses_a_config_that_does_not_fit():
    config = dataclasses.replace(worklist.CONFIGS["large"], num_stages=6)
    with pytest.raises(ValueError, match="bytes"):
        worklist.prepare_helion_worklist(*products(Case((4,), 8, 8)), config)


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
