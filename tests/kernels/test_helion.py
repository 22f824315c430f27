"""Test the Helion kernels beyond the shared cases: workers, tiles, offset tables."""

from __future__ import annotations

import helion
import pytest
import torch
from helion._compiler.type_propagation import TypePropagation
from helion.runtime import default_launcher

from groupbench.kernels.grouped_gemm import helion_jagged, helion_persistent
from groupbench.kernels.grouped_gemm.reference import grouped_gemm_reference
from groupbench.kernels.grouped_gemm.support import worker_count

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PREPARE = {
    "helion_jagged": helion_jagged.prepare_helion_jagged,
    "helion_persistent": helion_persistent.prepare_helion_persistent,
}


@pytest.mark.exhaustive  # cases of all backends have more tiles than workers, and fewer
@pytest.mark.parametrize("workers", [1, 2, 3, 7, 64])
def test_any_number_of_workers(workers, make_case, make_inputs, poisoned, check):
    a, b, offs = make_inputs(make_case("uneven", (70, 0, 1, 33, 5), n=70), torch.float16)
    run = helion_persistent.prepare_helion_persistent(a, b, offs, workers=workers)
    with poisoned():
        out = run()
    check(out, grouped_gemm_reference(a, b, offs), torch.float16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches fewer programs than Helion compiled for")
def test_workers_share_the_tiles_of_small_groups(make_case, make_inputs):
    """Seven groups of one tile go to four workers, two tiles to each and one to the last.

    If the numbering restarted at every group, worker 0 would get all seven.
    """
    a, b, offs = make_inputs(make_case("small", (16,) * 7, n=16), torch.float16)
    table = torch.cat([offs.new_zeros(1), offs])
    kernel = helion_persistent.grouped_gemm_persistent.bind((a, b, table, a.new_empty(112, 16), 4))
    compiled = kernel.compile_config(helion.Config(block_sizes=[16, 16, 16]))

    def rows_written_by_the_first(workers):
        def launch(kernel, grid, *args, **kwargs):
            return default_launcher(kernel, (workers,), *args, **kwargs)

        out = compiled(a, b, table, torch.full((112, 16), torch.nan, dtype=a.dtype), 4, _launcher=launch)
        return int(out.isfinite().all(1).sum())

    assert [rows_written_by_the_first(workers) for workers in (1, 2, 3, 4)] == [32, 64, 96, 112]


def test_refuses_no_workers(make_case, make_inputs):
    with pytest.raises(ValueError, match="workers=0"):
        helion_persistent.prepare_helion_persistent(*make_inputs(make_case("one", (4,)), torch.float16), workers=0)


@pytest.mark.parametrize(
    "blocks",
    [
        (16, 64, 32),
        (256, 16, 16),
        *(pytest.param(b, marks=pytest.mark.exhaustive) for b in ((64, 16, 16), (16, 256, 64))),
    ],
)
@pytest.mark.parametrize("prepare", PREPARE.values(), ids=PREPARE)
def test_any_tile(prepare, blocks, make_case, make_inputs, poisoned, check):
    a, b, offs = make_inputs(make_case("ragged", (30, 0, 70), n=53, k=45), torch.float16)
    run = prepare(a, b, offs, helion.Config(block_sizes=list(blocks)))
    with poisoned():
        out = run()
    check(out, grouped_gemm_reference(a, b, offs), torch.float16)


@pytest.mark.parametrize("table", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(
    ("module", "kernel", "extra"),
    [
        (helion_jagged, helion_jagged.grouped_gemm_jagged, ()),
        (helion_persistent, helion_persistent.grouped_gemm_persistent, (worker_count(DEVICE),)),
    ],
    ids=PREPARE,
)
def test_offset_tables_of_either_width(module, kernel, extra, table, make_case, make_inputs, check):
    a, b, offs = make_inputs(make_case("two", (21, 40)), torch.float16)
    out = a.new_empty(61, b.size(2))
    args = (a, b, torch.cat([offs.new_zeros(1), offs]).to(table), out, *extra)
    compiled = kernel.bind(args).compile_config(module.CHOICES.default(a, 4096))
    check(compiled(*args), grouped_gemm_reference(a, b, offs), torch.float16)


def test_types_that_are_inferred_once_give_the_same_code(make_case, make_inputs, monkeypatch):
    """These tests bind kernels faster than Helion does."""
    a, b, offs = make_inputs(make_case("two", (21, 40)), torch.float16)
    args = (a, b, torch.cat([offs.new_zeros(1), offs]), a.new_empty(61, b.size(2)))
    kernel, codes = helion_jagged.grouped_gemm_jagged, []
    for infer in (TypePropagation._loop_body, TypePropagation._loop_body.__wrapped__):
        monkeypatch.setattr(TypePropagation, "_loop_body", infer)
        kernel.reset()
        codes.append(kernel.bind(args).to_triton_code(helion_jagged.CHOICES.cpu))
    assert codes[0] == codes[1]
