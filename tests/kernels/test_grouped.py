"""Test the behaviour that all kernels of grouped products share: results, groups that stay apart, offsets, refusals.

Without a GPU the kernels run in the interpreter, except for those that only a Hopper GPU runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from grouped import (
    BACKENDS,
    CASES,
    DEVICE,
    FP8,
    FURTHER,
    GPU,
    HOPPER,
    HOPPERS,
    LOCKSTEP,
    LONG,
    NO_GPU,
    NO_HOPPER,
    RAGGED,
    SPECIALIZED,
    Case,
    Kernel,
    each,
    ends,
    gradients,
    of_fp8,
    of_weights,
    prepare_contiguous,
    prepare_pointer,
    products,
)
from torch import Tensor

from groupbench.kernels.device import KNOWN
from groupbench.kernels.grouped_gemm import (
    cluster,
    contiguous,
    flat,
    flat_pointers,
    fp8,
    helion_jagged,
    helion_persistent,
    helion_wgrad,
    helion_worklist,
    pointer,
    wgrad,
)
from groupbench.kernels.split_k import tiled

ALL = BACKENDS | FP8 | HOPPERS
REREADING = {name: kernel for name, kernel in ALL.items() if kernel.rereads}
OTHER_TILES = {
    **{
        f"flat_{name}": Kernel(partial(flat.prepare_flat, config=flat.CONFIGS[name]))
        for name in ("cpu_swap", "cpu_halves")
    },
    "helion_swap": Kernel(partial(helion_worklist.prepare_helion_worklist, config=helion_worklist.CONFIGS["cpu_swap"])),
}


def sized(kernel: Kernel, sizes: tuple[int, ...], n: int = 48, k: int = 64) -> Case:
    """Return a case, for a kernel for Hopper of a hundred times as many rows and ten times as many columns."""
    return Case(tuple(100 * size for size in sizes), 10 * n, 10 * k) if kernel.hopper else Case(sizes, n, k)


@pytest.mark.pairwise
@each(BACKENDS)
def test_matches_the_reference(kernel: Kernel, case: Case, dtype, check_run, no_tuning) -> None:
    operands = kernel.operands(case, dtype)
    check_run(kernel.bind(case, *operands), kernel.reference(*operands), dtype)


OF_FP8 = {name: case for name, case in CASES.items() if case.k and case.n and case.weights == "rows" and not case.pad_a}
OF_FP8 |= {"k_of_several_blocks": Case((5, 33), 130, 400), "ragged_tails": Case((33, 65, 1), 150, 200)}


@each(FP8)
@pytest.mark.parametrize("of_fp8", OF_FP8.values(), ids=OF_FP8)
def test_fp8_matches_the_reference(kernel: Kernel, of_fp8: Case, check_run) -> None:
    operands = kernel.operands(of_fp8)
    check_run(kernel.bind(of_fp8, *operands), kernel.reference(*operands), torch.float16)


@each(ALL)
def test_calls_read_their_operands_and_return_new_tensors(kernel: Kernel) -> None:
    operands = kernel.operands(sized(kernel, (21, 40)))
    run = kernel.prepare(*operands)
    first, second = run(), run()
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    next(x for x in operands if x.dtype in (torch.float16, torch.float32)).mul_(2)
    torch.testing.assert_close(run(), first * 2)


@each(REREADING | OTHER_TILES)
def test_offsets_are_read_on_the_device_at_every_call(kernel: Kernel, poisoned, check) -> None:
    """A serving engine keeps one buffer and writes each step's routing into it."""
    *operands, offs = kernel.operands(sized(kernel, (40, 24, 36)))
    run, rows = kernel.prepare(*operands, offs), int(offs[-1])
    dtype = run().dtype
    for changed in ((40, 64, 100), (0, 0, 100), (100, 100, 100), (1, 2, 3), (0, 0, 0)):
        offs.copy_(torch.tensor(changed) * (rows // 100 if max(changed) == 100 else 1))
        expected = kernel.reference(*operands, offs)
        written = expected.flatten(1).any(1)  # zeros would lower the RMS that errors are compared with
        with poisoned():
            out = run()
        check(out[written], expected[written], dtype)
        assert not out[~written].any()


SWAPPED = {
    f"fp8_{m}_{name}": of_fp8(m, config=fp8.CONFIGS[m][name])
    for m in fp8.MODES
    for name in ("decode", "small")
    if name in fp8.CONFIGS[m]
}


@pytest.mark.pairwise
@each(ALL | SWAPPED)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("where", [0, 1], ids=["row", "other"])
@pytest.mark.parametrize("columns", [48, 45], ids=["tma", "pointers"])
@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's
def test_nan_and_infinity_stay_in_their_row_or_group(kernel: Kernel, columns: int, where: int, value, check) -> None:
    """A zero in one operand's tail does not hide a NaN in the other's: 0 * NaN is NaN."""
    case = Case((150, 140, 70), 200, 104) if kernel.hopper else Case((21, 5, 40), columns, columns)
    case = replace(case, k=300) if len(kernel.operands(Case((1,)))) == 5 else case  # several blocks of scales
    start, end = case.sizes[0], sum(case.sizes[:2])
    *operands, offs = kernel.operands(case)
    spoiled, by_rows = [x for x in operands if x.dtype in (torch.float16, torch.float32)], kernel.operands is gradients
    good = kernel.reference(*operands, offs)
    if where == 0 or by_rows:
        spoiled[where][start + 2] = value
    else:
        spoiled[1][1] = value
    bad = torch.zeros(len(good), dtype=torch.bool)
    bad[slice(1, 2) if by_rows else slice(start, end) if where else slice(start + 2, start + 3)] = True
    out = kernel.prepare(*operands, offs)()
    assert not out[bad].isfinite().any()
    check(out[~bad], good[~bad], out.dtype)


def by_pointers(*operands: Tensor, config: Any) -> Callable[[], Tensor]:
    return lambda: flat_pointers.grouped_gemm_pointers(*operands, config=config)


def gpu_configs(module: Any) -> dict[str, Any]:
    configs = module.CONFIGS.items()
    return {name: c for name, c in configs if not name.startswith("cpu") and not getattr(c, "specialized", False)}


def configured() -> dict[str, tuple[Any, Any, Case]]:
    """Return how to prepare with a config of GPUs, it, and a case. Its tiles lead to masks of other shapes."""
    rows: dict[str, tuple[Any, Any, Case]] = {}
    worklist, gradient = helion_worklist.prepare_helion_worklist, replace(RAGGED, k=200, tail=3)
    for kind, prepare, module in (("flat", flat.prepare_flat, flat), ("helion_worklist", worklist, helion_worklist)):
        for weights in ("rows", "columns", "shared"):
            case = replace(RAGGED, weights=weights)
            rows |= {f"{kind}_{weights}_{name}": (prepare, c, case) for name, c in gpu_configs(module).items()}
    rows |= {f"wgrad_{name}": (wgrad.prepare_wgrad, c, gradient) for name, c in gpu_configs(wgrad).items()}
    for kind, prepare, module, case in (
        ("wgrad", helion_wgrad.prepare_helion_wgrad, helion_wgrad, gradient),
        ("jagged", helion_jagged.prepare_helion_jagged, helion_jagged, RAGGED),
        ("persistent", helion_persistent.prepare_helion_persistent, helion_persistent, RAGGED),
    ):
        names = ("large", "small", "fp32")
        rows |= {f"helion_{kind}_{name}": (prepare, getattr(module.CHOICES, name), case) for name in names}
    for kind, prepare, module in (
        ("pointer", prepare_pointer, pointer),
        ("contiguous", prepare_contiguous, contiguous),
    ):
        rows |= {
            f"{kind}_{name}": (prepare, module.CONFIGS[name], replace(RAGGED, n=140)) for name in ("cuda", "cuda_fp32")
        }
    for mean_rows in (8, 32, 90, 200):
        config = flat_pointers.choose_config(mean_rows, torch.float16, KNOWN["sm_90"])
        rows[f"pointers_{mean_rows}"] = by_pointers, config, replace(RAGGED, n=141, k=71, tail=3)
    return rows


# Helion compiles each for a second; the others differ in the sizes of tiles or in the strides of weights.
FEW = ("columns_decode", "rows_large", "columns_fp32", "wgrad_large", "d_fp32", "t_fp32")


@pytest.mark.parametrize(
    ("name", "prepare", "config", "of"),
    [
        pytest.param(
            name, *row, id=name, marks=pytest.mark.exhaustive if "helion" in name and not name.endswith(FEW) else ()
        )
        for name, row in configured().items()
    ],
)
def test_every_config_is_right(name: str, prepare: Any, config: Any, of: Case, check_run, monkeypatch) -> None:
    monkeypatch.setattr(wgrad, "TRITON", (3, 8))  # with which every config is legal
    dtype = torch.float32 if name.endswith("fp32") else torch.float16
    kernel = (of_weights if "wgrad" in name else Kernel)(prepare)
    operands = kernel.operands(of, dtype)
    check_run(prepare(*operands, config=config), kernel.reference(*operands), dtype)


def fp8_configs() -> dict[str, tuple[str, fp8.Fp8Config]]:
    """Return all default configs and candidates; without a GPU, only those that differ in the interpreter too."""
    configs = {}
    for mode in fp8.MODES:
        tried = [config for rows in (8, 32, 64, 500, 999) for config in fp8.candidates(mode, rows)]
        for c in [*fp8.CONFIGS[mode].values(), *tried]:
            assert fp8.illegal(c, mode) is None, c
            if HOPPER or not c.specialized:
                name = f"{mode}_{c.block_m}x{c.block_n}x{c.block_k}{'_swap' * c.swap}{'_split' * c.split_store}"
                configs[f"{name}{c}" if GPU else name] = mode, c
    return configs


@pytest.mark.parametrize(("mode", "config"), fp8_configs().values(), ids=fp8_configs())
def test_every_fp8_config_is_right(mode: str, config: fp8.Fp8Config, check_run) -> None:
    kernel = of_fp8(mode)
    operands = kernel.operands(Case((20, 0, 1, 70), config.block_n + 10, 144, tail=2))
    check_run(kernel.prepare(*operands, config=config), kernel.reference(*operands), torch.float16)


REFUSED: dict[str, tuple[tuple[str, ...], Callable[..., tuple[Any, ...]], str]] = {
    "fp64": ((), lambda a, b, offs: (a.double(), b.double(), offs), "not one of"),
    "mixed_dtypes": ((), lambda a, b, offs: (a, b.float(), offs), "one dtype and one device"),
    "gaps": (("triton_pointer",), lambda a, b, offs: (a, b, torch.stack([offs, offs], 1)[:, 0]), r"offs\.contiguous"),
    "past_the_end": (("triton_pointer",), lambda a, b, offs: (a, b, offs + 1), "exceeds the"),
    "rows": (tuple(BACKENDS)[:6], lambda a, dc, offs: (a, dc[:-1], offs), "a row for each of a's"),
    "one_dimension": (tuple(BACKENDS)[:6], lambda a, dc, offs: (a, dc[0], offs), "a row for each of a's"),
}
"""Names of kernels that are not asked, the change of operands, and the message. test_support.py has other offsets."""


@pytest.mark.parametrize(
    ("kernel", "change", "message"),
    [
        pytest.param(kernel, change, message, id=f"{name}-{reason}")
        for reason, (others, change, message) in REFUSED.items()
        for name, kernel in BACKENDS.items()
        if name not in others
    ],
)
def test_refuses_operands_it_cannot_multiply(kernel: Kernel, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernel.prepare(*change(*kernel.operands(Case((21, 40)))))


@pytest.mark.skipif(GPU, reason="a GPU computes bf16 correctly")
@each(BACKENDS)
def test_refuses_bf16_in_the_interpreter(kernel: Kernel) -> None:
    with pytest.raises(ValueError, match="use fp16"):
        kernel.prepare(*kernel.operands(Case((21, 40)), torch.bfloat16))


@pytest.mark.skipif(HOPPER, reason="they run")
@pytest.mark.parametrize("kernel", HOPPERS.values(), ids=HOPPERS)
def test_kernels_for_hopper_need_one(kernel: Kernel) -> None:
    with pytest.raises(ValueError, match=r"Hopper|interpreter"):
        kernel.prepare(*kernel.operands(Case((21, 40), 48, 272)))


# --- the plain kernel instead of the one with specialised warps -------------------------------------------------------


@dataclass(frozen=True)
class Preferring:
    """A plain kernel whose list of configs begins with a specialised one."""

    module: Any
    config: Any
    kernel: Kernel

    def check(self, operands: Any, reason: str, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Check that the specialised kernel is refused, and the plain one taken instead."""
        with pytest.raises(ValueError, match=reason):
            self.kernel.prepare(*operands, config=self.config)
        configs_for = self.module.configs_for
        preferred = ("first", self.config, None)
        monkeypatch.setattr(self.module, "configs_for", lambda *problem: [preferred, *configs_for(*problem)])
        check(self.kernel.prepare(*operands)(), self.kernel.reference(*operands), torch.float16)


PREFERRING = {
    "flat": Preferring(flat, SPECIALIZED, BACKENDS["triton_flat"]),
    "wgrad": Preferring(wgrad, LOCKSTEP, BACKENDS["triton_wgrad"]),
    **{name: Preferring(fp8, fp8.SPECIALIZED, kernel) for name, kernel in FP8.items()},
}
SMALL = Case((21, 40), 48, 272)
preferring = pytest.mark.parametrize("preferring", PREFERRING.values(), ids=PREFERRING)


@pytest.mark.skipif(HOPPER, reason="it runs")
@preferring
def test_the_plain_kernel_runs_without_a_hopper(preferring: Preferring, check, monkeypatch) -> None:
    preferring.check(preferring.kernel.operands(SMALL), r"Hopper|interpreter", check, monkeypatch)


def without_gluon(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a module's import fail as with a Triton that has another Gluon."""
    monkeypatch.delattr(module, raising=False)
    monkeypatch.delitem(sys.modules, module, raising=False)
    for name in ("triton.experimental.gluon", "triton.experimental.gluon.language.nvidia.hopper"):
        monkeypatch.setitem(sys.modules, name, None)


@preferring
def test_another_triton_without_this_gluon_takes_the_plain_kernel(preferring: Preferring, check, monkeypatch) -> None:
    without_gluon(f"{preferring.module.__name__}_specialized", monkeypatch)
    preferring.check(preferring.kernel.operands(SMALL), "Gluon differs", check, monkeypatch)


def test_another_triton_without_this_gluon_splits_k_by_tiles(check, monkeypatch) -> None:
    without_gluon("groupbench.kernels.split_k.stream", monkeypatch)
    a, b = (torch.randn(*size, device=DEVICE).half() for size in ((3, 64), (64, 5)))
    check(tiled.prepare_fixup(a, b)(), a.float() @ b.float(), torch.float16)


@pytest.mark.parametrize("name", ["flat", "fp8_rowwise"])
def test_the_plain_kernel_takes_more_groups(name: str, check, monkeypatch) -> None:
    operands = PREFERRING[name].kernel.operands(Case((1,) * 257, 16, 32))
    PREFERRING[name].check(operands, "257 groups", check, monkeypatch)


def test_the_plain_kernel_takes_experts_apart(check, monkeypatch) -> None:
    a, scale_a, b, *rest = PREFERRING["fp8_rowwise"].kernel.operands(SMALL)
    stretched = torch.empty(2 * 48 * 288 + 16, dtype=b.dtype, device=DEVICE)
    apart = stretched.as_strided(b.shape, (48 * 288 + 16, 288, 1)).copy_(b)
    PREFERRING["fp8_rowwise"].check((a, scale_a, apart, *rest), "not a multiple of a row", check, monkeypatch)


# --- on a GPU ---------------------------------------------------------------------------------------------------------

LARGE = {
    "ragged": Case((0, 300, 0, 129, 1, 128, 64, 193, 257, 65), 704, 1096, tail=5),  # tiles that end in M, N and K
    "no_rows": Case((0, 0, 0), 304, 256, tail=40),
    "one_row": Case((1,), 2048, 2048, tail=3),
    "many_groups": Case((5,) * 200, 264, 128),
    "one_step": Case((70_000,), 136, 48),  # many tiles of one step
    "one_tile": Case((9000,), 64, 72),  # of the gradient; the second group of warps has no rows or a few
    "even": Case((256 * 20,), 256, 4096),
    "full_waves": Case((256 * 44, 256 * 22), 1024, 512),  # no tile is cut
    "full_waves_192": Case((192 * 44, 192 * 22), 1024, 512),
    "cut_wave": Case((128 * 66 + 1,), 512, 192, tail=3),  # a last wave of two tiles, one with a single row
    "cut_wave_256": Case((256 * 66 + 1,), 512, 192, tail=3),
    "cut_tiles": Case((256 * 33 + 140,), 512, 192, tail=3),  # a last wave of two tiles, cut
    "columns": Case((400, 0, 77), 576, 320, tail=1),  # whole tiles of 192 columns
    "side": Case((400, 0, 77), 456, 320, tail=1),  # a last tile of 192 columns with part of its side
    "waves": Case((2048, 1024), 4096, 4096),  # of the gradient
}


@NO_HOPPER
@pytest.mark.parametrize("name", LARGE)
@each(HOPPERS | FURTHER)
def test_results_of_many_tiles(kernel: Kernel, name: str, check_calls) -> None:
    of_products = kernel.operands is products
    for weights in ("rows", "columns", "shared")[: 3 if of_products else 2 if kernel.operands is gradients else 1]:
        case = replace(LARGE[name], weights=weights)
        operands = kernel.operands(case, torch.bfloat16)
        run = kernel.bind(case, *operands)
        check_calls(run, kernel.reference(*operands), run().dtype)


@NO_HOPPER
@pytest.mark.parametrize("weights", ["rows", "columns"])
def test_sums_are_those_of_the_kernel_without_clusters(weights: str) -> None:
    a, b, offs = products(Case((3000, 0, 1111), 1024, 1000, weights))
    assert torch.equal(cluster.prepare_cluster(a, b, offs.long())(), flat.prepare_flat(a, b, offs, SPECIALIZED)())
    operands = FP8["fp8_rowwise_fast"].operands(Case((3000, 0, 1111), 1024, 1000))
    of_flat = fp8.prepare_fp8(*operands, True, config=fp8.CONFIGS[fp8.ROWWISE_FAST]["plain"])()
    for name, kernel in HOPPERS.items():
        assert not name.startswith("cluster_fp8") or torch.equal(kernel.prepare(*operands)(), of_flat), name


@NO_HOPPER
def test_kernels_with_clusters_refuse_what_they_cannot_read() -> None:
    for kernel in (HOPPERS["cluster"], HOPPERS["cluster_fp8_0"]):
        with pytest.raises(ValueError, match="16 bytes"):
            kernel.prepare(*kernel.operands(Case((21, 40), 45, 33)))
    a, scale_a, *rest = HOPPERS["cluster_fp8_0"].operands(SMALL)
    with pytest.raises(ValueError, match="9 stages"):
        HOPPERS["cluster_fp8_0"].prepare(a, scale_a, *rest, config=replace(LONG, stages=9))
    with pytest.raises(ValueError, match="neither rowwise"):
        HOPPERS["cluster_fp8_0"].prepare(a, scale_a[:-1], *rest)


@NO_HOPPER
@each({name: kernel for name, kernel in HOPPERS.items() if "fp8" not in name and "flat" not in name})
def test_views_with_wide_rows(kernel: Kernel, check) -> None:
    *operands, offs = kernel.operands(Case((500, 700), 512, 640))
    views = []
    for x in operands:
        wide = torch.full((*x.shape[:-2], x.size(-2) + 64, 1024), float("nan"), dtype=x.dtype, device=DEVICE)
        views.append(wide[..., 64:, 64 : 64 + x.size(-1)].copy_(x))
    check(kernel.prepare(*views, offs)(), kernel.reference(*operands, offs), torch.float16)


ROUTINGS = {  # rows of each of four experts; the rest belongs to no expert
    "rows": ((175, 175, 175, 175), (100, 0, 300, 1), (0, 0, 0, 0), (0, 700, 0, 0), (129, 127, 0, 64)),
    "decode": ((2, 2, 2, 2), (1, 0, 3, 2), (0, 8, 0, 0), (0, 0, 0, 0)),
}


@NO_GPU
@pytest.mark.parametrize("routings", ROUTINGS.values(), ids=ROUTINGS)
@each(REREADING)
def test_a_graph_follows_later_offsets(kernel: Kernel, routings: tuple[tuple[int, ...], ...], replays, check) -> None:
    for weights in ("rows", "columns"):
        *operands, offs = kernel.operands(Case(routings[0], 320, 256, weights), torch.bfloat16)
        run = kernel.prepare(*operands, offs)
        outputs = replays(run, lambda turn, offs=offs: offs.copy_(ends(*routings[turn])), len(routings))
        for out, rows in zip(outputs, routings, strict=True):
            check(out, kernel.reference(*operands, ends(*rows)), out.dtype)


BY_STREAM = {"flat": partial(flat.prepare_flat, config=SPECIALIZED), "cluster": cluster.prepare_cluster}


@NO_HOPPER
@pytest.mark.parametrize("prepare", BY_STREAM.values(), ids=BY_STREAM)
def test_launches_on_streams_and_in_graphs_do_not_wait_for_each_other(prepare: Any) -> None:
    operands = products(Case((4000,) * 8, 2048, 512), torch.bfloat16)
    run, outputs = prepare(*operands), []
    expected = run()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(run())
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prepare(*operands, trusted=True)()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
